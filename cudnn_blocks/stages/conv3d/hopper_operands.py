# SPDX-License-Identifier: Apache-2.0
"""Shared-memory layouts and TMA operands of the Hopper Conv3D kernel.

A halo stage holds 64 channels of ``halo_width x halo_height`` input pixels, one 128-byte swizzled
row each. The nine taps of a plane read it at shifted addresses: an m64 block is 8 x 8 pixels, so
that its 8-row groups lie one halo row apart, and a tap moves the wgmma descriptor by
``(r * halo_width + s) * 128`` bytes.

A weight stage holds one tap of 64 channels by ``n_tile`` filters. Its box permutes the filters
inside every 32, so that the accumulators of a thread are 8 consecutive channels of each group.

Residual travels in weight stages: 64 pixels of ``n_tile`` channels have the size of a tap.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import BFloat16
from cutlass.cute.nvgpu import cpasync, warpgroup

from cudnn_blocks.stages.conv3d.hopper_config import (
    BLOCK_SIDE,
    CHUNK,
    ELEMENT_BYTES,
    Conv3dKernelConfig,
)
from cudnn_blocks.stages.device.tma import TmaOperand, channels_first

BOX_MODES = (0, 1, 2, 3, 4)  # of the layouts below; stages follow


@dataclass(frozen=True)
class TmaOperands:
    """Everything that moves by TMA; the last two are None without a residual."""

    halo: TmaOperand
    weight: TmaOperand
    residual: TmaOperand | None
    value: TmaOperand | None


@dataclass(frozen=True)
class Stages:
    """Views of the two rings of stages in shared memory."""

    sX: cute.Tensor
    """(C, W, H, T, N, STAGE): halo stages as TMA fills them."""
    sA: cute.Tensor
    """(M, K, R, S, STAGE): the same as wgmma reads them."""
    sW: cute.Tensor
    """(C, E, Q, J, G, STAGE): weight stages as TMA fills them."""
    sB: cute.Tensor
    """(N, K, STAGE): the same as wgmma reads them."""
    sR: cute.Tensor
    """(C, W, H, T, N, STAGE): 64 pixels of residual in a weight stage, unswizzled."""
    sV: cute.Tensor
    """(C, W, H, T, N, WARP, STAGE): the same by warp, 16 pixels each."""


def swizzle() -> cute.Swizzle:
    """128-byte swizzle, of both rings."""
    return warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16).inner


def halo_box(cfg: Conv3dKernelConfig) -> tuple[int, ...]:
    """(C, W, H, T, N) of a halo stage."""
    return (CHUNK, cfg.halo_width, cfg.halo_height, 1, 1)


def weight_box(cfg: Conv3dKernelConfig) -> tuple[int, ...]:
    """(C, E, Q, J, G) of a weight stage: filter ``32 G + 8 Q + 2 J + E``."""
    return (CHUNK, 2, 4, 4, cfg.groups)


def pixel_box(cfg: Conv3dKernelConfig, rows: int) -> tuple[int, ...]:
    """(C, W, H, T, N) of ``8 x rows`` output pixels."""
    return (cfg.tile.n_tile, BLOCK_SIDE, rows, 1, 1)


def halo_layout(cfg: Conv3dKernelConfig) -> cute.Layout:
    """(C, W, H, T, N, STAGE), one pixel after the other."""
    return cute.make_layout(
        (*halo_box(cfg), cfg.num_halo_stages),
        stride=(1, CHUNK, CHUNK * cfg.halo_width, 0, 0, cfg.halo_stage_bytes // ELEMENT_BYTES),
    )


def halo_mma_layout(cfg: Conv3dKernelConfig) -> cute.Layout:
    """(M, K, R, S, STAGE): every pixel once per tap; M is ((w, h) in a block, blocks)."""
    row = CHUNK * cfg.halo_width
    blocks = (cfg.blocks_per_row, cfg.tile.height // BLOCK_SIDE)
    return cute.make_layout(
        (((BLOCK_SIDE, BLOCK_SIDE), *blocks), CHUNK, 3, 3, cfg.num_halo_stages),
        stride=(
            ((CHUNK, row), BLOCK_SIDE * CHUNK, BLOCK_SIDE * row),
            1,
            row,
            CHUNK,
            cfg.halo_stage_bytes // ELEMENT_BYTES,
        ),
    )


def weight_layout(cfg: Conv3dKernelConfig) -> cute.Layout:
    """(C, E, Q, J, G, STAGE): filter ``32 G + 8 Q + 2 J + E`` is row ``32 G + 8 J + 2 Q + E``."""
    return cute.make_layout(
        (*weight_box(cfg), cfg.num_weight_stages),
        stride=(1, CHUNK, 2 * CHUNK, 8 * CHUNK, 32 * CHUNK, cfg.tile.n_tile * CHUNK),
    )


def weight_mma_layout(cfg: Conv3dKernelConfig) -> cute.Layout:
    """(N, K, STAGE)."""
    return cute.make_layout(
        (cfg.tile.n_tile, CHUNK, cfg.num_weight_stages),
        stride=(CHUNK, 1, cfg.tile.n_tile * CHUNK),
    )


def pixel_layout(cfg: Conv3dKernelConfig, rows: int, *outer: int) -> cute.Layout:
    """(C, W, H, T, N, ...): ``8 x rows`` pixels, and ``outer`` more of these in a row."""
    n_tile = cfg.tile.n_tile
    strides = [1, n_tile, BLOCK_SIDE * n_tile, 0, 0]
    stride = BLOCK_SIDE * rows * n_tile
    for extent in outer:
        strides.append(stride)
        stride *= extent
    return cute.make_layout((*pixel_box(cfg, rows), *outer), stride=tuple(strides))


def halo_operand(cfg: Conv3dKernelConfig, mX: cute.Tensor) -> TmaOperand:
    """Input pixels; the CTAs of a channel cluster load slices along H of a box for each other."""
    cluster_n = cfg.tile.cluster_n
    op = cpasync.CopyBulkTensorTileG2SOp()
    if cluster_n > 1:
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    sX = cute.make_composed_layout(swizzle(), 0, cute.select(halo_layout(cfg), mode=BOX_MODES))
    atom, tensor = cpasync.make_tiled_tma_atom(
        op, channels_first(mX), sX, halo_box(cfg), num_multicast=cluster_n
    )
    return TmaOperand(atom, tensor)


def weight_operand(cfg: Conv3dKernelConfig, mW: cute.Tensor) -> TmaOperand:
    """Packed filters as (K, E, Q, J, G), K being a filter's row of taps and channels."""
    k = 27 * cfg.packed_channels
    filters = cute.make_layout(
        (k, 2, 4, 4, cfg.out_channels // 32), stride=(1, k, 8 * k, 2 * k, 32 * k)
    )
    op = cpasync.CopyBulkTensorTileG2SOp()
    if cfg.tile.cluster_m > 1:
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    sW = cute.make_composed_layout(swizzle(), 0, cute.select(weight_layout(cfg), mode=BOX_MODES))
    atom, tensor = cpasync.make_tiled_tma_atom(
        op, cute.make_tensor(mW.iterator, filters), sW, weight_box(cfg)
    )
    return TmaOperand(atom, tensor)


def residual_operand(cfg: Conv3dKernelConfig, mR: cute.Tensor | None) -> TmaOperand | None:
    """Loads of 64 pixels, a stage each."""
    if mR is None:
        return None
    op = cpasync.CopyBulkTensorTileG2SOp()
    layout, box = pixel_layout(cfg, BLOCK_SIDE), pixel_box(cfg, BLOCK_SIDE)
    return TmaOperand(*cpasync.make_tiled_tma_atom(op, channels_first(mR), layout, box))


def value_operand(cfg: Conv3dKernelConfig, mV: cute.Tensor | None) -> TmaOperand | None:
    """Stores of a warp's 16 pixels."""
    if mV is None:
        return None
    op = cpasync.CopyBulkTensorTileS2GOp()
    layout, box = pixel_layout(cfg, 2), pixel_box(cfg, 2)
    return TmaOperand(*cpasync.make_tiled_tma_atom(op, channels_first(mV), layout, box))
