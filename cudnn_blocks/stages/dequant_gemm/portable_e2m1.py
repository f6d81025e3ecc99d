# SPDX-License-Identifier: Apache-2.0
"""Matrix product of a few activations with block-scaled e2m1 weights (sm_80 and newer).

    W[n, k] = B(code[n, k] * scale[n, k // block_size])     B rounds to BF16; exact but at its ends
    acc[m, n] = sum_k f32(x[m, k]) * f32(W[n, k])           FP32
    y[m, n] = B(alpha * acc[m, n])

A byte holds two codes, and a table in shared memory has the BF16 pair of every byte, one copy for
each lane and so without bank conflicts. One byte permutation makes an address of a byte and a lane,
since entries are 256 bytes apart; one load and one multiplication by the scale then are two
weights, in the order of memory. They are the 8-column side of mma.sync m16n8k16, x the 16-row side.

Grid:          (clusters along N x CTAs of a cluster, tiles of tokens). Clusters share the tiles of
               8 weight rows evenly, one more or less; so each SM has one cluster's CTA. With so
               many bytes of x that reading them takes the time, two CTAs of a cluster (sm_90 and
               newer) share K.
Warps:         a slice of K each, every eighth step of 128 elements, for all tiles of the cluster;
               of a cluster of two, for every other tile. A pass has one or two steps of K.
Registers:     x of a pass. A lane's 16-byte load of x is A of two products: for up to 8 tokens it
               is A as it is, words 0 and 2 with rows of the first half, 1 and 3 with those of the
               second, and one half of either product is thrown away.
Pipeline:      codes and scales of ``depth`` tiles of a warp on their way at once (cp.async), into
               places of that warp alone. The only barriers are the one after the table is made and
               the one before the sums.
Shared memory: the table, whose entries end in holes of 128 bytes; codes in the holes, then behind;
               scales; FP32 sums, ``(slice, token, row)``. 16-byte pieces of codes are XOR-ed with
               the row, so that a word of each lane meets 32 banks.
Sums:          a warp stores its sums of a tile, and adds to them in later passes. At the end they
               are added in the order of slices: the bits are the same in every run.
Hot lines:     all SMs read the same x, and lines that all ask for at once are slow. From 16 tokens
               on CTAs begin at 8 or 16 different places.
Edges:         rows past N, K past its end and padding of the blob are not used.
Special:       where a scale may be NaN, is negative or too large for a single factor, the warp
               takes another path for the tile.
Overlap:       with PDL and up to 8 tokens an SM has room for a CTA of the next grid. Before the
               wait a CTA fills its table and asks for x, and for weights where they are not too
               many; into L2, where they are coherent. All else of memory is touched after it.
Requires:      K a multiple of 32, N of 8; 16-byte aligned rows of x, codes and y; B * S up to
               2**31 - 2**16 rows.
Source:        written for this project; scale blobs after the F8_128x4 layout of cudnn-frontend. No
               code copied.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from cudnn_blocks.stages.dequant_gemm.portable_e2m1_config import (
    ENTRY_BYTES,
    HOLE_SLOTS,
    SLICES,
    STEP_BYTES,
    TABLE_BYTES,
    THREADS,
    TILE_ROWS,
    WORD_BYTES,
    E2m1DecodeConfig,
    beyond_bytes,
    scale_bytes,
    smem_bytes,
    sums_bytes,
)
from cudnn_blocks.stages.dequant_gemm.portable_layout import (
    BLOB_COLUMNS,
    BLOB_ROWS,
    BLOB_TILE,
    COLUMN_BYTES,
    STEP,
    STORE,
    VECTOR_BYTES,
    WARP_THREADS,
)
from cudnn_blocks.stages.dequant_gemm.portable_operands import (
    VEC,
    WORDS,
    Operands,
    blob_columns,
    fake_operands,
    load_sums,
    store_outputs,
    words_view,
)
from cudnn_blocks.stages.device.cp_async import (
    cp_async_4,
    cp_async_4_or_zero,
    cp_async_16,
    cp_async_16_or_zero,
)
from cudnn_blocks.stages.device.packed_codes import (
    EVERY_SIGN,
    TWO_TO_120,
    e2m1_pattern,
    e4m3_nan_bits,
    e4m3_pattern,
    e8m0_pattern_factor,
    e8m0_rest,
    multiply_bf16x2,
    permute,
    saturate_bf16x2,
)
from cudnn_blocks.stages.device.prefetch import prefetch_l2, prefetch_l2_line
from cudnn_blocks.stages.gemm.portable_operands import rows_of

__all__ = ["E2m1DecodeKernel", "fake_operands"]

CHUNKS = 4
"""16-byte pieces of a row's step, and words of each that a lane has: one of every piece."""
CHUNK = STEP // CHUNKS
BYTES = 4  # of a word
ROW_BYTES = COLUMN_BYTES // BLOB_ROWS
BLOB_TILES = BLOB_TILE // TILE_ROWS
LINE = 64  # elements of x in a line of the L2
MMA_M, MMA_N, MMA_K = 16, 8, 16

MX_EXPONENT = 8
"""The table has codes times two to the minus this, so that a single factor does for scale 2**-127.

With e4m3 scales it has codes times 2**120: factors are patterns of scales, times 2**-120.
"""
TWO_TO_118, TWO_TO_126 = 0x7A807A80, 0x7E807E80


@dataclass(frozen=True)
class Place:
    """Where a thread is."""

    config: E2m1DecodeConfig
    tidx: Int32
    cluster: Int32
    """Along N."""
    rank: Int32
    """CTA within the cluster."""
    first_token: Int32

    @property
    def lane(self) -> Int32:
        """Within the warp."""
        return self.tidx % WARP_THREADS

    @property
    def quad(self) -> Int32:
        """Row of a tile, of codes; token of an 8-token half, of x."""
        return self.tidx % WARP_THREADS // 4

    @property
    def quad_lane(self) -> Int32:
        """Within the 4 lanes that share a row."""
        return self.tidx % 4

    @property
    def slice(self) -> Int32:
        """Of the CTA's; the same in all lanes of a warp."""
        return cute.arch.make_warp_uniform(self.tidx // WARP_THREADS) % self.config.slices

    @property
    def row_group(self) -> Int32:
        """Which of the tiles, modulo ``row_groups``."""
        return cute.arch.make_warp_uniform(self.tidx // WARP_THREADS) // self.config.slices

    # The place in x that this CTA begins at: XOR-ed with indices of registers.

    def turned(self, bit: int, extent: int) -> Int32:
        """A bit of the cluster where the registers have two such places."""
        is_turned = self.config.is_turned and extent > 1
        return self.cluster >> bit & 1 if is_turned else Int32(0)

    def step_turned(self, s) -> Int32:
        """Step of a pass that register ``s`` has."""
        return Int32(s) ^ self.turned(0, self.config.pass_steps)

    def chunk_turned(self, c) -> Int32:
        """Chunk of a step that register ``c`` has."""
        return Int32(c) ^ self.turned(1, CHUNKS) * 2

    def token(self, j: int, half: int) -> Int32:
        """Token of the CTA that registers ``(half, j)`` of x and the sums have."""
        in_half = Int32(half) ^ self.turned(2, self.config.halves)
        return self.quad + in_half * 8 + (Int32(j) ^ self.turned(3, self.config.m_tiles)) * MMA_M


@dataclass(frozen=True)
class Tiles:
    """Those of a cluster."""

    first: Int32
    """Over all of them, padding included."""
    count: Int32


@dataclass(frozen=True)
class Source:
    """Where a thread's codes and scales begin, but for the tile and the pass."""

    codes: cute.Pointer
    scales: cute.Pointer
    bytes_left: Int32
    """Of a row of codes, from this thread's first on."""
    blob_columns: Int32


@dataclass(frozen=True)
class Shared:
    """Shared memory."""

    sTable: cute.Tensor
    """Words of the table and its holes, then of the units beyond."""
    sScale: cute.Tensor
    """(SLOT, THREAD) words."""
    sPart: cute.Tensor
    """(SLICE, TOKEN, ROW) sums."""


class E2m1DecodeKernel:
    """The product; see the module docstring."""

    def __init__(self, config: E2m1DecodeConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        w_sf: cute.Tensor,
        y: cute.Tensor,
        alpha: Float32,
        stream,
    ):
        cfg = self.config
        operands = Operands(rows_of(x), w, w_sf, rows_of(y), alpha)
        m, _ = operands.mY.shape
        self.kernel(operands).launch(
            grid=(cfg.clusters * cfg.splits, (m - 1) // cfg.tokens + 1, 1),
            block=(THREADS, 1, 1),
            cluster=(cfg.splits, 1, 1) if cfg.splits > 1 else None,
            stream=stream,
            min_blocks_per_mp=cfg.ctas_per_sm,
            preferred_smem_carveout=100,
            use_pdl=cfg.use_pdl,
        )

    @cute.kernel
    def kernel(self, operands: Operands):
        cfg = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, token_tile, _ = cute.arch.block_idx()
        place = Place(cfg, tidx, bidx // cfg.splits, bidx % cfg.splits, token_tile * cfg.tokens)
        shared = self.allocate()
        all_tiles = ((operands.mW.shape[0] - 1) // BLOB_TILE + 1) * BLOB_TILES
        first, end = (cfg.first_tile(place.cluster + i, all_tiles, cutlass.min) for i in range(2))
        tiles = Tiles(first, end - first)
        if const_expr(cfg.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()
            if const_expr(cfg.prefetches):
                self.prefetch(operands, tiles, place)
            self.prefetch_x(operands, place)
        self.fill_table(shared, place)
        source = self.source(operands, place)
        cute.arch.sync_threads()
        if const_expr(cfg.use_pdl):
            cute.arch.griddepcontrol_wait()
        self.accumulate(operands, shared, source, tiles, place)
        if const_expr(cfg.splits > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        self.finish(operands, shared, tiles, place)
        if const_expr(cfg.splits > 1):
            # No CTA leaves while another reads its sums.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    def allocate(self) -> Shared:
        """Divides shared memory."""
        cfg = self.config
        layout = cute.make_layout(smem_bytes(cfg) // WORD_BYTES)
        words = SmemAllocator().allocate_tensor(Uint32, layout, byte_alignment=128).iterator
        codes, scales, sums = (
            num_bytes // WORD_BYTES
            for num_bytes in (TABLE_BYTES + beyond_bytes(cfg), scale_bytes(cfg), sums_bytes(cfg))
        )
        parts = cute.recast_ptr(words + (codes + scales), dtype=Float32)
        return Shared(
            cute.make_tensor(words, cute.make_layout(codes)),
            cute.make_tensor(words + codes, cute.make_layout(scales)),
            cute.make_tensor(parts, cute.make_layout(sums)),
        )

    # Before the wait.

    @cute.jit
    def prefetch(self, operands: Operands, tiles: Tiles, place: Place):
        """Asks for the rows of codes of this cluster, and all scales of their tiles of the blob."""
        cfg = self.config
        n, row_bytes = operands.mW.shape
        own = place.tidx * cfg.splits + place.rank
        for i in cutlass.range(own, tiles.count * TILE_ROWS, THREADS * cfg.splits, unroll=1):
            row = first_row(tiles.first + i // TILE_ROWS) + i % TILE_ROWS
            if row < n:
                offset = Int64(row) * operands.mW.stride[0]
                prefetch_l2(operands.mW.iterator + offset, row_bytes)
        tile = tiles.first // BLOB_TILES + own
        last_tile = (tiles.first + (tiles.count - 1)) // BLOB_TILES
        if (tile <= last_tile) & (tile * BLOB_TILE < n):
            num_bytes = blob_columns(operands, self.config.block_size) * COLUMN_BYTES
            prefetch_l2(operands.mSF.iterator + Int64(tile) * num_bytes, num_bytes)

    @cute.jit
    def prefetch_x(self, operands: Operands, place: Place):
        """Asks for x, of which every CTA takes a part."""
        cfg = self.config
        m, k = operands.mX.shape
        row_lines = (k - 1) // LINE + 1
        lines = cutlass.min(m - place.first_token, cfg.tokens) * row_lines
        ctas = cfg.clusters * cfg.splits
        own = place.cluster * cfg.splits + place.rank + place.tidx * ctas
        for i in cutlass.range(own, lines, ctas * THREADS, unroll=1):
            row = place.first_token + i // row_lines
            offset = Int64(row) * operands.mX.stride[0] + i % row_lines * LINE
            prefetch_l2_line(operands.mX.iterator + offset)

    @cute.jit
    def fill_table(self, shared: Shared, place: Place):
        """An entry by each thread: 32 copies of the pair of its number."""
        pattern = e2m1_pattern(place.tidx.to(Uint32))
        pair = multiply_bf16x2(pattern, Uint32(TWO_TO_118 if self.config.is_mx else TWO_TO_126))
        if const_expr(not self.config.is_mx):
            pair = multiply_bf16x2(pair, Uint32(TWO_TO_120))
        rEntry = cute.make_rmem_tensor(WORDS, Uint32)
        rEntry.fill(pair)
        vecs = ENTRY_BYTES // 2 // VECTOR_BYTES
        for i in cutlass.range_constexpr(vecs):
            offset = place.tidx * (ENTRY_BYTES // WORD_BYTES) + (place.tidx + i) % vecs * WORDS
            cute.autovec_copy(rEntry, words_view(shared.sTable, offset))

    # Mainloop.

    @cute.jit
    def accumulate(
        self, operands: Operands, shared: Shared, source: Source, tiles: Tiles, place: Place
    ):
        """Leaves this warp's sums of every tile that it has."""
        cfg = self.config
        # Of x: one product's words are neighbours, (WORD, PRODUCT, m16, CHUNK, STEP).
        rX = cute.make_rmem_tensor((WORDS, 2, cfg.m_tiles, CHUNKS, cfg.pass_steps), Uint32)
        rCodes = cute.make_rmem_tensor((CHUNKS, cfg.pass_steps), Uint32)
        rScales = cute.make_rmem_tensor((cfg.scale_words, cfg.pass_steps), Uint32)
        # ((2, 2), m16, PRODUCT, STEP): sums of neighbouring products do not wait for each other.
        tCrC = cute.make_rmem_tensor(((2, 2), cfg.m_tiles, 2, cfg.pass_steps), Float32)
        self.load_x(operands, rX, Int32(0), place)
        next_pass, next_tile = Int32(0), place.row_group
        for slot in cutlass.range(cfg.depth, unroll=1):
            self.fetch(operands, shared, source, slot, next_pass, next_tile, tiles, place)
            next_pass, next_tile = self.following(next_pass, next_tile, tiles, place)
        slot = Int32(0)
        for turn in cutlass.range(cfg.passes, unroll=cfg.unrolled_passes):
            if const_expr(cfg.passes > 1):
                if turn > 0:
                    self.load_x(operands, rX, turn, place)
            for tile in cutlass.range(place.row_group, tiles.count, cfg.row_groups, unroll=1):
                cute.arch.cp_async_wait_group(cfg.depth - 1)
                cute.arch.sync_warp()
                self.collect(operands, shared, rCodes, rScales, slot, turn, place)
                tCrC.fill(0.0)
                if cute.arch.vote_any_sync(self.is_special(rScales)):
                    self.multiply_carefully(operands, tCrC, shared, slot, turn, place)
                else:
                    self.multiply(tCrC, rCodes, rScales, rX, shared, place)
                if const_expr(cfg.refetches):
                    cute.arch.sync_warp()
                    self.fetch(operands, shared, source, slot, next_pass, next_tile, tiles, place)
                    next_pass, next_tile = self.following(next_pass, next_tile, tiles, place)
                else:
                    cute.arch.cp_async_commit_group()
                self.stage_sums(tCrC, shared, tile, turn, place)
                slot = slot + 1 if slot + 1 < cfg.depth else Int32(0)

    @cute.jit
    def following(self, turn: Int32, tile: Int32, tiles: Tiles, place: Place):
        """The pass and tile after these of a warp."""
        later = tile + self.config.row_groups
        is_last = later >= tiles.count
        return turn + 1 if is_last else turn, place.row_group if is_last else later

    def step(self, turn: Int32, s, place: Place) -> Int32:
        """Over all of K, step ``s`` of a pass."""
        cfg = self.config
        return (turn * cfg.pass_steps + s) * SLICES + place.rank * cfg.slices + place.slice

    # Weights on their way.

    def source(self, operands: Operands, place: Place) -> Source:
        """Of the first tile's row in the blob and of pass 0."""
        step = self.step(Int32(0), 0, place)
        byte = step * STEP_BYTES + place.quad_lane * VECTOR_BYTES
        codes = operands.mW.iterator + (Int64(place.quad) * operands.mW.stride[0] + byte)
        # With two words a row and step, a lane of the first pair has the first one.
        words = self.config.scale_words
        column = step * words + place.quad_lane // 2 * (words - 1)
        scales = operands.mSF.iterator + Int64(column * COLUMN_BYTES + place.quad * ROW_BYTES)
        bytes_left = operands.mW.shape[1] - byte
        return Source(codes, scales, bytes_left, blob_columns(operands, self.config.block_size))

    @cute.jit
    def fetch(
        self,
        operands: Operands,
        shared: Shared,
        source: Source,
        slot: Int32,
        turn: Int32,
        tile: Int32,
        tiles: Tiles,
        place: Place,
    ):
        """Starts this thread's codes and scales of a tile and pass on their way."""
        cfg = self.config
        pass_bytes = SLICES * STEP_BYTES
        pass_columns = SLICES * cfg.scale_words
        if (turn < cfg.passes) & (tile < tiles.count):
            number = tiles.first + tile
            row = first_row(number)
            offset = Int64(row.to(Uint32)) * operands.mW.stride[0]
            blob_tile, neighbours, word_slot = blob_place(number)
            column = blob_tile * source.blob_columns
            bytes_left = source.bytes_left
            if const_expr(cfg.passes > 1):
                offset += turn * (cfg.pass_steps * pass_bytes)
                column += turn * (cfg.pass_steps * pass_columns)
                bytes_left -= turn * (cfg.pass_steps * pass_bytes)
            codes = source.codes + cute.assume(offset, divby=VECTOR_BYTES)
            in_column = neighbours * (TILE_ROWS * ROW_BYTES) + word_slot * BLOB_COLUMNS
            scales = source.scales + (Int64(column.to(Uint32)) * COLUMN_BYTES + in_column)
            if const_expr(not cfg.is_whole):
                bytes_left = bytes_left if row < operands.mW.shape[0] else Int32(-STEP)
            for s in cutlass.range_constexpr(cfg.pass_steps):
                unit = slot * cfg.pass_steps + s
                # Pieces of a row are exchanged, so that lanes read words from different banks.
                piece = self.code_slot(shared, unit, place.tidx ^ (place.quad >> 1))
                word = shared.sScale.iterator + (unit * THREADS + place.tidx)
                codes_s = codes + s * pass_bytes
                scales_s = scales + s * (pass_columns * COLUMN_BYTES)
                if const_expr(cfg.is_whole):
                    cp_async_16(piece, codes_s)
                    cp_async_4(word, scales_s)
                else:
                    is_step = bytes_left + place.quad_lane * VECTOR_BYTES > s * pass_bytes
                    cp_async_16_or_zero(piece, codes_s, bytes_left > s * pass_bytes)
                    cp_async_4_or_zero(word, scales_s, is_step)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def code_slot(self, shared: Shared, unit: Int32, thread: Int32) -> cute.Pointer:
        """Where a thread's piece of a unit is: in holes of the table, or beyond."""
        hole = (thread // 8 * ENTRY_BYTES + ENTRY_BYTES // 2) // WORD_BYTES + thread % 8 * WORDS
        offset = unit * (TABLE_BYTES // HOLE_SLOTS // WORD_BYTES) + hole
        if const_expr(self.config.slots > HOLE_SLOTS):
            beyond = (unit - HOLE_SLOTS) * (THREADS * WORDS) + thread * WORDS
            offset = offset if unit < HOLE_SLOTS else TABLE_BYTES // WORD_BYTES + beyond
        return shared.sTable.iterator + cute.assume(offset, divby=WORDS)

    @cute.jit
    def collect(
        self,
        operands: Operands,
        shared: Shared,
        rCodes: cute.Tensor,
        rScales: cute.Tensor,
        slot: Int32,
        turn: Int32,
        place: Place,
    ):
        """Words of codes ``(CHUNK, STEP)`` and scales ``(WORD, STEP)`` that have arrived."""
        cfg = self.config
        for s in cutlass.range_constexpr(cfg.pass_steps):
            turned = place.step_turned(s)
            unit = slot * cfg.pass_steps + turned
            for c in cutlass.range_constexpr(CHUNKS):
                rCodes[c, s] = self.code_word(shared, unit, place.chunk_turned(c), place)
            step = self.step(turn, turned, place)
            for i in cutlass.range_constexpr(cfg.scale_words):
                first = place.chunk_turned(i * 2)
                rScales[i, s] = self.scale_word(operands, shared, unit, first, step, place)

    def code_word(self, shared: Shared, unit: Int32, chunk: Int32, place: Place) -> Uint32:
        """8 codes of this lane's row: word ``quad_lane`` of a piece."""
        piece = self.code_slot(shared, unit, place.tidx - place.quad_lane)
        swizzled = chunk ^ (place.quad >> 1)
        ptr = piece + (swizzled * WORDS + place.quad_lane)
        return cute.make_tensor(ptr, cute.make_layout(1))[0]

    @cute.jit
    def scale_word(
        self,
        operands: Operands,
        shared: Shared,
        unit: Int32,
        chunk: Int32,
        step: Int32,
        place: Place,
    ) -> Uint32:
        """The 4 scales of this lane's row that have a chunk's among them; 0 past K."""
        cfg = self.config
        thread = place.tidx
        if const_expr(cfg.scale_words > 1):
            thread = place.tidx - place.quad_lane + (chunk & 2)
        word = shared.sScale[unit * THREADS + thread]
        if const_expr(cfg.is_ragged):
            # Padding may be NaN, of which zeros times NaN would make more.
            chunks_left = operands.mX.shape[1] // CHUNK - step * CHUNKS
            if const_expr(cfg.scale_words > 1):
                chunks_left -= chunk & 2
            num_bits = cutlass.max(chunks_left * (8 * CHUNK // cfg.block_size), 0)
            mask = (Uint32(1) << (num_bits & 31).to(Uint32)) - Uint32(1)
            mask = mask if num_bits < 32 else Uint32(0xFFFFFFFF)
            word = word & mask
        return word

    # Activations.

    @cute.jit
    def load_x(self, operands: Operands, rX: cute.Tensor, turn: Int32, place: Place):
        """A pass's x, which this warp's codes of every tile meet."""
        for s in cutlass.range_constexpr(self.config.pass_steps):
            step = self.step(turn, place.step_turned(s), place)
            for c in cutlass.range_constexpr(CHUNKS):
                chunk = place.chunk_turned(c)
                self.load_chunk(operands, rX[None, None, None, c, s], step, chunk, place)

    @cute.jit
    def load_chunk(
        self, operands: Operands, rX: cute.Tensor, step: Int32, chunk: Int32, place: Place
    ):
        """What a lane's 8 codes of a chunk meet, ``(WORD, PRODUCT, m16)``; zeros past the edges."""
        cfg = self.config
        m, k = operands.mX.shape
        column = step * STEP + chunk * CHUNK + place.quad_lane * VEC
        for j in cutlass.range_constexpr(cfg.m_tiles):
            for half in cutlass.range_constexpr(cfg.halves):
                row = place.first_token + place.token(j, half)
                rVec = cute.make_rmem_tensor(WORDS, Uint32)
                rVec.fill(Uint32(0))
                if (row < m) & (column < k):
                    offset = Int64(row) * operands.mX.stride[0] + column
                    ptr = operands.mX.iterator + cute.assume(offset, divby=VEC)
                    gX = cute.make_tensor(
                        cute.recast_ptr(ptr, dtype=Uint32), cute.make_layout(WORDS)
                    )
                    cute.autovec_copy(gX, rVec)
                for word in cutlass.range_constexpr(WORDS):
                    if const_expr(cfg.halves == 1):
                        rX[word, 0, j] = rVec[word]
                    else:
                        rX[word % 2 * 2 + half, word // 2, j] = rVec[word]

    # Weights.

    @cute.jit
    def multiply(
        self,
        tCrC: cute.Tensor,
        rCodes: cute.Tensor,
        rScales: cute.Tensor,
        rX: cute.Tensor,
        shared: Shared,
        place: Place,
    ):
        """A tile's products of a pass."""
        cfg = self.config
        rW = cute.make_rmem_tensor(BYTES, Uint32)
        for c in cutlass.range_constexpr(CHUNKS):
            for s in cutlass.range_constexpr(cfg.pass_steps):
                factor = self.factor(rScales[None, s], c, place)
                for i in cutlass.range_constexpr(BYTES):
                    rW[i] = multiply_bf16x2(self.pair(shared, rCodes[c, s], i, place), factor)
                self.multiply_chunk(tCrC, rW, rX[None, None, None, c, s], s)

    @cute.jit
    def multiply_carefully(
        self,
        operands: Operands,
        tCrC: cute.Tensor,
        shared: Shared,
        slot: Int32,
        turn: Int32,
        place: Place,
    ):
        """The same where a factor is not all of a scale."""
        cfg = self.config
        rX = cute.make_rmem_tensor((WORDS, 2, cfg.m_tiles), Uint32)
        rW = cute.make_rmem_tensor(BYTES, Uint32)
        for number in cutlass.range(CHUNKS * cfg.pass_steps, unroll=1):
            chunk, s = number % CHUNKS, number // CHUNKS
            unit, step = slot * cfg.pass_steps + s, self.step(turn, s, place)
            word = self.code_word(shared, unit, chunk, place)
            scales = self.scale_word(operands, shared, unit, chunk, step, place)
            code = scales >> (self.scale_byte(chunk, place) * 8).to(Uint32) & Uint32(0xFF)
            rest = Uint32(0)
            if const_expr(cfg.is_mx):
                factor = e8m0_pattern_factor(code, MX_EXPONENT)
                rest = e8m0_rest(code, MX_EXPONENT)
            else:
                factor = e4m3_pattern(code)
            for i in cutlass.range_constexpr(BYTES):
                rW[i] = multiply_bf16x2(self.pair(shared, word, i, place), factor)
                if const_expr(cfg.is_mx):
                    rW[i] = saturate_bf16x2(multiply_bf16x2(rW[i], rest))
            self.load_chunk(operands, rX, step, chunk, place)
            self.multiply_chunk(tCrC, rW, rX, 0)

    @cute.jit
    def multiply_chunk(
        self,
        tCrC: cute.Tensor,
        rW: cute.Tensor,
        rX: cute.Tensor,
        s: cutlass.Constexpr[int],
    ):
        """Two products, of 8 weights of each lane with all tokens; sums of step ``s``."""
        cfg = self.config
        mma_atom = cute.make_mma_atom(warp.MmaF16BF16Op(BFloat16, Float32, (MMA_M, MMA_N, MMA_K)))
        for product in cutlass.range_constexpr(2):
            rB = cute.make_rmem_tensor(2, Uint32)
            for i in cutlass.range_constexpr(2):
                # Up to 8 tokens x is in the order of memory: rows of A are every other word.
                rB[i] = rW[2 * i + product] if cfg.halves == 1 else rW[2 * product + i]
            values = cute.recast_ptr(rB.iterator, dtype=BFloat16)
            tCrB = cute.make_tensor(values, cute.make_layout(((2, 2), 1)))
            for j in cutlass.range_constexpr(cfg.m_tiles):
                words = rX[None, 0 if cfg.halves == 1 else product, j].iterator
                values = cute.recast_ptr(words, dtype=BFloat16)
                tCrA = cute.make_tensor(values, cute.make_layout(((2, 2, 2), 1)))
                sums = tCrC[None, j, product, s].iterator
                tCrC_j = cute.make_tensor(sums, cute.make_layout(((2, 2), 1, 1)))
                cute.gemm(mma_atom, tCrC_j, tCrA, tCrB, tCrC_j)

    def pair(self, shared: Shared, word: Uint32, byte: int, place: Place) -> Uint32:
        """What the table has for a byte of codes: two BF16 values."""
        # Bytes of the offset: the lane's, the code, and zeros of the lane's upper half.
        offset = permute(word, (place.lane * WORD_BYTES).to(Uint32), Uint32(0x5504 | byte << 4))
        table = cute.recast_ptr(shared.sTable.iterator, dtype=Uint8)
        ptr = table + cute.assume(offset.to(Int32), divby=WORD_BYTES)
        return cute.make_tensor(cute.recast_ptr(ptr, dtype=Uint32), cute.make_layout(1))[0]

    def scale_byte(self, chunk: Int32, place: Place) -> Int32:
        """Which of its word is a chunk's scale, in this lane."""
        return chunk if self.config.is_mx else (chunk & 1) * 2 + (place.quad_lane >> 1)

    def factor(self, rScales: cute.Tensor, c: int, place: Place) -> Uint32:
        """What makes pairs of the table weights, for register ``c``."""
        word = rScales[0 if self.config.is_mx else c // 2]
        byte = self.scale_byte(place.chunk_turned(c), place)
        code = permute(word, Uint32(0), Uint32(0x4040) | (byte * 0x0101).to(Uint32))
        if self.config.is_mx:
            return code * Uint32(1 << 7) + Uint32(MX_EXPONENT * 0x00800080)
        return code * Uint32(1 << 4)

    def is_special(self, rScales: cute.Tensor) -> Boolean:
        """True where a factor is not all of a scale."""
        found = Uint32(0)
        for i in range(cute.size(rScales)):
            if self.config.is_mx:
                carry = Uint32((MX_EXPONENT + 1) * 0x01010101)
                found |= ((rScales[i] & Uint32(0x7F7F7F7F)) + carry) & rScales[i]
            else:
                found |= e4m3_nan_bits(rScales[i]) | rScales[i]
        return found & Uint32(EVERY_SIGN) != 0

    # Sums.

    @cute.jit
    def stage_sums(
        self,
        tCrC: cute.Tensor,
        shared: Shared,
        tile: Int32,
        turn: Int32,
        place: Place,
    ):
        """This warp's sums of a tile, added to those of the passes before."""
        cfg = self.config
        for j in cutlass.range_constexpr(cfg.m_tiles):
            for half in cutlass.range_constexpr(cfg.halves):
                row = tile * TILE_ROWS + place.quad_lane * 2
                offset = self.part_offset(place.slice, place.token(j, half), row)
                ptr = shared.sPart.iterator + cute.assume(offset, divby=2)
                sPair = cute.make_tensor(ptr, cute.make_layout(2))
                rPair = cute.make_rmem_tensor(2, Float32)
                rPair.fill(0.0)
                if const_expr(cfg.passes > 1):
                    if turn > 0:
                        cute.autovec_copy(sPair, rPair)
                for e in cutlass.range_constexpr(2):
                    rPair[e] += self.sum_of_chains(tCrC, e, half, j)
                cute.autovec_copy(rPair, sPair)

    def sum_of_chains(self, tCrC: cute.Tensor, e: int, half: int, j: int) -> Float32:
        """One sum out of those of the steps and products."""
        cfg = self.config
        steps = []
        for s in range(cfg.pass_steps):
            # Up to 8 tokens a product's sums are in the half that its words of x were in.
            first, second = (
                tCrC[(e, product if cfg.halves == 1 else half), j, product, s]
                for product in range(2)
            )
            steps.append(first + second)
        return steps[0] if len(steps) == 1 else steps[0] + steps[1]

    def part_offset(self, slice_, token, row) -> Int32:
        """Place of a sum."""
        return (slice_ * self.config.tokens + token) * self.config.part_pitch + row

    @cute.jit
    def finish(self, operands: Operands, shared: Shared, tiles: Tiles, place: Place):
        """Adds the sums of all slices, in order, and stores this CTA's part."""
        cfg = self.config
        m = operands.mY.shape[0]
        token_vecs = tiles.count * (TILE_ROWS // STORE)
        tokens = cutlass.min(m - place.first_token, cfg.tokens)
        first = place.rank * THREADS + place.tidx
        for i in cutlass.range(first, tokens * token_vecs, cfg.splits * THREADS, unroll=1):
            token, vec = i // token_vecs, i % token_vecs
            rSum = cute.make_rmem_tensor(STORE, Float32)
            rSum.fill(0.0)
            for slice_ in cutlass.range_constexpr(SLICES):
                part = self.part_offset(slice_ % cfg.slices, token, vec * STORE)
                rPart = load_sums(shared.sPart, part, slice_ // cfg.slices, cfg.splits)
                for e in cutlass.range_constexpr(STORE):
                    rSum[e] += rPart[e]
            row = vec * STORE
            column = first_row(tiles.first + row // TILE_ROWS) + row % TILE_ROWS
            store_outputs(operands, rSum, place.first_token + token, column)


def first_row(tile: Int32) -> Int32:
    """Of a tile: the 4 tiles whose scales are neighbours in the blob follow each other."""
    blob_tile, neighbours, slot = blob_place(tile)
    return blob_tile * BLOB_TILE + slot * BLOB_ROWS + neighbours * TILE_ROWS


def blob_place(tile: Int32) -> tuple[Int32, Int32, Int32]:
    """Tile of the blob, which 8 of its 32 rows, and which of their 4 words: by shifts alone."""
    return tile >> 4, tile >> 2 & 3, tile & 3
