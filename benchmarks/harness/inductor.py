# SPDX-License-Identifier: Apache-2.0
"""``torch.compile`` for peers: static shapes, whole graphs, and nothing falls back unseen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

NO_GPU = "n/a: Inductor is a peer on GPUs"


def compiled(function: Callable[..., Any], *, is_tuned: bool = False) -> Callable[..., Any]:
    """The function under Inductor; graph breaks raise. What was compiled before is dropped.

    Dynamo compiles one function for a handful of shapes and runs it eagerly from then on; dropping
    the others keeps every case's peer a compiled one.

    Args:
        function: plain torch.
        is_tuned: time the configurations of pointwise and reduction kernels, among them the one
            that the heuristics would choose; convolutions stay cuDNN's either way.
    """
    torch._dynamo.reset()
    options = {"max_autotune_pointwise": True} if is_tuned else None
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def inductor_words(*, is_tuned: bool) -> str:
    """What stands in front of the kernels of such an arm."""
    return "Inductor, kernels tuned" if is_tuned else "Inductor"
