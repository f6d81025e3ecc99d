# SPDX-License-Identifier: Apache-2.0
"""What a Conv3D kernel does behind the convolution; every engine has the same four."""

RAW, NORM, NORM_PAD, BIAS_RESIDUAL_PAD = EPILOGUES = (
    "raw",
    "norm",
    "norm_pad",
    "bias_residual_pad",
)
