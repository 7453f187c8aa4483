"""The generated layers' own host code, captured on a driver without a GPU, is what is predicted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fake_gpu import KERNEL, FakeMachine, Node

from kpipe.codegen.cli import main
from kpipe.runtime import verify_capture
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.schedules import execute, layers, trial_file

REPOSITORY = Path(__file__).resolve().parents[2]


class Anything:
    def __getattr__(self, name: str) -> None:
        return None


class Generated:
    """A generated layer on the fake machine: its own methods, and ops that only launch."""

    def __init__(self, machine: FakeMachine, layer_class: type, method: str) -> None:
        self.machine, self.method = machine, method
        self.layer = layer_class()
        for number, name in enumerate(("main", *layer_class.STREAMS)):
            setattr(self.layer, name, self.stream(number))
        self.layer.on = torch.cuda.stream
        for op in layer_class.OPS:
            setattr(self.layer, op.name, self.launcher(op.name))
        for name in layer_class.MEMORY.caches:
            setattr(self.layer, name, None)

    def stream(self, number: int) -> SimpleNamespace:
        driver, handle = self.machine.driver, self.machine.stream(number).cuda_stream

        def wait_stream(other: SimpleNamespace) -> None:
            event = driver.event()
            driver.record(event, other.cuda_stream)
            driver.wait(handle, event)

        return SimpleNamespace(cuda_stream=handle, wait_stream=wait_stream)

    def launcher(self, name: str):  # noqa: ANN201
        def launch(*_: object, pdl: bool = True, **__: object) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            made = Node(KERNEL, lambda: None, f"kernel_of_{name}_tensorptr")
            self.machine.library.issue(stream, made, pdl=pdl)

        return launch

    def run(self) -> str:
        getattr(self.layer, self.method)(Anything(), Anything())
        return self.method


@pytest.fixture
def captured(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # noqa: ANN201
    """Plans a shipped pipeline and captures stand-ins and layer: (exit code, document, judge)."""
    monkeypatch.setattr(layers, "compile_kernel", execute.compile_kernel)
    out = tmp_path / "captured.json"

    def capture(name: str, arch: str, build: Any = None):  # noqa: ANN202
        def built(layer_class: type, **use: Any) -> list[Generated]:
            method = layer_class.TABLE[use["arch"], use["q"]][use["rows"]]
            return [Generated(machine, layer_class, method) for _ in range(use["count"])]

        monkeypatch.setattr(layers, "build", build or built)
        machine.arch = arch
        spec, plan = str(REPOSITORY / "pipelines" / f"{name}.yaml"), str(tmp_path / "plan.json")
        assert CliRunner().invoke(main, ["verify-capture", spec, "--plan", plan]).exit_code == 0
        words = ["--plan", plan, "--out", str(out), "--layer", str(REPOSITORY / "generated" / name)]
        code = trial_file.main(verify_capture._options(words), verify_capture._capture)
        arguments = ["verify-capture", spec, "--captured", str(out)]
        return code, json.loads(out.read_text()), CliRunner().invoke(main, arguments)

    return capture


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", ["dsa_tp", "dsa_dcp"])
def test_what_the_generated_code_launches_is_what_was_proved(
    captured, name: str, arch: str
) -> None:
    code, document, result = captured(name, arch)
    assert code == 0 and document["refused"] == []
    assert sum(one["layer"] for one in document["lists"]) >= 3
    assert result.exit_code == 0, result.stdout
    assert "the layer  " in result.stdout


def test_a_list_that_is_refused_takes_no_other_along(
    captured, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(layer_class: type, **use: Any) -> list:
        raise LayerError(f"no kernels for {use['rows']} rows")

    code, document, result = captured("dsa_tp", "sm_90a", refuse)
    refused = document["refused"]
    assert code == 1 and len(refused) >= 3  # every list of the table
    assert all(one["layer"] and one["error"].startswith("no kernels for ") for one in refused)
    first = f"refused: {refused[0]['key']}, True: {refused[0]['error']}"
    assert first in capsys.readouterr().err
    assert result.exit_code == 1
    assert f"{len(refused)} differ" in result.stderr
    assert result.stdout.count("as predicted") == len(document["lists"]) > 20
    assert f"refused on that machine: {refused[0]['error']}" in result.stdout
