# SPDX-License-Identifier: Apache-2.0
"""The adapter for FLA's ShortConvolution.step, on the stand-in of tests/helpers/fla_stand_in.py."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
from torch import nn

from cudnn_blocks.errors import ContractError, LifecycleError, NotServedError
from cudnn_blocks.integrations import flash_linear_attention as adapter
from cudnn_blocks.integrations.flash_linear_attention import accelerate_short_convolutions
from tests.helpers import fla_stand_in
from tests.helpers.fla_stand_in import Layers, ShortConvolution

D, N = 24, 3


@pytest.fixture(autouse=True)
def _fla(monkeypatch):
    fla_stand_in.install(monkeypatch)
    with torch.no_grad():
        yield


def caches_of(model, slots=N, dtype=torch.bfloat16):
    width = model.convs[0].kernel_size[0]
    return [torch.randn(slots, D, width).to(dtype) for _ in model.convs]


def token(rows=N, dtype=torch.bfloat16):
    return torch.randn(rows, 1, D).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("changes", [{}, {"bias": True}, {"activation": None}], ids=str)
def test_steps_are_those_of_the_original(changes, width, dtype):
    torch.manual_seed(0)
    model = Layers(width=width, dtype=dtype, **changes)
    original = copy.deepcopy(model)
    caches = caches_of(model, dtype=dtype)
    expected_caches = [cache.clone() for cache in caches]
    acceleration = accelerate_short_convolutions(model)
    for _ in range(6):
        x = token(dtype=dtype)
        out, expected = model(x, caches), original(x, expected_caches)
        assert out.shape == x.shape
        assert out.dtype == dtype
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(caches, expected_caches, atol=2e-2, rtol=2e-2)
        assert torch.equal(caches[0], expected_caches[0]), "a state moves bit for bit"
    stats = acceleration.stats()
    assert stats.accelerated == 12
    assert stats.original == {}
    assert [conv.original_steps for conv in model.convs] == [0, 0]


def test_the_cache_is_returned_where_it_is_asked_for():
    model = Layers(count=1)
    accelerate_short_convolutions(model)
    (cache,) = caches_of(model)
    assert model.convs[0](token(), cache=cache, output_final_state=True)[1] is cache
    assert model.convs[0](token(), cache=cache)[1] is None


def test_packed_sequences_and_pitched_rows():
    """``[1, N, D]`` with cu_seqlens, and a slice of a wider projection, need no copy."""
    model = Layers(count=1)
    conv, original = model.convs[0], copy.deepcopy(model.convs[0])
    acceleration = accelerate_short_convolutions(model)
    (cache,) = caches_of(model)
    wide = torch.randn(1, N, D + 8).bfloat16()
    for x, more in (
        (token().transpose(0, 1), {"cu_seqlens": torch.arange(N + 1)}),
        (wide[..., :D].transpose(0, 1), {}),
    ):
        theirs = cache.clone()
        out, _ = conv(x, cache=cache, **more)
        expected, _ = original(x, cache=theirs, **more)
        assert out.shape == x.shape
        assert out.is_contiguous()
        torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
        assert torch.equal(cache, theirs)
    assert acceleration.stats().accelerated == 2


UNSERVED = {
    "residual": (lambda x, c: {"residual": x, "cache": c}, "residual: expected None"),
    "no cache": (lambda x, c: {"cache": None}, "cache: expected a tensor"),
    "strided cache": (
        lambda x, c: {"cache": c.transpose(1, 2).contiguous().transpose(1, 2)},
        "conv_state: expected strides",
    ),
    "few slots": (
        lambda x, c: {"cache": torch.cat([c, c])[:, :, :3].contiguous()},
        "conv_state: expected",
    ),
}


@pytest.mark.parametrize("case", UNSERVED)
def test_what_is_not_served_runs_the_original_and_is_counted(case):
    arguments, reason = UNSERVED[case]
    model = Layers(count=1)
    conv, original = model.convs[0], copy.deepcopy(model.convs[0])
    acceleration = accelerate_short_convolutions(model)
    (cache,), x = caches_of(model), token()
    ours, theirs = (arguments(x, cache.clone()) for _ in range(2))
    if case == "few slots":  # neither path can compute it: the original says so
        with pytest.raises(RuntimeError):
            conv(x, **ours)
    else:
        out, state = conv(x, output_final_state=True, **ours)
        expected, expected_state = original(x, output_final_state=True, **theirs)
        assert torch.equal(out, expected)
        assert torch.equal(state, expected_state)
    stats = acceleration.stats()
    assert stats.accelerated == 0
    assert conv.original_steps == 1
    ((counted, times),) = stats.original.items()
    assert counted.startswith(reason)
    assert times == 1


def test_prefill_and_autograd_are_not_touched():
    model = Layers(count=1)
    acceleration = accelerate_short_convolutions(model)
    y, state = model.convs[0](torch.randn(2, 5, D).bfloat16(), output_final_state=True)
    assert y.shape == (2, 5, D)
    with torch.enable_grad():
        y, _ = model.convs[0](token(), cache=state)
        assert y.requires_grad
    assert acceleration.stats() == adapter.CallCounts().stats()


def test_a_step_under_grad_mode_runs_the_original():
    model = Layers(count=1)
    acceleration = accelerate_short_convolutions(model)
    with torch.enable_grad():
        model.convs[0].step(token().requires_grad_(), None, caches_of(model)[0])
    (reason,) = acceleration.stats().original
    assert "requires grad" in reason


def test_weights_are_used_where_they_are():
    """In place, replaced, and of a dtype that no plan serves."""
    model = Layers(count=1)
    conv = model.convs[0]
    acceleration = accelerate_short_convolutions(model)
    x, (cache,) = token(), caches_of(model)

    def outputs():
        original = ShortConvolution.step(conv, x, None, cache.clone())[0]
        return conv(x, cache=cache.clone())[0], original

    conv.weight.mul_(-3)
    torch.testing.assert_close(*outputs(), atol=1e-2, rtol=1e-2)
    conv.load_state_dict({"weight": torch.randn(D, 1, 4).bfloat16()}, assign=True)
    torch.testing.assert_close(*outputs(), atol=1e-2, rtol=1e-2)
    assert acceleration.stats().accelerated == 2
    conv.float()
    x, cache = x.float(), cache.float()
    assert torch.equal(*outputs())
    ((reason, times),) = acceleration.stats().original.items()
    assert reason.startswith("x: expected dtype torch.bfloat16 or torch.float16")
    assert times == 1
    conv.bfloat16()
    x, cache = x.bfloat16(), cache.bfloat16()
    torch.testing.assert_close(*outputs(), atol=1e-2, rtol=1e-2)
    assert acceleration.stats().accelerated == 3


@pytest.mark.parametrize(
    "decline",
    [
        NotServedError("conv1d_update", "nvidia-cutlass-dsl not installed", "4.8.1 and up"),
        ImportError("No module named 'cutlass'"),
    ],
)
def test_a_layer_that_no_engine_serves_stays_on_the_original(monkeypatch, decline):
    def refuse(*_):
        raise decline

    monkeypatch.setattr(adapter, "find_plan", refuse)
    model = Layers()
    original = copy.deepcopy(model)
    acceleration = accelerate_short_convolutions(model)
    rows = acceleration.explain().on_torch
    assert [(row.layer, row.reason) for row in rows] == [
        ("convs.0", str(decline)),
        ("convs.1", str(decline)),
    ]
    x, caches = token(), caches_of(model)
    assert torch.equal(model(x, [c.clone() for c in caches]), original(x, caches))
    assert acceleration.stats() == adapter.CallCounts(0, {str(decline): 2}).stats()


def test_a_width_without_a_row_stays_on_the_original():
    model = Layers(width=5)
    acceleration = accelerate_short_convolutions(model)
    model(token(), caches_of(model))
    assert acceleration.stats().accelerated == 0
    assert sum(acceleration.stats().original.values()) == 2
    assert "width" in str(acceleration.explain().on_torch[0].reason)


def test_explain_names_the_layers_and_their_engine():
    explanation = accelerate_short_convolutions(Layers()).explain()
    assert [(row.layer, row.runs, row.engine) for row in explanation.rows] == [
        ("convs.0", "CausalConv1dUpdate", "reference"),
        ("convs.1", "CausalConv1dUpdate", "reference"),
    ]
    assert "convs.1" in str(explanation)


def test_layers_of_one_size_share_a_plan():
    model = Layers(count=3)
    accelerate_short_convolutions(model)
    assert len({id(conv.step._plan) for conv in model.convs}) == 1


def test_restore():
    model = Layers()
    acceleration = accelerate_short_convolutions(model)
    acceleration.restore()
    acceleration.restore()
    assert all("step" not in vars(conv) for conv in model.convs)
    model(token(), caches_of(model))
    assert [conv.original_steps for conv in model.convs] == [1, 1]
    assert acceleration.stats().accelerated == 0
    accelerate_short_convolutions(copy.deepcopy(model))


def test_an_accelerated_model_has_no_copy():
    """A copied step would update with the weights of the model that it was made for."""
    model = Layers()
    accelerate_short_convolutions(model)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(LifecycleError, match="restore\\(\\) it, then copy"):
            copied(model)


def half_moved() -> nn.Module:
    model = Layers()
    model.convs[1].to("meta")
    return model


BAD = {
    "no module": (lambda: "a model", TypeError, "model: expected Module, got str"),
    "another family": (lambda: nn.Linear(2, 2).eval(), ContractError, "ShortConvolution"),
    "training": (lambda: Layers().train(), ContractError, "evaluation mode"),
    "another dtype": (
        lambda: Layers(dtype=torch.float32),
        ContractError,
        "convs.0.weight: .*bfloat16",
    ),
    "half-moved": (half_moved, ContractError, "convs.1.weight: expected a parameter on cpu"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_model_is_refused_and_left_as_it_was(case):
    make, kind, message = BAD[case]
    model = make()
    with pytest.raises(kind, match=message):
        accelerate_short_convolutions(model)
    if isinstance(model, nn.Module):
        assert all("step" not in vars(module) for module in model.modules())


def test_twice_is_refused():
    model = Layers()
    accelerate_short_convolutions(model)
    steps = [conv.step for conv in model.convs]
    with pytest.raises(LifecycleError, match="convs.0.step is accelerated already"):
        accelerate_short_convolutions(model)
    assert [conv.step for conv in model.convs] == steps


def test_an_error_between_two_layers_undoes_the_first(monkeypatch):
    model = Layers()
    plans = iter([adapter.find_plan])

    def broken(*operands):
        return next(plans, None)(*operands)  # a bug, not a decline

    monkeypatch.setattr(adapter, "find_plan", broken)
    with pytest.raises(TypeError):
        accelerate_short_convolutions(model)
    assert all("step" not in vars(conv) for conv in model.convs)


def test_without_fla_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, fla_stand_in.MODULE, None)
    with pytest.raises(ImportError, match=r"pip install 'cudnn_blocks\[fla\]'"):
        accelerate_short_convolutions(Layers())


def test_under_torch_compile_the_original_is_traced():
    model = Layers(count=1)
    acceleration = accelerate_short_convolutions(model)
    x, (cache,) = token(), caches_of(model)
    expected, _ = ShortConvolution.step(model.convs[0], x, None, cache.clone())
    compiled = torch.compile(model.convs[0], backend="eager")
    assert torch.equal(compiled(x, cache=cache)[0], expected)
    assert acceleration.stats().accelerated == 0
