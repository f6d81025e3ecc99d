# SPDX-License-Identifier: Apache-2.0
"""The result files: ``benchmarks/results/<gpu>/<bench>.json``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

RESULTS = Path(__file__).resolve().parents[1] / "results"

Mode = Literal["graph", "eager"]
Measure = Literal["ratio", "share", "overhead", "launches"]
"""A row's ratio to the best peer, share of its ceiling, overhead, cost in trivial launches."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Row(_Model):
    """One arm of one case. Times are per launch or per call."""

    case: str
    """``<kind>/<case>[/<variant>]/<shape>``; kind is kernel, latency, host or a bench's own."""
    arm: str
    engine: str | None
    """The resolved engine; None where the arm could not be built."""
    mode: Mode
    median_us: float | None = None
    min_us: float | None = None
    max_us: float | None = None
    floor_us: float | None = None
    """Fewest bytes or operations of the op over their ceiling, whichever takes longer."""
    achieved: float | None = None
    """Those bytes or operations over the median, in ``unit``."""
    ceiling: float | None = None
    """Copy bandwidth or matrix-product rate measured in this run, in ``unit``."""
    control_spread: float | None = None
    """Relative difference of the best peer timed twice, per case and variant."""
    ratio_to_best_peer: float | None = None
    """Best peer's median over ours; on the default-engine arm only."""
    status: Literal["ok", "failed", "missing"] = "ok"
    """``failed``: the build or the correctness check failed; the row has no time and no ratio."""
    note: str | None = None
    ratio_to_trivial_launch: float | None = None
    """Host rows: this arm's median over the trivial launch's."""
    overhead: float | None = None
    """Relative cost over the same arm in the case's base variant, e.g. indexed over not indexed."""
    unit: Literal["GB/s", "TFLOP/s"] = "GB/s"
    """What bounds the op by the roofline: bytes or operations."""


class CompileCount(_Model):
    """Calls of ``cute.compile`` for one batch size and for a sweep of batch sizes."""

    case: str
    batch_sizes: int
    calls_one_batch_size: int
    calls_sweep: int

    @property
    def passes(self) -> bool:
        """The sweep compiles no more often than one batch size does."""
        return self.calls_sweep <= self.calls_one_batch_size


class Verdict(_Model):
    """What one row shows against a goal set for it."""

    case: str
    """The row's case, or the goal's pattern where no row matches it."""
    measure: Measure
    at_least: float | None = None
    """The bound, where more is better."""
    at_most: float | None = None
    """The bound, where less is better."""
    got: float | None
    """None where the row has no such number."""
    met: bool


class Document(_Model):
    """One run of one benchmark."""

    gpu: str
    driver: str | None
    torch: str
    dsl: str | None
    peers: dict[str, str]
    """Version of every peer package that was there."""
    missing_peers: dict[str, str] = Field(default_factory=dict)
    """Why each other peer package was not."""
    commit: str
    sm_clock_mhz: tuple[int | None, int | None]
    """SM clock before and after; read, never set."""
    selection: dict[str, str] = Field(default_factory=dict)
    """The filters of a partial run; empty for the whole grid."""
    is_sustained: bool = False
    """Every arm ran for a while, untimed, right before each measurement."""
    rows: list[Row]
    compile_counts: list[CompileCount] = Field(default_factory=list)
    verdicts: list[Verdict] = Field(default_factory=list)


def gpu_slug(name: str) -> str:
    """``NVIDIA H200`` becomes ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write(document: Document, bench: str, out: Path) -> Path:
    """Writes the document; a partial run goes beside the whole one, never over it."""
    suffix = ".partial.json" if document.selection else ".json"
    if document.is_sustained:
        suffix = f".sustained{suffix}"
    path = out / gpu_slug(document.gpu) / f"{bench}{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_lines(document))
    return path


def _lines(document: Document) -> str:
    """JSON with one row per line, so that two runs can be compared line by line."""
    fields = []
    for name, value in document.model_dump(mode="json").items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(f"  {json.dumps(one)}" for one in value) + "\n ]"
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"
