# SPDX-License-Identifier: Apache-2.0
"""Pure torch at the stated rounding points: the specification, the CPU engine, the oracle."""
