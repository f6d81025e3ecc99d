# SPDX-License-Identifier: Apache-2.0
"""WorkspaceLayout and GuardedBuffer."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cudnn_blocks import ContractError
from cudnn_blocks.workspace import (
    ENGINE_SCRATCH,
    REGION_ALIGNMENT_BYTES,
    GuardedBuffer,
    Region,
    WorkspaceLayout,
)

CPU = torch.device("cpu")
SIZES = st.lists(st.integers(0, 5000), max_size=12)


def layout_of(sizes: list[int]) -> WorkspaceLayout:
    layout = WorkspaceLayout()
    for i, size in enumerate(sizes):
        layout.book(f"region_{i}", size)
    return layout


@given(SIZES)
def test_regions_are_aligned_ordered_and_disjoint(sizes):
    layout = layout_of(sizes)
    end = 0
    for region, size in zip(layout.regions, sizes, strict=True):
        assert region.offset_bytes % REGION_ALIGNMENT_BYTES == 0
        assert region.offset_bytes >= end
        assert region.size_bytes == size
        end = region.offset_bytes + size
    assert layout.size_bytes >= end


@given(SIZES)
def test_size_is_exact(sizes):
    rounded = sum(math.ceil(s / REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES for s in sizes)
    assert layout_of(sizes).size_bytes == rounded


@given(SIZES, SIZES)
def test_append_only_what_is_booked_first_never_moves(first, more):
    layout = layout_of(first)
    before = layout.regions
    for i, size in enumerate(more):
        layout.book(f"more_{i}", size)
    assert layout.regions[: len(before)] == before
    assert all(layout[region.name] == region for region in before)


@given(SIZES, st.integers(0, 5000))
def test_scratch_is_last_and_moves_nothing(sizes, scratch):
    plain, with_scratch = layout_of(sizes), layout_of(sizes)
    region = with_scratch.book_scratch(scratch)
    assert with_scratch.regions == (*plain.regions, region)
    assert region == Region(ENGINE_SCRATCH, plain.size_bytes, scratch)


def test_nothing_follows_the_scratch():
    layout = WorkspaceLayout()
    layout.book_scratch(1)
    with pytest.raises(AssertionError, match="region 'late' follows engine_scratch"):
        layout.book("late", 1)


def test_a_name_is_booked_once():
    layout = layout_of([1])
    with pytest.raises(AssertionError, match="'region_0' is booked twice"):
        layout.book("region_0", 1)


def test_negative_size():
    with pytest.raises(ContractError, match="^h: expected a size of at least 0 bytes, got -1$"):
        WorkspaceLayout().book("h", -1)


def test_views_write_their_own_region_only():
    layout = WorkspaceLayout()
    layout.book("a", 24)
    layout.book("b", 6)
    workspace = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    a = layout.view(workspace, "a", torch.float32, (2, 3))
    b = layout.view(workspace, "b", torch.bfloat16, (3,))
    assert a.data_ptr() == workspace.data_ptr()
    assert b.data_ptr() == workspace.data_ptr() + REGION_ALIGNMENT_BYTES
    assert (a.shape, a.dtype, a.is_contiguous()) == ((2, 3), torch.float32, True)
    a.view(torch.int32).fill_(-1)
    b.view(torch.int16).fill_(-1)
    written = workspace.nonzero().flatten().tolist()
    assert written == [*range(24), *range(256, 262)]


def test_a_view_may_be_smaller_than_its_region_but_not_larger():
    layout = layout_of([8])
    workspace = torch.zeros(256, dtype=torch.uint8)
    assert layout.view(workspace, "region_0", torch.float32, (1,)).numel() == 1
    with pytest.raises(AssertionError, match="region_0: 12 > 8 bytes"):
        layout.view(workspace, "region_0", torch.float32, (3,))


def aligned(size_bytes: int, offset: int = 0) -> torch.Tensor:
    raw = torch.zeros(size_bytes + 2 * REGION_ALIGNMENT_BYTES, dtype=torch.uint8)
    start = -raw.data_ptr() % REGION_ALIGNMENT_BYTES + offset
    return raw[start : start + size_bytes]


def test_check_accepts_an_exact_and_a_larger_workspace():
    layout = layout_of([300])
    layout.check(aligned(512), CPU)
    layout.check(aligned(513), CPU)


def test_check_accepts_none_only_where_nothing_is_needed():
    WorkspaceLayout().check(None, CPU)
    layout_of([0]).check(None, CPU)
    with pytest.raises(ContractError, match=r"^workspace: expected 256 bytes .*, got None$"):
        layout_of([1]).check(None, CPU)


@pytest.mark.parametrize(
    ("workspace", "got"),
    [
        pytest.param(aligned(511), "511 bytes", id="one-byte-short"),
        pytest.param(aligned(512, 16), r"address % 64 == 16", id="misaligned"),
        pytest.param(aligned(1024)[::2], "shape", id="strided"),
        pytest.param(aligned(512).view(2, 256), "shape", id="matrix"),
        pytest.param(aligned(512).view(torch.int32), "torch.int32", id="dtype"),
        pytest.param(torch.empty(512, dtype=torch.uint8, device="meta"), "meta", id="device"),
    ],
)
def test_check_refuses(workspace, got):
    with pytest.raises(ContractError, match=got) as refused:
        layout_of([300]).check(workspace, CPU)
    assert refused.value.operand == "workspace"


def test_an_empty_layout_still_judges_what_is_passed():
    with pytest.raises(ContractError, match=r"torch\.float32"):
        WorkspaceLayout().check(torch.zeros(4), CPU)


def test_prints_a_map():
    layout = layout_of([300, 1])
    assert str(WorkspaceLayout()) == "workspace: none"
    assert str(layout).splitlines()[0] == "workspace: 768 bytes"
    assert str(layout).splitlines()[2].split() == ["512", "1", "region_1"]


@pytest.mark.parametrize("size_bytes", [0, 1, 300])
def test_guarded_buffer_is_poisoned_and_intact(size_bytes):
    buffer = GuardedBuffer(size_bytes, "cpu")
    assert buffer.bytes.shape == (size_bytes,)
    assert bool((buffer.bytes == 0xFF).all())
    buffer.bytes.zero_()
    assert buffer.is_intact()


@pytest.mark.parametrize("index", [-4096, -1, 300, 300 + 4095])
def test_guarded_buffer_notices_one_byte_outside(index):
    buffer = GuardedBuffer(300, "cpu")
    whole = torch.empty(0, dtype=torch.uint8).set_(buffer.bytes.untyped_storage())
    whole[4096 + index] = 0
    assert not buffer.is_intact()
