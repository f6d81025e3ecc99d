# SPDX-License-Identifier: Apache-2.0
"""The accelerated WAN VAE: results of the eager model, and the model as it was afterwards."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from diffusers import AutoencoderKLWan

from cudnn_blocks.integrations.diffusers import (
    WAN_2_2,
    accelerate_vae_decoder,
    accelerate_vae_encoder,
    grouped_encode,
    random_model,
    torch_steps,
)
from cudnn_blocks.integrations.diffusers.builder import Builder
from cudnn_blocks.integrations.diffusers.conv_steps import copy_wide
from cudnn_blocks.integrations.diffusers.decoder import decoder_program
from cudnn_blocks.integrations.diffusers.encoder import encoder_program
from cudnn_blocks.integrations.diffusers.family import Family, Service
from cudnn_blocks.integrations.patching import TORCH
from cudnn_blocks.target import Target

SMALL = {"base_dim": 16, "decoder_base_dim": 16, "z_dim": 8}
TOLERANCE = {"atol": 0.02, "rtol": 0.02}
DECODED = {"atol": 0.05, "rtol": 0.02}
NO_WORSE = 2.0
"""Our RMS distance to the FP32 model over the eager model's, whose biases round less on a CPU."""


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small only make threads wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def vae():
    return random_model(**SMALL)


def clip(batch, frames, height, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(batch, 3, frames, height, width, generator=generator) * 2 - 1).bfloat16()


def latents(batch, frames, height, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, SMALL["z_dim"], frames, height, width, generator=generator).bfloat16()


@torch.no_grad()
def encode(vae, x):
    return vae.encode(x).latent_dist.parameters


@torch.no_grad()
def decode(vae, z):
    return vae.decode(z).sample


def check_against(vae, ours, run, x, **tolerance):
    """Near the eager model, and no farther than it from the same weights in FP32."""
    eager, exact = run(vae, x), run(copy.deepcopy(vae).float(), x.float())
    assert ours.shape == eager.shape
    assert ours.dtype == eager.dtype
    assert ours.is_contiguous() or not eager.is_contiguous()  # the CPU's libraries choose eager's
    torch.testing.assert_close(ours, eager, **tolerance)
    error, eager_error = ((x - exact).square().mean().sqrt() for x in (ours, eager))
    assert error <= NO_WORSE * eager_error


@pytest.mark.parametrize(
    ("batch", "frames", "height", "width"),
    [(1, 1, 32, 48), (1, 5, 48, 16), (1, 17, 16, 48), (1, 33, 16, 16), (4, 5, 16, 16)],
)
def test_encodes_as_the_eager_model_does(vae, batch, frames, height, width):
    x = clip(batch, frames, height, width)
    accelerated = copy.deepcopy(vae)
    accelerate_vae_encoder(accelerated)
    check_against(vae, encode(accelerated, x), encode, x, **TOLERANCE)


def test_a_part_of_a_single_site_has_strides_in_order(vae):
    # Of sizes 1 is_contiguous() says nothing, but cat goes by their strides.
    accelerate_vae_encoder(vae)
    strides = []
    vae.quant_conv.register_forward_pre_hook(lambda _, args: strides.append(args[0].stride()))
    encode(vae, clip(4, 1, 16, 16))
    channels = 2 * SMALL["z_dim"]
    assert strides == [(channels, 1, 1, 1, 1)]


@pytest.mark.parametrize(
    ("batch", "frames", "height", "width"), [(1, 1, 2, 3), (1, 4, 3, 1), (2, 2, 1, 2)]
)
def test_decodes_as_the_eager_model_does(vae, batch, frames, height, width):
    z = latents(batch, frames, height, width)
    accelerated = copy.deepcopy(vae)
    accelerate_vae_decoder(accelerated)
    check_against(vae, decode(accelerated, z), decode, z, **DECODED)


def rows_of_wan_2_2(program, part, target):
    """What explain() prints, without weights; that results are right is the example's test."""
    with torch.device("meta"):
        vae = AutoencoderKLWan(**WAN_2_2, latents_mean=[0.0] * 48, latents_std=[1.0] * 48)
    family = Family(Target.parse(target))
    torch.nn.Module.to(vae, torch.bfloat16)
    steps = program(getattr(vae, part), Builder(family)).steps
    return [row for step in steps for row in step.rows(family)]


def last_names(rows):
    return Counter(row.layer.split(",")[0].rpartition(".")[2] for row in rows)


def test_every_3x3x3_convolution_of_the_encoder_of_wan_2_2_is_on_hopper():
    rows = rows_of_wan_2_2(encoder_program, "encoder", "sm_90a")
    convs = [
        row for row in rows if last_names([row]).keys() & {"conv_in", "conv1", "conv2", "conv_out"}
    ]
    assert len(convs) == 22
    assert {row.engine for row in convs} == {"hopper", "portable + hopper"}
    assert sum(row.runs == "Conv3dRmsNormSiluPad" for row in convs) == 6
    assert last_names(row for row in rows if row.engine == TORCH) == {
        "avg_shortcut": 4,
        "conv_shortcut": 2,
        "downsampler": 3,
        "time_conv": 2,
        "3": 1,  # the sum behind down block 3
        "0": 1,  # the attention
    }


def test_the_widest_convolutions_of_the_decoder_stay_on_torch_for_a_reason():
    rows = rows_of_wan_2_2(decoder_program, "decoder", "sm_90a")
    convs = [row for row in rows if last_names([row]).keys() & {"conv1", "conv2"}]
    wide = [row for row in convs if "mid_block" in row.layer or row.layer[18] in "01"]
    assert {row.engine for row in wide} == {TORCH}
    assert all("hopper: out_channels=1024 (served: 96" in row.reason for row in wide)
    assert {row.engine for row in convs if row not in wide} == {"hopper"}
    ampere = rows_of_wan_2_2(decoder_program, "decoder", "sm_80")
    assert {row.engine for row in ampere if row.layer.endswith("conv1")} == {"portable"}


def test_a_shortcut_into_the_last_block_of_a_level():
    vae = random_model(**SMALL, num_res_blocks=1)
    x = clip(1, 5, 16, 16)
    expected = encode(vae, x)
    accelerate_vae_encoder(vae)
    torch.testing.assert_close(encode(vae, x), expected, **TOLERANCE)


def test_two_clips_in_a_row_and_then_the_first_again(vae):
    first, second = clip(1, 5, 16, 32), clip(1, 9, 32, 16, seed=1)
    expected = [encode(vae, x) for x in (first, second)]
    accelerate_vae_encoder(vae)
    ours = [encode(vae, x) for x in (first, second, first)]
    torch.testing.assert_close(ours[0], expected[0], **TOLERANCE)
    torch.testing.assert_close(ours[1], expected[1], **TOLERANCE)
    assert torch.equal(ours[2], ours[0])


def test_a_clip_that_breaks_off_leaves_nothing_to_the_next(vae):
    x = clip(1, 5, 16, 32)
    accelerate_vae_encoder(vae)
    alone = encode(vae, x)
    with pytest.raises(ValueError, match="H and W multiples of 8"):
        encode(vae, clip(1, 5, 24, 32))
    assert torch.equal(encode(vae, x), alone)


@pytest.mark.parametrize("mode", ["slicing", "tiling"])
def test_slices_and_tiles(vae, mode):
    x, z = clip(2, 1, 16, 48), latents(2, 1, 1, 3)
    if mode == "slicing":
        vae.enable_slicing()
    else:
        vae.enable_tiling(32, 32, 16, 16)
    expected = encode(vae, x), decode(vae, z)
    accelerate_vae_encoder(vae)
    accelerate_vae_decoder(vae)
    torch.testing.assert_close(encode(vae, x), expected[0], **TOLERANCE)
    torch.testing.assert_close(decode(vae, z), expected[1], **DECODED)


@pytest.mark.parametrize("declined", [["conv_norm"], ["conv_norm", "conv", "conv_add"]])
def test_what_the_family_declines_runs_apart_or_on_torch(vae, monkeypatch, declined):
    x, z = clip(1, 9, 16, 16), latents(1, 3, 1, 1)
    expected = encode(vae, x), decode(vae, z)
    for name in declined:
        monkeypatch.setattr(Family, name, lambda *_: Service("Conv3d", None, "not today"))
    handles = accelerate_vae_encoder(vae), accelerate_vae_decoder(vae)
    torch.testing.assert_close(encode(vae, x), expected[0], **TOLERANCE)
    torch.testing.assert_close(decode(vae, z), expected[1], **DECODED)
    for handle in handles:
        fused = [row for row in handle.explain().rows if row.layer.endswith("norm2, SiLU")]
        assert {row.runs for row in fused} == {"RmsNormSiluPad"}
        reasons = {row.reason for row in handle.explain().on_torch if "conv1" in row.layer}
        assert reasons == ({"not today"} if "conv" in declined else set())


def test_a_large_frame_takes_the_attention_of_the_model(vae, monkeypatch):
    x = clip(1, 5, 32, 32)
    accelerate_vae_encoder(vae)
    explicit = encode(vae, x)
    monkeypatch.setattr(torch_steps, "MAX_LOGITS", 0)
    calls = []
    vae.encoder.mid_block.attentions[0].register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(encode(vae, x), explicit, **TOLERANCE)
    assert len(calls) == 2


def test_attention_takes_as_many_frames_as_fit(vae, monkeypatch):
    x = clip(2, 17, 32, 32)
    accelerate_vae_encoder(vae)
    at_once = encode(vae, x)
    monkeypatch.setattr(torch_steps, "MAX_LOGITS", 3 * (2 * 2) ** 2)
    torch.testing.assert_close(encode(vae, x), at_once, **TOLERANCE)


@pytest.mark.parametrize(
    ("frames", "calls"),
    [
        (1, [1]),
        (4, [1]),
        (5, [1, 4]),
        (16, [1, 4, 4, 4]),
        (17, [1, 16]),
        (26, [1, 16, 4, 4]),
        (81, [1, 16, 16, 16, 16, 16]),
    ],
)
def test_chunks_go_in_groups_as_long_as_there_are_enough(vae, monkeypatch, frames, calls):
    got = []

    def encoder(x, **_):
        got.append(x.shape[2])
        return torch.zeros(1, 16, -(-x.shape[2] // 4), 1, 1, dtype=torch.bfloat16)

    accelerate_vae_encoder(vae)
    monkeypatch.setattr(vae.encoder, "forward", encoder)
    assert encode(vae, clip(1, frames, 16, 16)).shape[2] == 1 + (frames - 1) // 4
    assert got == calls


def test_a_group_is_its_chunks(vae, monkeypatch):
    x = clip(1, 33, 16, 32)
    accelerate_vae_encoder(vae)
    grouped = encode(vae, x)
    monkeypatch.setattr(grouped_encode, "GROUP_CHUNKS", 99)
    torch.testing.assert_close(encode(vae, x), grouped, atol=1e-3, rtol=0.01)


def test_restore_gives_the_model_back(vae):
    x, z = clip(1, 5, 32, 16), latents(1, 2, 2, 1)
    before = {name: value.clone() for name, value in vae.state_dict().items()}
    strides = {name: value.stride() for name, value in vae.state_dict().items()}
    parameters = list(vae.parameters())
    expected = encode(vae, x), decode(vae, z)
    handles = accelerate_vae_encoder(vae), accelerate_vae_decoder(vae)
    assert not torch.equal(encode(vae, x), expected[0])  # it did run something else
    for handle in handles:
        handle.restore()
        handle.restore()
    assert torch.equal(encode(vae, x), expected[0])
    assert torch.equal(decode(vae, z), expected[1])
    after = vae.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert {name: value.stride() for name, value in after.items()} == strides
    assert all(old is new for old, new in zip(parameters, vae.parameters(), strict=True))
    assert "forward" not in vars(vae.encoder)
    accelerate_vae_encoder(vae).restore()


def test_no_weight_is_held_twice(vae):
    handle = accelerate_vae_encoder(vae)
    convs = [step.conv for step in handle._program.steps if hasattr(step, "conv")]
    assert len(convs) == 21
    modules = dict(vae.named_modules())
    for conv in convs:
        assert modules[conv.name].weight.data_ptr() == conv.weight.data_ptr()


def test_the_plans_of_warm_are_all_that_a_clip_needs(vae):
    """On a CPU warm() stops before them, as there is nothing to compile."""
    handle = accelerate_vae_encoder(vae)
    handle.warm(32, 16)
    plans = handle._family._plans
    assert plans.stats().misses == 0
    handle._build_plans((1, 12, 1, 16, 8))
    count = plans.stats().misses
    assert count > 30
    for frames in (13, 33):
        encode(vae, clip(1, frames, 32, 16))
    assert plans.stats().misses == count


def test_a_listing_that_fails_leaves_no_plan_that_nobody_compiled(vae, monkeypatch):
    handle = accelerate_vae_encoder(vae)
    monkeypatch.setattr(torch_steps.Attention, "__call__", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        handle._build_plans((1, 12, 1, 8, 8))
    monkeypatch.undo()
    encode(vae, clip(1, 1, 16, 16))


def test_plans_are_shared_between_layers_and_clips(vae):
    handle = accelerate_vae_encoder(vae)
    encode(vae, clip(1, 5, 16, 16))
    plans = handle._family._plans.stats()
    encode(vae, clip(1, 5, 16, 16, seed=1))
    again = handle._family._plans.stats()
    assert again.misses == plans.misses
    assert again.hits > 2 * plans.hits


@pytest.mark.parametrize("channels", [3, 8, 160])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copied_rows_keep_their_bits(channels, dtype):
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.iinfo(bits)
    source = torch.randint(info.min, info.max, (2, 2, 5, 7, channels), dtype=bits).view(dtype)
    target = torch.zeros(2, 4, 7, 9, channels, dtype=dtype)
    copy_wide(target[:, 1:3, 1:-1, 1:-1], source)
    assert torch.equal(target[:, 1:3, 1:-1, 1:-1].view(bits), source.view(bits))
    target[:, 1:3, 1:-1, 1:-1] = 0
    assert not target.view(bits).any(), "a border was written"
