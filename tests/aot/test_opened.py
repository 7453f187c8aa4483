"""`prepare()` with a build: it compiles nothing, and what does not fit is refused by name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layer_inputs import engine_inputs
from small_build import ARCH, KERNELS, LENGTHS, Project

from kpipe.runtime.aot.manifest import BuildError
from kpipe.runtime.aot.opened import open_build
from kpipe.runtime.metadata import LayerError


def spoiled(project: Project, before: str, after: str) -> None:
    path = project.out / "manifest.json"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def refused(project: Project, host: list[str], **options: object) -> str:
    """The words between "cannot be used" and the repair; nothing may have been compiled."""
    with pytest.raises(BuildError) as error:
        project.prepared(**options)
    assert host == []
    text = str(error.value)
    found = re.fullmatch(
        rf"small: the build in {re.escape(str(project.out))} cannot be used: (.*); build again: "
        rf"kpipe build {re.escape(str(project.folder))} --arch sm_90a, or "
        r"delete it to compile in prepare\(\)",
        text,
    )
    assert found, text
    return found[1]


@pytest.mark.parametrize("named", [False, True])
def test_nothing_is_compiled(project: Project, host: list[str], named: bool) -> None:
    layer = project.prepared(build=project.out) if named else project.prepared()
    assert host == []
    step = engine_inputs(project.layer, LENGTHS).step
    # The object itself is called: it checks its operands, which lie on the CPU here.
    with pytest.raises(ValueError, match=r"argument #0 when calling.*q_a.*device_type=cuda"):
        layer.run(step)
    with pytest.raises(LayerError, match="sparse_decode is launched by no step of"):
        layer.sparse_decode()


def test_without_a_build_kernels_are_compiled(project: Project, host: list[str]) -> None:
    layer = project.prepared(build=None)
    assert sorted(host) == ["MlaGate", "OProj", "RmsNorm"] and layer.run(
        engine_inputs(project.layer, LENGTHS).step
    )
    shutil.rmtree(project.out)
    project.prepared()
    assert len(host) == 6
    with pytest.raises(BuildError) as error:
        project.prepared(build=project.out)
    assert str(error.value) == (
        f"small: no build in {project.out}; make it: kpipe build {project.folder} --arch sm_90a"
    )
    elsewhere = project.folder.parent / "there"
    with pytest.raises(BuildError, match=rf"--arch sm_90a --out {elsewhere}$"):
        project.prepared(build=elsewhere)
    assert len(host) == 6


def test_a_changed_kernel_is_refused(project: Project, host: list[str]) -> None:
    for name in ("rms_norm", "o_proj"):
        with open(project.folder / "kernels" / f"{name}.py", "a") as file:
            file.write("# touched\n")
    assert refused(project, host) == (
        "o_proj is stale: kernels/o_proj.py changed; rms_norm is stale: kernels/rms_norm.py changed"
    )


def test_a_changed_block_is_refused(project: Project, host: list[str]) -> None:
    kernels = json.loads((project.out / "manifest.json").read_text())["kernels"]
    (gate,) = (entry for entry in kernels if entry["name"] == "mla_gate")
    spoiled(project, gate["sources"]["device/sigmoid.py"], "0" * 64)
    assert refused(project, host) == "mla_gate is stale: runtime/device/sigmoid.py changed"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"dsl": "4.8.1"', '"dsl": "4.8.0"', "built by CuTe DSL 4.8.0, this machine has 4.8.1"),
        (
            '"arch": "sm_90a"',
            '"arch": "sm_100a"',
            "it is the build of small for sm_100a, not of this for sm_90a",
        ),
        (
            '"pipeline": "small"',
            '"pipeline": "large"',
            "it is the build of large for sm_90a, not of this for sm_90a",
        ),
        (
            "--gpu-arch sm_90a",
            "--gpu-arch sm_90a --lineinfo",
            "built with `--enable-tvm-ffi --gpu-arch sm_90a --lineinfo`, not `--enable-tvm-ffi "
            "--gpu-arch sm_90a`",
        ),
        (
            '"flags": {"release": false, "pdl": true}',
            '"flags": {"release": true, "pdl": true}',
            "rms_norm release=false pdl=true was never built",
        ),
        ('"name": "o_proj"', '"name": "other"', "kernels/o_proj.py was never built"),
    ],
)
def test_another_build_is_refused(
    project: Project, host: list[str], before: str, after: str, said: str
) -> None:
    spoiled(project, before, after)
    assert refused(project, host) == said


def test_every_lost_or_damaged_object_is_named(project: Project, host: list[str]) -> None:
    lost, cut = (next(project.out.glob(f"{k}-*")) for k in ("rms_norm", "mla_gate"))
    lost.unlink()
    cut.write_bytes(cut.read_bytes()[:100])
    assert refused(project, host) == (
        "mla_gate release=false pdl=true sigmoid=refined is damaged: "
        f"{cut.name}: 100 bytes that are not those of the build; "
        f"rms_norm release=false pdl=true is damaged: {lost.name}: No such file or directory"
    )


def test_a_file_that_is_no_library_is_refused(project: Project, host: list[str]) -> None:
    entries = json.loads((project.out / "manifest.json").read_text())["objects"]
    (norm,) = (entry for entry in entries if entry["kernel"] == "rms_norm")
    spoiled(project, norm["symbol"], "kpipe_other")
    assert refused(project, host).startswith("rms_norm release=false pdl=true does not load: ")


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "kpipe.build/1"}', '{"schema": "x"}'])
def test_a_manifest_that_is_none(project: Project, host: list[str], text: str) -> None:
    (project.out / "manifest.json").write_text(text)
    with pytest.raises(BuildError, match="the manifest .*manifest.json"):
        project.prepared()
    assert host == []


def test_the_reference_backend_runs_no_build(project: Project) -> None:
    inputs = engine_inputs(project.layer, LENGTHS)
    inputs.prepared(project.layer)
    with pytest.raises(LayerError, match="small: the reference backend runs no build: there"):
        inputs.prepared(project.layer, build="there")


def test_objects_load_without_the_compiler(built: Path) -> None:
    """What a serving process does: check the sources, load, find the function."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom kpipe.runtime.aot.opened import open_build\n"
        f"build = open_build('small', Path({str(built)!r}), {ARCH!r}, 'auto')\n"
        "norm = build.kernel('rms_norm:RmsNorm').variant({'release': False})\n"
        "print(norm.operands, type(norm.load()).__name__)\n"
        "print([name for name in ('cutlass', 'pydantic', 'rich') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "('q_a', 'q_norm', 'q_c') Function\n[]\n", done.stderr


def test_objects_are_loaded_once(project: Project) -> None:
    def load() -> object:
        build = open_build("small", project.folder, ARCH, project.out)
        return build.kernel("rms_norm:RmsNorm").variant({"release": False}).load()

    assert load() is load()
    q_a = torch.zeros(1, 128, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="Expects 3 parameters"):
        load()(q_a)
    assert len(KERNELS) == 3
