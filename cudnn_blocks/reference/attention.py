# SPDX-License-Identifier: Apache-2.0
"""Scaled dot product attention in plain torch, at the rounding points of the contract."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from cudnn_blocks.quant_spec import E4M3
from cudnn_blocks.reference.quantize import encode_e4m3
from cudnn_blocks.reference.sigmoid_gate import sigmoid_gate

MAX_SCORES = 2**24
"""Scores that are held at a time: FP32, so 64 MiB."""
WEIGHT_SCALE = 2.0**8
"""Of weights that become e4m3: the largest of a row is 256, the smallest normal one 2**-6."""


@dataclass(frozen=True)
class AttentionMask:
    """Which keys below the length a query row sees.

    Row i sees key j iff ``j < L``, where the mask is causal ``j <= i + offset +
    max(window_right, 0)``, and where ``window_left >= 0`` ``j >= i + offset - window_left``.
    ``offset`` is ``L - S`` with ``causal_bottom_right``, else 0.
    """

    is_causal: bool = True
    causal_bottom_right: bool = False
    window_left: int = -1
    """Keys shown left of the diagonal; -1 for all."""
    window_right: int = -1
    """Keys shown right of a causal diagonal; -1 and 0 for none."""

    def key_ranges(
        self, rows: torch.Tensor, num_rows: int, num_keys: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """First key of each row and the one past its last; empty where the first is not below.

        Args:
            rows: numbers of query rows.
            num_rows: S.
            num_keys: L.
        """
        offset = num_keys - num_rows if self.causal_bottom_right else 0
        first, end = torch.zeros_like(rows), torch.full_like(rows, num_keys)
        if self.window_left >= 0:
            first = (rows + offset - self.window_left).clamp(min=0)
        if self.is_causal:
            end = (rows + offset + max(self.window_right, 0) + 1).clamp(max=num_keys)
        return first, end


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    gate: torch.Tensor | None,
    lse: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    scale: float,
    mask: AttentionMask,
    descale_v: float = 1.0,
    scale_o: float = 1.0,
) -> None:
    """Writes ``o``, and ``lse`` where it is given.

    Rounding, with ``A`` to the dtype of q and everything else in FP32::

        s   = scale * sum_d q[d] * k[d]
        p   = exp(s - max of the row)                        0 where the row does not see the key
        o   = A(sum_j float(A(p[j])) * v[j] / sum_j p[j])    0 by select where it sees none
        lse = max of the row + ln(sum_j p[j])                -inf by select where it sees none
        o   = A(o * sigmoid(gate))                           with a gate

    Where q, k and v are e4m3 codes, ``A`` is the rounding to BF16, ``C`` that to e4m3, saturating
    at 448, and::

        o   = A(sum_j float(C(256 * p[j])) * v[j] / sum_j (256 * p[j]) * descale_v)
        o   = C(o * scale_o)                                 at the end, where o is e4m3 as well

    Keys and values that a row does not see reach neither its output nor its LSE, whatever they
    hold.

    Args:
        q: ``[B, S, h_q, D]``.
        k: ``[B, Sk, h_kv, D]``, ``h_kv`` a divisor of ``h_q``.
        v: shape of k.
        o: shape of q, written.
        gate: shape of q, or None.
        lse: FP32 ``[B, h_q, S]``, written, or None.
        seq_lens: ``[B]``, keys of each entry, cut to 0 to Sk; or None for Sk.
        scale: factor of the scores; of codes, times what the codes of q and k are scaled by.
        mask: which keys a row sees.
        descale_v: what the codes of v are multiplied by.
        scale_o: what the result is multiplied by before it becomes codes.
    """
    batch, num_rows, h_q, _ = q.shape
    lengths = [k.shape[1]] * batch if seq_lens is None else seq_lens.tolist()
    for b, length in enumerate(lengths):
        num_keys = min(max(length, 0), k.shape[1])
        step = max(1, MAX_SCORES // (h_q * max(num_keys, 1)))
        for start in range(0, num_rows, step):
            rows = slice(start, start + step)
            numbers = torch.arange(start, min(start + step, num_rows), device=q.device)
            ranges = mask.key_ranges(numbers, num_rows, num_keys)
            out, log_sum = _attend(q[b, rows], k[b], v[b], scale, descale_v, *ranges)
            if gate is not None:
                sigmoid_gate(out, gate[b, rows], out)
            o[b, rows] = encode_e4m3(out.float() * scale_o).view(E4M3) if o.dtype == E4M3 else out
            if lse is not None:
                lse[b, :, rows] = log_sum


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    descale_v: float,
    first: torch.Tensor,
    end: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded output ``[S, h_q, D]`` and LSE ``[h_q, S]`` of some rows of one batch entry."""
    num_rows, h_q, d_head = q.shape
    h_kv = k.shape[1]
    act_dtype = torch.bfloat16 if q.dtype == E4M3 else q.dtype
    low, high = int(first.min()), int(end.max())
    if low >= high:
        log_sum = torch.full((h_q, num_rows), -math.inf, device=q.device)
        return torch.zeros(q.shape, dtype=act_dtype, device=q.device), log_sum
    keys = torch.arange(low, high, device=q.device)
    visible = (keys >= first.unsqueeze(1)) & (keys < end.unsqueeze(1))
    # Query heads of one key and value head are further rows of one product.
    rows = q.unflatten(1, (h_kv, -1)).permute(1, 2, 0, 3).float()
    s = torch.matmul(rows.flatten(1, 2), k[low:high].float().permute(1, 2, 0)) * scale
    s = s.view(h_kv, -1, num_rows, high - low).masked_fill(~visible, -math.inf)
    top = s.amax(dim=-1, keepdim=True)
    base = top.masked_fill(top == -math.inf, 0.0)
    p = torch.exp(s - base)
    total = p.sum(dim=-1, keepdim=True)
    weight_scale = WEIGHT_SCALE if q.dtype == E4M3 else 1.0
    rounded = (p * weight_scale).to(q.dtype).float() / weight_scale
    weighted = _weigh(rounded, v[low:high].float().transpose(0, 1), visible)
    is_dead = ~visible.any(dim=1, keepdim=True)
    out = (weighted / total * descale_v).masked_fill(is_dead, 0.0).to(act_dtype)
    log_sum = (base + total.log()).masked_fill(is_dead, -math.inf)
    return out.permute(2, 0, 1, 3).reshape(num_rows, h_q, d_head), log_sum.view(h_q, num_rows)


def _weigh(p: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """``p @ v`` over the visible keys: a weight of 0 does not hide an infinite or NaN value.

    Args:
        p: ``[h_kv, ratio, S, keys]``.
        v: ``[h_kv, keys, D]``.
        visible: ``[S, keys]``.
    """
    v = v.unsqueeze(1)
    if bool(torch.isfinite(v).all()):
        return torch.matmul(p, v)
    is_bad = ~torch.isfinite(v)
    sees_bad = torch.matmul(visible.float(), is_bad.float()) > 0
    return torch.where(sees_bad, torch.matmul(p, v), torch.matmul(p, v.masked_fill(is_bad, 0.0)))
