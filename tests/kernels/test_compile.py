"""Generated kernels compile for both targets, wait before they read, and stay formatted."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from kernel_files import (
    ARCHS,
    GEOMETRIES,
    KERNELS,
    LAYOUT_ONLY,
    STEP_READS,
    WEIGHTS,
    assert_waits,
    build,
    load,
    parameters,
    render,
)
from ptx_flow import RELEASE, WAIT, global_accesses, parameter_registers

from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.runtime.host.compile import (
    Symbol,
    TensorSpec,
    compile_kernel,
    flags_of,
    kernel_key,
    ptx_of,
)


@dataclass(frozen=True)
class Mutable:
    """A kernel class whose flag has no structural key."""

    flags: list


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """geometry -> folder with its rendered kernels."""
    made = {geometry: tmp_path_factory.mktemp(geometry) for geometry in GEOMETRIES}
    for geometry, folder in made.items():
        render(folder, geometry)
    return made


@pytest.fixture(scope="module")
def modules(folders) -> dict[tuple[str, str], ModuleType]:
    """(geometry, kernel) -> imported module."""
    return {(g, name): load(folders[g] / f"{name}.py") for g in GEOMETRIES for name in KERNELS}


# Every pair of geometry and target, and of target and release on Hopper, for each kernel.
FORMS = [
    *itertools.product(["kimi"], ARCHS, [True]),
    ("small", "sm_100a", True),
    ("small", "sm_90a", False),
]


@pytest.mark.parametrize(("geometry", "arch", "release"), FORMS)
@pytest.mark.parametrize("name", KERNELS)
def test_waits_and_releases(modules, geometry, name, arch, release):
    module = modules[geometry, name]
    ptx = build(module, name, arch, release=release)
    assert f".target {arch}" in ptx
    assert WAIT in ptx
    assert (RELEASE in ptx) == release
    assert ".local" not in ptx, "a register array went to local memory"
    assert_waits(ptx, parameters(module), WEIGHTS[name], STEP_READS.get(name, ()))


@pytest.mark.parametrize("name", KERNELS)
def test_the_contract_says_what_is_read_ahead(modules, name):
    accesses = global_accesses(build(modules["kimi", name], name, "sm_90a"))
    names = parameters(modules["kimi", name])
    early = {names[n] for access in accesses if not access.waited for n in access.parameters}
    assert early - WEIGHTS[name] == STEP_READS.get(name, set())
    (contract, *_) = (one for one in CONTRACTS.values() if one.kernel == name)
    assert set(contract.early_reads) == STEP_READS.get(name, set())


@pytest.mark.parametrize("name", KERNELS)
def test_every_operand_is_touched(modules, name):
    module = modules["kimi", name]
    accesses = global_accesses(build(module, name, "sm_90a"))
    names = parameters(module)
    touched = {names[number] for access in accesses for number in access.parameters}
    assert touched == set(names) - LAYOUT_ONLY.get(name, set())


@pytest.mark.parametrize("name", KERNELS)
def test_a_missing_wait_is_noticed(modules, name):
    module = modules["kimi", name]
    ptx = build(module, name, "sm_90a")
    waitless = "\n".join(line for line in ptx.splitlines() if WAIT not in line)
    assert len(waitless) < len(ptx)
    with pytest.raises(AssertionError, match="touched before the wait"):
        assert_waits(waitless, parameters(module), WEIGHTS[name], STEP_READS.get(name, ()))


def test_the_wait_comes_from_the_kernel_itself(folders, tmp_path):
    text = (folders["kimi"] / "rms_norm.py").read_text()
    (tmp_path / "rms_norm.py").write_text(text.replace("pdl.wait()", "pass"))
    module = load(tmp_path / "rms_norm.py")
    ptx = build(module, "rms_norm", "sm_90a")
    assert WAIT not in ptx
    with pytest.raises(AssertionError, match="touched before the wait"):
        assert_waits(ptx, parameters(module), WEIGHTS["rms_norm"])


def test_a_late_wait_is_noticed(folders, tmp_path):
    text = (folders["kimi"] / "rms_norm.py").read_text()
    load_line = "        x = memory.load_float(q_a[row, None], part, VECTOR)\n"
    moved = text.replace(load_line, "").replace(
        "        pdl.wait()\n", load_line + "        pdl.wait()\n"
    )
    (tmp_path / "rms_norm.py").write_text(moved)
    module = load(tmp_path / "rms_norm.py")
    with pytest.raises(AssertionError, match=r"\['q_a'\] touched before the wait"):
        assert_waits(build(module, "rms_norm", "sm_90a"), ["q_a", "q_norm", "q_c"], {"q_norm"})


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("arch", ARCHS)
def test_slot_addresses_are_64_bit(modules, geometry, arch):
    module = modules[geometry, "dsa_index"]
    ptx = build(module, "dsa_index", arch)
    cache = [spec.name for spec in module.operands()].index("index_kv")
    (stride,) = parameter_registers(ptx, cache, 16)
    products = [line for line in ptx.splitlines() if stride in line and "ld.param" not in line]
    assert products and all(".lo.s64" in line for line in products), products


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_e4m3_saturates(modules, geometry):
    ptx = build(modules[geometry, "dsa_index"], "dsa_index", "sm_90a")
    conversions = [line for line in ptx.splitlines() if "e4m3" in line]
    assert conversions and all("cvt.rn.satfinite.e4m3x2.f32" in line for line in conversions)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("v_tile", [8, 16, 32])
def test_value_uses_the_tensor_cores(modules, geometry, v_tile):
    module = modules[geometry, "mla_value"]
    ptx = build(module, "mla_value", "sm_90a", v_tile=v_tile)
    steps = module.WARP_SLICES * 2 * v_tile // 8
    assert ptx.count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") == steps


@pytest.mark.parametrize(
    ("mode", "present", "absent"),
    [
        ("refined", "rcp.approx.ftz.f32", "rcp.rn.f32"),
        ("fast", "rcp.approx.ftz.f32", "rcp.rn.f32"),
        ("exact", "rcp.rn.f32", "rcp.approx.ftz.f32"),
    ],
)
@pytest.mark.parametrize("name", ["mla_value", "mla_gate"])
def test_sigmoid_modes(modules, name, mode, present, absent):
    ptx = build(modules["kimi", name], name, "sm_90a", sigmoid=mode)
    assert present in ptx
    assert absent not in ptx
    assert ("0f7E800000" in ptx) == (mode == "refined"), "only the Newton step needs a range"


def test_value_flags_are_checked(modules):
    module = modules["kimi", "mla_value"]
    for kernel in (module.MlaValue, modules["kimi", "mla_gate"].MlaGate):
        with pytest.raises(
            ValueError, match="unknown sigmoid 'soft'; choose from refined, exact, fast"
        ):
            kernel(sigmoid="soft")
    for v_tile in (12, 48):
        with pytest.raises(
            ValueError, match=f"v_tile {v_tile} is not a multiple of 8 that divides"
        ):
            module.MlaValue(v_tile=v_tile)


ONCE = "ld.global.L1::no_allocate.L2::cache_hint.v4.b32"  # of weights, which nobody reads again


def test_wide_loads(modules):
    for name, (vectors, once) in {
        "rms_norm": (2, 0), "mla_value": (8, 8), "mla_gate": (2, 0)
    }.items():  # fmt: skip
        lines = build(modules["kimi", name], name, "sm_90a").splitlines()
        assert sum("ld.global.v4.b32" in line for line in lines) == vectors
        assert sum(ONCE in line for line in lines) == once


def test_a_launch_asks_for_all_of_shared_memory(modules, monkeypatch):
    """Once a launch, and nothing is left behind in the compiler."""
    from cutlass.cutlass_dsl.cutlass import cuda_dialect

    asked = []
    carve_out = cuda_dialect.launch_cfg_shared_mem_carveout
    set_cooperative = cuda_dialect.launch_cfg_cooperative

    def counted(config, percent, **where):
        asked.append(percent.owner.attributes["value"].value)
        return carve_out(config, percent, **where)

    monkeypatch.setattr(cuda_dialect, "launch_cfg_shared_mem_carveout", counted)
    kernel = modules["kimi", "mla_value"].MlaValue(v_tile=8)  # compiled nowhere else
    compile_kernel(kernel, modules["kimi", "mla_value"].operands(), "sm_90a")
    assert asked == [100]
    assert cuda_dialect.launch_cfg_cooperative is set_cooperative


def test_gate_takes_the_values_of_a_larger_step(modules):
    """The values' heads lie a whole buffer of rows apart; every CTA owns whole vectors of a row."""
    module = modules["kimi", "mla_gate"]
    values, gate, _, gated = module.operands()
    pitch = values.strides[0]
    assert isinstance(pitch, Symbol) and pitch.multiple == 128 and values.strides[1:] == (128, 1)
    assert values.shape[1] == gate.shape[0] == gated.shape[0]
    assert module.ROW_PARTS * module.VECTOR == 12 * 128
    assert module.ROW_PARTS % module.THREADS == 0
    # 3804 elements from row to row allow 8-byte accesses only, and fewer lanes than a warp.
    small = modules["small", "mla_gate"]
    assert (small.VECTOR, small.THREADS) == (4, 16)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_rendered_files_are_clean(folders, geometry):
    files = sorted(str(path) for path in folders[geometry].glob("*.py"))
    assert len(files) == len(KERNELS)
    ruff = [sys.executable, "-m", "ruff"]
    style = ["--isolated", "--line-length", "100"]
    rules = ["--select", "E,F,I,B,UP", "--config", 'lint.isort.known-first-party=["kpipe"]']
    for command in (["format", "--check", *style], ["check", *style, *rules]):
        done = subprocess.run([*ruff, *command, *files], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", KERNELS)
def test_header_and_constants(folders, name):
    text = (folders["kimi"] / f"{name}.py").read_text()
    assert text.startswith('"""Generated from pipelines/example.yaml; do not edit.\n')
    assert "{{" not in text and "{%" not in text


def test_equal_structure_is_compiled_once(folders, modules):
    again = load(folders["kimi"] / "rms_norm.py")
    first = modules["kimi", "rms_norm"]
    one = compile_kernel(first.RmsNorm(), first.operands(), "sm_90a")
    assert compile_kernel(again.RmsNorm(), again.operands(), "sm_90a") is one
    assert compile_kernel(first.RmsNorm(release=False), first.operands(), "sm_90a") is not one
    assert compile_kernel(first.RmsNorm(), first.operands(), "sm_100a") is not one


def test_key_holds_structure_only(folders, modules):
    again = load(folders["kimi"] / "rms_norm.py")
    first = modules["kimi", "rms_norm"]
    key = kernel_key(first.RmsNorm(), first.operands(), "sm_90a")
    assert key == kernel_key(again.RmsNorm(), again.operands(), "sm_90a")
    assert key.name == "RmsNorm"
    assert key.flags == (("release", True), ("pdl", True))
    assert " at 0x" not in repr(key)
    small = modules["small", "rms_norm"]
    assert key.source != kernel_key(small.RmsNorm(), small.operands(), "sm_90a").source


def test_ptx_must_be_kept(modules):
    module = modules["small", "rms_norm"]
    compiled = compile_kernel(module.RmsNorm(), module.operands(), "sm_90a")
    with pytest.raises(ValueError, match="no PTX was kept; compile with keep_ptx=True"):
        ptx_of(compiled)


def test_refusals(modules):
    module = modules["kimi", "rms_norm"]
    with pytest.raises(ValueError, match="unknown arch 'sm_90'; known: sm_90a, sm_100a, sm_103a"):
        compile_kernel(module.RmsNorm(), module.operands(), "sm_90")
    with pytest.raises(TypeError, match="object is not a frozen dataclass"):
        flags_of(object())
    with pytest.raises(TypeError, match=r"Mutable\.flags is a list; flags are plain values"):
        flags_of(Mutable([]))
    with pytest.raises(ValueError, match="x: unknown dtype 'fp4'; known: bf16, fp32"):
        TensorSpec("x", "fp4", (1,))
    with pytest.raises(ValueError, match="x: 2 extents but 1 strides"):
        TensorSpec("x", "bf16", (1, 2), (1,))
    with pytest.raises(ValueError, match="x: give strides where an inner extent is dynamic"):
        TensorSpec("x", "bf16", (1, Symbol("n")))


def test_import_is_light():
    check = (
        "import sys, kpipe.runtime.host.compile as c; print('cutlass' in sys.modules, c.ARCHS[0])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.stdout == "False sm_90a\n", done.stderr
