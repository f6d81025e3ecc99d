# SPDX-License-Identifier: Apache-2.0
"""The steps of ops and blocks. Kernels live here, and cutlass is imported nowhere else."""
