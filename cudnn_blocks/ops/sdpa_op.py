# SPDX-License-Identifier: Apache-2.0
"""SdpaFwd: scaled dot product attention with an optional gate, as a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch

from cudnn_blocks.api_base import Sample, require_type
from cudnn_blocks.errors import ContractError, NotServedError
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
from cudnn_blocks.ops.seen_calls import Operands, SeenCallsOp
from cudnn_blocks.quant_spec import E4M3
from cudnn_blocks.stages.attention.stage import SdpaModes, SdpaStage
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.strided import Strided, vector_strides
from cudnn_blocks.target import Target
from cudnn_blocks.workspace import ENGINE_SCRATCH

_INT32_BYTES = 4
_CODES_VEC = 16
"""Codes in 16 bytes."""
_CODES = "e4m3"


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

    Codes: q, k and v may be e4m3, per tensor ``value = code * descale``. ``A`` is then the rounding
    to BF16 and ``C`` that to e4m3, saturating at 448; scores are of values, and::

        o    = A(sum_j C(256 * exp(s[j] - r)) * v[j] / sum_j (256 * exp(s[j] - r)))
        o    = C(o * scale_o)                                  at the end, where o is e4m3

    ``r`` is then the row's maximum, or up to 0.52 below it as far as an engine had met the keys.
    Their strides other than 1 are multiples of 16; o is BF16 or e4m3, the gate BF16. On Hopper, a
    first launch transposes v into the workspace, and products of codes are summed by the tensor
    cores in fewer bits than FP32 has.

    Other operands are BF16 or FP16, all of one dtype. All are 16-byte aligned, with innermost
    stride 1 and the others multiples of 8, so that bands of a projection slab are served as they
    are. B, S and Sk are dynamic, up to the samples' extents; B = 0 or S = 0 is an empty result; Sk
    is at least 1.
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
        descale_q: what codes of q are multiplied by; it and those that follow are arguments of the
            kernel, and 1.0 for what is not codes.
        descale_k: the same of k.
        descale_v: the same of v.
        scale_o: what o is multiplied by before it becomes codes.

    Workspace: none; of codes on Hopper, ``B * h_kv * D`` bytes per key, keys up to whole 128.
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``; seq_lens is read at replay.
    Mutates: o, lse.

    Raises:
        ContractError: a tensor breaks the contract, written memory overlaps another operand, or a
            scale has nothing to act on.
        NotServedError: E5M2 codes; a head size or length without a row; the message lists what is
            served.
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
        descale_q: float = 1.0,
        descale_k: float = 1.0,
        descale_v: float = 1.0,
        scale_o: float = 1.0,
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
        self._scales = {
            "descale_q": descale_q,
            "descale_k": descale_k,
            "descale_v": descale_v,
            "scale_o": scale_o,
        }
        for name, value in self._scales.items():
            require_type(name, value, float, int)

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
        workspace: torch.Tensor | None = None,
    ) -> None:
        """One call; see the class for every operand."""
        self._launch((q, k, v, o, gate, lse, seq_lens), current_stream, workspace)

    def _build_operands(self) -> OperandTable:
        geometry, dtype, is_fp8 = self.geometry, self._specs["q"].dtype, self._is_fp8
        if dtype == torch.float8_e5m2:
            raise NotServedError(SdpaStage.name, f"q in {dtype}", f"codes in {E4M3}")
        if not is_fp8:
            check_activation_dtype("q", dtype)
        act_dtype = torch.bfloat16 if is_fp8 else dtype
        o_dtype = E4M3 if self._has_o_codes else act_dtype
        self._check_scales()
        rows = ("B", "S", geometry.h_q, geometry.d_head)
        keys = ("B", "Sk", geometry.h_kv, geometry.d_head)
        gate_strides = vector_strides(geometry.d_head)
        read = Strided(math.gcd(_CODES_VEC, geometry.d_head)) if is_fp8 else gate_strides
        written = vector_strides(geometry.d_head, is_written=True)
        return OperandTable(
            (
                Operand("q", dtype, rows, read),
                Operand("k", dtype, keys, read),
                Operand("v", dtype, keys, read),
                Operand("o", o_dtype, rows, written, is_mutated=True),
                Operand("gate", act_dtype, rows, gate_strides, is_declared="gate" in self._specs),
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

    @property
    def _is_fp8(self) -> bool:
        return self._specs["q"].dtype == E4M3

    @property
    def _has_o_codes(self) -> bool:
        return self._is_fp8 and self._specs["o"].dtype == E4M3

    def _check_scales(self) -> None:
        """ContractError for a scale that is no positive number, or that nothing is scaled by."""
        for name, value in self._scales.items():
            if not (math.isfinite(value) and value > 0):
                raise ContractError(name, "a finite number above 0", value)
            has_codes = self._has_o_codes if name == "scale_o" else self._is_fp8
            if value != 1.0 and not has_codes:
                raise ContractError(name, "1.0 without codes that it belongs to", value)

    def _is_plainly_good(self, operands: Operands) -> bool:
        return not self._is_fp8 and super()._is_plainly_good(operands)

    def _stage_operands(
        self, operands: Operands, workspace: torch.Tensor | None
    ) -> Sequence[Operands]:
        if not self._is_fp8:
            return (operands,)
        scratch = None
        for region in self._layout.regions:
            assert workspace is not None
            shape = (region.size_bytes,)
            scratch = self._layout.view(workspace, ENGINE_SCRATCH, torch.uint8, shape)
        return ((*operands, scratch),)

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
        specs, scales = self._specs, self._scales
        modes = SdpaModes.of(
            self.geometry,
            _CODES if self._is_fp8 else ACTIVATION_DTYPES[specs["q"].dtype],
            has_gate="gate" in specs,
            has_lse=self._has_lse,
            has_seq_lens=self._has_seq_lens,
            has_o_codes=self._has_o_codes,
        )
        samples = [specs[name] for name in ("q", "k", "v", "o")]
        stage = SdpaStage(
            modes,
            self.geometry.scale * scales["descale_q"] * scales["descale_k"],
            samples,
            target,
            engines.get(SdpaStage.name),
            descale_v=scales["descale_v"],
            scale_o=scales["scale_o"],
        )
        return (stage,)
