# SPDX-License-Identifier: Apache-2.0
"""S25 without a second GPU: the short way to a launch is closed to tensors of another device."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import CausalConv1dGeometry, CausalConv1dUpdate, ContractError


class Recorder:
    """A stage that only counts its launches."""

    name = "conv1d_update"

    def __init__(self) -> None:
        self.launches = 0

    def launch(self, operands, stream) -> None:
        self.launches += 1


@pytest.fixture
def plan_of_the_first_gpu(monkeypatch):
    """A plan as it is after ``compile()`` on cuda:0, whose launches are recorded."""
    from cudnn_blocks import api_base

    monkeypatch.setattr(api_base, "ambient_stream", lambda _: 0)
    channels = 8
    x, out = torch.zeros(2, channels).bfloat16(), torch.zeros(2, channels).bfloat16()
    state, weight = torch.zeros(2, channels, 4).bfloat16(), torch.zeros(channels, 4).bfloat16()
    plan = CausalConv1dUpdate(x, state, weight, out, CausalConv1dGeometry(channels))
    plan.compile()
    stage = Recorder()
    plan._stages, plan._device_index = (stage,), 0
    return plan, stage, (x, state, weight, out)


def test_tensors_of_another_device_are_refused(plan_of_the_first_gpu):
    plan, stage, operands = plan_of_the_first_gpu
    with pytest.raises(ContractError, match="expected a tensor on cuda:0"):
        plan.execute(*operands)
    assert stage.launches == 0


def test_tensors_of_its_own_device_take_the_short_way(plan_of_the_first_gpu):
    plan, stage, operands = plan_of_the_first_gpu
    plan._device_index = operands[0].get_device()
    plan.execute(*operands)
    assert stage.launches == 1
