# SPDX-License-Identifier: Apache-2.0
"""What shows that the stages of the gated attention block ran."""

from __future__ import annotations

from cudnn_blocks.stages.capabilities import OneOf

_RESULTS = "benchmarks/results/nvidia-h200"
EVIDENCE = {"sm_90a": f"{_RESULTS}/gated_attention_block.json"}
"""Of every GPU engine."""
SHOWN = {"dtype": OneOf(("bf16", "fp16"))}
"""Its operands."""
CODES = {"sm_90a": f"{_RESULTS}/gated_attention_precision.json"}
"""Of operands in codes."""
TESTED = {"sm_90a": f"{_RESULTS}/gpu_test.log"}
"""Of what no benchmark has."""
