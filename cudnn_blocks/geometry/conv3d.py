# SPDX-License-Identifier: Apache-2.0
"""Sizes and extents of the Conv3D family for video-VAE inference.

Channels are fixed by the geometry; N, T, H and W are dynamic and belong to the samples. The methods
turn an input shape into the shape of every other operand, so that ops, wrappers and the reference
share one statement of each extent. Activations are ``N T H W C`` unless a name says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.frozen import frozen
from cudnn_blocks.geometry.sizes import validate_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

Shape = tuple[int, ...]

KERNEL = (3, 3, 3)
"""T, R, S: the only filter that the family serves; stride, dilation and groups are 1."""
KERNEL_TAPS = 27
MAX_HISTORY_FRAMES = 2
"""Frames before the current one that a causal filter of three taps sees."""
PACKED_CHANNEL_MULTIPLE = 64
"""A packed filter row is zero-padded to a multiple of this many input channels."""
CAUSAL_IN_CHANNELS = 12
CAUSAL_OUT_CHANNELS = 160
CAUSAL_PADDED_CHANNELS = 16
"""Channels of one pixel of ``padded_input``, and of one tap of the packed causal weight."""
CAUSAL_PACKED_COLUMNS = (KERNEL_TAPS + 1) * CAUSAL_PADDED_CHANNELS
"""448: 27 taps and one zero tap, which makes the row a multiple of 64."""


def packed_channels(in_channels: int) -> int:
    """Returns ``in_channels`` rounded up to the multiple of 64 that a packed filter row holds."""
    return -(-in_channels // PACKED_CHANNEL_MULTIPLE) * PACKED_CHANNEL_MULTIPLE


def cache_frames(frames: int, history_frames: int) -> int:
    """Returns the frames kept for the next chunk: ``min(2, frames + history_frames)``."""
    return min(MAX_HISTORY_FRAMES, frames + history_frames)


def check_history_frames(history_frames: int) -> None:
    """Raises unless ``history_frames`` is 0, 1 or 2."""
    _check_frame_knob("history_frames", history_frames)


def check_zero_leading_frames(zero_leading_frames: int) -> None:
    """Raises unless ``zero_leading_frames`` is 0, 1 or 2."""
    _check_frame_knob("zero_leading_frames", zero_leading_frames)


def history_frames_of(previous_shape: Sequence[int] | None) -> int:
    """Returns the frames that ``previous`` holds, 0 where it is None.

    Raises:
        ContractError: ``previous`` is not 5-D, or holds other than 1 or 2 frames.
    """
    if previous_shape is None:
        return 0
    shape = tuple(previous_shape)
    if len(shape) != 5 or not 1 <= shape[1] <= MAX_HISTORY_FRAMES:
        raise ContractError("previous", "shape [N, 1 or 2, H, W, C], or None for no history", shape)
    return shape[1]


@frozen
class Conv3dGeometry:
    """Channels of a valid 3x3x3 convolution ``Ci -> Co`` over a padded NTHWC activation.

    Any positive channel counts are inside the contract; which pairs an engine serves is a row of
    that engine's capabilities.
    """

    in_channels: int
    """Ci, channels of the input activation."""
    out_channels: int
    """Co, channels of the output, bias, gamma and residual."""
    kernel: tuple[int, int, int] = KERNEL
    """T, R, S of the filter; only (3, 3, 3) is inside the contract."""

    @classmethod
    def from_shapes(
        cls, input_shape: Sequence[int], packed_weight_shape: Sequence[int]
    ) -> Conv3dGeometry:
        """Reads Ci from the input and Co from the packed weight, and validates them.

        Raises:
            ContractError: a rank is not 5, a size is not positive, or the weight is not packed.
        """
        if len(input_shape) != 5:
            raise ContractError("input", "shape [N, T, H, W, Ci]", tuple(input_shape))
        got = tuple(packed_weight_shape)
        if len(got) != 5:
            raise ContractError("packed_weight", "shape [Co, 3, 3, 3, ceil64(Ci)]", got)
        geometry = cls(in_channels=input_shape[-1], out_channels=got[0], kernel=KERNEL)
        geometry.validate()
        if got != geometry.packed_weight_shape:
            expected = f"shape {geometry.packed_weight_shape} as made by pack_conv3d_weight"
            raise ContractError("packed_weight", expected, got)
        return geometry

    def validate(self) -> None:
        """Raises ContractError where a size lies outside the contract."""
        validate_sizes(self, "in_channels", "out_channels")
        if self.kernel != KERNEL:
            raise ContractError("kernel", f"{KERNEL}", self.kernel)

    def validate_input(self, input_shape: Sequence[int]) -> None:
        """Raises ContractError unless the shape is ``[N, T, H, W, Ci]`` with T, H, W at least 3."""
        _check_activation("input", input_shape, self.in_channels, min_extent=3)

    @property
    def packed_weight_shape(self) -> Shape:
        """``[Co, 3, 3, 3, ceil64(Ci)]``."""
        return (self.out_channels, *self.kernel, packed_channels(self.in_channels))

    def output_shape(self, input_shape: Sequence[int]) -> Shape:
        """Valid convolution: ``[N, T-2, H-2, W-2, Co]``."""
        n, t, h, w, _ = input_shape
        return (n, t - 2, h - 2, w - 2, self.out_channels)

    def padded_output_shape(self, input_shape: Sequence[int]) -> Shape:
        """Output with two leading planes and a one-pixel border: ``[N, T, H, W, Co]``."""
        return (*input_shape[:4], self.out_channels)

    def spatial_padded_output_shape(self, input_shape: Sequence[int]) -> Shape:
        """Output with a zero bottom row and right column: ``[N, T-2, H-1, W-1, Co]``."""
        n, t, h, w, _ = input_shape
        return (n, t - 2, h - 1, w - 1, self.out_channels)

    def cache_output_shape(self, input_shape: Sequence[int], history_frames: int = 0) -> Shape:
        """Frames kept for the next chunk: ``[N, min(2, T-2+P), H-2, W-2, Co]``."""
        n, t, h, w, _ = input_shape
        return (n, cache_frames(t - 2, history_frames), h - 2, w - 2, self.out_channels)


@frozen
class RmsNormSiluGeometry:
    """Channels of the standalone normalisation, activation and padding."""

    channels: int
    """C, the full row that one pixel's norm spans."""

    @classmethod
    def from_shapes(cls, input_shape: Sequence[int]) -> RmsNormSiluGeometry:
        """Reads C from the input and validates it.

        Raises:
            ContractError: the rank is not 5, or C is not positive.
        """
        if len(input_shape) != 5:
            raise ContractError("input", "shape [N, T, H, W, C]", tuple(input_shape))
        geometry = cls(channels=input_shape[-1])
        geometry.validate()
        return geometry

    def validate(self) -> None:
        """Raises ContractError where a size lies outside the contract."""
        validate_sizes(self, "channels")

    def validate_input(self, input_shape: Sequence[int]) -> None:
        """Raises ContractError unless the shape is ``[N, T, H, W, C]`` with T, H, W at least 1."""
        _check_activation("input", input_shape, self.channels, min_extent=1)

    def padded_output_shape(self, input_shape: Sequence[int]) -> Shape:
        """Two leading planes and a one-pixel border: ``[N, T+2, H+2, W+2, C]``."""
        n, t, h, w, _ = input_shape
        return (n, t + 2, h + 2, w + 2, self.channels)

    def previous_shape(self, input_shape: Sequence[int], history_frames: int) -> Shape:
        """Activated history of the chunk before: ``[N, P, H, W, C]``."""
        n, _, h, w, _ = input_shape
        return (n, history_frames, h, w, self.channels)

    def cache_output_shape(self, input_shape: Sequence[int], history_frames: int = 0) -> Shape:
        """Frames kept for the next chunk: ``[N, min(2, T+P), H, W, C]``."""
        n, t, h, w, _ = input_shape
        return (n, cache_frames(t, history_frames), h, w, self.channels)


@frozen
class CausalConv3dGeometry:
    """Channels of the streaming causal 3x3x3 convolution, 12 -> 160."""

    in_channels: int = CAUSAL_IN_CHANNELS
    """Ci of the NCTHW chunk and of the history; only 12 is inside the contract."""
    out_channels: int = CAUSAL_OUT_CHANNELS
    """Co; only 160 is inside the contract."""

    def validate(self) -> None:
        """Raises ContractError where a size lies outside the contract."""
        for name, served in (
            ("in_channels", CAUSAL_IN_CHANNELS),
            ("out_channels", CAUSAL_OUT_CHANNELS),
        ):
            if getattr(self, name) != served:
                raise ContractError(
                    name, f"{served} (the causal convolution is 12 -> 160)", getattr(self, name)
                )

    def validate_input(self, input_shape: Sequence[int]) -> None:
        """Raises ContractError unless the shape is ``[N, 12, T, H, W]`` with T, H, W at least 1."""
        shape = tuple(input_shape)
        if len(shape) != 5 or shape[1] != self.in_channels or min(shape[2:]) < 1:
            expected = f"shape [N, {self.in_channels}, T, H, W] with T, H, W >= 1"
            raise ContractError("input", expected, shape)

    @property
    def packed_weight_shape(self) -> Shape:
        """``[160, 448]``: 27 taps of 16 channels and one zero tap."""
        return (self.out_channels, CAUSAL_PACKED_COLUMNS)

    def padded_input_shape(self, input_shape: Sequence[int]) -> Shape:
        """The NTHWC scratch that the convolution reads: ``[N, T+2, H+2, W+2, 16]``."""
        n, _, t, h, w = input_shape
        return (n, t + 2, h + 2, w + 2, CAUSAL_PADDED_CHANNELS)

    def output_shape(self, input_shape: Sequence[int]) -> Shape:
        """``[N, T, H, W, 160]``: one output frame per frame of the chunk."""
        n, _, t, h, w = input_shape
        return (n, t, h, w, self.out_channels)

    def previous_shape(self, input_shape: Sequence[int], history_frames: int) -> Shape:
        """Raw history of the chunk before: ``[N, P, H, W, 12]``."""
        n, _, _, h, w = input_shape
        return (n, history_frames, h, w, self.in_channels)

    def cache_output_shape(self, input_shape: Sequence[int], history_frames: int = 0) -> Shape:
        """Raw frames kept for the next chunk: ``[N, min(2, T+P), H, W, 12]``."""
        n, _, t, h, w = input_shape
        return (n, cache_frames(t, history_frames), h, w, self.in_channels)


def _check_frame_knob(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not 0 <= value <= MAX_HISTORY_FRAMES:
        raise ContractError(name, f"0 to {MAX_HISTORY_FRAMES}", value)


def _check_activation(name: str, shape: Sequence[int], channels: int, *, min_extent: int) -> None:
    got = tuple(shape)
    if len(got) != 5 or got[-1] != channels or min(got[1:4]) < min_extent:
        expected = f"shape [N, T, H, W, {channels}] with T, H, W >= {min_extent}"
        raise ContractError(name, expected, got)
