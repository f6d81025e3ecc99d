# SPDX-License-Identifier: Apache-2.0
"""The contract page lists the operands that the code checks, in the code's order and shapes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cudnn_blocks.geometry.conv3d import (
    CausalConv3dGeometry,
    Conv3dGeometry,
    RmsNormSiluGeometry,
    packed_channels,
)
from cudnn_blocks.geometry.conv3d_shapes import (
    ResidualMode,
    causal_conv3d_with_cache_shapes,
    conv3d_bias_residual_pad_shapes,
    conv3d_raw_shapes,
    conv3d_rmsnorm_silu_pad_shapes,
    conv3d_rmsnorm_silu_shapes,
    rmsnorm_silu_pad_shapes,
)

PAGE = Path(__file__).parents[2] / "docs" / "conv3d_contract.md"
N, T, H, W, CI, CO, P = 2, 3, 7, 9, 160, 320, 1
CONV = Conv3dGeometry(in_channels=CI, out_channels=CO)
X = (N, T, H, W, CI)
FULL = ResidualMode.ADD_BIASED
TABLES = {
    "Conv3dRaw": conv3d_raw_shapes(CONV, X),
    "Conv3dRmsNormSilu": conv3d_rmsnorm_silu_shapes(CONV, X, FULL),
    "Conv3dRmsNormSiluPad": conv3d_rmsnorm_silu_pad_shapes(CONV, X, FULL, history_frames=P),
    "Conv3dBiasResidualPad": conv3d_bias_residual_pad_shapes(CONV, X, has_residual_bias=True),
    "RmsNormSiluPad": rmsnorm_silu_pad_shapes(
        RmsNormSiluGeometry(channels=CI),
        X,
        FULL,
        has_input_bias=True,
        previous_shape=(N, P, H, W, CI),
    ),
    "CausalConv3dWithCache": causal_conv3d_with_cache_shapes(
        CausalConv3dGeometry(), (N, 12, T, H, W), previous_shape=(N, P, H, W, 12)
    ),
}
NAMES = {
    "N": N, "T": T, "H": H, "W": W, "C": CI, "Ci": CI, "Co": CO, "P": P,
    "min": min, "ceil64": packed_channels,
}  # fmt: skip


@pytest.mark.parametrize("op", TABLES)
def test_the_page_states_the_shapes_of_the_code(op):
    section = PAGE.read_text().split(f"\n## {op}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| \d \| `(\w+)`[^|]*\| `\[([^`]*)\]`", section, re.MULTILINE)
    # The page is ours and holds plain arithmetic over the axes.
    stated = {name: tuple(eval(f"({shape},)", {"__builtins__": {}}, NAMES)) for name, shape in rows}
    assert list(stated) == list(TABLES[op])
    assert stated == TABLES[op]
