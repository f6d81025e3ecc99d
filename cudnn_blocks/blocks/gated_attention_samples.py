# SPDX-License-Identifier: Apache-2.0
"""Samples of the gated attention block without a tensor in memory, for each of its modes."""

from __future__ import annotations

import torch

from cudnn_blocks.blocks.gated_attention_precision import Quant, block_formats
from cudnn_blocks.geometry import GatedAttentionGeometry
from cudnn_blocks.quant_spec import E2M1_X2, E4M3, Fp4Format, MxQuantSpec, QuantSpec
from cudnn_blocks.reference.scale_blobs import blob_bytes
from cudnn_blocks.tensor_spec import TensorSpec

UNIT_SPECS: dict[str, Quant] = {
    "fp8": QuantSpec(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    "mxfp8": MxQuantSpec(1.0),
    "mxfp4-weights": MxQuantSpec(1.0, w_qkvg_dtype=E2M1_X2),
    "nvfp4-output": MxQuantSpec(1.0, o_fp4=Fp4Format.NVFP4),
    "mxfp4-output": MxQuantSpec(1.0, o_fp4=Fp4Format.MXFP4),
}
"""A spec of each kind by its name, for plans that are asked about and not run: scales of 1."""


def block_samples(
    geometry: GatedAttentionGeometry,
    batch: int,
    tokens: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    quant: Quant | None = None,
    device: torch.device | str = "meta",
) -> dict[str, TensorSpec]:
    """The constructor's ``sample_`` arguments, contiguous, without those that it does not take.

    Args:
        geometry: sizes.
        batch: B.
        tokens: S, and rows of the tables.
        dtype: of activations where nothing is quantised.
        quant: the spec; codes and blobs are then of the dtypes that it names.
        device: of the specs.
    """
    one, act = geometry, torch.bfloat16 if quant is not None else dtype

    def spec(of: torch.dtype, *shape: int) -> TensorSpec:
        return TensorSpec.contiguous(shape, of, device)

    samples = {
        name: spec(act, one.d_head)
        for name in ("sample_w_q_norm", "sample_w_k_norm")
        if one.qk_norm
    }
    for name in ("sample_cos", "sample_sin") if one.rope_dim else ():
        samples[name] = spec(act, batch, tokens, one.rope_dim)
    samples["sample_out"] = spec(act, batch, tokens, one.d_model)
    matrices = {
        "h": ((batch, tokens), one.d_model),
        "w_qkvg": ((one.n_qkvg,), one.d_model),
        "w_o": ((one.d_model,), one.attn_width),
    }
    for name, block in block_formats(quant).items():
        outer, k = matrices[name]
        if block is None:
            samples[f"sample_{name}"] = spec(act if quant is None else E4M3, *outer, k)
            continue
        samples[f"sample_{name}"] = spec(block.code_dtype, *outer, k // block.codes_per_byte)
        rows = outer[0] * outer[-1] if len(outer) > 1 else outer[0]
        blob = blob_bytes(rows, k // block.block_size)
        samples[f"sample_{name}_sf"] = spec(block.scale_dtype, blob)
    return samples
