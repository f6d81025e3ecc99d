# SPDX-License-Identifier: Apache-2.0
"""``ops.gated_attention``: cached plans of the block behind a function, and its library op."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_blocks.api_base import require_type
from cudnn_blocks.blocks.gated_attention import GatedAttentionBlockFwd
from cudnn_blocks.blocks.gated_attention_precision import BLOBS, Quant
from cudnn_blocks.geometry import GatedAttentionGeometry
from cudnn_blocks.ops.allocate import run_on_stream
from cudnn_blocks.ops.library import (
    bind_arguments,
    check_traceable,
    defaults_of,
    is_eager,
    register,
)
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.quant_spec import PER_TENSOR_SCALES, Fp4Format, MxQuantSpec, QuantSpec
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.tensor_spec import TensorSpec

Operands = dict[str, Any]

_OP_NAME = "gated_attention"
_TENSORS = ("h", "w_qkvg", "w_q_norm", "w_k_norm", "cos", "sin", "w_o", "seq_lens")
_FAST = "fast"
"""In the spelling of a spec with ``fast_accumulation``."""
_FIELDS = tuple(field.name for field in dataclasses.fields(GatedAttentionGeometry))


@dataclass(frozen=True)
class Options:
    """What a plan is made for beside its tensors and geometry."""

    return_lse: bool
    fuse_norm_rope: bool
    fuse_gate: bool
    quant: Quant | None

    def out_dtype(self, h: torch.Tensor) -> torch.dtype:
        """Of the result."""
        return h.dtype if self.quant is None else torch.bfloat16


def gated_attention(
    h: torch.Tensor,
    w_qkvg: torch.Tensor,
    w_q_norm: torch.Tensor | None,
    w_k_norm: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    w_o: torch.Tensor,
    geometry: GatedAttentionGeometry,
    *,
    seq_lens: torch.Tensor | None = None,
    return_lse: bool = False,
    fuse_norm_rope: bool = False,
    fuse_gate: bool = False,
    current_stream: StreamLike | None = None,
    quant: Quant | None = None,
    h_sf: torch.Tensor | None = None,
    w_qkvg_sf: torch.Tensor | None = None,
    w_o_sf: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A gated attention layer; operands, rounding and errors are those of the block.

    The shared plan cache is asked by device, dtypes, geometry, B, S and keywords, scales of
    ``quant`` among them. A new B, S or scale makes a new plan, which finds its kernels compiled
    unless it chooses another tile; for scales that change often, plan once and
    ``update_quant_scales``. Outputs and the
    workspace are allocated on the stream of the launch; where that matters, plan once with
    :class:`GatedAttentionBlockFwd` instead.

    Args:
        h: ``[B, S, d_model]``, BF16 or FP16; with ``quant`` codes, as the weights are.
        w_qkvg: ``[n_qkvg, d_model]``, row bands ``Q | GATE | K | V``.
        w_q_norm: ``[d_head]``, or None where the geometry's ``qk_norm`` is False.
        w_k_norm: as ``w_q_norm``.
        cos: ``[B, T, rope_dim]`` with T >= S, or None where rope_dim is 0.
        sin: as ``cos``.
        w_o: ``[d_model, h_q * d_head]``.
        geometry: sizes, norm and mask.
        seq_lens: int32 ``[B]``, keys of each entry, or None.
        return_lse: also return the log-sum-exp of the scaled scores.
        fuse_norm_rope: norm and rotation in the epilogue of the projection.
        fuse_gate: gate in the epilogue of the attention.
        current_stream: stream to launch on; None for torch's current stream of h's device.
        quant: ``QuantSpec`` or ``MxQuantSpec``, or None.
        h_sf: scale blob of ``h``, with ``MxQuantSpec``.
        w_qkvg_sf: scale blob of ``w_qkvg``, with ``MxQuantSpec``.
        w_o_sf: scale blob of ``w_o``, with ``MxQuantSpec(o_fp4=...)``.

    Returns:
        ``[B, S, d_model]``, contiguous, new; with ``return_lse`` also FP32 ``[B, h_q, S]``.

    Under ``torch.compile`` the op ``torch.ops.cudnn_blocks.gated_attention`` stands for the call.
    """
    require_type("geometry", geometry, GatedAttentionGeometry)
    flags = (return_lse, fuse_norm_rope, fuse_gate)
    for name, flag in zip(("return_lse", "fuse_norm_rope", "fuse_gate"), flags, strict=True):
        require_type(name, flag, bool)
    if quant is not None:
        require_type("quant", quant, QuantSpec, MxQuantSpec)
    options = Options(*flags, quant)
    tensors = (h, w_qkvg, w_q_norm, w_k_norm, cos, sin, w_o, seq_lens, h_sf, w_qkvg_sf, w_o_sf)
    operands = dict(zip((*_TENSORS, *BLOBS), tensors, strict=True))
    if is_eager(h):
        results = _run(operands, geometry, options, current_stream)
    else:
        check_traceable(_OP_NAME, "h", h, current_stream)
        blobs = tensors[len(_TENSORS) :]
        fields = (getattr(geometry, name) for name in _FIELDS)
        results = _OVERLOAD(*tensors[: len(_TENSORS)], *fields, *flags, *_spell(quant), *blobs)
    return (results[0], results[1]) if return_lse else results[0]


def _run(
    operands: Operands,
    geometry: GatedAttentionGeometry,
    options: Options,
    current_stream: StreamLike | None,
) -> list[torch.Tensor]:
    h, has_lse = operands["h"], options.return_lse
    plan = _find_plan(operands, geometry, options)
    workspace_bytes = plan.get_workspace_size()

    def launch(stream: StreamLike | None) -> list[torch.Tensor]:
        results = _new_results(h, geometry, options)
        plan.execute(
            **operands,
            out=results[0],
            workspace=torch.empty(workspace_bytes, dtype=torch.uint8, device=h.device),
            lse=results[1] if has_lse else None,
            current_stream=stream,
        )
        return results

    return run_on_stream(h, current_stream, launch)


def _new_results(
    h: torch.Tensor, geometry: GatedAttentionGeometry, options: Options
) -> list[torch.Tensor]:
    results = [h.new_empty(h.shape, dtype=options.out_dtype(h))]
    if options.return_lse:
        batch, tokens, _ = h.shape
        results.append(h.new_empty((batch, geometry.h_q, tokens), dtype=torch.float32))
    return results


def _find_plan(
    operands: Operands, geometry: GatedAttentionGeometry, options: Options
) -> GatedAttentionBlockFwd:
    h = operands["h"]
    given = tuple(getattr(tensor, "dtype", None) for tensor in operands.values())
    key = (GatedAttentionBlockFwd, h.get_device(), h.shape, geometry, given, options)

    def build() -> GatedAttentionBlockFwd:
        samples = {f"sample_{name}": operands[name] for name in operands if name != "seq_lens"}
        plan = GatedAttentionBlockFwd(
            **samples,
            sample_out=TensorSpec.contiguous(h.shape, options.out_dtype(h), h.device),
            geometry=geometry,
            return_lse=options.return_lse,
            seq_lens_present=operands["seq_lens"] is not None,
            fuse_norm_rope=options.fuse_norm_rope,
            fuse_gate=options.fuse_gate,
            quant=options.quant,
        )
        plan.compile()
        return plan

    plan: GatedAttentionBlockFwd = PLANS.get(key, build)
    return plan


def _library_op(*arguments: Any, **named: Any) -> list[torch.Tensor]:
    return _run(*_split(arguments, named), None)


def _library_fake(*arguments: Any, **named: Any) -> list[torch.Tensor]:
    operands, geometry, options = _split(arguments, named)
    return _new_results(operands["h"], geometry, options)


def _split(arguments: Sequence[Any], named: dict[str, Any]) -> tuple[Any, Any, Options]:
    """Tensors, geometry and options; the dispatcher leaves out trailing defaults."""
    values = bind_arguments(_DEFAULTS, arguments, named)
    tensors = {name: values.pop(name) for name in (*_TENSORS, *BLOBS)}
    fields = {name: values.pop(name) for name in _FIELDS}
    quant = _read(values.pop("quant"), values.pop("scales"))
    return tensors, GatedAttentionGeometry(**fields), Options(**values, quant=quant)


def _spell(quant: Quant | None) -> tuple[str, list[float]]:
    """A spec as the schema has it: what is compiled in, by name, and its scales in their order."""
    if quant is None:
        return "", []
    fast = f" {_FAST}" if quant.fast_accumulation else ""
    if isinstance(quant, QuantSpec):
        return f"{quant.dtype}{fast}", [getattr(quant, name) for name in PER_TENSOR_SCALES]
    o_fp4 = "none" if quant.o_fp4 is None else quant.o_fp4.name
    formats = f"{quant.dtype} {quant.block_size} {quant.w_qkvg_dtype} {o_fp4}{fast}"
    return formats, [quant.descale_w_o, quant.scale_o]


def _read(formats: str, scales: Sequence[float]) -> Quant | None:
    """The spec of ``_spell``."""
    if not formats:
        return None
    words = formats.split()
    is_fast = words[-1] == _FAST
    dtype, *others = words[:-1] if is_fast else words
    if not others:
        own = dict(zip(PER_TENSOR_SCALES, scales, strict=True))
        return QuantSpec(**own, dtype=_dtype_of(dtype), fast_accumulation=is_fast)
    block_size, w_qkvg_dtype, o_fp4 = others
    descale_w_o, scale_o = scales
    return MxQuantSpec(
        descale_w_o,
        scale_o,
        _dtype_of(dtype),
        int(block_size),
        _dtype_of(w_qkvg_dtype),
        Fp4Format.__members__.get(o_fp4),
        is_fast,
    )


def _dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


_OVERLOAD = register(
    f"{_OP_NAME}(Tensor h, Tensor w_qkvg, Tensor? w_q_norm, Tensor? w_k_norm, Tensor? cos, "
    "Tensor? sin, Tensor w_o, Tensor? seq_lens, int d_model, int h_q, int h_kv, int d_head, "
    "int rope_dim, float qk_norm_eps, float? attn_scale, bool is_causal, "
    "bool causal_bottom_right, int window_left, int window_right, bool qk_norm, "
    "bool return_lse=False, bool fuse_norm_rope=False, bool fuse_gate=False, str quant='', "
    "float[] scales=[], Tensor? h_sf=None, Tensor? w_qkvg_sf=None, Tensor? w_o_sf=None) "
    "-> Tensor[]",
    _library_op,
    _library_fake,
)
_DEFAULTS = defaults_of(_OVERLOAD)
