# SPDX-License-Identifier: Apache-2.0
"""What shows that the stages of the gated attention block ran."""

from __future__ import annotations

from cudnn_blocks.stages.capabilities import OneOf

EVIDENCE = {"sm_90a": "benchmarks/results/nvidia-h200/gated_attention_block.json"}
"""Of every GPU engine."""
SHOWN = {"dtype": OneOf(("bf16", "fp16"))}
"""Its operands; codes have not run."""
