# SPDX-License-Identifier: Apache-2.0
"""One case from buffer sets to rows: build the arms, check each, then time those that are right."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness.arm import Arm, Launch, Offer, Role, one_line
from benchmarks.harness.case import ArmCase, Lab, Outcome
from benchmarks.harness.host import MAX_CALLS_BETWEEN_SYNCS, interleaved_host_us
from benchmarks.harness.rows import CONTROL, Measured, best_peers, build_rows, passing
from benchmarks.harness.sets import plan_sets
from benchmarks.harness.timing import CapturedArm, GraphTimer, capture, eager

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.harness.results import Mode


def descriptions_of(offers: Sequence[Offer]) -> list[str]:
    """What the arms' plans say of themselves."""
    return [one.description for one in offers if isinstance(one, Arm) and one.description]


def failures_of(case: ArmCase, offers: Sequence[Offer]) -> dict[str, str]:
    """Arm key to what the build or the check found wrong; an arm that raises is wrong too."""
    failures = {}
    for arm in (one for one in offers if isinstance(one, Arm)):
        wrong = arm.fault
        if wrong is None and arm.role is not Role.YARDSTICK:
            try:
                wrong = case.check(arm)
            except Exception as error:
                wrong = one_line(error)
        if wrong:
            failures[arm.key] = wrong
    return failures


def captured_arms(
    arms: Sequence[Arm], sets: Sequence[Any], failures: dict[str, str], mode: Mode = "graph"
) -> dict[str, CapturedArm]:
    """One graph per arm over all sets, or plain calls; an arm that raises joins the failures."""
    captured = {}
    for arm in arms:
        launches = partial(_launches, arm, sets)
        try:
            captured[arm.key] = capture(launches()) if mode == "graph" else eager(launches())
        except Exception as error:
            what = "capture" if mode == "graph" else "eager"
            failures[arm.key] = f"{what}: {one_line(error)}"
    return captured


def _launches(arm: Arm, sets: Sequence[Any]) -> list[Launch]:
    return [arm.bind(buffers) for buffers in sets]


def rounds_of(
    arms: Sequence[Arm],
    captured: Mapping[str, CapturedArm],
    timer: GraphTimer,
    rounds: int,
    *,
    has_equal_bursts: bool = False,
    is_sustained: bool = False,
) -> dict[str, list[float]]:
    """Times the captured arms, and the best peer of each variant a second time as control."""
    pilots = {key: timer.pilot_us(graph) for key, graph in captured.items()}
    timed = dict(captured)
    for peer in best_peers([arm for arm in arms if arm.key in captured], pilots).values():
        timed[peer.key + CONTROL] = captured[peer.key]
        pilots[peer.key + CONTROL] = pilots[peer.key]
    leads = pilots if is_sustained else None
    if has_equal_bursts:
        pilots = dict.fromkeys(pilots, min(pilots.values(), default=0.0))
    with _uncollected():
        return timer.interleaved_us(timed, pilots, rounds, leads_us=leads)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Garbage is collected before, not during."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure_graph(case: ArmCase, lab: Lab) -> Outcome:
    """Kernel and latency rows: each arm over the case's buffer sets, in each of its modes."""
    plan = plan_sets(case.footprint_bytes, lab.l2_bytes, case.min_sets)
    sets = case.make_sets(1 if lab.check_only else plan.count)
    offers = case.offers(sets, lab.timer)
    wrong = failures_of(case, offers)
    rows = []
    for mode in case.modes:
        failures, rounds = dict(wrong), {}
        if lab.timer is not None and not lab.check_only:
            arms = passing(offers, failures)
            captured = captured_arms(arms, sets, failures, mode)
            rounds = rounds_of(
                arms,
                captured,
                lab.timer,
                lab.rounds,
                has_equal_bursts=case.has_equal_bursts,
                is_sustained=lab.is_sustained,
            )
            del captured
        measured = Measured(
            kind=case.family if case.family and plan.is_cold else plan.kind,
            name=f"{case.name}/{mode}" if len(case.modes) > 1 else case.name,
            shape=case.shape,
            mode=mode,
            offers=offers,
            failures=failures,
            rounds_us=rounds,
            traffic_bytes=case.traffic_bytes,
            ceiling_gb_s=lab.ceiling_gb_s,
            flops=case.flops,
            peak_tflop_s=lab.peak_tflop_s,
            base_variant=case.base_variant,
        )
        rows += build_rows(measured)
    return Outcome(rows, descriptions=descriptions_of(offers))


def measure_host(case: ArmCase, lab: Lab, trivial: str, calls_per_round: int = 500) -> Outcome:
    """Host rows: eager calls on one buffer set.

    Args:
        case: the case.
        lab: the run.
        trivial: key of the arm the others are related to.
        calls_per_round: at most 1000, all between two syncs.
    """
    sets = case.make_sets(1)
    offers = case.offers(sets, None)
    failures = failures_of(case, offers)
    rounds = {}
    if not lab.check_only:
        calls = {arm.key: arm.bind(sets[0]) for arm in passing(offers, failures)}
        for peer in best_peers_after_trial(passing(offers, failures), calls):
            calls[peer.key + CONTROL] = calls[peer.key]
        rounds = interleaved_host_us(calls, torch.cuda.synchronize, lab.rounds, calls_per_round)
    return Outcome(
        build_rows(
            Measured(
                kind="host",
                name=case.name,
                shape=case.shape,
                mode="eager",
                offers=offers,
                failures=failures,
                rounds_us=rounds,
                trivial=trivial,
            )
        ),
        descriptions=descriptions_of(offers),
    )


def best_peers_after_trial(arms: Sequence[Arm], calls: dict[str, Any]) -> list[Arm]:
    """The fastest peer of each variant by a short host trial; these are timed twice as control."""
    trial = interleaved_host_us(calls, torch.cuda.synchronize, 2, MAX_CALLS_BETWEEN_SYNCS // 10)
    return list(best_peers(arms, {key: min(times) for key, times in trial.items()}).values())
