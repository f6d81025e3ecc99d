# SPDX-License-Identifier: Apache-2.0
"""From build machine to serving process: a bundle, and a process that starts without a compiler.

The build needs no GPU: it probes a deploy file, compiles every kernel and packs them. Then fresh
processes serve their first call, cold, from the disk cache and from the bundle, and say how long
that took. The one with the bundle cannot import the CuTe DSL and refuses to compile. Run it from
the repository root::

    python examples/05_build_and_serve.py
    python examples/05_build_and_serve.py --plan decode --keep model.cbb

Without a GPU the bundle is built for sm_90a and loaded as well, but nothing is launched, and no
time to a result is claimed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch

DEFAULT_TARGET = "sm_90a"
PLANS: dict[str, dict[str, Any]] = {
    "decode": {"op": "causal-conv1d-update", "channels": 8192, "batch": 64},
    "layer": {
        "op": "gated-attention-block",
        "d_model": 2048,
        "h_q": 16,
        "h_kv": 2,
        "tokens": 4096,
        "fuse_norm_rope": True,
        "fuse_gate": True,
    },
}
"""Lines of a deploy file: a decode convolution, and an attention layer of Qwen3-Next."""
MODES = ("cold", "disk cache", "bundle")
_CHILD = "--serve"


def serve(spec: dict[str, Any]) -> dict[str, Any]:
    """What a fresh process does: a first call of every plan of the deploy file."""
    is_bundled = spec["bundle"] is not None
    if is_bundled:
        sys.modules["cutlass"] = None  # type: ignore[assignment]  # whoever imports it fails
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.zeros(1, device="cuda")  # the context is there before the clock runs
        torch.cuda.synchronize()
    start = time.perf_counter()

    from cudnn_blocks.artifacts import load_bundle, refuse_compiles
    from cudnn_blocks.deploy import read_deploy_file

    if is_bundled:
        load_bundle(spec["bundle"])
        refuse_compiles()
    sums = []
    for request in read_deploy_file(spec["deploy"]).plans:
        if has_gpu:
            sums.append(first_call(request))
        else:
            request.plan(spec["target"]).compile()
    took_ms = (time.perf_counter() - start) * 1e3
    return {"took_ms": took_ms, "sums": sums, "imports_dsl": bool(sys.modules.get("cutlass"))}


def first_call(request: Any) -> float:
    """Compiles and runs a plan on made-up operands; the sum of what it has written last."""
    arguments = request.arguments()
    torch.manual_seed(0)
    operands = {
        name: (torch.randn(spec.shape, device="cuda") * 0.05).to(spec.dtype)
        for name, spec in arguments.items()
        if name.startswith("sample_") and spec is not None
    }
    plan = request.op_class(**{**arguments, **operands})
    plan.compile()
    tensors = {name.removeprefix("sample_"): tensor for name, tensor in operands.items()}
    size_bytes = plan.get_workspace_size()
    if size_bytes:
        tensors["workspace"] = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    plan.execute(**tensors)
    torch.cuda.synchronize()
    return float(tensors["out"].double().sum())


def run(command: list[str], **environment: str) -> str:
    """A fresh process; its output, or its end with an error."""
    done = subprocess.run(
        command, check=False, text=True, stdout=subprocess.PIPE, env={**os.environ, **environment}
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:5])} ... ended with status {done.returncode}")
    return done.stdout


def build(deploy: Path, target: str, bundle: Path, cache: Path) -> None:
    """Probes and compiles the deploy file as a build machine would, which has no GPU."""
    package = [sys.executable, "-m", "cudnn_blocks"]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "CUDNN_BLOCKS_CACHE_DIR": str(cache)}
    print(run([*package, "probe", "--file", str(deploy), "--target", target], **hidden), end="")
    compiled = [*package, "compile", "--file", str(deploy), "--target", target, "-o", str(bundle)]
    print(run(compiled, **hidden), end="")


def compare(deploy: Path, target: str, bundle: Path, folder: Path) -> bool:
    """Serves in every mode; True where all results are the same and the bundle kept its word."""
    has_gpu = torch.cuda.is_available()
    what = "first result" if has_gpu else "compiled plans (no GPU here: nothing was launched)"
    found = {}
    for mode in MODES:  # the cold process leaves its kernels for the second one
        spec = {
            "deploy": str(deploy),
            "target": target,
            "bundle": str(bundle) if mode == "bundle" else None,
        }
        cache = "off" if mode == "bundle" else str(folder / "served")
        command = [sys.executable, str(Path(__file__).resolve()), _CHILD, json.dumps(spec)]
        found[mode] = json.loads(run(command, CUDNN_BLOCKS_CACHE_DIR=cache))
        one = found[mode]
        share = one["took_ms"] / found["cold"]["took_ms"]
        dsl = "CuTe DSL imported" if one["imports_dsl"] else "no CuTe DSL"
        print(f"{mode:>10}: {one['took_ms']:8.0f} ms to {what}, {share:.2f} of cold, {dsl}")
    sums = {str(one["sums"]) for one in found.values()}
    if len(sums) > 1:
        print(
            "results differ: " + ", ".join(f"{mode} {one['sums']}" for mode, one in found.items())
        )
    return len(sums) == 1 and not found["bundle"]["imports_dsl"]


@click.command(context_settings={"show_default": True})
@click.option("--plan", "names", type=click.Choice([*PLANS]), multiple=True, help="default: all")
@click.option("--keep", type=click.Path(dir_okay=False, path_type=Path), help="copy the bundle to")
@click.option(_CHILD, "spec", hidden=True)
def main(names: tuple[str, ...], keep: Path | None, spec: str | None) -> None:
    """Builds a bundle, serves from it, and times the first result."""
    if spec is not None:
        print(json.dumps(serve(json.loads(spec))))
        return
    target = DEFAULT_TARGET
    if torch.cuda.is_available():
        from cudnn_blocks import Target

        target = Target.of_device(torch.device("cuda")).name
    with TemporaryDirectory(prefix="cudnn_blocks_") as name:
        folder = Path(name)
        deploy, bundle = folder / "deploy.json", folder / "model.cbb"
        deploy.write_text(json.dumps({"plans": [PLANS[one] for one in names or PLANS]}, indent=2))
        build(deploy, target, bundle, folder / "built")
        is_good = compare(deploy, target, bundle, folder)
        if keep is not None:
            shutil.copyfile(bundle, keep)
            print(f"bundle: {keep}")
    print("PASSED" if is_good else "FAILED: see above")
    if not is_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
