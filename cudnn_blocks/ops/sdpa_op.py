# SPDX-License-Identifier: Apache-2.0
"""SdpaFwd: scaled dot product attention with an optional gate, as a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from cudnn_blocks.api_base import Sample, require_type
from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.gated_attention import GatedAttentionGeometry
from cudnn_blocks.geometry.sdpa import SdpaGeometry
from cudnn_blocks.operands import (
    ACTIVATION_DTYPES,
    Contiguous,
    Extents,
    Operand,
    OperandTable,
    check_activation_dtype,
)
from cudnn_blocks.ops.seen_calls import SeenCallsOp
from cudnn_blocks.stages.attention.stage import SdpaModes, SdpaStage
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.strided import vector_strides
from cudnn_blocks.target import Target

_INT32_BYTES = 4


class SdpaFwd(SeenCallsOp):
    """Attention of every query row over the keys that it sees, gated where there is a gate.

    With ``A`` the rounding to the dtype of q, row ``i`` of query head ``h`` and the key and value
    head ``h // (h_q / h_kv)``::

        s[j] = scale * sum_d q[i, d] * k[j, d]                 over the keys j that row i sees
        o    = A(sum_j A(exp(s[j] - r)) * v[j] / sum_j exp(s[j] - r))
        lse  = ln(sum_j exp(s[j]))
        o    = A(o * sigmoid(gate))                            with a gate

    Row ``i`` sees key ``j`` iff all that apply hold::

        j < L                                          L is seq_lens[b], cut to 0 to Sk, or Sk
        j <= i + offset + max(window_right, 0)         is_causal
        j >= i + offset - window_left                  window_left >= 0

    ``offset`` is ``L - S`` with ``causal_bottom_right``, else 0. Windows count keys beside the
    diagonal, which is not counted. Query rows from L on are ordinary rows. A row that sees no key
    is exactly 0, before and after the gate; its LSE is -inf.

    Rounding: scores, exponentials and sums are FP32; ``r``, near the row's maximum, and the order
    of the sums belong to the engine. The gated output has the bits that :class:`SigmoidGate` makes
    of the plain one.

    Keys and values from ``L`` on reach nothing, whatever they hold. A value that is not finite
    reaches rows that see it; where it lies within ``L``, a GPU engine may also pass it to rows that
    do not see it but share a tile with one that does.

    Operands are BF16 or FP16, all of one dtype, 16-byte aligned, with innermost stride 1 and the
    others multiples of 8, so that bands of a projection slab are served as they are. B, S and Sk
    are dynamic, up to the samples' extents; B = 0 or S = 0 is an empty result; Sk is at least 1.
    The ``cudnn`` engine, which has to be pinned, serves the samples' extents and strides alone.

    Args:
        sample_q: ``[B, S, h_q, D]``.
        sample_k: ``[B, Sk, h_kv, D]``.
        sample_v: shape of k.
        sample_o: shape of q, with strides that keep all elements apart.
        geometry: heads, D, scale and mask; a block's geometry serves as well.
        sample_gate: shape of q, or None.
        return_lse: ``execute`` takes ``lse``, FP32 ``[B, h_q, S]``, contiguous, 16-byte aligned.
        seq_lens_present: ``execute`` takes ``seq_lens``, int32 ``[B]``, contiguous, 4-byte aligned.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins; the stage is ``sdpa``.

    Workspace: none.
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``; seq_lens is read at replay.
    Mutates: o, lse.

    Raises:
        ContractError: a tensor breaks the contract, or written memory overlaps another operand.
        NotServedError: a head size or length without a row; the message lists what is served.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> plan = SdpaFwd(q, k, v, o, SdpaGeometry(h_q=16, h_kv=2, d_head=256))
        >>> plan.compile()
        >>> plan.execute(q, k, v, o)

    Source: behaviour after the gated attention block of cudnn-frontend; no code taken.
    """

    op_name = "sdpa-fwd"

    def __init__(
        self,
        sample_q: Sample,
        sample_k: Sample,
        sample_v: Sample,
        sample_o: Sample,
        geometry: SdpaGeometry | GatedAttentionGeometry,
        *,
        sample_gate: Sample | None = None,
        return_lse: bool = False,
        seq_lens_present: bool = False,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        require_type("geometry", geometry, SdpaGeometry, GatedAttentionGeometry)
        require_type("return_lse", return_lse, bool)
        require_type("seq_lens_present", seq_lens_present, bool)
        samples = {
            "q": sample_q,
            "k": sample_k,
            "v": sample_v,
            "o": sample_o,
            "gate": sample_gate,
        }
        super().__init__(samples, SdpaGeometry.of(geometry), target=target, engines=engines)
        self._has_lse = return_lse
        self._has_seq_lens = seq_lens_present

    def execute(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        gate: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        current_stream: StreamLike | None = None,
    ) -> None:
        """One call; see the class for every operand."""
        self._launch((q, k, v, o, gate, lse, seq_lens), current_stream)

    def _build_operands(self) -> OperandTable:
        geometry, dtype = self.geometry, self._specs["q"].dtype
        check_activation_dtype("q", dtype)
        rows = ("B", "S", geometry.h_q, geometry.d_head)
        keys = ("B", "Sk", geometry.h_kv, geometry.d_head)
        read = vector_strides(geometry.d_head)
        written = vector_strides(geometry.d_head, is_written=True)
        return OperandTable(
            (
                Operand("q", dtype, rows, read),
                Operand("k", dtype, keys, read),
                Operand("v", dtype, keys, read),
                Operand("o", dtype, rows, written, is_mutated=True),
                Operand("gate", dtype, rows, read, is_declared="gate" in self._specs),
                Operand(
                    "lse",
                    torch.float32,
                    ("B", geometry.h_q, "S"),
                    Contiguous(),
                    is_mutated=True,
                    is_declared=self._has_lse,
                    has_sample=False,
                ),
                Operand(
                    "seq_lens",
                    torch.int32,
                    ("B",),
                    Contiguous(),
                    alignment_bytes=_INT32_BYTES,
                    is_declared=self._has_seq_lens,
                    has_sample=False,
                ),
            )
        )

    def _check_extents(self, extents: Extents) -> None:
        if self._is_empty(extents):
            return
        if extents["Sk"] == 0:
            raise ContractError("k", "at least one key; seq_lens may hide it", "Sk = 0")
        for stage in self._stages:  # none yet while the samples are checked
            cast("SdpaStage", stage).check_extents(extents["B"], extents["S"], extents["Sk"])

    def _is_empty(self, extents: Extents) -> bool:
        return extents["B"] == 0 or extents["S"] == 0

    def _build_stages(self, target: Target, engines: Mapping[str, str]) -> tuple[SdpaStage, ...]:
        specs = self._specs
        modes = SdpaModes.of(
            self.geometry,
            ACTIVATION_DTYPES[specs["q"].dtype],
            has_gate="gate" in specs,
            has_lse=self._has_lse,
            has_seq_lens=self._has_seq_lens,
        )
        samples = [specs[name] for name in ("q", "k", "v", "o")]
        engine = engines.get(SdpaStage.name)
        return (SdpaStage(modes, self.geometry.scale, samples, target, engine),)
