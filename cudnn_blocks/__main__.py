# SPDX-License-Identifier: Apache-2.0
"""``python -m cudnn_blocks``."""

from cudnn_blocks.cli import main

main()
