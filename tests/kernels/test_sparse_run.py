"""The sparse core, run on the CPU from its PTX against the oracle of the GPU runs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernel_files import KIMI, load
from ptx_machine import Launch, packed, parse, run
from test_sparse_decode import render

from kpipe.runtime.host.compile import compile_kernel, ptx_of
from kpipe.runtime.launch_cases import small, sparse


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    for module in (small, sparse):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(sparse, "CACHE_BLOCKS", 40)
    torch.manual_seed(0)


def module_of(folder: Path, form: str, dcp: int | None, *edit: str) -> ModuleType:
    """The generated file with 12 heads, or 16 of 8 ranks, one occurrence of a text replaced."""
    module = render(folder, form, dcp, 2 if dcp else 12, KIMI)
    if edit:
        path = Path(module.__file__)
        text = path.read_text()
        assert text.count(edit[0]) == 1
        path = path.with_name("edited.py")
        path.write_text(text.replace(*edit))
        module = load(path)
    return module


def wrong_of(monkeypatch, module: ModuleType, counts: list[int], splits: int) -> list[str]:
    """What the judge of GPU runs says of a launch whose rows have that many keys."""
    case, rows = sparse.SparseDecodeCase(module), len(counts)
    monkeypatch.setattr(sparse, "EDGES", (*counts[-1:], *counts[:-1]))  # the case begins at one
    full = case.inputs(rows, 1)
    assert full["valid"].tolist() == counts
    kernel = module.SparseDecode(splits=splits, dcp=len(case.outputs) > 1)
    specs = module.operands()
    program = parse(ptx_of(compile_kernel(kernel, specs, "sm_90a", keep_ptx=True)))
    live = [full[spec.name] for spec in specs]
    cache, *others = live
    sizes = [rows], [rows], [], [], [rows], [rows], [rows]
    given = packed(list(zip(others, sizes, strict=False)))
    strided = packed([(cache, [cache.shape[0]])])[0].ljust(16, b"\0")
    given.insert(0, strided + int(cache.stride(0)).to_bytes(8, "little"))
    run([Launch(program, (splits, rows, module.TILES), given, live, cluster=splits)])
    return case.check(full, full, 1).wrong


@pytest.mark.parametrize(
    ("form", "dcp", "counts", "splits"),
    [
        ("fp8_tensor", None, [65, 0], 2),
        ("fp8_tensor", None, [270], 1),  # more groups than slots
        ("fp8_ds_mla", None, [33], 2),
        ("fp8_tensor", 8, [17], 1),
    ],
)
def test_a_launch_is_right(monkeypatch, tmp_path, form, dcp, counts, splits):
    assert wrong_of(monkeypatch, module_of(tmp_path, form, dcp), counts, splits) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("            slots.wait_scored(order)\n", ""),
        (
            "            slots.wait_ready(order)\n            slot = order % slots.count\n"
            "            keys = slots.keys[slot, None, None]\n            lane_rows",
            "            slot = order % slots.count\n"
            "            keys = slots.keys[slot, None, None]\n            lane_rows",
        ),
    ],
)
def test_a_wait_left_out_is_found(monkeypatch, tmp_path, old, new):
    module = module_of(tmp_path, "fp8_tensor", None, old, new)
    wrong = wrong_of(monkeypatch, module, [160], 1)
    assert any("latent: error" in line for line in wrong), wrong
