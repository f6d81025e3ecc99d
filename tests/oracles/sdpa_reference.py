# SPDX-License-Identifier: Apache-2.0
"""Attention written from its contract, and as the kernels take it; shares no line with the package.

``exact`` is FP64, one row and one head at a time, over the keys that three plain inequalities let
through. ``lazy_online`` walks blocks of keys from last to first with a reference that lags behind
the maximum, and rounds wherever a kernel does.
"""

from __future__ import annotations

import math

import torch


def visible_keys(
    row: int,
    num_rows: int,
    length: int,
    *,
    is_causal: bool = True,
    causal_bottom_right: bool = False,
    window_left: int = -1,
    window_right: int = -1,
) -> list[int]:
    """The keys that one query row sees."""
    diagonal = row + (length - num_rows if causal_bottom_right else 0)
    return [
        key
        for key in range(length)
        if not (is_causal and key > diagonal + max(window_right, 0))
        and not (window_left >= 0 and key < diagonal - window_left)
    ]


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    seq_lens: list[int] | None = None,
    **mask: bool | int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``o`` ``[B, S, h_q, D]`` and ``lse`` ``[B, h_q, S]``, FP64, nothing rounded."""
    batch, num_rows, h_q, d_head = q.shape
    num_keys, h_kv = k.shape[1:3]
    o = torch.zeros(batch, num_rows, h_q, d_head, dtype=torch.float64)
    lse = torch.full((batch, h_q, num_rows), -math.inf, dtype=torch.float64)
    q, k, v = (x.double().cpu() for x in (q, k, v))
    for b in range(batch):
        length = num_keys if seq_lens is None else min(max(seq_lens[b], 0), num_keys)
        for row in range(num_rows):
            keys = visible_keys(row, num_rows, length, **mask)
            for head in range(h_q) if keys else ():
                kv_head = head // (h_q // h_kv)
                scores = (k[b, keys, kv_head] * q[b, row, head]).sum(1) * scale
                lse[b, head, row] = torch.logsumexp(scores, 0)
                o[b, row, head] = torch.exp(scores - lse[b, head, row]) @ v[b, keys, kv_head]
    return o, lse


def lazy_online(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    visible: torch.Tensor,
    block: int,
    growth: float = 8.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One head: ``[S, D]`` each, ``visible`` ``[S, Sk]``.

    The reference of a row moves to the maximum only where that is more than ``growth`` powers of 2
    above it, so that weights reach 2**growth; they are rounded to the dtype of q where they meet V.
    """
    log2_e = math.log2(math.e)
    num_rows, num_keys = q.shape[0], k.shape[0]
    ref = torch.full((num_rows,), -math.inf)
    total, acc = torch.zeros(num_rows), torch.zeros(num_rows, v.shape[1])
    for start in reversed(range(0, num_keys, block)):
        keys = slice(start, min(start + block, num_keys))
        s = torch.zeros(num_rows, keys.stop - keys.start)
        for d in range(q.shape[1]):  # one fused multiply-add after the other
            s = s + q[:, d, None].float() * k[None, keys, d].float()
        s = s.masked_fill(~visible[:, keys], -math.inf)
        top = s.amax(1) * (scale * log2_e)
        moves = top - ref > growth
        new_ref = torch.where(moves, top, ref)
        factor = torch.where(moves, torch.exp2(ref - new_ref), 1.0)
        total, acc, ref = total * factor, acc * factor[:, None], new_ref
        base = torch.where(ref == -math.inf, 0.0, ref)
        p = torch.exp2((s.double() * (scale * log2_e) - base[:, None]).float())
        total = total + p.sum(1)
        acc = acc + p.to(q.dtype).float() @ torch.where(
            visible[:, keys].any(0)[:, None], v[keys].float(), 0.0
        )
    dead = ~visible.any(1)
    o = torch.where(dead[:, None], 0.0, acc / total[:, None])
    lse = torch.where(dead, -math.inf, (ref + torch.log2(total)) / log2_e)
    return o.to(q.dtype), lse
