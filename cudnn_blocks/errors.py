# SPDX-License-Identifier: Apache-2.0
"""The typed errors, one class per situation; messages name operand, expected and got."""

from __future__ import annotations


class ContractError(ValueError):
    """The caller broke the contract: shape, stride, dtype, alignment, overlap, small workspace.

    Args:
        operand: name of the offending argument, as spelled in the public signature.
        expected: what the contract asks for.
        got: what the caller passed.
    """

    def __init__(self, operand: str, expected: str, got: object) -> None:
        self.operand = operand
        self.expected = expected
        self.got = got
        super().__init__(f"{operand}: expected {expected}, got {got}")


class NotServedError(NotImplementedError):
    """Inside the contract, but no engine serves it.

    Args:
        stage: the stage (or op) that declines.
        missing: what was asked for and is not there.
        served: what is served instead.
    """

    def __init__(self, stage: str, missing: str, served: str) -> None:
        self.stage = stage
        self.missing = missing
        self.served = served
        super().__init__(f"{stage}: {missing} is not served; served: {served}")


class LifecycleError(RuntimeError):
    """The calls came in the wrong order; the message says what to do instead."""


class CaptureError(LifecycleError):
    """A cold plan met a CUDA graph capture; compile it before the capture begins."""


class CudaUnavailableError(RuntimeError):
    """The target is a GPU and this process has none."""


class GradModeError(RuntimeError):
    """An operand requires grad while grad mode is on; every op here is inference-only."""


class DriverError(RuntimeError):
    """The CUDA driver or the compiler refused; the original error is chained."""


class BundleError(RuntimeError):
    """A bundle of compiled kernels is damaged, or made for something else than what is here.

    Args:
        path: of the bundle.
        field: of its manifest, or the file in it.
        expected: what this process needs.
        got: what the bundle has.
    """

    def __init__(self, path: object, field: str, expected: object, got: object) -> None:
        self.path = path
        self.field = field
        self.expected = expected
        self.got = got
        super().__init__(f"bundle {path}: {field}: expected {expected}, got {got}")


class CompileRefusedError(RuntimeError):
    """A kernel would have to be compiled, and ``artifacts.refuse_compiles()`` is in force."""


class LinkError(RuntimeError):
    """A kernel could not be linked for a bundle; the message says what is missing."""


class BadSlotError(RuntimeError):
    """``check_status`` found rows whose slot index was below -1, out of range or duplicated.

    Args:
        faults: one ``(row, slot, kind)`` per bad row, in row order.
    """

    def __init__(self, faults: list[tuple[int, int, str]]) -> None:
        self.faults = faults
        shown = ", ".join(f"row {row}: slot {slot} ({kind})" for row, slot, kind in faults[:8])
        more = f", and {len(faults) - 8} more" if len(faults) > 8 else ""
        super().__init__(
            f"conv_state_indices: expected -1 or unique slots in range, got {shown}{more}; "
            "those rows were skipped and their outputs are zero"
        )
