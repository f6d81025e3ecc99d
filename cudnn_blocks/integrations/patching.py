# SPDX-License-Identifier: Apache-2.0
"""What the integrations share: attributes replaced and put back, and the rows of ``explain()``."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.table import Table

from cudnn_blocks.errors import LifecycleError

TORCH = "torch"
"""``LayerRow.engine`` of a layer that stays on the original code."""
_MISSING = object()


@dataclass(frozen=True)
class _Replaced:
    owner: Any
    name: str
    before: Any
    """What the owner itself held; ``_MISSING`` where the attribute came from its class."""
    after: Any


class Patches:
    """Attributes replaced on modules, classes or objects, and put back in reverse order.

    As a context manager it keeps what was replaced, unless its body raises: then everything is put
    back, so that a half-patched model never leaves it.
    """

    def __init__(self) -> None:
        self._replaced: list[_Replaced] = []

    def __enter__(self) -> Patches:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.restore()

    @property
    def is_active(self) -> bool:
        """True while anything is replaced."""
        return bool(self._replaced)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets ``owner.name``, which has to exist, and remembers what was there."""
        getattr(owner, name)
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        self._replaced.append(_Replaced(owner, name, before, value))

    def restore(self) -> None:
        """Puts everything back; a second call does nothing.

        Raises:
            LifecycleError: somebody has replaced one of the attributes since; nothing was put back.
        """
        for entry in self._replaced:
            if vars(entry.owner).get(entry.name, _MISSING) is not entry.after:
                raise LifecycleError(
                    f"{type(entry.owner).__name__}.{entry.name} was replaced again after this "
                    "integration replaced it; undo the later change first"
                )
        while self._replaced:
            entry = self._replaced.pop()
            if entry.before is _MISSING:
                delattr(entry.owner, entry.name)
            else:
                setattr(entry.owner, entry.name, entry.before)


@dataclass(frozen=True)
class LayerRow:
    """One layer of a model and what runs it."""

    layer: str
    """Its path in the model, as in ``model.named_modules()``."""
    runs: str
    """The operation, or the original's name."""
    engine: str
    """The engine chosen; ``torch`` where the original runs."""
    reason: str | None = None
    """Why it stays on torch; None where it does not."""


@dataclass(frozen=True)
class Explanation:
    """What runs every layer; prints as a table."""

    model: str
    rows: tuple[LayerRow, ...]

    @classmethod
    def of(cls, model: str, rows: Iterable[LayerRow]) -> Explanation:
        """From rows in the model's order."""
        return cls(model, tuple(rows))

    @property
    def on_torch(self) -> tuple[LayerRow, ...]:
        """The layers that stay on the original code."""
        return tuple(row for row in self.rows if row.engine == TORCH)

    def __str__(self) -> str:
        table = Table("layer", "runs", "engine", "why not here", title=self.model)
        for row in self.rows:
            table.add_row(row.layer, row.runs, row.engine, row.reason or "-")
        text = io.StringIO()
        Console(file=text, width=160, color_system=None).print(table, markup=False)
        return text.getvalue().rstrip("\n")
