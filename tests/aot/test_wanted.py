"""The objects of a build are those that `prepare()` would compile, however a group is driven."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from layer_factory import LayerFactory
from layer_inputs import engine_inputs

from kpipe.runtime import build
from kpipe.runtime.aot.manifest import (
    BuildError,
    KernelEntry,
    ObjectEntry,
    manifest_of,
    variant_id,
    write_manifest,
)
from kpipe.runtime.aot.opened import BuiltVariant, OpenBuild
from kpipe.runtime.aot.toolchain import dsl_version
from kpipe.runtime.aot.wanted import FolderKernels, Place, Wanted
from kpipe.runtime.comm.device_ranks import DeviceRanks
from kpipe.runtime.host import kernel_file
from kpipe.runtime.host.compile import flags_of
from kpipe.runtime.layer import Layer

ARCH = "sm_90a"


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> LayerFactory:
    return LayerFactory(tmp_path_factory.mktemp("project"))


def compiled_by(layer_class: type[Layer], monkeypatch: pytest.MonkeyPatch, **group: Any) -> set:
    """(kernel, flags) of everything that prepare() compiles, on every rank."""
    asked = set()

    def compiled(kernel: Any, specs: Any, arch: str) -> Any:
        asked.add(variant_id(type(kernel).__module__.rsplit(".")[-1], dict(flags_of(kernel))))
        return lambda *operands: None

    monkeypatch.setattr(kernel_file, "compile_kernel", compiled)

    def prepared(comm: Any) -> None:
        inputs = engine_inputs(layer_class, (5,), rank=comm.rank if comm else 0)
        inputs.prepared(layer_class, backend="cuda", arch=ARCH, comm=comm)

    if group:
        DeviceRanks(layer_class.RANKS, "cpu", **group).run(prepared)
    else:
        prepared(None)
    return asked


def wanted_of(layer_class: type[Layer], places: list[Place]) -> list[Wanted]:
    folder = Path(inspect.getfile(layer_class)).parent
    return FolderKernels(layer_class, folder, ARCH, "4.8.1").wanted((), places)


@pytest.mark.parametrize("mode", ["front", "fork"])
def test_a_rank_alone(layers, host, monkeypatch, mode) -> None:
    layer_class = layers.tp(4, mode=mode)
    wanted = wanted_of(layer_class, [])
    assert {one.id for one in wanted} == compiled_by(layer_class, monkeypatch)
    assert len({one.key for one in wanted}) == len({one.symbol for one in wanted}) == len(wanted)


def roomy(monkeypatch):
    """One device with room for two ranks, as if each had its own."""
    on_one = "kpipe.runtime.comm.device_ranks."
    monkeypatch.setattr(on_one + "multiprocessors", lambda device: 264)
    monkeypatch.setattr(on_one + "POLLING_SMS", 264)
    monkeypatch.setattr(on_one + "SMS_PER_GPC", 64)


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_group(layers, host, monkeypatch, lockstep) -> None:
    roomy(monkeypatch)
    layer_class = layers.dcp(2)
    resident = 264 if lockstep else 132
    asked = compiled_by(layer_class, monkeypatch, lockstep=lockstep)
    wanted = wanted_of(layer_class, [Place(0, resident), Place(1, resident)])
    assert asked <= {one.id for one in wanted}
    halves = {one.id for one in wanted if one.flags.get("half") in ("publish", "collect")}
    whole = {one.id for one in wanted if one.flags.get("half") == "whole" and one.resident}
    assert halves and whole and asked.isdisjoint(whole if lockstep else halves)
    assert {one.id for one in wanted} - asked == (whole if lockstep else halves)


@pytest.mark.parametrize("lockstep", [True, False])
def test_a_group_is_prepared_from_a_build(layers, host, monkeypatch, tmp_path, lockstep) -> None:
    """Every rank finds what it asks for in a manifest of the wanted objects, and nothing else."""
    roomy(monkeypatch)
    layer_class = layers.dcp(2)
    folder = Path(inspect.getfile(layer_class)).parent
    kernels = FolderKernels(layer_class, folder, ARCH, dsl_version())
    resident = 264 if lockstep else 132
    wanted = kernels.wanted((), [Place(0, resident), Place(1, resident)])
    objects = [
        ObjectEntry(w.kernel, w.flags, w.key, w.symbol, w.file, "", 0, w.operands, w.resident)
        for w in wanted
    ]
    plain = {"pipeline": layer_class.NAME, "arch": ARCH, "dsl": kernels.dsl}
    plain["options"] = kernels.options
    write_manifest(tmp_path, manifest_of(plain, kernels.entries.values(), objects))
    loaded: list[str] = []

    def load(variant: BuiltVariant) -> Any:
        loaded.append(variant.entry.kernel)
        return lambda *operands: None

    monkeypatch.setattr(BuiltVariant, "load", load)

    def run(comm: Any) -> None:
        inputs = engine_inputs(layer_class, (5,), rank=comm.rank)
        inputs.prepared(layer_class, backend="cuda", arch=ARCH, comm=comm, build=tmp_path)

    group = DeviceRanks(2, "cpu", lockstep=lockstep)
    group.run(run)
    assert host == [] and set(loaded) == {w.kernel for w in wanted}
    write_manifest(tmp_path, manifest_of(plain, kernels.entries.values(), objects[1:]))
    gone = re.escape(f"cannot be used: {wanted[0].label} was never built; build again: ")
    with pytest.raises(BuildError, match=gone):
        group.run(run)


def test_places_of_a_group(layers, capsys) -> None:
    folder = Path(inspect.getfile(layers.dcp(2))).parent
    words = [str(folder), "--arch", ARCH, "--check", "--only", "index_scores"]

    def said(*more: str) -> tuple[int, str]:
        code = build.main([*words, *more])
        out, err = capsys.readouterr()
        return code, out or err

    assert {rank: f"rank={rank}" in said()[1] for rank in range(3)} == {0: True, 1: True, 2: False}
    assert "rank=0" not in said("--ranks", "1")[1]
    assert said("--ranks", "1,2") == (2, "error: --ranks: dcp_2_i1 has the ranks 0 to 1, no `2`\n")


def test_the_repair_names_the_place(tmp_path: Path) -> None:
    flags = {"rank": 0, "resident": 132}
    kernel = KernelEntry("o_reduce", "OReduce", {}, {}, ("rank", "resident"))
    entry = ObjectEntry("o_reduce", flags, "", "", "", "", 0, ())
    plain = {"pipeline": "dcp", "arch": ARCH, "dsl": "", "options": ""}
    opened = OpenBuild("dcp", tmp_path, tmp_path, manifest_of(plain, [kernel], [entry]), "build")
    source = opened.kernel("o_reduce:OReduce")
    assert source.variant(flags).entry is entry
    wanted = r"o_reduce rank=1 resident=66 was never built \(add --ranks 1 --resident 66\);"
    with pytest.raises(BuildError, match=wanted):
        source.variant({"rank": 1, "resident": 66})
    with pytest.raises(BuildError, match="o_reduce rank=0 resident=132 was not built for 8 rows"):
        source.variant(flags).resident_ctas(8)
