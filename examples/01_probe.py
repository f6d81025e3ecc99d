# SPDX-License-Identifier: Apache-2.0
"""Ask before you deploy: which GPUs serve a decode convolution, by what engine, in what workspace?

Nothing here needs a GPU, a CUDA toolkit or any memory for tensors: the samples are on torch's
``meta`` device and every target is only named. Run it from the repository root::

    python examples/01_probe.py
    python examples/01_probe.py --channels 4096 --target sm_80 --target sm_121a
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch

from cudnn_blocks import CausalConv1dGeometry, CausalConv1dUpdate, NotServedError, SupportReport
from cudnn_blocks.support import render_reports
from cudnn_blocks.target import TARGET_NAMES

TARGETS = ("sm_90a", "sm_80", "sm_100a", "sm_120a", "cpu")
MAX_ROWS, NUM_SLOTS = 1024, 2048


def build_plan(channels: int, width: int, state_len: int, target: str) -> CausalConv1dUpdate:
    """One decode step of a short convolution for up to 1024 rows, routed to 2048 cache slots."""

    def sample(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return CausalConv1dUpdate(
        sample(MAX_ROWS, channels),
        sample(NUM_SLOTS, channels, state_len),
        sample(channels, width),
        sample(MAX_ROWS, channels),
        CausalConv1dGeometry(channels, width, state_len),
        sample_conv_state_indices=sample(MAX_ROWS, dtype=torch.int32),
        activation="silu",
        target=target,
    )


def probe_targets(channels: int, width: int, targets: Sequence[str]) -> list[SupportReport]:
    """One report per target; ``probe()`` never raises on a decline."""
    return [build_plan(channels, width, width, target).probe() for target in targets]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--channels", type=int, default=8192, help="channels of the convolution")
    parser.add_argument(
        "--target", action="append", choices=TARGET_NAMES, help="repeats; default: five of them"
    )
    options = parser.parse_args(argv)
    channels, targets = options.channels, options.target or TARGETS

    print(f"1. Which targets serve {channels} channels, filter width 4, a cache of 4 tokens?\n")
    reports = probe_targets(channels, 4, targets)
    print(render_reports(reports))

    print("\n2. And filter width 5? A decline says what is missing and what is served instead.\n")
    declines = probe_targets(channels, 5, targets[:1])
    print(render_reports(declines))

    print("\n3. A plan answers the same, but raises what probe() only reports:\n")
    try:
        build_plan(channels, 5, 5, targets[0]).check_support()
    except NotServedError as decline:
        print(f"   width 5: {type(decline).__name__}, missing: {decline.missing}")
    if reports[0]:
        plan = build_plan(channels, 4, 4, targets[0])
        print(f"   width 4: workspace of {plan.get_workspace_size()} bytes, known before compile()")

    print("\n4. The same report for a deployment script, as JSON:\n")
    print(json.dumps(declines[0].model_dump(), indent=2))
    return 0 if all(reports) else 1


if __name__ == "__main__":
    raise SystemExit(main())
