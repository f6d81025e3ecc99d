# SPDX-License-Identifier: Apache-2.0
"""What a model has to be before anything of it is replaced, and whether it has changed since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from cudnn_blocks.api_base import require_type
from cudnn_blocks.errors import ContractError, GradModeError, LifecycleError, NotServedError
from cudnn_blocks.integrations.calls import check_not_replaced
from cudnn_blocks.ops.conv3d_family import DTYPE

FAMILY = "AutoencoderKLWan"


def part_of(vae: Any, part: str) -> Any:
    """The ``encoder`` or ``decoder`` of a model that can be accelerated.

    Raises:
        TypeError: no ``AutoencoderKLWan``, or a part of it that something else has wrapped.
        NotServedError: a WAN model without residual blocks (WAN 2.1), or another activation.
        ContractError: a training-mode model, a parameter of another dtype, or on another device
            than the rest.
        LifecycleError: the part is accelerated already, or its ``forward`` is somebody else's.
    """
    from diffusers import AutoencoderKLWan
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanDecoder3d, WanEncoder3d

    require_type("vae", vae, AutoencoderKLWan)
    module = getattr(vae, part)
    require_type(f"vae.{part}", module, {"encoder": WanEncoder3d, "decoder": WanDecoder3d}[part])
    if not vae.config.is_residual:
        raise NotServedError(FAMILY, "is_residual=False (WAN 2.1)", "is_residual=True (WAN 2.2)")
    if not isinstance(module.nonlinearity, nn.SiLU):
        got = type(module.nonlinearity).__name__
        raise NotServedError(FAMILY, f"{part}.nonlinearity {got}", "SiLU")
    check_not_replaced(f"vae.{part}", module, "forward")
    if "forward" in vars(module):
        raise LifecycleError(
            f"vae.{part}.forward is not the model's own (an offloading hook?); remove what "
            "replaced it first"
        )
    check_mode(dict(module.named_modules(prefix=part)))
    _check_parameters(part, module)
    return module


def _check_parameters(part: str, module: nn.Module) -> None:
    first: tuple[str, torch.device] | None = None
    for name, parameter in module.named_parameters(prefix=part):
        if parameter.dtype != DTYPE:
            raise ContractError(name, f"{DTYPE}, after vae.to({DTYPE})", parameter.dtype)
        first = first or (name, parameter.device)
        if parameter.device != first[1]:
            raise ContractError(name, f"a parameter on {first[1]}, as {first[0]}", parameter.device)


class Watch:
    """Looks at a part of the model again before every clip; it costs some 50 microseconds.

    Args:
        part: ``encoder`` or ``decoder``.
        module: that part, its weights packed.
    """

    def __init__(self, part: str, module: nn.Module) -> None:
        self._part = part
        self._modules = dict(module.named_modules(prefix=part))
        self._seen = self._look()

    def check(self) -> None:
        """Raises where the model is no longer what was accelerated.

        Raises:
            ContractError: training mode.
            LifecycleError: a weight has moved, was written or replaced.
        """
        check_mode(self._modules)
        if self._look() != self._seen:
            raise LifecycleError(
                f"{self._part}: its weights have moved or changed since they were packed; "
                "restore() it and accelerate it again"
            )

    def check_grad_mode(self, x: torch.Tensor) -> None:
        """GradModeError where autograd would have something to record."""
        if torch.is_grad_enabled() and (
            x.requires_grad or any(parameter.requires_grad for parameter in self._parameters())
        ):
            raise GradModeError(
                f"{self._part}: an accelerated model has no gradient and grad mode is on; use "
                "torch.no_grad(), or vae.requires_grad_(False)"
            )

    def _parameters(self) -> Iterator[nn.Parameter]:
        for module in self._modules.values():
            for parameter in module._parameters.values():
                if parameter is not None:
                    yield parameter

    def _look(self) -> list[tuple[int, int]]:
        return [
            (parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version)
            for parameter in self._parameters()
        ]


def check_mode(modules: Mapping[str, nn.Module]) -> None:
    """Raises where one of the modules is in training mode."""
    for name, module in modules.items():
        if module.training:
            raise ContractError(name, "a module in evaluation mode, after eval()", "training mode")
