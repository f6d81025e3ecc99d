# SPDX-License-Identifier: Apache-2.0
"""Illegal calls of the block, by who notices them first on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cudnn_blocks import GatedAttentionGeometry
from tests.helpers.gated_attention_problem import GatedProblem, make_problem

GEOMETRY = GatedAttentionGeometry(d_model=64, h_q=2, h_kv=1, d_head=64, rope_dim=16)
BF16 = torch.bfloat16


def make(
    batch: int = 2, tokens: int = 8, device: torch.device | str = "cpu", **options: Any
) -> GatedProblem:
    return make_problem(GEOMETRY, batch, tokens, device=device, **options)


def make_full(device: torch.device | str = "cpu", batch: int = 2, tokens: int = 8) -> GatedProblem:
    """With every operand, and tables of 8 rows."""
    lengths = [tokens] * batch
    return make(batch, tokens, device, has_lse=True, seq_lens=lengths, table_rows=max(tokens, 8))


def over_out(full: GatedProblem, name: str, *shape: int) -> GatedProblem:
    """``name`` is a tensor of ``shape`` with ``out`` in its middle."""
    count = shape[0] * shape[1]
    flat = torch.zeros(count + 1024, dtype=BF16, device=full["h"].device)
    middle = count // 2
    out = flat[middle : middle + 1024].view(2, 8, 64)
    return full.with_(**{name: flat[:count].view(shape), "out": out})


def _zeros(full: GatedProblem, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=full["h"].device)


def _strided(full: GatedProblem, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    return _zeros(full, 1 << 15).as_strided(shape, stride)


Change = Callable[[GatedProblem], GatedProblem]
HIDDEN, TABLE = (2, 8, 64), (2, 8, 16)

QUICKLY_SEEN: dict[str, Change] = {
    "seq_lens missing": lambda c: c.with_(seq_lens=None),
    "lse missing": lambda c: c.with_(lse=None),
    "one norm weight missing": lambda c: c.with_(w_k_norm=None),
    "one table missing": lambda c: c.with_(sin=None),
    "larger batch": lambda c: make_full(c["h"].device, batch=3),
    "more tokens": lambda c: make_full(c["h"].device, tokens=9),
    "short tables": lambda c: c.with_(cos=c["cos"][:, :7], sin=c["sin"][:, :7]),
    "batch stride of h": lambda c: c.with_(h=_zeros(c, 2, 9, 64)[:, :8]),
    "batch stride of out": lambda c: c.with_(out=_zeros(c, 2, 9, 64)[:, :8]),
    "overlapping rows of h": lambda c: c.with_(h=_strided(c, HIDDEN, (256, 32, 1))),
    "overlapping rows of out": lambda c: c.with_(out=_strided(c, HIDDEN, (256, 32, 1))),
    "lse of other strides": lambda c: c.with_(
        lse=c["lse"].transpose(1, 2).contiguous().transpose(1, 2)
    ),
    "seq_lens of other strides": lambda c: c.with_(seq_lens=_zeros(c, 4, dtype=torch.int32)[::2]),
    "h is out": lambda c: c.with_(h=c["out"]),
    "out in w_o": lambda c: over_out(c, "w_o", 64, 128),
    "out in w_qkvg": lambda c: over_out(c, "w_qkvg", 384, 64),
    "w_q_norm in out": lambda c: c.with_(w_q_norm=c["out"].view(-1)[512:576]),
    "w_k_norm at the end of out": lambda c: c.with_(w_k_norm=c["out"].view(-1)[-64:]),
    "cos in out": lambda c: c.with_(cos=c["out"].view(-1)[:256].view(TABLE)),
    "sin in lse": lambda c: c.with_(
        sin=c["lse"].view(-1).view(BF16)[:64].as_strided(TABLE, (0, 0, 1))
    ),
    "seq_lens in lse": lambda c: c.with_(seq_lens=c["lse"].view(-1)[-2:].view(torch.int32)),
    "seq_lens in out": lambda c: c.with_(seq_lens=c["out"].view(-1)[:4].view(torch.int32)),
    "lse in out": lambda c: c.with_(
        lse=c["out"].view(-1).view(torch.float32)[: c["lse"].numel()].view(c["lse"].shape)
    ),
}
"""What the quick check sees before the one host call."""

SEEN_BY_THE_LAUNCHER: dict[str, Change] = {
    "h of another dtype": lambda c: c.with_(h=c["h"].half()),
    "h of another width": lambda c: c.with_(h=_zeros(c, 2, 8, 72)),
    "h at an odd address": lambda c: c.with_(h=_zeros(c, 1032)[1:1025].view(HIDDEN)),
    "h at an odd pitch": lambda c: c.with_(h=_strided(c, HIDDEN, (8 * 68, 68, 1))),
    "h with gaps": lambda c: c.with_(h=_strided(c, HIDDEN, (8 * 128, 128, 2))),
    "out of other extents": lambda c: c.with_(out=_zeros(c, 2, 7, 64)),
    "out at an odd address": lambda c: c.with_(out=_zeros(c, 1032)[4:1028].view(HIDDEN)),
    "w_qkvg at a pitch": lambda c: c.with_(w_qkvg=_zeros(c, 384, 72)[:, :64]),
    "w_qkvg of fewer rows": lambda c: c.with_(w_qkvg=c["w_qkvg"][:-64]),
    "w_o of another width": lambda c: c.with_(w_o=_zeros(c, 64, 64)),
    "w_q_norm with gaps": lambda c: c.with_(w_q_norm=_zeros(c, 128)[::2]),
    "tables of different lengths": lambda c: c.with_(cos=_zeros(c, 2, 9, 16)),
    "tables of another batch": lambda c: c.with_(cos=c["cos"][:1], sin=c["sin"][:1]),
    "cos at an odd pitch": lambda c: c.with_(cos=_strided(c, TABLE, (8 * 17, 17, 1))),
    "sin with gaps": lambda c: c.with_(sin=_strided(c, TABLE, (256, 32, 2))),
    "seq_lens of another dtype": lambda c: c.with_(seq_lens=c["seq_lens"].long()),
    "lse of another dtype": lambda c: c.with_(lse=c["lse"].bfloat16()),
    "lse of other extents": lambda c: c.with_(lse=_zeros(c, 2, 2, 7, dtype=torch.float32)),
}
"""What the quick check leaves to the launcher."""
EVERY_BAD_CALL = QUICKLY_SEEN | SEEN_BY_THE_LAUNCHER
