# SPDX-License-Identifier: Apache-2.0
"""The ledger of scratch regions that a plan books at construction and looks up at launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cudnn_blocks.errors import ContractError

REGION_ALIGNMENT_BYTES = 256
"""Of each region within the workspace, and of the workspace itself on a GPU."""
HOST_ALIGNMENT_BYTES = 64
"""Of a workspace on the CPU: what torch's allocations there have."""
ENGINE_SCRATCH = "engine_scratch"


@dataclass(frozen=True)
class Region:
    """A named slice of the workspace: ``size_bytes`` bytes from ``offset_bytes`` on."""

    name: str
    offset_bytes: int
    size_bytes: int


class WorkspaceLayout:
    """An append-only ledger of 256-byte aligned regions.

    Named regions come first and depend on the geometry and mode alone; what an engine needs beyond
    them is ``engine_scratch``, booked last. Contents are undefined between calls.
    """

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}
        self._size_bytes = 0

    def book(self, name: str, size_bytes: int) -> Region:
        """Appends a region and returns it; nothing may follow ``engine_scratch``."""
        if size_bytes < 0:
            raise ContractError(name, "a size of at least 0 bytes", size_bytes)
        assert name not in self._regions, f"region {name!r} is booked twice"
        assert ENGINE_SCRATCH not in self._regions, f"region {name!r} follows {ENGINE_SCRATCH}"
        region = Region(name, self._size_bytes, size_bytes)
        self._regions[name] = region
        self._size_bytes += -(-size_bytes // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES
        return region

    def book_scratch(self, size_bytes: int) -> Region:
        """Appends ``engine_scratch``, the last region."""
        return self.book(ENGINE_SCRATCH, size_bytes)

    @property
    def size_bytes(self) -> int:
        """Exact bytes that the caller has to provide."""
        return self._size_bytes

    @property
    def regions(self) -> tuple[Region, ...]:
        """Every region, in the order of booking."""
        return tuple(self._regions.values())

    def __getitem__(self, name: str) -> Region:
        return self._regions[name]

    def check(self, workspace: torch.Tensor | None, device: torch.device) -> None:
        """Raises ContractError unless ``workspace`` can hold this layout on ``device``."""
        if self._size_bytes == 0 and workspace is None:
            return
        wanted = f"{self._size_bytes} bytes of contiguous uint8 on {device}"
        if workspace is None:
            raise ContractError("workspace", wanted, None)
        if workspace.dtype != torch.uint8 or workspace.dim() != 1 or not workspace.is_contiguous():
            shape, dtype = tuple(workspace.shape), workspace.dtype
            raise ContractError("workspace", wanted, f"shape {shape} {dtype}")
        if workspace.device != device:
            raise ContractError("workspace", wanted, workspace.device)
        if workspace.numel() < self._size_bytes:
            raise ContractError("workspace", wanted, f"{workspace.numel()} bytes")
        alignment = REGION_ALIGNMENT_BYTES if device.type == "cuda" else HOST_ALIGNMENT_BYTES
        excess = workspace.data_ptr() % alignment
        if self._size_bytes and excess:
            raise ContractError(
                "workspace",
                f"a {alignment}-byte aligned address",
                f"address % {alignment} == {excess}",
            )

    def view(
        self, workspace: torch.Tensor, name: str, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        """A typed view of one region; no copy, no allocation."""
        region = self._regions[name]
        used_bytes = math.prod(shape) * dtype.itemsize
        assert used_bytes <= region.size_bytes, f"{name}: {used_bytes} > {region.size_bytes} bytes"
        window = workspace[region.offset_bytes : region.offset_bytes + used_bytes]
        return window.view(dtype).view(*shape)

    def __str__(self) -> str:
        if not self._regions:
            return "workspace: none"
        rows = (
            f"  {region.offset_bytes:>12}  {region.size_bytes:>12}  {region.name}"
            for region in self.regions
        )
        return "\n".join([f"workspace: {self._size_bytes} bytes", *rows])
