# SPDX-License-Identifier: Apache-2.0
"""The streaming example: chunked equals whole, it computes what it says, and it can fail."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "03_video_vae_stream.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("example_03_video_vae_stream", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small only make threads wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def invoke(example, tmp_path):
    """Runs the program on the CPU; its result, and where it was to put the picture."""

    def invoke(*argv):
        out = tmp_path / "features.png"
        argv = ["--device", "cpu", "--out", str(out), *map(str, argv)]
        return CliRunner().invoke(example.main, argv), out

    return invoke


def make_frames(num_frames, height, width):
    generator = torch.Generator().manual_seed(0)
    shape = (num_frames, height, width, 3)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@pytest.fixture
def video(tmp_path):
    """A lossless clip of noise."""
    import av

    path = tmp_path / "noise.mkv"
    frames = make_frames(10, 20, 28)
    with av.open(path, "w") as container:
        track = container.add_stream("ffv1", rate=25, width=28, height=20, pix_fmt="bgr0")
        for frame in frames:
            for packet in track.encode(av.VideoFrame.from_ndarray(frame.numpy(), format="rgb24")):
                container.mux(packet)
        container.mux(track.encode())
    return path


def whole_clip(weights, patches):
    """The same layers from torch's own operators in FP32, without the padding."""

    def conv(x, weight):
        return F.conv3d(F.pad(x, (1, 1, 1, 1, 2, 0)), weight.float())

    def add_bias(x, bias):
        return x + bias.float().view(1, -1, 1, 1, 1)

    def norm_silu(x, gamma):
        return F.silu(
            F.normalize(x, dim=1) * x.shape[1] ** 0.5 * gamma.float().view(1, -1, 1, 1, 1)
        )

    stem = weights.stem.view(160, 28, 16)[:, :27, :12].mT.reshape(160, 12, 3, 3, 3)
    convs = [packed[..., :160].permute(0, 4, 1, 2, 3) for packed in weights.convs]
    x = add_bias(conv(patches.float(), stem), weights.stem_bias)
    for i in range(0, len(convs), 2):
        h = norm_silu(x, weights.gammas[i])
        h = norm_silu(add_bias(conv(h, convs[i]), weights.biases[i]), weights.gammas[i + 1])
        x = x + add_bias(conv(h, convs[i + 1]), weights.biases[i + 1])
    return norm_silu(x, weights.gammas[-1]).permute(0, 2, 3, 4, 1)


def test_streams_the_clip_of_scikit_video(invoke):
    result, out = invoke("--frames", 6, "--width", 32)
    assert result.exit_code == 0, result.output
    assert "bigbuckbunny.mp4: 6 frames of 32x18" in result.output
    assert "`reference` engine" in result.output
    assert "3 of 3 chunks bitwise equal to the whole clip\n" in result.output
    assert "frames/s" not in result.output
    assert str(out) in result.output
    assert result.output.rstrip().splitlines()[-1].startswith("PASSED")


def test_draws_frames_beside_feature_maps(invoke):
    from matplotlib.image import imread

    result, out = invoke("--frames", 3, "--width", 16)
    assert result.exit_code == 0, result.output
    picture = imread(out)
    height, width = picture.shape[:2]
    assert width > 1000
    for row in range(3):
        for column in range(6):
            tile = picture[row * height // 3 : (row + 1) * height // 3]
            tile = tile[:, column * width // 6 : (column + 1) * width // 6, :3]
            assert tile.std() > 0.05


def test_streams_a_file(invoke, video):
    result, _ = invoke("--video", video, "--width", 12, "--frames", 99)
    assert result.exit_code == 0, result.output
    assert "noise.mkv: 10 frames of 12x8" in result.output
    assert "4 of 4 chunks bitwise equal" in result.output


def test_decodes_every_pixel(example, video):
    assert torch.equal(example.decode(video, 99, None), make_frames(10, 20, 28))
    assert example.decode(video, 3, None).shape == (3, 20, 28, 3)
    assert example.decode(video, 1, 11).shape == (1, 8, 10, 3)  # even sides


def test_patches_have_the_channel_order_of_wan(example):
    frames = make_frames(2, 4, 6)
    patches = example.patchify(frames)
    assert patches.shape == (1, 12, 2, 2, 3)
    for colour in range(3):
        for column in range(2):
            for row in range(2):
                pixels = frames[:, row::2, column::2, colour].float() / 127.5 - 1
                channel = 4 * colour + 2 * column + row
                assert torch.equal(patches[0, channel], pixels.bfloat16())


@pytest.mark.parametrize("num_frames", [1, 2, 3, 6, 9])
def test_any_number_of_frames_gives_equal_chunks(example, capsys, num_frames):
    patches = example.patchify(make_frames(num_frames, 2, 6))
    maps, passed = example.stream(patches)
    assert passed
    assert maps.shape == (1, num_frames + 2, 3, 5, 160)
    num_chunks = 1 + (num_frames + 2) // 4
    assert f"{num_chunks} of {num_chunks} chunks" in capsys.readouterr().out


def test_feature_maps_are_those_of_plain_torch(example):
    patches = example.patchify(make_frames(6, 12, 16))
    maps, _ = example.stream(patches)
    expected = whole_clip(example.Weights(patches.device), patches)
    error = maps[:, 2:, 1:-1, 1:-1].float() - expected
    assert error.norm() < 0.02 * expected.norm()


def test_fails_where_history_is_not_brought(example, invoke, monkeypatch):
    monkeypatch.setattr(example, "bring_history", lambda *_: None)
    result, _ = invoke("--frames", 6, "--width", 16)
    assert result.exit_code == 1
    assert "1 of 3 chunks bitwise equal" in result.output
    assert "FAILED" in result.output
    assert "PASSED" not in result.output


def test_fails_on_one_flipped_bit_of_a_cache(example, invoke, monkeypatch):
    turn = example.Cache.turn

    def flip(cache, frames):
        previous, newest = turn(cache, frames)
        if previous is not None and previous.shape[-1] == 160 and previous.shape[1] == 1:
            previous.view(torch.int16)[0, 0, 0, 0, 7] ^= 1
        return previous, newest

    monkeypatch.setattr(example.Cache, "turn", flip)
    result, _ = invoke("--frames", 9, "--width", 16)
    assert result.exit_code == 1
    assert re.search(r"^[12] of 3 chunks bitwise equal", result.output, re.M)


@pytest.mark.parametrize("missing", ["av", "matplotlib", "skvideo"])
def test_a_missing_package_is_named_with_the_extra_that_has_it(invoke, monkeypatch, missing):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    result, _ = invoke()
    assert result.exit_code == 2
    assert {"skvideo": "scikit-video"}.get(missing, missing) in result.output
    assert '".[video]"' in result.output


def test_refuses_a_file_that_is_no_video(invoke, tmp_path):
    (tmp_path / "text.mp4").write_text("no video")
    result, _ = invoke("--video", tmp_path / "text.mp4")
    assert result.exit_code == 2
    assert "no video in" in result.output


@pytest.mark.gpu
@pytest.mark.parametrize(("height", "width"), [(180, 320), (34, 66)])
def test_streams_on_a_gpu(example, capsys, height, width):
    patches = example.patchify(make_frames(15, height, width).cuda())
    maps, passed = example.stream(patches)
    assert passed
    printed = capsys.readouterr().out
    assert "5 of 5 chunks bitwise equal to the whole clip\n" in printed
    assert re.search(r"\d frames/s", printed)
    expected = whole_clip(example.Weights(patches.device), patches)
    error = maps[:, 2:, 1:-1, 1:-1].float() - expected
    assert error.norm() < 0.02 * expected.norm()
