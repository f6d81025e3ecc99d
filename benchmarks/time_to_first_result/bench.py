# SPDX-License-Identifier: Apache-2.0
"""How a case is measured: fresh processes in turn, their results compared bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from typing_extensions import override

from benchmarks.harness.case import Case, Lab, Outcome
from benchmarks.harness.environment import ROOT
from benchmarks.harness.results import Row
from benchmarks.time_to_first_result.cases import BUNDLE
from cudnn_blocks.artifacts import BUNDLE_VARIABLE, CACHE_VARIABLE
from cudnn_blocks.deploy import DeployFile, Request
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec

COLD, DISK = "ours cold", "ours from the disk cache"
ARMS = (COLD, DISK, BUNDLE)
MAX_ROUNDS = 5
"""Each is three processes, one of which compiles."""
TIMEOUT_S = 240
PREBUILT_VARIABLE = "CUDNN_BLOCKS_BENCH_BUNDLES"
"""A folder with ``<case>.cbb`` of the same sources, where this machine has no linker."""


class FirstResultCase(Case):
    """One plan of a deploy file; the cold arm stands where a peer would."""

    kinds = ("first",)

    def __init__(self, name: str, shape: str, plan: dict[str, Any]) -> None:
        self.name, self.shape = name, shape
        self.deploy = DeployFile.model_validate_json(json.dumps({"plans": [plan]}))

    @override
    def measure(self, lab: Lab) -> Outcome:
        rounds = 1 if lab.check_only else min(lab.rounds, MAX_ROUNDS)
        with TemporaryDirectory(prefix="cudnn_blocks_") as folder:
            runs = self.run_all(rounds, Path(folder), "cuda")
        rows = [_row(f"first/{self.label}", arm, runs) for arm in ARMS]
        if lab.check_only:
            untimed = {"median_us": None, "min_us": None, "max_us": None}
            rows = [row.model_copy(update={**untimed, "ratio_to_best_peer": None}) for row in rows]
        return Outcome(rows)

    def run_all(self, rounds: int, folder: Path, device: str) -> dict[str, list[dict[str, Any]]]:
        """What every process of every arm has printed, arm by arm in turn."""
        target = Target.of_device(torch.device(device))
        bundle = None if target.is_cpu else self.bundle(folder, target.name)
        (request,) = self.deploy.plans
        spec = {**spec_of(request), "device": device, "bundle": None}
        runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        for turn in range(rounds):
            for arm in ARMS:
                cache = folder / (f"cold{turn}" if arm == COLD else "cold0")
                environment = {CACHE_VARIABLE: "off" if arm == BUNDLE else str(cache)}
                own = {**spec, "bundle": bundle and str(bundle)} if arm == BUNDLE else spec
                program = ("benchmarks.time_to_first_result.child", json.dumps(own))
                runs[arm].append(json.loads(_run(program, environment)))
        return runs

    def bundle(self, folder: Path, target: str) -> Path:
        """Built in the folder; or the one that was built elsewhere, as on a build machine."""
        prebuilt = os.environ.get(PREBUILT_VARIABLE)
        if prebuilt:
            return Path(prebuilt) / f"{self.name}.cbb"
        bundle = folder / f"{self.name}.cbb"
        deploy = folder / "deploy.json"
        deploy.write_text(self.deploy.model_dump_json(by_alias=True))
        program = ("cudnn_blocks", "compile", "--file", str(deploy), "--target", target)
        environment = {CACHE_VARIABLE: str(folder / "build"), "CUDA_VISIBLE_DEVICES": ""}
        _run((*program, "-o", str(bundle)), environment)
        return bundle


def spec_of(request: Request) -> dict[str, Any]:
    """The constructor's arguments as JSON, so that a child needs nothing of the package for it."""
    tensors: dict[str, Any] = {}
    geometry: dict[str, Any] = {}
    knobs: dict[str, Any] = {}
    for name, value in request.arguments().items():
        if name.startswith("sample_"):
            shape = list(value.shape) if isinstance(value, TensorSpec) else None
            tensors[name.removeprefix("sample_")] = shape
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            geometry[name] = (type(value).__name__, dataclasses.asdict(value))
        else:
            knobs[name] = value
    op = request.op_class.__name__
    return {"op": op, "tensors": tensors, "geometry": geometry, "knobs": knobs}


def _run(program: tuple[str, ...], environment: dict[str, str]) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != BUNDLE_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-m", *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={**inherited, **environment},
    )
    if done.returncode:
        raise RuntimeError(f"{program[0]} failed: {done.stderr[-2000:]}")
    return done.stdout


def _row(case: str, arm: str, runs: dict[str, list[dict[str, Any]]]) -> Row:
    """Times of an arm, and what is wrong with it: other bits, or a DSL where none may be."""
    own = runs[arm]
    times = [one["took_us"] for one in own]
    cold_us = median(one["took_us"] for one in runs[COLD])
    imports_dsl = any(one["imports_dsl"] for one in own)
    wrong = None
    if any(one["sha256"] != runs[COLD][0]["sha256"] for one in own):
        wrong = "other bits than the cold process"
    elif arm == BUNDLE and imports_dsl:
        wrong = "cutlass was imported"
    if wrong is not None:
        return Row(case=case, arm=arm, engine=None, mode="eager", status="failed", note=wrong)
    note = f"{median(times) / 1e3:.0f} ms, {median(times) / cold_us:.3f} of cold, cutlass "
    return Row(
        case=case,
        arm=arm,
        engine="; ".join(own[0]["engines"]),
        mode="eager",
        median_us=median(times),
        min_us=min(times),
        max_us=max(times),
        ratio_to_best_peer=None if arm == COLD else cold_us / median(times),
        note=note + ("imported" if imports_dsl else "not imported"),
    )
