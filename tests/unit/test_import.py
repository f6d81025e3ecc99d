# SPDX-License-Identifier: Apache-2.0
"""Importing the package is cheap and touches no device."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
theirs = set(sys.modules)  # what torch imports itself is not ours
import {module}
assert not torch.cuda.is_initialized(), "CUDA was initialised"
heavy = ("cutlass", "tvm_ffi", "cuda", "cudnn", "fla", "triton")
ours = [name for name in set(sys.modules) - theirs if name.split(".")[0] in heavy]
assert not ours, f"imported {{ours}}"
import os
child = os.fork()
if child == 0:  # CUDA works in a fork only where the parent has not touched the driver
    try:
        if torch.cuda.is_available():
            torch.zeros(1, device="cuda")
        os._exit(0)
    finally:
        os._exit(1)
assert os.waitpid(child, 0)[1] == 0, "CUDA does not work in a fork"
"""


@pytest.mark.parametrize(
    "module",
    [
        "cudnn_blocks",
        "cudnn_blocks.ops",
        "cudnn_blocks.blocks",
        "cudnn_blocks.cli",
        "cudnn_blocks.deploy",
        "cudnn_blocks.stages.bundle_store",
        "cudnn_blocks.api_base",
        "cudnn_blocks.integrations.flash_linear_attention",
        "cudnn_blocks.integrations.diffusers",
        "cudnn_blocks.integrations.transformers",
        "cudnn_blocks.integrations.upstream_names",
    ],
)
def test_import_touches_neither_cuda_nor_the_dsl(module):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def test_the_package_alone_does_not_import_torch():
    program = "import sys, cudnn_blocks; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_every_public_name_loads():
    import cudnn_blocks

    for name in cudnn_blocks.__all__:
        assert getattr(cudnn_blocks, name) is not None
    assert dir(cudnn_blocks) == sorted(cudnn_blocks.__all__)
    assert "CausalConv1dUpdate" in dir(cudnn_blocks)


def test_an_unknown_name_is_an_attribute_error():
    import cudnn_blocks

    with pytest.raises(AttributeError, match="'cudnn_blocks' has no attribute 'Fft'"):
        _ = cudnn_blocks.Fft


def test_the_oracle_needs_no_op():
    program = (
        "import sys, cudnn_blocks.reference.causal_conv1d; "
        "above = ('cudnn_blocks.ops', 'cudnn_blocks.stages', 'cudnn_blocks.api_base'); "
        "bad = [m for m in sys.modules if m.startswith(above)]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
