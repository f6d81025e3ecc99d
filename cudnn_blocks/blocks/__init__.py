# SPDX-License-Identifier: Apache-2.0
"""Multi-stage blocks behind one class, one workspace, one ``execute``."""
