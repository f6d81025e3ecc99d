# SPDX-License-Identifier: Apache-2.0
"""Cases over the modules of a package that need not be installed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from typing_extensions import override

from benchmarks.harness.arm import Missing, one_line
from benchmarks.harness.case import Outcome
from benchmarks.harness.problem_case import ProblemCase
from benchmarks.harness.rows import Measured, build_rows

if TYPE_CHECKING:
    from benchmarks.harness.case import Lab


class PackageCase(ProblemCase):
    """Without the package there is nothing to accelerate: one row says what is missing."""

    package: str
    """Module that the problem's buffers are made of."""

    @override
    def measure(self, lab: Lab) -> Outcome:
        try:
            import_module(self.package)
        except ImportError as error:
            missing = Missing(self.package.partition(".")[0], one_line(error))
            measured = Measured(self.kinds[0], self.name, self.shape, "eager", [missing], {}, {})
            return Outcome(build_rows(measured))
        return super().measure(lab)
