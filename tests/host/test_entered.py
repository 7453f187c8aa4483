"""Side streams: what is current inside a block and behind it, and which launch goes where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from idle_device import Device
from layer_factory import LayerFactory
from layer_inputs import engine_inputs

from kpipe.runtime.host import launch
from kpipe.runtime.host.entered import entered


class Streams:
    """torch's current stream on a machine with two devices, of which `device` is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: int = 0) -> None:
        self.device = device
        self.current = {0: stream("main", 0), 1: stream("main", 1)}
        monkeypatch.setattr(torch.cuda, "set_stream", self.set)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)
        monkeypatch.setattr(torch.cuda, "stream", lambda one: Whole(self, one))

    def set(self, one: Any) -> None:
        """As torch documents it: the stream's device becomes the current one."""
        self.device, self.current[one.device_index] = one.device_index, one


class Whole:
    """torch's own block: device and streams are behind it what they were ahead of it."""

    def __init__(self, streams: Streams, one: Any) -> None:
        self.streams, self.one = streams, one

    def __enter__(self) -> None:
        self.before = self.streams.device, dict(self.streams.current)
        self.streams.set(self.one)

    def __exit__(self, *error: object) -> None:
        self.streams.device, self.streams.current = self.before


def stream(name: str, device: int) -> Any:
    one = SimpleNamespace(name=name, device_index=device, synchronize=lambda: None)
    one.wait_stream = lambda other: None
    return one


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_behind_the_block_everything_is_as_ahead_of_it(
    monkeypatch: pytest.MonkeyPatch, current: int, fails: bool
) -> None:
    streams = Streams(monkeypatch, current)
    main, side = streams.current[0], stream("side", 0)
    before = dict(streams.current)
    try:
        with entered(side, main):
            assert streams.current[0] is side and streams.device == 0
            if fails:
                raise ArithmeticError
    except ArithmeticError:
        assert fails
    assert streams.device == current and streams.current == before


def test_a_main_of_another_device_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch, 0)
    before = dict(streams.current)
    with entered(stream("side", 0), streams.current[1]):
        pass
    assert streams.device == 0 and streams.current == before


def test_each_launch_of_a_step_goes_to_its_stream(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode fork of dsa_tp: the query alone is launched aside, in every step."""
    device = Device(monkeypatch)
    streams = Streams(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: streams.current[0])
    monkeypatch.setattr(launch, "side_stream", lambda _, name, *rest: stream(name, 0))
    layer_class = LayerFactory(tmp_path_factory.mktemp("project")).tp(4, mode="fork")
    ready = engine_inputs(layer_class, (70, 1, 64))
    layer = ready.prepared(layer_class, backend="cuda", arch="sm_90a")
    where: list[tuple[str, str]] = []
    for op in layer.OPS:
        if callable(getattr(layer, op.name, None)):
            setattr(layer, op.name, _noting(where, streams, op.name, getattr(layer, op.name)))
    for name in ("main", "engine's own"):
        streams.current[0] = stream(name, 0)
        where.clear()
        layer.run(ready.step)
        assert len(where) == 10 == len(device.launched)
        assert [op for op, on in where if on == "side"] == ["mla_query"]
        assert {on for op, on in where if op != "mla_query"} == {name}
        assert streams.current[0].name == name
        device.launched.clear()


def _noting(where: list[tuple[str, str]], streams: Streams, name: str, ready: Any) -> Any:
    def run(*operands: Any, **named: Any) -> None:
        where.append((name, streams.current[0].name))
        ready(*operands, **named)

    return run
