# SPDX-License-Identifier: Apache-2.0
"""The grid of the decode convolution update, as data."""

from __future__ import annotations

from benchmarks.causal_conv1d_update.problem import Problem

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024)
CHANNELS = (2048, 4096, 8192, 12288)

LAYOUTS = {
    "L4": {"state_len": 4},
    "L3-compact": {"state_len": 3},
    "L3-channel-last": {"state_len": 3, "channel_last": True},
}
"""Case name to state layout, all of width 4 in bf16: decode of gated delta networks."""

SPECIALISATIONS = {
    "fp16-L4": {"dtype": "float16", "state_len": 4},
    "fp16-L3-channel-last": {"dtype": "float16", "state_len": 3, "channel_last": True},
    "W2-L2": {"width": 2, "state_len": 2},
    "W2-L1": {"width": 2, "state_len": 1},
    "W3-L3": {"width": 3, "state_len": 3},
    "W3-L2": {"width": 3, "state_len": 2},
}
SPECIALISED_SHAPES = ((64, 8192), (1024, 8192))

INDEXED_SHAPES = ((1024, 8192), (1024, 2048))
HOST_CHANNELS = (2048, 8192)

PROBLEMS = tuple(
    Problem(name, rows, channels, **layout)
    for name, layout in LAYOUTS.items()
    for channels in CHANNELS
    for rows in ROWS
) + tuple(
    Problem(name, rows, channels, **fields)
    for name, fields in SPECIALISATIONS.items()
    for rows, channels in SPECIALISED_SHAPES
)
INDEXED_PROBLEMS = tuple(
    Problem("indices", rows, channels, state_len=4, indexed=True)
    for rows, channels in INDEXED_SHAPES
)
HOST_PROBLEMS = tuple(Problem("update", 1, channels, state_len=4) for channels in HOST_CHANNELS)
