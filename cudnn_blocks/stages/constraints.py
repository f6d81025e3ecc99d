# SPDX-License-Identifier: Apache-2.0
"""Sets of served values that several families' capabilities share."""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_blocks.stages.capabilities import Constraint


@dataclass(frozen=True)
class UpTo:
    """Integers up to ``high``."""

    high: int

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and value <= self.high

    def __str__(self) -> str:
        return f"up to {self.high}"


@dataclass(frozen=True)
class MultipleOf:
    """Positive multiples of ``step``, up to ``high`` where there is one."""

    step: int
    high: int | None = None

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int) or value < 1 or value % self.step:
            return False
        return self.high is None or value <= self.high

    def __str__(self) -> str:
        limit = "" if self.high is None else f" up to {self.high}"
        return f"multiples of {self.step}{limit}"


@dataclass(frozen=True)
class NoneOr:
    """None, or a value of another set; ``otherwise`` says what to run for the rest."""

    served: Constraint
    otherwise: str

    def __contains__(self, value: object) -> bool:
        return value is None or value in self.served

    def __str__(self) -> str:
        return f"{self.served}, otherwise {self.otherwise}"
