# SPDX-License-Identifier: Apache-2.0
"""Weight packing of the Conv3D family, tap by tap."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from cudnn_blocks.errors import ContractError
from cudnn_blocks.reference.conv3d_packing import (
    causal_conv3d_taps,
    conv3d_taps,
    pack_causal_conv3d_weight,
    pack_conv3d_weight,
)

TAPS = list(itertools.product(range(3), repeat=3))


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize(
    ("co", "ci", "packed_ci"), [(8, 160, 192), (16, 64, 64), (1, 1, 64), (2, 320, 320)]
)
def test_every_tap_lands_in_its_row(co, ci, packed_ci):
    weight = weights(co, ci, 3, 3, 3)
    packed = pack_conv3d_weight(weight)
    assert packed.shape == (co, 3, 3, 3, packed_ci)
    assert packed.dtype == torch.bfloat16
    assert packed.is_contiguous()
    for t, r, s in TAPS:
        assert torch.equal(packed[:, t, r, s, :ci], weight[:, :, t, r, s])
        assert not packed[:, t, r, s, ci:].any()


def test_every_causal_tap_lands_in_its_columns():
    weight = weights(160, 12, 3, 3, 3)
    packed = pack_causal_conv3d_weight(weight)
    assert packed.shape == (160, 448)
    assert packed.is_contiguous()
    for tap, (t, r, s) in enumerate(TAPS):
        first = 16 * tap
        assert torch.equal(packed[:, first : first + 12], weight[:, :, t, r, s])
        assert not packed[:, first + 12 : first + 16].any()
    assert not packed[:, 432:].any()


def test_taps_undo_the_packing():
    weight, causal = weights(8, 24, 3, 3, 3), weights(160, 12, 3, 3, 3)
    for taps, source in (
        (conv3d_taps(pack_conv3d_weight(weight), 24), weight),
        (causal_conv3d_taps(pack_causal_conv3d_weight(causal), 12), causal),
    ):
        assert taps.dtype == torch.float32
        assert torch.equal(taps, source.float().flatten(2).permute(2, 1, 0))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
def test_packed_weight_is_a_copy_so_repacking_shows_a_change(memory_format):
    # channels_last_3d with Ci = 64 already has the packed layout: the trap is to return an alias.
    weight = weights(8, 64, 3, 3, 3).contiguous(memory_format=memory_format)
    packed = pack_conv3d_weight(weight)
    before = packed.clone()
    weight[3, 5, 2, 1, 0] = 7.0
    assert torch.equal(packed, before)
    assert pack_conv3d_weight(weight)[3, 2, 1, 0, 5] == 7.0


def test_causal_repacking_shows_a_change():
    weight = weights(160, 12, 3, 3, 3)
    packed = pack_causal_conv3d_weight(weight)
    before = packed.clone()
    weight[159, 11, 2, 2, 2] = 7.0
    assert torch.equal(packed, before)
    assert pack_causal_conv3d_weight(weight)[159, 26 * 16 + 11] == 7.0


def test_strided_and_meta_weights():
    weight = weights(16, 48, 3, 3, 3)
    assert torch.equal(
        pack_conv3d_weight(weight[::2, ::2]), pack_conv3d_weight(weight[::2, ::2].clone())
    )
    meta = pack_conv3d_weight(torch.empty(320, 160, 3, 3, 3, dtype=torch.bfloat16, device="meta"))
    assert meta.shape == (320, 3, 3, 3, 192)
    assert meta.device.type == "meta"


def test_packing_does_not_drop_gradients_silently():
    weight = torch.nn.Parameter(weights(8, 8, 3, 3, 3))
    assert pack_conv3d_weight(weight).requires_grad
    with torch.no_grad():
        assert not pack_conv3d_weight(weight).requires_grad


@pytest.mark.parametrize("pack", [pack_conv3d_weight, pack_causal_conv3d_weight])
def test_wrong_types_are_type_errors(pack):
    with pytest.raises(TypeError, match=r"weight: expected a torch\.Tensor, got list"):
        pack([1.0])
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(TypeError, match=f"weight: expected dtype torch.bfloat16, got {dtype}"):
            pack(torch.zeros(160, 12, 3, 3, 3, dtype=dtype))


@pytest.mark.parametrize(
    "shape", [(8, 8, 1, 3, 3), (8, 8, 3, 3), (8, 3, 3, 3, 64), (0, 8, 3, 3, 3), (8, 0, 3, 3, 3)]
)
def test_wrong_shapes_are_contract_errors(shape):
    message = re.escape(f"weight: expected shape [Co, Ci, 3, 3, 3], got {shape}")
    with pytest.raises(ContractError, match=message):
        pack_conv3d_weight(torch.zeros(shape, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "shape", [(160, 16, 3, 3, 3), (96, 12, 3, 3, 3), (160, 12, 3, 3), (160, 448)]
)
def test_wrong_causal_shapes_are_contract_errors(shape):
    message = re.escape(f"weight: expected shape (160, 12, 3, 3, 3), got {shape}")
    with pytest.raises(ContractError, match=message):
        pack_causal_conv3d_weight(torch.zeros(shape, dtype=torch.bfloat16))
