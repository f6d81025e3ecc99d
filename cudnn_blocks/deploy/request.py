# SPDX-License-Identifier: Apache-2.0
"""Request: one configuration of an op or block, and the plan that it stands for."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field

from cudnn_blocks.api_base import APIBase
from cudnn_blocks.operands import ACTIVATION_DTYPES
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec

Dtype = Literal["bf16", "fp16"]
Batch = Annotated[int, Field(description="largest B")]
Tokens = Annotated[int, Field(description="largest S")]

TORCH_DTYPES = {name: dtype for dtype, name in ACTIVATION_DTYPES.items()}


class Request(BaseModel):
    """Sizes, modes and knobs of one plan; the largest extents where axes are dynamic.

    A subclass says with ``op`` which op or block it is for, and makes its constructor's arguments.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    op_class: ClassVar[type[APIBase]]
    op: str
    name: Annotated[str | None, Field(description="label in tables and messages")] = None
    engines: Annotated[dict[str, str], Field(description="stage name to engine name, pins")] = {}

    @classmethod
    def op_name(cls) -> str:
        """Name of the op, in files and on the command line."""
        (name,) = get_args(cls.model_fields["op"].annotation)
        return str(name)

    def arguments(self) -> dict[str, Any]:
        """Arguments of the op's constructor, without ``engines`` and ``target``."""
        raise NotImplementedError

    def plan(self, target: str | Target) -> APIBase:
        """The plan, over samples without memory; not checked, not compiled.

        Raises:
            ContractError, TypeError: as the op's constructor does.
        """
        arguments = {**self.arguments(), "engines": self.engines, "target": target}
        return self.op_class(**arguments)

    def __str__(self) -> str:
        return self.name or self.op


def spec(dtype: str | torch.dtype, *shape: int) -> TensorSpec:
    """A contiguous sample without memory."""
    return TensorSpec.contiguous(shape, TORCH_DTYPES[dtype] if isinstance(dtype, str) else dtype)
