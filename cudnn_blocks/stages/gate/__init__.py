# SPDX-License-Identifier: Apache-2.0
"""The sigmoid gate of an attention output."""
