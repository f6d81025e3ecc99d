# SPDX-License-Identifier: Apache-2.0
"""One problem of the update: sizes, buffer sets, bytes, and the FP32 reference of every arm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from benchmarks.harness.checks import Tolerance, close, same_bits

INDEX_BYTES = 4


@dataclass(frozen=True)
class Buffers:
    """The operands of one launch."""

    x: torch.Tensor
    """``[N, D]``"""
    conv_state: torch.Tensor
    """``[S, D, L]``, mutated"""
    weight: torch.Tensor
    """``[D, W]``"""
    out: torch.Tensor
    """``[N, D]``, for the arms that write into the caller's output"""
    conv_state_indices: torch.Tensor | None = None
    """int32 ``[N]``, a permutation of the slots"""
    status: torch.Tensor | None = None
    """int32 ``[N, 2]``, zeroed"""


@dataclass(frozen=True)
class Problem:
    """Sizes and layout of one case; SiLU, no bias, as many slots as rows."""

    name: str
    rows: int
    channels: int
    state_len: int
    width: int = 4
    dtype: str = "bfloat16"
    channel_last: bool = False
    """Strides ``(L*D, 1, D)``, the hand-off from prefill, instead of compact ``[S, D, L]``."""
    indexed: bool = False
    """torch.compile joins the peers."""

    @property
    def shape(self) -> str:
        """The shape word of a row."""
        return f"N{self.rows}-D{self.channels}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of every data operand."""
        return getattr(torch, self.dtype)

    @property
    def footprint_bytes(self) -> int:
        """Distinct bytes of one buffer set: x, out, state, weight, and indices."""
        data = self.rows * self.channels * (2 + self.state_len) + self.channels * self.width
        return data * self.torch_dtype.itemsize + self._index_bytes

    @property
    def traffic_bytes(self) -> int:
        """Fewest bytes of one launch: x, state and weight read, state and output written."""
        data = self.rows * self.channels * (2 + 2 * self.state_len) + self.channels * self.width
        return data * self.torch_dtype.itemsize + self._index_bytes

    @property
    def _index_bytes(self) -> int:
        return self.rows * INDEX_BYTES if self.indexed else 0

    def make_sets(self, count: int, device: str = "cuda") -> list[Buffers]:
        """Random data, never zeros; outputs poisoned. Each operand of all sets lies in one slab."""
        n, d, length = self.rows, self.channels, self.state_len
        options = {"dtype": self.torch_dtype, "device": device}
        x = torch.randn(count, n, d, **options)
        stored = (count, n, length, d) if self.channel_last else (count, n, d, length)
        state = torch.randn(stored, **options)
        weight = torch.randn(count, d, self.width, **options) * self.width**-0.5
        out = torch.full((count, n, d), torch.nan, **options)
        indices = status = None
        if self.indexed:
            order = [torch.randperm(n, device=device, dtype=torch.int32) for _ in range(count)]
            indices = torch.stack(order)
            status = torch.zeros(count, n, 2, dtype=torch.int32, device=device)
        return [
            Buffers(
                x=x[i],
                conv_state=state[i].transpose(1, 2) if self.channel_last else state[i],
                weight=weight[i],
                out=out[i],
                conv_state_indices=None if indices is None else indices[i],
                status=None if status is None else status[i],
            )
            for i in range(count)
        ]


def reference(buffers: Buffers, *, indexed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 output and the state afterwards, from the definition; mutates nothing."""
    slots = (
        buffers.conv_state_indices.long()
        if indexed
        else torch.arange(len(buffers.x), device=buffers.x.device)
    )
    width, length = buffers.weight.shape[1], buffers.conv_state.shape[2]
    history = torch.cat([buffers.conv_state[slots], buffers.x.unsqueeze(-1)], dim=-1)
    state = buffers.conv_state.clone()
    state[slots] = history[..., -length:]
    products = history[..., -width:].float() * buffers.weight.float()
    return functional.silu(products.sum(-1)), state


def mismatch(
    expected: tuple[torch.Tensor, torch.Tensor],
    output: torch.Tensor,
    state: torch.Tensor,
    tolerance: Tolerance,
) -> str | None:
    """What an arm got wrong: the state bit by bit, the output within the tolerance."""
    expected_output, expected_state = expected
    return same_bits("conv_state", state, expected_state) or close(
        output.view_as(expected_output), expected_output, tolerance
    )
