# SPDX-License-Identifier: Apache-2.0
"""Command-line options made of a request's fields, so that files and commands say the same."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from cudnn_blocks.deploy import Request

_NOT_ON_THE_COMMAND_LINE = ("op", "name")


def request_options(request: type[Request]) -> list[click.Option]:
    """An option for every field of the request."""
    return [
        _engines() if name == "engines" else _option(name, field)
        for name, field in request.model_fields.items()
        if name not in _NOT_ON_THE_COMMAND_LINE
    ]


def request_of(request: type[Request], values: dict[str, Any]) -> Request:
    """The request that the values of those options ask for."""
    return request(op=request.op_name(), **values)


def _option(name: str, field: FieldInfo) -> click.Option:
    spelled = name.replace("_", "-")
    kind = field.annotation
    if get_origin(kind) in (Union, types.UnionType):  # an optional number
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    declaration = f"--{spelled}/--no-{spelled}" if kind is bool else f"--{spelled}"
    choice = click.Choice(get_args(kind)) if get_origin(kind) is Literal else None
    default: dict[str, Any] = {"required": True}
    if not field.is_required():
        default = {"default": field.default, "show_default": field.default is not None}
    return click.Option([declaration, name], type=choice or kind, help=field.description, **default)


def _engines() -> click.Option:
    return click.Option(
        ["--engine", "engines"],
        multiple=True,
        callback=_parse_engines,
        help="stage=engine, such as sdpa=portable; repeats",
    )


def _parse_engines(
    _context: click.Context, _option: click.Parameter, pins: tuple[str, ...]
) -> dict[str, str]:
    malformed = [pin for pin in pins if pin.count("=") != 1]
    if malformed:
        raise click.UsageError(f"--engine: expected stage=engine, got {malformed[0]}")
    return dict(pin.split("=") for pin in pins)


def command_of(
    request: type[Request], run: Callable[[Request, dict[str, Any]], None], more: list[click.Option]
) -> click.Command:
    """A command named like the op, which calls ``run`` with the request and the other options."""

    def call(**values: Any) -> None:
        rest = {option.name: values.pop(str(option.name)) for option in more}
        run(request_of(request, values), rest)

    return click.Command(
        request.op_name(),
        params=[*request_options(request), *more],
        callback=call,
        help=request.__doc__,
    )
