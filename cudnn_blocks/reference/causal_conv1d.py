# SPDX-License-Identifier: Apache-2.0
"""Reference of the causal conv1d decode update."""

from __future__ import annotations

import torch

from cudnn_blocks.errors import BadSlotError
from cudnn_blocks.geometry.causal_conv1d import (
    BELOW_PADDING,
    DUPLICATE,
    NO_FAULT,
    OUT_OF_RANGE,
    PADDING_SLOT,
)

FAULT_NAMES = {BELOW_PADDING: "below -1", OUT_OF_RANGE: "out of range", DUPLICATE: "duplicate"}


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
    status: torch.Tensor | None,
    *,
    use_silu: bool,
) -> None:
    """Advances ``conv_state`` by one token and writes ``out``.

    Rounding: FP32 fused multiply-adds, taps in ascending order, then the bias, then SiLU as
    ``v / (1 + exp(-v))``; one rounding to the output dtype. States move bitwise.

    Args:
        x: ``[N, D]``, the new token of each row.
        conv_state: ``[S, D, L]``, mutated.
        weight: ``[D, W]``.
        out: ``[N, D]``, written.
        bias: ``[D]`` or None.
        conv_state_indices: int32 ``[N]`` or None; -1 marks a padding row.
        status: int32 ``[N, 2]`` that receives ``(fault, slot)`` of bad rows, or None to raise.
        use_silu: SiLU instead of the identity.

    Raises:
        BadSlotError: a bad slot and ``status`` is None; nothing is written then.
    """
    rows, slots = _good_rows(x.shape[0], conv_state, conv_state_indices, status)
    state_len, width = conv_state.shape[2], weight.shape[1]
    history = torch.cat([conv_state[slots], x[rows].unsqueeze(2)], dim=2)
    # FP64 holds product and sum without a second rounding that shows: each step is one FP32 FMA.
    taps, filters = history[:, :, -width:].double(), weight.double()
    acc = (taps[:, :, 0] * filters[:, 0]).float()
    for tap in range(1, width):
        acc = (acc.double() + taps[:, :, tap] * filters[:, tap]).float()
    if bias is not None:
        acc = acc + bias.float()
    if use_silu:
        acc = acc / (1 + torch.exp(-acc))
    if rows.numel() < x.shape[0]:
        out.zero_()
    out[rows] = acc.to(out.dtype)
    conv_state[slots] = history[:, :, -state_len:]


def find_faults(indices: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Fault code of each row, 0 for a usable or padding slot; every row of a group counts."""
    below = indices < PADDING_SLOT
    beyond = indices >= num_slots
    _, group, sizes = torch.unique(indices, return_inverse=True, return_counts=True)
    repeated = (sizes[group] > 1) & (indices != PADDING_SLOT)
    faults = torch.where(repeated, DUPLICATE, NO_FAULT)
    faults = torch.where(beyond, OUT_OF_RANGE, faults)
    return torch.where(below, BELOW_PADDING, faults)


def _good_rows(
    num_rows: int,
    conv_state: torch.Tensor,
    indices: torch.Tensor | None,
    status: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to compute and their slots."""
    if indices is None:
        rows = torch.arange(num_rows, device=conv_state.device)
        return rows, rows
    faults = find_faults(indices, conv_state.shape[0])
    bad = faults.nonzero().flatten()
    if bad.numel():
        if status is None:
            raise BadSlotError(list_faults(torch.stack([faults, indices.long()], dim=1)))
        status[bad] = torch.stack([faults[bad], indices[bad].long()], dim=1).int()
    rows = ((faults == NO_FAULT) & (indices != PADDING_SLOT)).nonzero().flatten()
    return rows, indices[rows].long()


def list_faults(status: torch.Tensor) -> list[tuple[int, int, str]]:
    """``(row, slot, kind)`` of each bad row of a status tensor; reads the device."""
    host = status.cpu()
    rows = host[:, 0].nonzero().flatten().tolist()
    return [(row, int(host[row, 1]), FAULT_NAMES[int(host[row, 0])]) for row in rows]
