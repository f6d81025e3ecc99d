# SPDX-License-Identifier: Apache-2.0
"""What the Conv3D ops serve, per target and engine: probe, declines, sizes. No GPU needed."""

from __future__ import annotations

import math

import pytest

from cudnn_blocks import NotServedError
from cudnn_blocks.stages.constraints import MultipleOf, NoneOr, UpTo
from cudnn_blocks.stages.conv3d import stage as conv3d_stage
from cudnn_blocks.stages.conv3d.hopper_tiles import CHANNEL_TILES, NORM_OUT_CHANNELS
from cudnn_blocks.stages.conv3d_input import stage as input_stage
from cudnn_blocks.stages.norm import stage as norm_stage
from cudnn_blocks.target import GPU_TARGET_NAMES, TARGET_NAMES, Target
from tests.helpers.conv3d_forms import CAUSAL, CONV_KINDS, KINDS, NORM, NORM_ONLY, NORM_PAD, RAW
from tests.helpers.conv3d_problem import spec_plan as plan

SEED_CHANNELS = [(160, 160), (160, 320), (320, 320), (320, 640), (640, 640)]


def chosen(kind, **options):
    report = plan(kind, **options).probe()
    assert report.served, report.decline
    return [stage.engine for stage in report.stages]


@pytest.mark.parametrize("target", TARGET_NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_op_is_served_on_every_target(kind, target):
    report = plan(kind, target=target).probe()
    assert report.served, report.decline
    expected = "reference" if target == "cpu" else "portable"
    names = [expected] * (2 if kind == CAUSAL else 1)
    if target == "sm_90a" and kind != NORM_ONLY:
        names[-1] = "hopper"
    assert [stage.engine for stage in report.stages] == names
    for stage in report.stages:
        assert stage.smem_bytes is not None
        assert stage.status is not None
    assert report.workspace_bytes == 0


@pytest.mark.parametrize("channels", SEED_CHANNELS)
@pytest.mark.parametrize("kind", CONV_KINDS)
def test_the_channels_of_the_wan_encoder(kind, channels):
    if kind in (NORM, NORM_PAD) and channels[1] == 640:
        for target in TARGET_NAMES:
            with pytest.raises(NotServedError, match="Conv3dRaw, then RmsNormSiluPad") as declined:
                plan(kind, channels, target=target).check_support()
            assert "normalized_channels=640" in declined.value.missing
            assert declined.value.stage == "conv3d"
        return
    assert chosen(kind, channels=channels, target="sm_90a") == ["hopper"]
    assert chosen(kind, channels=channels, target="sm_80") == ["portable"]


@pytest.mark.parametrize("kind", CONV_KINDS)
def test_other_channels_fall_to_the_portable_engine(kind):
    assert chosen(kind, channels=(24, 40), target="sm_90a") == ["portable"]
    assert chosen(kind, channels=(160, 40), target="sm_90a") == ["portable"]
    assert chosen(kind, channels=(24, 160), target="sm_90a") == ["portable"]
    for out_channels in (96, 128, 192, 256):
        assert chosen(kind, channels=(96, out_channels), target="sm_90a") == ["hopper"]


@pytest.mark.parametrize("target", TARGET_NAMES)
@pytest.mark.parametrize("kind", CONV_KINDS)
@pytest.mark.parametrize(("channels", "fact"), [((12, 160), "in"), ((160, 12), "out")])
def test_channels_that_no_engine_serves_are_declined_with_what_is(kind, channels, fact, target):
    with pytest.raises(NotServedError) as declined:
        plan(kind, channels, target=target).check_support()
    assert f"{fact}_channels=12 (served: " in declined.value.missing
    assert "in_channels multiples of 8; out_channels multiples of 8" in declined.value.served
    report = plan(kind, channels, target=target).probe()
    assert report.decline == str(declined.value)
    assert report.decline_type == "NotServedError"


@pytest.mark.parametrize(("channels", "missing"), [(12, "channels=12"), (2056, "channels=2056")])
def test_channels_that_the_norm_alone_declines(channels, missing):
    for target in TARGET_NAMES:
        with pytest.raises(NotServedError, match=rf"{missing} \(served: multiples of 8 up to 2048"):
            plan(NORM_ONLY, (channels, channels), (1, 1, 1, 1), target=target).check_support()


@pytest.mark.parametrize("kind", CONV_KINDS)
def test_pins(kind):
    assert chosen(kind, target="sm_90a", engines={"conv3d": "portable"}) == ["portable"]
    for engine, target in (("hopper", "sm_80"), ("reference", "sm_90a"), ("portable", "cpu")):
        with pytest.raises(NotServedError, match=f"{engine}: target={target} "):
            plan(kind, target=target, engines={"conv3d": engine}).check_support()
    with pytest.raises(NotServedError, match=r"hopper: out_channels=40 \(served: 96, 128"):
        plan(kind, (160, 40), target="sm_90a", engines={"conv3d": "hopper"}).check_support()


def test_pins_of_the_causal_stages():
    engines = {"causal_conv3d": "portable"}
    assert chosen(CAUSAL, target="sm_90a", engines=engines) == ["portable", "portable"]
    with pytest.raises(NotServedError, match="^causal_conv3d: hopper: target=sm_80 "):
        plan(CAUSAL, target="sm_80", engines={"causal_conv3d": "hopper"}).check_support()


@pytest.mark.parametrize("kind", CONV_KINDS)
def test_activations_beyond_2_to_the_31_elements_are_served(kind):
    """S10, and far beyond it."""
    assert 20 * 1026 * 738 * 160 > 2**31
    for sites in ((1, 18, 1024, 736), (1, 2000, 2048, 2048)):
        for target in ("sm_80", "sm_90a"):
            assert plan(kind, sites=sites, target=target).probe().served


def test_an_engine_never_depends_on_the_number_of_frames():
    """A clip and its chunks run on one engine, as engines round in different orders."""
    for kind in CONV_KINDS:
        for channels in ((8, 8), (160, 160)):
            for frames in (1, 4, 2**20, 2**24):
                seen = plan(kind, channels, (1, frames, 6, 6), target="sm_90a").probe()
                one = plan(kind, channels, (1, 1, 6, 6), target="sm_90a").probe()
                assert seen.stages[0].engine in (one.stages[0].engine, None)


@pytest.mark.parametrize("target", GPU_TARGET_NAMES)
def test_sizes_that_no_kernel_numbers_are_declined(target):
    row_limit = conv3d_stage.MAX_ROWS
    frames = row_limit // 3
    assert plan(RAW, (8, 8), (1, frames - 2, 1, 1), target=target).probe().served
    with pytest.raises(NotServedError, match=r"rows=268435458 \(served: up to 268435455\)"):
        plan(RAW, (8, 8), (1, frames - 1, 1, 1), target=target).check_support()
    with pytest.raises(NotServedError, match="plane_sites=2147534622 .served: up to 2147483647"):
        plan(RAW, (8, 8), (1, 1, 46339, 46339 + 1), target=target).check_support()
    for kind, stage in ((NORM_ONLY, "rmsnorm_silu_pad"), (CAUSAL, "causal_pack")):
        big = (1, 60, 6000, 6000)
        with pytest.raises(NotServedError, match=rf"^{stage}: portable: padded_sites=\d+ .served"):
            plan(kind, (8, 8), big, target=target).check_support()
        assert plan(kind, (8, 8), (1, 50, 6000, 6000), target=target).probe().served


def test_the_limits_are_those_of_the_kernel_files():
    """Stated again on the host side, which must not import the CuTe DSL."""
    from cudnn_blocks.stages.conv3d import portable as conv3d
    from cudnn_blocks.stages.conv3d import portable_config
    from cudnn_blocks.stages.conv3d_input import pack_portable_config as pack
    from cudnn_blocks.stages.norm import portable_config as norm

    assert conv3d_stage.PORTABLE_CHANNEL_MULTIPLE == conv3d.VEC
    widest = conv3d.Conv3dKernelConfig.from_geometry(
        8,
        conv3d_stage.PORTABLE_NORM_CHANNELS,
        Target.parse("sm_80"),
        epilogue=NORM,
        has_residual=False,
        has_residual_bias=False,
        history_frames=0,
        zero_leading_frames=0,
        output_sites=(1, 1, 1, 1),
    )
    assert widest.num_channel_tiles == 1
    assert (widest.warp_channels, widest.warps_n) == (80, 4)  # both at their largest
    assert conv3d_stage.MAX_ROWS == (2**31 - 1) // conv3d.BORDER_PARTS
    assert norm_stage.CHANNEL_MULTIPLE == norm.VEC
    assert norm.choose_lanes(norm_stage.MAX_CHANNELS // norm.VEC) == norm.WARP_THREADS
    # The last CTA numbers sites beyond the end, in 32 bits.
    assert norm_stage.MAX_SITES + max(norm.THREADS, pack.THREADS) < 2**31
    assert input_stage.TAPS16 == portable_config.TAPS16
    assert {160, 320, 640} <= set(CHANNEL_TILES)
    assert {160, 320} <= set(NORM_OUT_CHANNELS)
    assert 640 not in NORM_OUT_CHANNELS


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("kind", KINDS)
def test_describe_names_the_tile_of_a_named_target(kind, target):
    text = plan(kind, target=target).describe()
    if kind != NORM_ONLY:
        assert " pixels" in text
    assert ("run: benchmarks/results" if target == "sm_90a" else "compile-only") in text


def test_the_causal_workspace_does_not_depend_on_the_engine():
    """S28: exact before compile(), on every target, one region."""
    sizes = set()
    for target in TARGET_NAMES:
        carved = plan(CAUSAL, target=target, history_frames=2, has_padded_input=False)
        sizes.add(carved.get_workspace_size())
        assert "padded_input" in str(carved._layout)
    padded_bytes = math.prod((1, 6, 90, 162, 16)) * 2
    assert sizes == {-(-padded_bytes // 256) * 256}


def test_constraints_print_what_they_serve():
    assert 8 in UpTo(8)
    assert 9 not in UpTo(8)
    assert None not in UpTo(8)
    assert str(UpTo(8)) == "up to 8"
    eights = MultipleOf(8, 320)
    assert [n for n in (-8, 0, 4, 8, 320, 328, None) if n in eights] == [8, 320]
    assert 328 in MultipleOf(8)
    assert (str(eights), str(MultipleOf(8))) == ("multiples of 8 up to 320", "multiples of 8")
    maybe = NoneOr(eights, "something else")
    assert None in maybe
    assert 328 not in maybe
    assert str(maybe) == "multiples of 8 up to 320, otherwise something else"


@pytest.mark.parametrize("target", GPU_TARGET_NAMES)
def test_every_served_convolution_fits_the_shared_memory_of_its_target(target):
    limit_bytes = Target.parse(target).smem_per_cta_bytes
    for kind in CONV_KINDS:
        for channels in (
            *((8, co) for co in (8, 24, 104, 160, 168, 320, *CHANNEL_TILES)),
            *((ci, co) for ci in (32, 160, 640) for co in CHANNEL_TILES),
        ):
            for sites in ((1, 1, 1, 1), (1, 7, 88, 160), (1, 4, 352, 640)):
                residual = "none" if kind == RAW else "add_biased"
                ours = plan(kind, channels, sites, target=target, residual=residual)
                report = ours.probe()
                if report.served:
                    assert 0 < report.stages[0].smem_bytes <= limit_bytes, ours.describe()
                else:
                    assert "normalized_channels" in report.decline
