# SPDX-License-Identifier: Apache-2.0
"""The DSL's types of activations and codes, by the names that configs have for them."""

from cutlass import BFloat16, Float8E4M3FN, Float16

DTYPES = {"bf16": BFloat16, "fp16": Float16, "e4m3": Float8E4M3FN}
