# SPDX-License-Identifier: Apache-2.0
"""The DSL's types of the activation dtypes, by the names that configs have for them."""

from cutlass import BFloat16, Float16

DTYPES = {"bf16": BFloat16, "fp16": Float16}
