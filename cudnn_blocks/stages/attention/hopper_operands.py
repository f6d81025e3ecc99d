# SPDX-License-Identifier: Apache-2.0
"""Operands of the Hopper SDPA kernel: TMA boxes, stages in shared memory, tiled products.

A stage holds a *panel*: rows whose elements lie side by side in memory, cut into chunks of a
swizzled row. Of Q and K these are query and key rows of channels, and of V as well as long as it is
16 bits wide, which wgmma can read transposed. Codes it cannot: V of e4m3 is transposed in memory,
and its panel has rows of keys, one for each channel.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.pipeline import PipelineTmaAsync

from cudnn_blocks.stages.attention.hopper_config import MMA_M, Panel, SdpaConfig
from cudnn_blocks.stages.device.dtypes import DTYPES
from cudnn_blocks.stages.device.tma import TmaOperand

BOX_MODES = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class TmaOperands:
    """What is loaded by TMA."""

    query: TmaOperand
    key: TmaOperand
    value: TmaOperand


@dataclass(frozen=True)
class Stages:
    """Rings of stages in shared memory, as wgmma reads them."""

    sQ: cute.Tensor
    """(M, D, WARPGROUP)"""
    sK: cute.Tensor
    """(N, D, STAGE)"""
    sV: cute.Tensor
    """(N, D, STAGE), of codes (D, N, STAGE)"""


@dataclass(frozen=True)
class Pipelines:
    """Barriers of the rings."""

    query: PipelineTmaAsync
    key: PipelineTmaAsync
    value: PipelineTmaAsync


@dataclass(frozen=True)
class TiledMmas:
    """Scores are ``Q K'``; output is ``P V`` with P in registers."""

    scores: cute.TiledMma
    output: cute.TiledMma


def make_tiled_mmas(cfg: SdpaConfig) -> TiledMmas:
    """One m64 block per warpgroup."""
    smem, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
    k_major, n_major = OperandMajorMode.K, OperandMajorMode.MN
    dtype = DTYPES[cfg.dtype]

    def make(n: int, source: warpgroup.OperandSource, major: OperandMajorMode) -> cute.TiledMma:
        shape = (MMA_M, n, cfg.mma_k)
        if cfg.is_fp8:
            op = warpgroup.MmaF8Op(dtype, dtype, Float32, shape, source, k_major, k_major)
        else:
            op = warpgroup.MmaF16BF16Op(dtype, Float32, shape, source, k_major, major)
        return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))

    return TiledMmas(make(cfg.tile.n, smem, k_major), make(cfg.d_head, registers, n_major))


def swizzle_atom(cfg: SdpaConfig, panel: Panel) -> cute.ComposedLayout:
    """Eight rows of a chunk."""
    kind = getattr(warpgroup.SmemLayoutAtomKind, f"K_SW{panel.chunk * cfg.element_bytes}")
    return warpgroup.make_smem_layout_atom(kind, DTYPES[cfg.dtype])


def box(panel: Panel) -> tuple[int, ...]:
    """(C, ROW, CHUNK, H, B): one head, one TMA instruction."""
    return (panel.chunk, panel.rows, panel.chunks, 1, 1)


def box_layout(panel: Panel, num_stages: int = 1) -> cute.Layout:
    """(C, ROW, CHUNK, H, B, STAGE)."""
    stride = (1, panel.chunk, panel.rows * panel.chunk, 0, 0, panel.size)
    return cute.make_layout((*box(panel), num_stages), stride=stride)


def tma_operand(
    cfg: SdpaConfig, mX: cute.Tensor, panel: Panel, is_multicast: bool = False
) -> TmaOperand:
    """``[B, ROW, H, COLUMN]`` as (C, ROW, CHUNK, H, B); rows past the end are filled with zeros."""
    batch, num_rows, heads, columns = mX.shape
    chunk = panel.chunk
    stride = (1, mX.stride[1], chunk, mX.stride[2], mX.stride[0])
    layout = cute.make_layout((chunk, num_rows, columns // chunk, heads, batch), stride=stride)
    op = cpasync.CopyBulkTensorTileG2SOp()
    if is_multicast:
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    sX = cute.make_composed_layout(
        swizzle_atom(cfg, panel).inner, 0, cute.select(box_layout(panel), mode=BOX_MODES)
    )
    gX = cute.make_tensor(mX.iterator, layout)
    return TmaOperand(*cpasync.make_tiled_tma_atom(op, gX, sX, box(panel)))
