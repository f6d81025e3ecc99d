# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: arms, buffer sets, timing, checks, ceilings, results, tables."""
