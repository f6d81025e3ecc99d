# SPDX-License-Identifier: Apache-2.0
"""How each kind of case of the update is measured."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from benchmarks.causal_conv1d_update import ours, peers
from benchmarks.causal_conv1d_update.problem import Buffers, Problem, mismatch, reference
from benchmarks.harness.arm import Arm, Launch, Missing, Offer, Role, offer, one_line, own
from benchmarks.harness.case import ArmCase, Case, Lab, Outcome
from benchmarks.harness.checks import ONE_ROUNDING, PEER
from benchmarks.harness.compiles import counted_compiles
from benchmarks.harness.measure import measure_graph, measure_host
from benchmarks.harness.results import CompileCount, Row
from benchmarks.harness.trivial import TRIVIAL, trivial_arm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.harness.timing import GraphTimer


class _ProblemCase(ArmCase):
    """A case around one problem."""

    def __init__(self, problem: Problem, device: str = "cuda") -> None:
        self.problem = problem
        self.device = device
        self.name = problem.name
        self.shape = problem.shape
        self.footprint_bytes = problem.footprint_bytes
        self.traffic_bytes = problem.traffic_bytes

    @override
    def make_sets(self, count: int) -> Sequence[Buffers]:
        return self.problem.make_sets(count, self.device)

    @override
    def check(self, arm: Arm) -> str | None:
        buffers = self.make_sets(1)[0]
        expected = reference(buffers, indexed=self.is_indexed(arm))
        output = arm.bind(buffers)()
        tolerance = ONE_ROUNDING if arm.role is Role.OURS else PEER
        return mismatch(
            expected, buffers.out if output is None else output, buffers.conv_state, tolerance
        )

    def is_indexed(self, arm: Arm) -> bool:
        """True where the arm takes slot indices."""
        return False


class UpdateCase(_ProblemCase):
    """No indices: row n owns slot n."""

    kinds = ("kernel", "latency")

    @override
    def offers(self, sets: Sequence[Buffers], timer: GraphTimer | None) -> list[Offer]:
        return [
            own("ours", lambda: ours.plan_arm(sets[0])),
            *peers.kernel_peers(self.problem, sets, timer),
        ]

    @override
    def measure(self, lab: Lab) -> Outcome:
        return measure_graph(self, lab)


class IndexedCase(_ProblemCase):
    """Indices absent, checked with a trap, checked with a report: what the checks cost."""

    kinds = ("kernel", "latency")
    base_variant = "none"
    VARIANTS = ("none", "trap", "report")

    @override
    def offers(self, sets: Sequence[Buffers], timer: GraphTimer | None) -> list[Offer]:
        offers: list[Offer] = []
        for variant in self.VARIANTS:
            bad_index = None if variant == "none" else variant
            build = partial(ours.plan_arm, sets[0], on_bad_index=bad_index, variant=variant)
            offers.append(own("ours", build, variant))
            offers += self._peers(sets[0], variant)
        return offers

    def _peers(self, sample: Buffers, variant: str) -> list[Offer]:
        if variant == "report":
            return [
                Missing(name, "n/a: it cannot report bad slots", variant)
                for name in ("cudnn-frontend", "fla")
            ]
        indexed = variant == "trap"
        build = partial(peers.cudnn_plan, sample, indexed=indexed, variant=variant)
        gap = peers.fla_gap(self.problem) if indexed else "n/a here: see the L4 rows"
        return [
            offer("cudnn-frontend", build, variant),
            Missing("fla", gap or "", variant),
            peers.eager(indexed=indexed, variant=variant),
        ]

    @override
    def is_indexed(self, arm: Arm) -> bool:
        return arm.variant != "none"

    @override
    def measure(self, lab: Lab) -> Outcome:
        return measure_graph(self, lab)


class HostCase(_ProblemCase):
    """Microseconds per eager call, beside a trivial TVM-FFI launch."""

    kinds = ("host",)

    @override
    def offers(self, sets: Sequence[Buffers], timer: GraphTimer | None) -> list[Offer]:
        sample = sets[0]
        return [
            offer(TRIVIAL, trivial_arm),
            Arm("torch-mul-out", Role.YARDSTICK, "torch", _mul_out),
            own("ours-op", lambda: ours.functional_arm(sample, "op"), "op"),
            offer("cudnn-frontend", lambda: peers.cudnn_functional(sample, "op"), "op"),
            offer("fla", lambda: peers.fla_step(sample, "op"), "op"),
            own(
                "ours-execute",
                lambda: ours.plan_arm(sample, name="ours-execute", variant="plan"),
                "plan",
            ),
            offer(
                "cudnn-frontend",
                lambda: peers.cudnn_plan(sample, indexed=False, variant="plan"),
                "plan",
            ),
        ]

    @override
    def measure(self, lab: Lab) -> Outcome:
        return measure_host(self, lab, trivial=TRIVIAL)


def _mul_out(buffers: Buffers) -> Launch:
    return partial(torch.mul, buffers.x, buffers.x, out=buffers.out)


class CompileCountCase(Case):
    """Calls of ``cute.compile`` over a sweep of batch sizes; runs before all other cases."""

    kinds = ("compiles",)
    name = "update"
    shape = "N1..200"
    BATCH_SIZES = 200
    CHANNELS = (1024, 1032)
    """One for the single batch size, one for the sweep: neither finds the other's kernels."""

    @override
    def measure(self, lab: Lab) -> Outcome:
        try:
            one, sweep = self._counts()
        except Exception as error:
            failed = Row(
                case=f"compiles/{self.label}",
                arm="ours-op",
                engine=None,
                mode="eager",
                status="failed",
                note=one_line(error),
            )
            return Outcome(rows=[failed])
        counts = CompileCount(
            case=f"compiles/{self.label}",
            batch_sizes=self.BATCH_SIZES,
            calls_one_batch_size=one,
            calls_sweep=sweep,
        )
        return Outcome(compile_counts=[counts])

    def _counts(self) -> tuple[int, int]:
        one, sweep = (
            counted_compiles(partial(self._sweep, channels, batches))
            for channels, batches in zip(
                self.CHANNELS, ([self.BATCH_SIZES], range(1, self.BATCH_SIZES + 1)), strict=True
            )
        )
        return one, sweep

    def _sweep(self, channels: int, batches: Sequence[int]) -> None:
        from cudnn_blocks import ops

        sets = Problem("update", self.BATCH_SIZES, channels, state_len=4).make_sets(1)[0]
        for rows in batches:
            ops.causal_conv1d_update(
                sets.x[:rows], sets.conv_state[:rows], sets.weight, activation="silu"
            )
        torch.cuda.synchronize()
