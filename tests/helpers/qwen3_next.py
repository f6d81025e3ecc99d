# SPDX-License-Identifier: Apache-2.0
"""Small Qwen3-Next models of transformers with seeded weights."""

from __future__ import annotations

import torch

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 0,
    "layer_types": ["linear_attention", "full_attention"],
}
ATTENTION = "model.layers.1.self_attn"


def make_model(dtype=torch.bfloat16, attention="sdpa", **changes):
    """A causal LM with one linear and one full attention layer, norm weights away from zero."""
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    config = modeling.Qwen3NextConfig(**{**SIZES, **changes})
    config._attn_implementation = attention
    torch.manual_seed(7)
    model = modeling.Qwen3NextForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") and "self_attn" in name:
                parameter.uniform_(-0.5, 0.5)
            elif "self_attn" in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model.to(dtype).eval()
