# SPDX-License-Identifier: Apache-2.0
"""accelerate_gated_attention on small Qwen3-Next models, on the reference engine."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

from cudnn_blocks.errors import ContractError, LifecycleError, NotServedError
from cudnn_blocks.integrations import transformers as integration
from cudnn_blocks.integrations.calls import CallCounts
from cudnn_blocks.integrations.transformers import accelerate_gated_attention
from tests.helpers.qwen3_next import ATTENTION, make_model

TOKENS = torch.arange(2 * 19).remainder(64).view(2, 19)


@pytest.fixture(scope="module")
def plain():
    """A model that no test changes."""
    return make_model()


@pytest.fixture
def model(plain):
    return copy.deepcopy(plain)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def logits(model, tokens=TOKENS, **arguments):
    return model(tokens, use_cache=False, **arguments).logits


def attention_inputs(model, batch=2, tokens=19, dtype=torch.bfloat16):
    torch.manual_seed(3)
    h = torch.randn(batch, tokens, model.config.hidden_size).to(dtype)
    tables = model.model.rotary_emb(h, torch.arange(tokens)[None])
    return h, tables


def distance(out, exact):
    return float((out.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_is_as_near_to_full_precision_as_the_original(dtype):
    model = make_model(dtype)
    layer = model.get_submodule(ATTENTION)
    h, tables = attention_inputs(model, dtype=dtype)
    exact_model = make_model(torch.float32)
    exact_model.load_state_dict(model.state_dict())
    exact, _ = exact_model.get_submodule(ATTENTION)(h.float(), [t.float() for t in tables], None)
    original, _ = layer(h, tables, None)
    accelerate_gated_attention(model)
    out, weights = layer(h, tables, None)
    assert weights is None
    assert out.dtype == dtype
    assert out.shape == h.shape
    assert distance(out, exact) <= 1.1 * distance(original, exact)


def test_a_prefill_without_a_cache_runs_on_the_block(model, plain):
    acceleration = accelerate_gated_attention(model)
    out, expected = logits(model), logits(plain)
    assert not torch.equal(out, expected), "another order of roundings"
    assert distance(out, expected) < 0.03
    assert logits(model, TOKENS[:1, :1]).shape == (1, 1, 64)
    padding_free = torch.ones_like(TOKENS)
    assert torch.equal(logits(model, attention_mask=padding_free), out)
    assert acceleration.stats() == CallCounts(3).stats()
    positions = torch.arange(5, 5 + TOKENS.shape[1])[None].expand(2, -1)
    moved = logits(model, position_ids=positions)
    assert distance(moved, logits(plain, position_ids=positions)) < 0.03


PADDED = torch.ones_like(TOKENS)
PADDED[0, :4] = 0
PACKED = torch.cat([torch.arange(9), torch.arange(10)])[None]
BYPASSED = {
    "a cache": ({"use_cache": True}, "cache: expected None"),
    "padding": ({"attention_mask": PADDED}, "attention_mask: expected None"),
    "output_attentions": ({"output_attentions": True}, "output_attentions: expected None"),
    "packed sequences": (
        {"input_ids": TOKENS[:1], "position_ids": PACKED},
        "attention_mask: expected None",
    ),
}


@pytest.mark.parametrize("case", BYPASSED)
def test_other_calls_run_the_original_and_are_counted(model, plain, case):
    arguments, reason = BYPASSED[case]
    arguments = {"input_ids": TOKENS, "use_cache": False, **arguments}
    acceleration = accelerate_gated_attention(model)
    assert torch.equal(model(**arguments).logits, plain(**arguments).logits)
    assert acceleration.stats() == CallCounts(0, {reason: 1}).stats()


def test_generation_runs_the_original(model, plain):
    acceleration = accelerate_gated_attention(model)
    arguments = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(TOKENS, **arguments), plain.generate(TOKENS, **arguments))
    assert acceleration.stats() == CallCounts(0, {"cache: expected None": 3}).stats()


@pytest.mark.parametrize(
    ("backend", "positions", "reason"),
    [
        ("eager", None, "attention backend 'eager': expected sdpa or a flash one"),
        ("flash_attention_2", PACKED, "position_ids: expected one sequence an entry"),
        ("flash_attention_2", None, None),
        ("flash_attention_2", torch.arange(19)[None], None),
        ("kernels-community/flash-attn3", torch.arange(7, 26)[None], None),
    ],
)
def test_backends_for_which_no_mask_is_a_causal_one(model, monkeypatch, backend, positions, reason):
    acceleration = accelerate_gated_attention(model)
    layer = model.get_submodule(ATTENTION)
    h, tables = attention_inputs(model, batch=1)
    layer.config._attn_implementation_internal = backend
    ran = []
    monkeypatch.setattr(layer.forward, "_original", lambda *_, **__: ran.append(1) or (h, None))
    layer(h, tables, None, position_ids=positions)
    assert acceleration.stats() == CallCounts(int(not ran), {reason: 1} if reason else {}).stats()
    assert bool(ran) is bool(reason)


def test_training_grad_and_autocast_run_the_original(model):
    acceleration = accelerate_gated_attention(model)
    with torch.enable_grad():
        assert logits(model).requires_grad
    with torch.autocast("cpu", torch.float16):
        logits(model)
    model.train()
    logits(model)
    assert list(acceleration.stats().original) == [
        "grad mode is on",
        "autocast is on",
        "the layer is in training mode",
    ]
    assert acceleration.stats().accelerated == 0


def test_tables_of_another_layout_run_the_original(model):
    """Not an error of the caller: the block declines, the original takes any broadcast."""
    acceleration = accelerate_gated_attention(model)
    layer = model.get_submodule(ATTENTION)
    h, (cos, sin) = attention_inputs(model)
    columns = [table.mT.contiguous().mT for table in (cos, sin)]
    layer(h, columns, None)
    ((reason, times),) = acceleration.stats().original.items()
    assert reason.startswith("cos: expected")
    assert times == 1


def test_weights_that_change_are_repacked(model):
    acceleration = accelerate_gated_attention(model)
    layer = model.get_submodule(ATTENTION)
    h, tables = attention_inputs(model)
    before = layer(h, tables, None)[0]
    layer.v_proj.weight.mul_(2)
    layer.load_state_dict({"q_norm.weight": layer.q_norm.weight + 1}, strict=False, assign=True)
    after = layer(h, tables, None)[0]
    assert not torch.equal(before, after)
    acceleration.restore()
    assert distance(after, layer(h, tables, None)[0]) < 0.03
    packed = layer.forward.__self__
    assert packed is layer, "the layer's own method is back"


def test_explain_lists_what_runs(model):
    explanation = accelerate_gated_attention(model).explain()
    (row,) = explanation.rows
    assert row.layer == ATTENTION
    assert row.runs == "GatedAttentionBlockFwd(fuse_norm_rope, fuse_gate)"
    assert (row.engine, row.reason) == ("reference", None)
    assert ATTENTION in str(explanation)


def with_hook(model):
    model.get_submodule(ATTENTION).q_proj.register_forward_hook(lambda *_: None)


def with_subclass(model):
    class Adapted(nn.Linear):
        pass

    layer = model.get_submodule(ATTENTION)
    layer.v_proj.__class__ = Adapted


def with_two_eps(model):
    model.get_submodule(ATTENTION).k_norm.eps = 1e-5


def with_all_keys(model):
    model.get_submodule(ATTENTION).is_causal = False


STAYING = {
    "hooks": (with_hook, {}, "q_proj with forward hooks"),
    "an adapted projection": (with_subclass, {}, "v_proj of type Adapted"),
    "bias": (lambda model: None, {"attention_bias": True}, "q_proj with a bias"),
    "two eps": (with_two_eps, {}, "two eps"),
    "no causal mask": (with_all_keys, {}, "is_causal=False"),
}


@pytest.mark.parametrize("case", STAYING)
def test_a_layer_that_the_block_does_not_compute_stays_on_the_original(case):
    change, sizes, reason = STAYING[case]
    model = make_model(**sizes)
    change(model)
    expected = logits(model)
    acceleration = accelerate_gated_attention(model)
    (row,) = acceleration.explain().on_torch
    assert reason in row.reason
    assert "served: " in row.reason
    assert torch.equal(logits(model), expected)
    assert acceleration.stats() == CallCounts(0, {row.reason: 1}).stats()


def test_knobs_that_no_engine_serves_are_left_out(model, monkeypatch):
    """A stage that declines one fusion leaves the others; one that declines all stays on torch."""
    real, unserved = integration.GatedAttentionBlockFwd, {"fuse_norm_rope"}

    class Block(real):
        def _build_stages(self, target, engines):
            for knob in unserved & {name for name, is_on in self._knobs.items() if is_on}:
                raise NotServedError("gemm", knob, "a plain product")
            return super()._build_stages(target, engines)

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._knobs = {"fuse_norm_rope": False, **kwargs, "always": True}

    monkeypatch.setattr(integration, "GatedAttentionBlockFwd", Block)
    acceleration = accelerate_gated_attention(model)
    assert acceleration.explain().rows[0].runs == "Block(fuse_gate)"
    acceleration.restore()
    unserved.add("always")
    (row,) = accelerate_gated_attention(model).explain().on_torch
    assert row.reason.startswith("gemm: ")


def half_moved():
    model = make_model()
    model.get_submodule(ATTENTION).k_proj.to("meta")
    return model


BAD = {
    "no module": (lambda: {}, TypeError, "model: expected Module, got dict"),
    "another family": (lambda: nn.Linear(2, 2).eval(), ContractError, "Qwen3-Next full-attention"),
    "training": (lambda: make_model().train(), ContractError, "evaluation mode"),
    "another dtype": (
        lambda: make_model(torch.float32),
        ContractError,
        "self_attn.q_proj.weight: expected dtype torch.bfloat16 or torch.float16",
    ),
    "half-moved": (half_moved, ContractError, "k_proj.weight: expected a parameter on cpu"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_model_is_refused_and_left_as_it_was(case):
    make, kind, message = BAD[case]
    model = make()
    with pytest.raises(kind, match=message):
        accelerate_gated_attention(model)
    if isinstance(model, nn.Module):
        assert all("forward" not in vars(module) for module in model.modules())


def test_a_model_that_was_dispatched_may_span_devices(model):
    model.lm_head.to("meta")
    with pytest.raises(ContractError, match="lm_head"):
        accelerate_gated_attention(model)
    model.hf_device_map = {"model": "cpu", "lm_head": "meta"}
    accelerate_gated_attention(model)


def test_twice_is_refused_and_restore_is_complete(model, plain):
    acceleration = accelerate_gated_attention(model)
    with pytest.raises(LifecycleError, match="accelerated already"):
        accelerate_gated_attention(model)
    with pytest.raises(LifecycleError, match="no copy"):
        copy.deepcopy(model)
    acceleration.restore()
    acceleration.restore()
    assert torch.equal(logits(model), logits(plain))
    assert acceleration.stats().accelerated == 0
    copy.deepcopy(model)


def test_under_torch_compile_the_original_is_traced(model, plain):
    acceleration = accelerate_gated_attention(model)
    h, tables = attention_inputs(model)
    compiled = torch.compile(model.get_submodule(ATTENTION), backend="eager")
    expected = plain.get_submodule(ATTENTION)(h, tables, None)[0]
    assert torch.equal(compiled(h, tables, None)[0], expected)
    assert acceleration.stats().accelerated == 0


def test_one_layer_alone(model):
    acceleration = accelerate_gated_attention(model.get_submodule(ATTENTION))
    logits(model)
    assert acceleration.explain().rows[0].layer == ""
    assert acceleration.stats().accelerated == 1


def test_without_transformers_the_extra_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.models.qwen3_next.modeling_qwen3_next", None)
    with pytest.raises(ImportError, match=r"pip install 'cudnn_blocks\[transformers\]'"):
        accelerate_gated_attention(model)
