# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of one specialisation of the Hopper Conv3D kernel."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudnn_blocks.stages.conv3d.epilogues import BIAS_RESIDUAL_PAD, NORM, NORM_PAD, RAW
from cudnn_blocks.stages.conv3d.hopper_tiles import MAX_TILE_ELEMENTS, TileChoice, choose_tile

if TYPE_CHECKING:
    from cudnn_blocks.target import Target

TAPS_PER_PLANE = 9
NUM_PLANES = 3
HALO = 2  # rows and columns of input beyond a tile's outputs
CHUNK = 64  # input channels of one stage: a 128-byte swizzle row
MMA_K = 16
ELEMENT_BYTES = 2

BLOCK_SIDE = 8  # an m64 block is 8 x 8 pixels
BLOCK_PIXELS = 64

WARP_THREADS = 32
WARPGROUP_THREADS = 128
CONSUMER_WARPGROUPS = 2
CONSUMER_WARPS = 4 * CONSUMER_WARPGROUPS
NUM_THREADS = WARPGROUP_THREADS * (CONSUMER_WARPGROUPS + 1)
LOAD_WARP = CONSUMER_WARPS
BORDER_WARPS = 3  # the rest of the load warp's warpgroup

SMEM_ALIGN_BYTES = 1024  # of a 128-byte swizzle atom
BARRIER_BYTES = 8
MAX_WEIGHT_STAGES = 8
SMEM_RESERVE_BYTES = 512  # for barriers and alignment


@dataclass(frozen=True)
class PipelineFacts:
    """What the barriers of one ring of stages count."""

    num_stages: int
    full_bytes: int
    """TMA bytes that fill a stage, from whichever CTA; the load warp's arrival expects them."""
    multicast: int
    """CTAs that a stage's loads reach, and whose consumers all release it."""

    @property
    def empty_arrivals(self) -> int:
        """One arrival per consumer warp and CTA."""
        return CONSUMER_WARPS * self.multicast


@dataclass(frozen=True)
class Conv3dKernelConfig:
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    in_channels: int
    out_channels: int
    epilogue: str
    has_residual: bool
    has_residual_bias: bool
    history_frames: int
    zero_leading_frames: int
    tile: TileChoice
    num_clusters: int
    """Clusters of the persistent grid: as many as the device holds."""
    smem_limit_bytes: int

    @classmethod
    def from_geometry(
        cls,
        in_channels: int,
        out_channels: int,
        target: "Target",
        *,
        epilogue: str,
        has_residual: bool,
        has_residual_bias: bool,
        history_frames: int,
        zero_leading_frames: int,
        output_sites: tuple[int, int, int, int],
    ) -> "Conv3dKernelConfig":
        """Chooses the tile for ``output_sites``; drops facts that the epilogue does not use."""
        tile = choose_tile(out_channels, epilogue, output_sites, target.num_sms)
        return cls(
            in_channels=in_channels,
            out_channels=out_channels,
            epilogue=epilogue,
            has_residual=has_residual,
            has_residual_bias=has_residual_bias,
            history_frames=history_frames if epilogue == NORM_PAD else 0,
            zero_leading_frames=zero_leading_frames,
            tile=tile,
            num_clusters=target.num_sms // (tile.cluster_m * tile.cluster_n),
            smem_limit_bytes=target.smem_per_cta_bytes,
        )

    # What the epilogue does.

    @property
    def is_raw(self) -> bool:
        """Stores the rounded accumulators and nothing else."""
        return self.epilogue == RAW

    @property
    def is_norm(self) -> bool:
        """Normalises, scales and activates."""
        return self.epilogue in (NORM, NORM_PAD)

    @property
    def has_borders(self) -> bool:
        """Output positions outside the valid convolution have to be zeroed."""
        return self.epilogue in (NORM_PAD, BIAS_RESIDUAL_PAD)

    # The tile.

    @property
    def tile_pixels(self) -> int:
        """M of the CTA tile."""
        return self.tile.width * self.tile.height

    @property
    def blocks_per_row(self) -> int:
        """8 x 8 pixel blocks along W."""
        return self.tile.width // BLOCK_SIDE

    @property
    def blocks_per_warpgroup(self) -> int:
        """m64 blocks that one warpgroup accumulates; block ``m * 2 + warpgroup`` is its m-th."""
        return self.tile_pixels // (BLOCK_PIXELS * CONSUMER_WARPGROUPS)

    @property
    def groups(self) -> int:
        """32-channel groups of a CTA; a thread owns 8 consecutive channels of each."""
        return self.tile.n_tile // 32

    @property
    def cluster_size(self) -> int:
        """CTAs that start together."""
        return self.tile.cluster_m * self.tile.cluster_n

    @property
    def num_border_warps(self) -> int:
        """Warps of the grid that zero borders."""
        return BORDER_WARPS * self.cluster_size * self.num_clusters

    @property
    def num_passes(self) -> int:
        """Tiles along Co for one pixel tile, neighbours in the schedule: the halo stays in L2."""
        return self.out_channels // (self.tile.n_tile * self.tile.cluster_n)

    @property
    def has_cluster_norm(self) -> bool:
        """A row's channels are spread over the cluster."""
        return self.is_norm and self.tile.cluster_n > 1

    # The K loop: planes, chunks of 64 channels, taps, k16 blocks.

    @property
    def num_chunks(self) -> int:
        """Channel chunks of a plane."""
        return -(-self.in_channels // CHUNK)

    @property
    def packed_channels(self) -> int:
        """Columns of one tap of a packed filter row."""
        return self.num_chunks * CHUNK

    @property
    def chunks_per_step(self) -> int:
        """Chunks unrolled in a step, so that a short last one skips its padding: 64 + 64 + 32."""
        is_short = self.in_channels % CHUNK != 0
        return self.num_chunks if is_short and self.num_chunks <= NUM_PLANES else 1

    def k_blocks(self, chunk: int) -> int:
        """k16 blocks of an unrolled chunk that hold channels."""
        if self.chunks_per_step == 1:
            return CHUNK // MMA_K
        return -(-min(CHUNK, self.in_channels - chunk * CHUNK) // MMA_K)

    # Shared memory.

    @property
    def halo_width(self) -> int:
        """Input pixels of a stage along W."""
        return self.tile.width + HALO

    @property
    def halo_height(self) -> int:
        """Input pixels of a stage along H."""
        return self.tile.height + HALO

    @property
    def halo_bytes(self) -> int:
        """Bytes that one halo load brings."""
        return self.halo_width * self.halo_height * CHUNK * ELEMENT_BYTES

    @property
    def halo_stage_bytes(self) -> int:
        """Distance of halo stages: whole swizzle atoms."""
        return -(-self.halo_bytes // SMEM_ALIGN_BYTES) * SMEM_ALIGN_BYTES

    @property
    def weight_stage_bytes(self) -> int:
        """One tap of a chunk; also 64 pixels of residual, which travel through the same stages."""
        return self.tile.n_tile * CHUNK * ELEMENT_BYTES

    @property
    def num_vectors(self) -> int:
        """Per-channel vectors kept in shared memory: bias, gamma, residual_bias."""
        return 0 if self.is_raw else 3

    @property
    def vector_bytes(self) -> int:
        """Bytes of the per-channel vectors."""
        return self.num_vectors * self.out_channels * ELEMENT_BYTES

    @property
    def row_sum_bytes(self) -> int:
        """Sums of squares of every row from every CTA of the cluster, for two tiles in flight."""
        return 2 * self.tile_pixels * self.tile.cluster_n * 4 if self.has_cluster_norm else 0

    @property
    def num_halo_stages(self) -> int:
        """The tile's, or one more where every unrolled step would use the same stages.

        The compiler would then hoist a step's wgmma descriptors out of the loop, over 200 of them,
        and read each back from an ordinary register.
        """
        stages = self.tile.num_halo_stages
        return stages + 1 if self.chunks_per_step % stages == 0 else stages

    @property
    def num_weight_stages(self) -> int:
        """As many as fit beside the halo stages, or one less for the same reason."""
        taken = self.num_halo_stages * self.halo_stage_bytes
        taken += self.vector_bytes + self.row_sum_bytes + SMEM_RESERVE_BYTES
        stages = min(MAX_WEIGHT_STAGES, (self.smem_limit_bytes - taken) // self.weight_stage_bytes)
        return stages - 1 if self.chunks_per_step * TAPS_PER_PLANE % stages == 0 else stages

    # Pipelines and registers.

    @property
    def halo_pipeline(self) -> PipelineFacts:
        """Halo stages; the CTAs of a channel cluster load slices of them for each other."""
        return PipelineFacts(self.num_halo_stages, self.halo_bytes, self.tile.cluster_n)

    @property
    def weight_pipeline(self) -> PipelineFacts:
        """Weight stages; the CTAs of a pixel cluster take turns to load them for all."""
        return PipelineFacts(self.num_weight_stages, self.weight_stage_bytes, self.tile.cluster_m)

    @property
    def is_register_bound(self) -> bool:
        """A fused epilogue on top of 160 accumulators a thread."""
        return not self.is_raw and self.tile_pixels * self.tile.n_tile == MAX_TILE_ELEMENTS

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer thread; with the producers' within the 3 x 168 of the launch."""
        return 240 if self.is_register_bound else 232

    @property
    def producer_registers(self) -> int:
        """Registers of a thread in the load warp's warpgroup."""
        return 24 if self.is_register_bound else 40


def smem_bytes(config: Conv3dKernelConfig) -> int:
    """Shared memory of one CTA, as ``Conv3dKernel.allocate`` lays it out."""
    halo, weight = config.halo_pipeline.num_stages, config.weight_pipeline.num_stages
    barriers = 2 * (halo + weight)
    barriers += 2 * CONSUMER_WARPGROUPS if config.has_cluster_norm else 0
    stages = halo * config.halo_stage_bytes + weight * config.weight_stage_bytes
    return stages + config.vector_bytes + config.row_sum_bytes + barriers * BARRIER_BYTES
