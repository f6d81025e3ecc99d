# SPDX-License-Identifier: Apache-2.0
"""An arm is one implementation, timed side by side with the others of its case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

Launch = Callable[[], Any]
"""Launches once; returns its output, or None where it wrote into the caller's."""


class Role(Enum):
    """What an arm stands for when ratios are formed."""

    OURS = "ours"
    """The default engine; carries the ratio to the best peer of its variant."""
    ENGINE = "engine"
    """Another engine of ours: checked and timed, and no ratio is formed with it."""
    PEER = "peer"
    """A baseline; it competes for best peer of its variant."""
    YARDSTICK = "yardstick"
    """A cost to read the others against; never a peer."""


@dataclass(frozen=True)
class Arm:
    """One implementation, ready to be bound to buffer sets."""

    name: str
    role: Role
    engine: str
    """The resolved engine, printed beside every time."""
    bind: Callable[[Any], Launch]
    """Takes one buffer set, returns the launch over it."""
    variant: str = ""
    """Arms of one case are timed together; ratios are formed among arms of equal variant."""
    description: str = ""
    """What ``describe()`` says of the plan behind it."""
    fault: str | None = None
    """What its build already found wrong; such an arm fails its check and is never timed."""

    @property
    def key(self) -> str:
        """Unique within a case."""
        return f"{self.variant}/{self.name}" if self.variant else self.name


@dataclass(frozen=True)
class Missing:
    """A peer that cannot run this case; it is listed with its reason, never dropped."""

    name: str
    reason: str
    variant: str = ""


Offer = Arm | Missing


def one_line(error: BaseException) -> str:
    """The type and first line of an error, for a table cell."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


def offer(name: str, build: Callable[[], Arm], variant: str = "") -> Offer:
    """Builds a peer's arm; a peer that is absent or declines becomes a row that says so."""
    try:
        return build()
    except Exception as error:
        return Missing(name, one_line(error), variant)


def own(name: str, build: Callable[[], Arm], variant: str = "") -> Arm:
    """Builds one of our arms; where that raises, the arm's check fails with the same error."""
    try:
        return build()
    except Exception as error:
        reason = error

        def bind(_: Any) -> Launch:
            raise reason

        return Arm(name, Role.OURS, "not built", bind, variant)
