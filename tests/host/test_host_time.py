"""`bench/host_time.py` without a GPU: what it times, and that it says what it cannot."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from layer_factory import LayerFactory

from kpipe.runtime.generated_folder import launches, load_layer
from kpipe.runtime.layer import Layer

ROOT = Path(__file__).resolve().parents[2]


TABLE = """\
overlap:
  table:
    q1: {"1-4": front, "5-32": fork, "33-64": fork_split}
    q4: {"4-32": fork, "33-64": fork_split}
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with the folder that it lies in on the path as when it is run."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("host_time")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small layer with a side stream."""
    layers = LayerFactory(tmp_path_factory.mktemp("project"))
    text = "extends: dsa_tp.yaml\nname: small\ngeometry: small\nparallel: {tp: 4}\n"
    return layers.folder("small", text + TABLE)


def test_every_launch_of_a_step_is_timed(
    bench: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "host.json"
    words = [str(folder), "--stub", "--rows", "1,16", "--rounds", "2", "--out", str(out)]
    assert bench.main(words) == 0
    document = json.loads(out.read_text())
    layer_class = load_layer(folder)
    text = capsys.readouterr().out
    for at, rows in zip(document["layers"], (1, 16), strict=True):
        method = layer_class.TABLE["sm_90a", 1][rows]
        names = [op.name for op in launches(layer_class, method)]
        assert at["rows"] == rows and list(at["idle"]) == ["ffi", "python"]
        for found in at["idle"].values():
            assert list(found["launch_us"]) == names
            assert all(one["median"] >= one["low"] > 0 for one in found["launch_us"].values())
        assert all(f"\n{name} " in text for name in names)
    assert document["gpu"] == "none" and "stream_operation_us" not in document


def test_an_op_alone_is_called_as_the_step_calls_it(
    bench: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same arguments reach the same kernels, in whichever way it is asked for."""
    handed: list[tuple[int, ...]] = []

    def kernel(*operands: torch.Tensor | None) -> None:
        handed.append(tuple(id(one) for one in operands))

    machine, layer_class = bench.Machine(True), load_layer(folder)
    with bench.without_device():
        generator = torch.Generator("cpu").manual_seed(0)
        inputs = bench.make_inputs(layer_class, 16, 1, bench.CONTEXT, generator)
        one = machine.prepared(layer_class, inputs, kernel)
        calls = bench.operands_of(one)
        handed.clear()
        one.run()
        whole = list(handed)
        handed.clear()
        for call in calls.values():
            call()
    assert len(whole) == len(calls) == 10 and handed == whole


def test_streams_are_torchs_own_again_behind_it(bench: ModuleType) -> None:
    before = torch.cuda.current_stream, Layer.prepare
    with bench.without_device():
        assert torch.cuda.current_stream is not before[0]
    assert (torch.cuda.current_stream, Layer.prepare) == before


def test_without_a_device_and_for_what_is_no_folder(
    bench: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not torch.cuda.is_available():
        assert bench.main([str(folder)]) == 4
        expected = "error: this machine has no CUDA device; --stub needs none\n"
        assert capsys.readouterr().err == expected
    assert bench.main([str(tmp_path / "none"), "--stub"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert bench.main([str(folder), "--stub", "--rows", "65"]) == 4
    assert capsys.readouterr().err.endswith("65 rows; declared for q 1 are 1 to 64\n")
    assert bench.main([str(folder), "--stub", "--rows", "1,x"]) == 2
    assert capsys.readouterr().err == "error: --rows: 'x' is no number of rows\n"


def test_deciles_are_those_of_the_rounds(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = importlib.import_module("host_parts.timed")
    assert timed.spread([float(n) for n in range(100, 0, -1)]) == timed.Spread(51.0, 11.0)
    ends = iter((0.0, 8e-6, 1.0, 1.0 + 2e-6))
    waited, ran = [], []
    clock = SimpleNamespace(perf_counter=lambda: next(ends))
    monkeypatch.setattr(timed, "time", clock)
    found = timed.host_us(lambda: ran.append(1), lambda: waited.append(len(ran)), 4, 2)
    assert waited == [0, 4] and len(ran) == 8, "waited for ahead of a round, outside of its time"
    assert found.median == pytest.approx(2.0) and found.low == pytest.approx(0.5)
