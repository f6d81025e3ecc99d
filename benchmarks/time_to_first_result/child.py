# SPDX-License-Identifier: Apache-2.0
"""A fresh serving process: ``python -m benchmarks.time_to_first_result.child SPEC``.

The clock runs from ``import cudnn_blocks`` to the end of the first call, its launches waited for;
torch is imported, the CUDA context is live and the operands are there before.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import torch


def main() -> None:
    """Prints what it took, what was imported, and a hash of every operand afterwards."""
    spec = json.loads(sys.argv[1])
    device = torch.device(spec["device"])
    tensors = make_tensors(spec["tensors"], device)
    _wait(device)
    loaded_before = _has_dsl()
    start = time.perf_counter()

    import cudnn_blocks

    if spec["bundle"]:
        from cudnn_blocks.artifacts import load_bundle, refuse_compiles

        load_bundle(spec["bundle"])
        refuse_compiles()
    geometry = {
        name: getattr(cudnn_blocks, kind)(**fields)
        for name, (kind, fields) in spec["geometry"].items()
    }
    samples = {f"sample_{name}": tensor for name, tensor in tensors.items()}
    plan = getattr(cudnn_blocks, spec["op"])(**samples, **geometry, **spec["knobs"])
    plan.compile()
    size_bytes = plan.get_workspace_size()
    more = {}
    if size_bytes:
        more["workspace"] = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    plan.execute(**tensors, **more)
    _wait(device)
    took_s = time.perf_counter() - start
    print(
        json.dumps(
            {
                "took_us": took_s * 1e6,
                "imports_dsl": _has_dsl() and not loaded_before,
                "engines": [f"{one.stage}: {one.engine}" for one in plan.probe().stages],
                "sha256": hash_of(tensors),
            }
        )
    )


def make_tensors(shapes: dict[str, Any], device: torch.device) -> dict[str, torch.Tensor | None]:
    """Seeded operands; values small enough for sums of thousands."""
    torch.manual_seed(0)
    return {
        name: None
        if shape is None
        else torch.randn(shape, device=device).mul_(0.05).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def hash_of(tensors: dict[str, torch.Tensor | None]) -> str:
    """Over the bits of all operands."""
    found = hashlib.sha256()
    for tensor in tensors.values():
        if tensor is not None:
            found.update(tensor.view(torch.int16).cpu().numpy().tobytes())
    return found.hexdigest()


def _has_dsl() -> bool:
    return "cutlass" in sys.modules


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
