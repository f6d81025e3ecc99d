# SPDX-License-Identifier: Apache-2.0
"""resolve_stream: every accepted spelling, and the refusals."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import ContractError
from cudnn_blocks import stream as stream_module
from cudnn_blocks.stream import is_capturing, resolve_stream


class ProtocolMethod:
    def __cuda_stream__(self):
        return (0, 77)


class ProtocolProperty:
    @property
    def __cuda_stream__(self):
        return (0, 78)


class CUstream:
    """Stands in for the class of that name in cuda.bindings."""

    def __int__(self):
        return 79


class cudaStream_t(CUstream):  # noqa: N801
    pass


class FakeTorchStream:
    device_index, device, cuda_stream = 1, "cuda:1", 80


@pytest.mark.parametrize(
    ("given", "handle"),
    [
        (ProtocolMethod(), 77),
        (ProtocolProperty(), 78),
        (CUstream(), 79),
        (cudaStream_t(), 79),
        (0, 0),
        (2**40, 2**40),
    ],
)
def test_accepted(given, handle):
    assert resolve_stream(given, 0) == handle


def test_the_real_driver_stream():
    from cuda.bindings import driver

    assert resolve_stream(driver.CUstream(91), 0) == 91


def test_none_is_the_ambient_stream_of_that_device(monkeypatch):
    asked = []
    monkeypatch.setattr(stream_module, "ambient_stream", lambda i: asked.append(i) or 5)
    assert resolve_stream(None, 3) == 5
    assert asked == [3]


def test_a_torch_stream_of_another_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", FakeTorchStream)
    message = "^current_stream: expected a stream of cuda:0, got a stream of cuda:1$"
    with pytest.raises(ContractError, match=message):
        resolve_stream(FakeTorchStream(), 0)
    assert resolve_stream(FakeTorchStream(), 1) == 80


@pytest.mark.parametrize("given", ["0", 1.0, True, False, -1, object(), [0], torch.zeros(1)])
def test_refused(given):
    with pytest.raises(TypeError, match=r"current_stream: expected a torch\.cuda\.Stream, .*got"):
        resolve_stream(given, 0)


def test_no_capture_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not is_capturing()


@pytest.mark.gpu
class TestOnTheDevice:
    def test_torch_streams_and_their_handles(self):
        side = torch.cuda.Stream()
        assert resolve_stream(side, 0) == side.cuda_stream
        with torch.cuda.stream(side):
            assert resolve_stream(None, 0) == side.cuda_stream
        assert resolve_stream(None, 0) == torch.cuda.current_stream().cuda_stream

    @pytest.mark.parametrize("handle", [0, 1])
    def test_the_default_stream_keeps_its_torch_object(self, handle):
        found = stream_module.as_torch_stream(handle, 0)
        assert found == torch.cuda.default_stream(0)

    def test_an_external_handle_comes_back_as_itself(self):
        side = torch.cuda.Stream()
        assert stream_module.as_torch_stream(side.cuda_stream, 0).cuda_stream == side.cuda_stream

    def test_capture_is_noticed(self):
        buffer = torch.zeros(1, device="cuda")
        assert not is_capturing()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            buffer.add_(1)
            assert is_capturing()
        assert not is_capturing()
