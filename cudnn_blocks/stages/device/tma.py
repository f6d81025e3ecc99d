# SPDX-License-Identifier: Apache-2.0
"""TMA boxes of NTHWC activations (sm_90 and newer)."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync


@dataclass(frozen=True)
class TmaOperand:
    """A TMA atom and the tensor of coordinates that it copies from or to."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


def channels_first(mX: cute.Tensor) -> cute.Tensor:
    """(C, W, H, T, N), the order of TMA coordinates."""
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[4, 3, 2, 1, 0]))


@cute.jit
def partition_box(tma: TmaOperand, box, origin, sX, rank=0, cta_layout=None):
    """Partitions for the box of ``tma`` at ``origin``: ``sX``'s five box modes become one."""
    gX = cute.local_tile(cute.domain_offset(origin, tma.tensor), box, (0, 0, 0, 0, 0))
    cta_layout = cute.make_layout(1) if const_expr(cta_layout is None) else cta_layout
    return cpasync.tma_partition(
        tma.atom, rank, cta_layout, cute.group_modes(sX, 0, 5), cute.group_modes(gX, 0, 5)
    )
