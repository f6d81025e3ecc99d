# SPDX-License-Identifier: Apache-2.0
"""``@frozen``: the strict, immutable pydantic dataclass behind every geometry and spec."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def frozen(cls: type[T]) -> type[T]:
    """Makes ``cls`` a frozen pydantic dataclass without coercion.

    A wrong Python type raises ``TypeError``. Values are judged by the class's own ``validate()``,
    so that a geometry can be built, printed and asked why it is not served.
    """
    built = dataclass(cls, frozen=True, config=ConfigDict(strict=True, extra="forbid"))
    init = built.__init__
    names = [field.name for field in dataclasses.fields(built)]

    def _spelled(part: int | str) -> str:
        """A positional argument by its field's name."""
        return names[part] if isinstance(part, int) and part < len(names) else str(part)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(_spelled(part) for part in first["loc"]) or "arguments"
            raise TypeError(
                f"{cls.__name__}.{field}: {first['msg']}, got {type(first['input']).__name__}"
            ) from None

    built.__init__ = __init__  # type: ignore[method-assign]
    return built  # type: ignore[return-value]
