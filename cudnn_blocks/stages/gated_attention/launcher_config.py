# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of the one host call of the gated attention block."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One kernel of the block: its class and its specialisation."""

    slot: str
    kernel: str
    """Dotted name of the class."""
    config: object


@dataclass(frozen=True)
class LauncherConfig:
    """Compile-time facts; the steps' own configs hold everything else."""

    steps: tuple[Step, ...]
    """In launch order; the slots say which fusions took place."""
    dtype: str
    d_model: int
    h_q: int
    h_kv: int
    d_head: int
    rope_dim: int
    table_multiple: int
    """Elements that the strides of the tables are multiples of."""
    has_norm: bool
    has_lse: bool
    has_seq_lens: bool

    @property
    def n_qkvg(self) -> int:
        """Columns of the slab."""
        return 2 * (self.h_q + self.h_kv) * self.d_head
