# SPDX-License-Identifier: Apache-2.0
"""Plans of this package inside the models that people run; each module needs its optional extra."""
