# SPDX-License-Identifier: Apache-2.0
"""Attention as a plan of the cuDNN graph API.

A plan has fixed extents and strides: those of the samples. Sums, exponentials and the rounding of
the weights are cuDNN's, and close to the contract's; the LSE is natural. cuDNN counts the diagonal
as a key of the left window, so that its bound is ``window_left + 1``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_blocks.errors import ContractError
from cudnn_blocks.stages.cudnn_graph import HANDLES, PinnedPlan, pin_plan
from cudnn_blocks.tensor_spec import TensorSpec

Q, K, V, OUT, LSE = range(1, 6)  # tensor uids
_NAMES = ("q", "k", "v", "o")
_DATA_TYPES = {"bf16": "BFLOAT16", "fp16": "HALF"}


@dataclass(frozen=True)
class CudnnSdpa:
    """Attention without gate and lengths, for one set of extents and strides."""

    device_index: int
    layouts: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Shape and stride of q, k, v and o."""
    plan: PinnedPlan

    @classmethod
    def build(
        cls, modes: Any, scale: float, samples: Sequence[TensorSpec], device_index: int
    ) -> CudnnSdpa:
        """Builds the plan.

        Args:
            modes: the stage's ``SdpaModes``.
            scale: factor of the scores.
            samples: of q, k, v and o.
            device_index: where the samples are.

        Raises:
            PlanDeclinedError: cuDNN has none.
        """
        HANDLES.prepare(device_index)
        with torch.cuda.device(device_index), HANDLES.bound(device_index, 0) as handle:
            plan = _build_plan(modes, scale, samples, handle)
        layouts = {
            name: (tuple(one.shape), tuple(one.stride))
            for name, one in zip(_NAMES, samples, strict=True)
        }
        return cls(device_index, layouts, plan)

    def launch(self, operands: Sequence[Any], stream: int) -> None:
        """One launch on operands in the order of the stage."""
        q, k, v, o, _, lse, _ = operands
        for name, tensor in zip(_NAMES, (q, k, v, o), strict=True):
            shape, stride = self.layouts[name]
            if tensor.shape != shape or tensor.stride() != stride:
                expected = f"shape {shape} and strides {stride}, the sample's, with engine cudnn"
                got = f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"
                raise ContractError(name, expected, got)
        addresses = {Q: q.data_ptr(), K: k.data_ptr(), V: v.data_ptr(), OUT: o.data_ptr()}
        if lse is not None:
            addresses[LSE] = lse.data_ptr()
        self.plan.execute(addresses, self.device_index, stream)

    def __str__(self) -> str:
        return f"plan {self.plan.name}"


def _build_plan(modes: Any, scale: float, samples: Sequence[TensorSpec], handle: Any) -> PinnedPlan:
    import cudnn

    io_type, fp32 = getattr(cudnn.data_type, _DATA_TYPES[modes.dtype]), cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        name="sdpa",
        io_data_type=io_type,
        intermediate_data_type=fp32,
        compute_data_type=fp32,
        handle=handle,
    )
    uids = {"q": Q, "k": K, "v": V}
    inputs = {
        name: graph.tensor(dim=dim, stride=stride, name=name, uid=uids[name])
        for name, (dim, stride) in zip(_NAMES[:3], map(_heads_first, samples[:3]), strict=True)
    }
    alignment = cudnn.diagonal_alignment
    o, lse = graph.sdpa(
        **inputs,
        name="attention",
        attn_scale=scale,
        generate_stats=modes.has_lse,
        diagonal_alignment=(
            alignment.BOTTOM_RIGHT if modes.causal_bottom_right else alignment.TOP_LEFT
        ),
        diagonal_band_right_bound=0 if modes.is_causal else None,
        diagonal_band_left_bound=None if modes.window_left < 0 else modes.window_left + 1,
    )
    dim, stride = _heads_first(samples[3])
    o.set_output(True).set_dim(dim).set_stride(stride).set_data_type(io_type).set_uid(OUT)
    if modes.has_lse:
        batch, heads, rows, _ = dim
        lse.set_output(True).set_dim([batch, heads, rows, 1]).set_data_type(fp32).set_uid(LSE)
        lse.set_stride([heads * rows, rows, 1, 1])
    return pin_plan(graph)


def _heads_first(sample: TensorSpec) -> tuple[list[int], list[int]]:
    """Dim and stride in cuDNN's order: batch, heads, sequence, channels."""
    order = (0, 2, 1, 3)
    return [sample.shape[i] for i in order], [sample.stride[i] for i in order]
