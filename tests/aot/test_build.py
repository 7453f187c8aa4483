"""`kpipe build`: what it makes, keeps, makes again, and says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from elf_symbols import exported, needed
from small_build import ARCH, KERNELS, Project

from kpipe.runtime import build
from kpipe.runtime.aot import maker, toolchain
from kpipe.runtime.aot.sources import sources_of
from kpipe.runtime.evidence import device_files

PREFIX = "__tvm_ffi_"


def manifest(out: Path) -> dict:
    return json.loads((out / "manifest.json").read_text())


def edited(project: Project, kernel: str, text: str = "\n# touched\n") -> None:
    with open(project.folder / "kernels" / f"{kernel}.py", "a") as file:
        file.write(text)


def test_every_launch_of_the_table_has_an_object(project: Project) -> None:
    data = manifest(project.out)
    assert {entry["name"] for entry in data["kernels"]} == KERNELS
    assert sorted(entry["kernel"] for entry in data["objects"]) == sorted(KERNELS)
    assert {entry["file"] for entry in data["objects"]} == set(project.objects())
    (gate,) = (entry for entry in data["objects"] if entry["kernel"] == "mla_gate")
    assert gate["flags"] == {"release": False, "pdl": True, "sigmoid": "refined"}
    assert gate["operands"] == ["values", "gate", "lengths", "gated"]


def test_no_two_objects_export_one_symbol(project: Project) -> None:
    seen: set[str] = set()
    for entry in manifest(project.out)["objects"]:
        path = project.out / entry["file"]
        assert exported(path) == {PREFIX + entry["symbol"]}
        assert "_cudaLaunchKernelEx" in needed(path)
        assert not seen & exported(path)
        seen |= exported(path)


def test_what_is_there_is_kept(project: Project) -> None:
    before, text = project.objects(), (project.out / "manifest.json").read_bytes()
    code, out, err = project.build()
    assert (code, err) == (0, "")
    assert re.fullmatch(
        r".*/build/sm_90a: 0 compiled, 3 reused, 0\.\d MB, \d+\.\d s; sm_90a, CuTe DSL 4\.8\.1\n",
        out,
    )
    assert (project.objects(), (project.out / "manifest.json").read_bytes()) == (before, text)
    assert project.build("--check") == (0, f"{project.out}: all 3 objects are current\n", "")


def test_a_changed_kernel_is_built_again_and_nothing_else(project: Project) -> None:
    edited(project, "rms_norm")
    before = project.objects()
    code, out, err = project.build("--check")
    assert code == 3
    assert out == "stale  rms_norm release=false pdl=true: kernels/rms_norm.py changed\n"
    assert err == (
        "1 of 3 objects are not current; to build them: kpipe build "
        f"{project.folder} --arch sm_90a\n"
    )
    assert project.objects() == before, "a check writes nothing"
    code, out, err = project.build()
    assert code == 0 and "1 compiled, 2 reused" in out
    assert re.fullmatch(r"1/1  rms_norm release=false pdl=true  \d+\.\d s\n", err)
    after = project.objects()
    assert len(after) == 3 and len(after.keys() & before.keys()) == 2, "the old object is gone"
    assert project.build("--check")[0] == 0


def test_a_lost_or_damaged_object_is_built_again(project: Project) -> None:
    lost, damaged = (next(project.out.glob(f"{k}-*")) for k in ("rms_norm", "mla_gate"))
    lost.unlink()
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    code, out, _ = project.build("--check")
    assert code == 3
    assert out == (
        "damaged  mla_gate release=false pdl=true sigmoid=refined: "
        f"{damaged.name}: {len(data)} bytes that are not those of the build\n"
        f"damaged  rms_norm release=false pdl=true: {lost.name}: No such file or directory\n"
    )
    assert "2 compiled, 1 reused" in project.build()[1]
    assert project.build("--check")[0] == 0


def test_some_kernels_alone(project: Project) -> None:
    """What others there were stays where its kernel has not changed, and goes where it has."""
    edited(project, "rms_norm")
    edited(project, "mla_gate")
    assert "1 compiled, 0 reused" in project.build("--only", "rms_norm")[1]
    assert [entry["kernel"] for entry in manifest(project.out)["objects"]] == ["o_proj", "rms_norm"]
    assert project.build("--check")[1].startswith("missing  mla_gate ")
    code, _, err = project.build("--only", "rms_norm,foo")
    assert code == 2
    assert err == (
        "error: small launches no kernel `foo` on sm_90a; it launches mla_gate, o_proj, rms_norm\n"
    )


def test_a_stopped_build_is_taken_up(project: Project) -> None:
    (project.out / ".making-abc").mkdir()
    (project.out / ".making-abc" / "rms_norm.so").write_text("half")
    (project.out / "manifest.json").write_text('{"schema": "kpipe.bui')
    code, _, err = project.build("--check")
    assert code == 3 and "cannot be read" in err
    assert "3 compiled, 0 reused" in project.build()[1]
    assert not list(project.out.glob(".making-*")) and project.build("--check")[0] == 0


def test_a_kernel_that_does_not_compile(project: Project) -> None:
    path = project.folder / "kernels" / "rms_norm.py"
    path.write_text(path.read_text().replace("pdl.wait()", "pdl.no_such_thing()"))
    edited(project, "mla_gate")
    code, out, err = project.build()
    assert code == 1
    assert "1 compiled, 1 reused, 1 failed" in out
    assert re.search(r"(?m)^error: rms_norm release=false pdl=true does not compile: \w+: ", err)
    assert project.build("--check")[1].startswith("missing  rms_norm ")


def test_a_kernel_that_changes_while_it_is_compiled(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited(project, "rms_norm")

    def make(order: maker.Order) -> maker.Made:
        order.target.write_bytes(b"of the text before")
        edited(project, "rms_norm", "# again\n")
        return maker.Made(order, 0.0)

    monkeypatch.setattr("kpipe.runtime.aot.builder.make", make)
    code, _, err = project.build()
    assert code == 1
    assert "error: rms_norm release=false pdl=true does not compile: its sources changed" in err
    assert [entry["kernel"] for entry in manifest(project.out)["objects"]] == ["mla_gate", "o_proj"]


def test_another_build_in_the_folder_is_left_alone(project: Project) -> None:
    text = (project.out / "manifest.json").read_text()
    (project.out / "manifest.json").write_text(text.replace('"small"', '"large"'))
    for words in ((), ("--check",)):
        code, _, err = project.build(*words)
        assert code == 2
        assert "holds the build of large for sm_90a, not of small for sm_90a" in err
    assert len(project.objects()) == 3


def test_what_the_machine_lacks(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    code, _, err = project.build()
    assert code == 4
    assert err.startswith("error: no linker: none of cc, gcc, clang is here; install a C compiler")
    monkeypatch.setattr(build, "find_spec", lambda name: name != "cutlass" or None)
    assert project.build()[::2] == (
        4,
        "error: cutlass not installed: pip install 'kpipe-dsl[gpu]'\n",
    )


def test_usage(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert project.build("--arch", "sm_80")[::2] == (
        2,
        "error: small: no plan for sm_80; generated for sm_90a\n",
    )
    shutil.rmtree(project.out)
    project.out.parent.mkdir(exist_ok=True)
    project.out.write_text("a file")
    code, _, err = project.build()
    assert code == 2 and err == f"error: {project.out}: File exists\n"


def test_the_linker_says_why(tmp_path: Path) -> None:
    (tmp_path / "no.o").write_text("this is no object")
    with pytest.raises(toolchain.BuildError, match=r"cc cannot link: .+"):
        toolchain.link("cc", tmp_path / "no.o", tmp_path / "no.so")
    order = maker.Order(tmp_path / "no.py", "No", {}, ARCH, "no", "cc", tmp_path / "no.so")
    assert maker.make(order).error.startswith("FileNotFoundError: ")


def test_sources_reach_beyond_the_device_blocks(generated: Path) -> None:
    found = sources_of(generated / "kernels" / "index_scores.py")
    assert {"kernel", "device/pdl.py", "host/compile.py", "sharding.py"} <= set(found)
    assert all(len(digest) == 64 for digest in found.values())
    blocks = {f"device/{name}" for name in device_files(generated / "kernels" / "index_scores.py")}
    assert {name for name in found if name.startswith("device/")} == blocks
    other = generated.parent / "other.py"
    other.write_text("# from a spec\nfrom kpipe.runtime.device import mailbox\n")
    through = {"device/mailbox.py", "comm/device_mailbox.py", "comm/word_index.py"}
    assert through <= set(sources_of(other)), "through one another"
    first, rest = (generated / "kernels" / "rms_norm.py").read_text().split("\n", 1)
    other = generated.parent / "rms_norm.py"
    other.write_text(f'"""Generated from another place; do not edit.\n{rest}')
    assert sources_of(other) == sources_of(generated / "kernels" / "rms_norm.py")


def test_two_builds_at_once(generated: Path, tmp_path: Path) -> None:
    """Of one folder, from two processes, one of them with two of its own."""
    kernels = ("rms_norm", "mla_value")
    command = [sys.executable, "-m", "kpipe.runtime.build", str(generated), "--arch", ARCH]
    command += ["--out", str(tmp_path), "--only", ",".join(kernels)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [*command, "--jobs", jobs], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment,
        )
        for jobs in ("1", "2")
    ]  # fmt: skip
    said = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    entries = manifest(tmp_path)["objects"]
    numbers = [re.search(r"(\d+) compiled, (\d+) reused", out).groups() for out, _ in said]
    total = str(len(entries))
    assert sorted(numbers) == [("0", total), (total, "0")], "the second finds everything done"
    for entry in entries:
        assert exported(tmp_path / entry["file"]) == {PREFIX + entry["symbol"]}
    left = {path.name for path in tmp_path.iterdir()} - {entry["file"] for entry in entries}
    assert left == {"manifest.json", ".lock"}
