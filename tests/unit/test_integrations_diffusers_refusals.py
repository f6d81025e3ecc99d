# SPDX-License-Identifier: Apache-2.0
"""Models and calls that are refused: a typed error, and the model as it was."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from cudnn_blocks.errors import (
    ContractError,
    GradModeError,
    LifecycleError,
    NotServedError,
)
from cudnn_blocks.integrations.diffusers import (
    accelerate_vae_decoder,
    accelerate_vae_encoder,
    random_model,
)

SIZES = {"base_dim": 8, "decoder_base_dim": 8, "z_dim": 4}


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small only make threads wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def vae():
    return random_model(**SIZES)


def clip(frames=1):
    return torch.zeros(1, 3, frames, 16, 16, dtype=torch.bfloat16)


def to_float(vae):
    vae.float()


def one_float_gamma(vae):
    vae.encoder.norm_out.gamma.data = vae.encoder.norm_out.gamma.data.float()


def train(vae):
    vae.train()


def train_one_layer(vae):
    vae.encoder.mid_block.resnets[0].dropout.train()


def half_moved(vae):
    vae.encoder.mid_block.to("meta")


def moved_to_meta(vae):
    vae.to("meta")


def wrap(vae):
    vae.encoder = nn.Sequential(vae.encoder)


def hook(vae):
    vae.encoder.forward = vae.encoder.forward


def relu(vae):
    vae.encoder.nonlinearity = nn.ReLU()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (to_float, ContractError, r"encoder.conv_in.weight: expected torch.bfloat16.*float32"),
        (one_float_gamma, ContractError, r"encoder.norm_out.gamma: expected torch.bfloat16"),
        (train, ContractError, "encoder: expected a module in evaluation mode.*training mode"),
        (train_one_layer, ContractError, r"encoder.mid_block.resnets.0.dropout: expected"),
        (half_moved, ContractError, r"mid_block.*expected a parameter on cpu.*got meta"),
        (moved_to_meta, ContractError, "target: expected a cpu or cuda device"),
        (wrap, TypeError, "vae.encoder: expected WanEncoder3d, got Sequential"),
        (hook, LifecycleError, "vae.encoder.forward is not the model's own"),
        (relu, NotServedError, "encoder.nonlinearity ReLU is not served; served: SiLU"),
    ],
)
def test_a_model_in_another_state_is_refused_and_left_alone(vae, change, error, message):
    change(vae)
    before = {name: (value.data_ptr(), value.stride()) for name, value in vae.state_dict().items()}
    own = dict(vars(vae.encoder))
    with pytest.raises(error, match=message):
        accelerate_vae_encoder(vae)
    after = {name: (value.data_ptr(), value.stride()) for name, value in vae.state_dict().items()}
    assert after == before
    assert dict(vars(vae.encoder)) == own


def test_another_family_is_refused():
    with pytest.raises(TypeError, match="vae: expected AutoencoderKLWan, got Linear"):
        accelerate_vae_encoder(nn.Linear(2, 2))


def test_wan_2_1_is_refused():
    vae = random_model(**SIZES, is_residual=False)
    with pytest.raises(NotServedError, match=r"is_residual=False \(WAN 2.1\) is not served"):
        accelerate_vae_encoder(vae)


def test_channels_without_a_norm_are_refused_and_the_model_left_alone():
    vae = random_model(**{**SIZES, "base_dim": 12})
    weights = {name: value.data_ptr() for name, value in vae.state_dict().items()}
    with pytest.raises(NotServedError, match=r"down_blocks.0.resnets.0.norm1: .*channels=12"):
        accelerate_vae_encoder(vae)
    assert {name: value.data_ptr() for name, value in vae.state_dict().items()} == weights
    assert "forward" not in vars(vae.encoder)


def test_twice_is_once_too_often(vae):
    accelerate_vae_encoder(vae)
    accelerate_vae_decoder(vae)
    with pytest.raises(LifecycleError, match="vae.encoder.forward is accelerated already"):
        accelerate_vae_encoder(vae)


def test_an_accelerated_model_has_no_copy(vae):
    handle = accelerate_vae_encoder(vae)
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(LifecycleError, match="restore"):
            make(vae)
    handle.restore()
    copy.deepcopy(vae)


def test_changed_weights_are_noticed_and_kept_by_restore(vae):
    handle = accelerate_vae_encoder(vae)
    other = random_model(**SIZES, seed=1)
    vae.load_state_dict(other.state_dict())
    with torch.no_grad(), pytest.raises(LifecycleError, match="accelerate it again"):
        vae.encode(clip())
    handle.restore()
    with torch.no_grad():
        assert torch.equal(
            vae.encode(clip()).latent_dist.mean, other.encode(clip()).latent_dist.mean
        )


def test_a_later_training_mode_is_noticed(vae):
    accelerate_vae_encoder(vae)
    vae.train()
    with torch.no_grad(), pytest.raises(ContractError, match="evaluation mode"):
        vae.encode(clip())


def test_a_forward_replaced_again_is_not_overwritten(vae):
    handle = accelerate_vae_encoder(vae)
    ours = vae.encoder.forward
    vae.encoder.forward = len
    with pytest.raises(LifecycleError, match="forward was replaced again"):
        handle.restore()
    assert vae.encoder.forward is len
    vae.encoder.forward = ours
    handle.restore()


def test_grad_mode_is_refused_unless_nothing_asks_for_gradients(vae):
    accelerate_vae_encoder(vae)
    with pytest.raises(GradModeError, match=r"torch.no_grad\(\), or vae.requires_grad_\(False\)"):
        vae.encode(clip())
    vae.requires_grad_(False)
    vae.encode(clip())
    with pytest.raises(GradModeError, match="encoder"):
        vae.encode(clip().requires_grad_())


@pytest.mark.parametrize(
    ("shape", "dtype", "caches", "error"),
    [
        ((1, 12, 1, 8, 8), torch.bfloat16, None, "feat_cache: expected the list of caches"),
        ((1, 12, 1, 8, 8), torch.float16, [None], "x: expected torch.bfloat16, got torch.float16"),
        ((1, 12, 2, 8, 8), torch.bfloat16, [None], r"x: expected shape .* T 1 for the first chunk"),
        ((1, 3, 1, 8, 8), torch.bfloat16, [None], r"x: expected shape \[N, 12, T, H, W\]"),
        ((1, 12, 1, 8, 12), torch.bfloat16, [None], "H and W multiples of 8, got"),
        ((12, 1, 8, 8), torch.bfloat16, [None], r"x: expected shape"),
    ],
)
def test_a_bad_chunk_is_refused_before_any_cache_is_written(vae, shape, dtype, caches, error):
    accelerate_vae_encoder(vae)
    with torch.no_grad(), pytest.raises(ContractError, match=error):
        vae.encoder(torch.zeros(shape, dtype=dtype), feat_cache=caches, feat_idx=[0])
    assert caches in (None, [None])


def test_a_later_chunk_has_whole_latent_frames(vae):
    accelerate_vae_encoder(vae)
    caches = [None] * vae._cached_conv_counts["encoder"]
    with torch.no_grad():
        vae.encoder(torch.zeros(1, 12, 1, 8, 8, dtype=torch.bfloat16), caches, [0])
        with pytest.raises(ContractError, match="T a multiple of 4"):
            vae.encoder(torch.zeros(1, 12, 3, 8, 8, dtype=torch.bfloat16), caches, [0])


def test_warm_refuses_a_size_that_is_not_of_the_model(vae):
    handle = accelerate_vae_encoder(vae)
    with pytest.raises(ContractError, match="width: expected a multiple of 2, got 17"):
        handle.warm(16, 17)
    with pytest.raises(ContractError, match="H and W multiples of 8"):
        handle.warm(16, 18)
    with torch.no_grad():  # and the refused one has left no plan behind that nobody compiled
        vae.encode(clip())
