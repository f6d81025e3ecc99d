# SPDX-License-Identifier: Apache-2.0
"""The plain matrix product as plans of the cuDNN graph API.

A plan has fixed sizes. There is one for the largest number of rows and one for every power of two
below it: a call of fewer rows runs as the binary digits of their number, each on its own rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cudnn_blocks.errors import ContractError
from cudnn_blocks.stages.cudnn_graph import HANDLES, PinnedPlan, pin_plan

X, W, Y = 1, 2, 3  # tensor uids
_DATA_TYPES = {"bf16": "BFLOAT16", "fp16": "HALF"}


@dataclass(frozen=True)
class CudnnGemm:
    """``y = A(x @ w.T)`` of compact operands, for every number of rows up to ``rows``."""

    n: int
    k: int
    device_index: int
    plans: tuple[tuple[int, PinnedPlan], ...]
    """Rows and plan, the most rows first."""

    @classmethod
    def build(cls, rows: int, n: int, k: int, dtype: str, device_index: int) -> CudnnGemm:
        """Builds every plan.

        Raises:
            PlanDeclinedError: cuDNN has none for some size.
        """
        HANDLES.prepare(device_index)
        rows = max(rows, 1)
        powers = (1 << i for i in range(rows.bit_length()))
        sizes = sorted({rows, *(size for size in powers if size < rows)}, reverse=True)
        with torch.cuda.device(device_index), HANDLES.bound(device_index, 0) as handle:
            plans = tuple((size, _build_plan(size, n, k, dtype, handle)) for size in sizes)
        return cls(n, k, device_index, plans)

    def launch(self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, stream: int) -> None:
        """One launch for the most rows, a few for less."""
        for name, operand in (("x", x), ("w", w), ("y", y)):
            if not operand.is_contiguous():
                raise ContractError(name, "contiguous with engine cudnn", operand.stride())
        left = x.shape[0] * x.shape[1]
        x_address, y_address = x.data_ptr(), y.data_ptr()
        row_bytes = self.k * x.element_size(), self.n * y.element_size()
        for size, plan in self.plans:
            if size <= left:
                addresses = {X: x_address, W: w.data_ptr(), Y: y_address}
                plan.execute(addresses, self.device_index, stream)
                x_address += size * row_bytes[0]
                y_address += size * row_bytes[1]
                left -= size

    def __str__(self) -> str:
        return f"plan {self.plans[0][1].name}"


def _build_plan(rows: int, n: int, k: int, dtype: str, handle: Any) -> PinnedPlan:
    import cudnn

    io_type, fp32 = getattr(cudnn.data_type, _DATA_TYPES[dtype]), cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        name="gemm",
        io_data_type=io_type,
        intermediate_data_type=fp32,
        compute_data_type=fp32,
        handle=handle,
    )
    x = graph.tensor(dim=[1, rows, k], stride=[rows * k, k, 1], name="x", uid=X)
    w = graph.tensor(dim=[1, k, n], stride=[k * n, 1, k], name="w", uid=W)
    y = graph.matmul(x, w, compute_data_type=fp32, name="product")
    y.set_output(True).set_data_type(io_type).set_uid(Y)
    return pin_plan(graph)
