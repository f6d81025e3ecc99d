# SPDX-License-Identifier: Apache-2.0
"""From offers, verdicts and rounds to rows: the rules on ratios, free of any device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.harness.arm import Arm, Missing, Offer, Role
from benchmarks.harness.results import Mode, Row
from benchmarks.harness.statistics import Sample, control_spread, ratio_to_best_peer, summarise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONTROL = " (control)"


@dataclass(frozen=True)
class Measured:
    """Everything known about one case after its rounds."""

    kind: str
    name: str
    shape: str
    mode: Mode
    offers: Sequence[Offer]
    failures: Mapping[str, str]
    """Arm key to what is wrong with it; such an arm has no rounds."""
    rounds_us: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Arm key to its rounds; a control's key is its arm's key plus `` (control)``."""
    traffic_bytes: int | None = None
    ceiling_gb_s: float | None = None
    trivial: str | None = None
    """Key of the arm that host rows are related to."""
    base_variant: str | None = None
    """Variant that ``overhead`` of the others is counted from."""
    flops: int | None = None
    peak_tflop_s: float | None = None


def passing(offers: Sequence[Offer], failures: Mapping[str, str]) -> list[Arm]:
    """Arms that were built and are correct."""
    return [one for one in offers if isinstance(one, Arm) and one.key not in failures]


def best_peers(arms: Sequence[Arm], medians_us: Mapping[str, float]) -> dict[str, Arm]:
    """The fastest peer of each variant."""
    best: dict[str, Arm] = {}
    for arm in arms:
        if arm.role is not Role.PEER:
            continue
        rival = best.get(arm.variant)
        if rival is None or medians_us[arm.key] < medians_us[rival.key]:
            best[arm.variant] = arm
    return best


class _Builder:
    def __init__(self, measured: Measured) -> None:
        self._it = measured
        self._samples = {key: summarise(times) for key, times in measured.rounds_us.items()}
        self._arms = [
            arm for arm in passing(measured.offers, measured.failures) if arm.key in self._samples
        ]
        self._spreads = {
            arm.variant: control_spread(self._median(arm.key), self._median(arm.key + CONTROL))
            for arm in self._arms
            if arm.key + CONTROL in self._samples
        }

    def rows(self) -> list[Row]:
        rows = []
        for one in self._it.offers:
            if isinstance(one, Missing):
                rows.append(self._row(one, engine=None, status="missing", note=one.reason))
            elif one.key in self._it.failures:
                rows.append(
                    self._row(
                        one, engine=one.engine, status="failed", note=self._it.failures[one.key]
                    )
                )
            elif one.key not in self._samples:
                rows.append(self._row(one, engine=one.engine, note="checked, not timed"))
            else:
                rows.append(self._timed(one, self._samples[one.key]))
                if one.key + CONTROL in self._samples:
                    rows.append(self._timed(one, self._samples[one.key + CONTROL], is_control=True))
        return rows

    def _median(self, key: str) -> float:
        return self._samples[key].median_us

    def _row(self, one: Offer, **fields: object) -> Row:
        words = [self._it.kind, self._it.name, one.variant, self._it.shape]
        fields.setdefault("arm", one.name)
        return Row(case="/".join(word for word in words if word), mode=self._it.mode, **fields)

    def _timed(self, arm: Arm, sample: Sample, *, is_control: bool = False) -> Row:
        median_us = sample.median_us
        trivial = self._it.trivial
        return self._row(
            arm,
            arm=arm.name + CONTROL if is_control else arm.name,
            engine=arm.engine,
            median_us=round(median_us, 4),
            min_us=round(sample.min_us, 4),
            max_us=round(sample.max_us, 4),
            control_spread=_rounded(self._spreads.get(arm.variant)),
            ratio_to_best_peer=None if is_control else _rounded(self._ratio(arm)),
            ratio_to_trivial_launch=(
                _rounded(median_us / self._median(trivial)) if trivial in self._samples else None
            ),
            overhead=None if is_control else _rounded(self._overhead(arm)),
            **self._roofline(median_us),
        )

    def _roofline(self, median_us: float) -> dict[str, object]:
        """Against whichever of bytes and operations bounds the case."""
        it = self._it
        bounds = [
            (amount / (ceiling * scale), amount / (median_us * scale), ceiling, unit)
            for amount, ceiling, scale, unit in (
                (it.traffic_bytes, it.ceiling_gb_s, 1e3, "GB/s"),
                (it.flops, it.peak_tflop_s, 1e6, "TFLOP/s"),
            )
            if amount is not None and ceiling is not None
        ]
        if not bounds:
            return {}
        floor_us, achieved, ceiling, unit = max(bounds, key=lambda bound: bound[0])
        return {
            "floor_us": round(floor_us, 4),
            "achieved": round(achieved, 1),
            "ceiling": round(ceiling, 1),
            "unit": unit,
        }

    def _ratio(self, arm: Arm) -> float | None:
        if arm.role is not Role.OURS:
            return None
        peers = [one for one in self._arms if one.role is Role.PEER and one.variant == arm.variant]
        return ratio_to_best_peer(self._median(arm.key), (self._median(peer.key) for peer in peers))

    def _overhead(self, arm: Arm) -> float | None:
        base_variant = self._it.base_variant
        if base_variant is None or arm.variant == base_variant:
            return None
        bases = [one for one in self._arms if (one.name, one.variant) == (arm.name, base_variant)]
        return self._median(arm.key) / self._median(bases[0].key) - 1 if bases else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def build_rows(measured: Measured) -> list[Row]:
    """One row per offer, in the order offered, and one per control.

    Failed and missing arms carry a note and no numbers; they get no ratio and are no one's peer.
    """
    return _Builder(measured).rows()
