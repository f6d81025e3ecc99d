# SPDX-License-Identifier: Apache-2.0
"""Weights in the layout that runs, shared with the model: nothing is held twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cudnn_blocks import ops


@dataclass(frozen=True)
class _Shared:
    parameter: torch.nn.Parameter
    view: torch.Tensor
    """The weight that runs, with the parameter's shape."""
    layout: torch.Tensor
    """On the meta device, with the strides that the parameter had."""


class Weights:
    """Packs weights one by one; ``share()`` then makes the parameters views of what was packed.

    A parameter keeps its shape and its values, and writing to it still reaches the layer.
    """

    def __init__(self) -> None:
        self._shared: list[_Shared] = []

    def pack(self, module: Any) -> torch.Tensor:
        """The weight of a 3x3x3 convolution as the family reads it."""
        weight = module.weight.detach()
        packed = ops.pack_conv3d_weight(weight)
        self._add(module, packed[..., : weight.shape[1]].permute(0, 4, 1, 2, 3))
        return packed

    def channels_last(self, module: Any) -> torch.Tensor:
        """The weight of a convolution as cuDNN reads it beside channels-last activations."""
        weight: torch.Tensor = module.weight.detach()
        by_rank = {4: torch.channels_last, 5: torch.channels_last_3d}
        last = weight.contiguous(memory_format=by_rank[weight.ndim])
        self._add(module, last)
        return last

    def _add(self, module: Any, view: torch.Tensor) -> None:
        parameter = module.weight
        layout = torch.empty_strided(parameter.shape, parameter.stride(), device="meta")
        self._shared.append(_Shared(parameter, view, layout))

    def share(self) -> None:
        """Makes the parameters views; their own storage is freed."""
        for shared in self._shared:
            shared.parameter.data = shared.view

    def restore(self) -> None:
        """Gives every parameter that is still a view a storage of its own, laid out as before."""
        for shared in self._shared:
            parameter = shared.parameter
            if parameter.data_ptr() == shared.view.data_ptr():
                own = torch.empty_strided(
                    parameter.shape,
                    shared.layout.stride(),
                    dtype=parameter.dtype,
                    device=parameter.device,
                )
                parameter.data = own.copy_(parameter.data)
