"""Every committed kernel compiles for its targets, with the waits that its contract promises."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from kpipe.codegen.evidence import kernel_digest, same_blocks
from kpipe.codegen.ops.contract import Release
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.runtime.host.compile import compile_kernel, ptx_of
from kpipe.runtime.host.kernel_file import operands_of

GENERATED = Path(__file__).resolve().parents[2] / "generated"
FILES = sorted(path for path in GENERATED.glob("*/kernels/*.py") if path.stem != "__init__")
RELEASING = {c.kernel: c.release is not Release.NEVER for c in CONTRACTS.values() if c.kernel}


def _body(path: Path) -> str:
    """A kernel file but for its first line, which names the spec."""
    return path.read_text().partition("\n")[2]


# Pipelines share most kernels; equal ones are compiled once.
DISTINCT = sorted({_body(path): path for path in reversed(FILES)}.values())
WAITING = {contract.kernel: contract.waits for contract in CONTRACTS.values() if contract.kernel}
ARCHS = {
    contract.kernel: contract.limits.archs or ("sm_90a", "sm_100a")
    for contract in CONTRACTS.values()
    if contract.kernel
}


def _module(path: Path):
    name = f"committed_{path.parents[1].name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_there_are_kernels() -> None:
    assert {path.stem for path in DISTINCT} == set(WAITING)
    # The name of the spec is all that the first line says.
    for path in FILES:
        spec = f"pipelines/{path.parents[1].name}.yaml"
        assert path.read_text().startswith(f'"""Generated from {spec}; do not edit.\n')


def _targets(path: Path) -> list[str]:
    """The targets that a kernel is compiled for here.

    All; of one that differs from an earlier one in numbers alone, those that it has not run on.
    """
    archs = [*ARCHS.get(path.stem, ())]
    numberless = re.sub(r"\d+", "", _body(path))
    first = next(p for p in DISTINCT if re.sub(r"\d+", "", _body(p)) == numberless)
    return archs if first == path else [arch for arch in archs if not _has_run(path, arch)]


def _has_run(path: Path, arch: str) -> bool:
    """Whether a record that was right is for these very bytes; test_evidence.py asks for it."""
    for file in sorted((path.parents[1] / "evidence").glob("*.json")):
        document = json.loads(file.read_text())
        made = document["kernels"].get(path.stem)
        if made and made["sha256"] == kernel_digest(path.read_bytes()):
            for entry in document.get("records", ()):
                about = entry["kernel"] == path.stem and entry["arch"] == arch
                if about and entry["ok"] and same_blocks(made["device"]):
                    return True
    return False


@pytest.mark.parametrize(
    ("path", "arch"),
    [(path, arch) for path in DISTINCT for arch in _targets(path)],
    ids=lambda part: part if isinstance(part, str) else f"{part.parents[1].name}-{part.stem}",
)
def test_committed_kernel(path: Path, arch: str) -> None:
    module = _module(path)
    kernel_class = getattr(module, "".join(part.capitalize() for part in path.stem.split("_")))
    kernel = kernel_class()  # with its release: the templates' tests compile some of these too
    compiled = compile_kernel(kernel, operands_of(module, kernel), arch, keep_ptx=True)
    ptx = ptx_of(compiled)
    assert f".target {arch}" in ptx
    assert ("griddepcontrol.wait" in ptx) == WAITING[path.stem]
    assert ("griddepcontrol.launch_dependents" in ptx) == RELEASING[path.stem]
