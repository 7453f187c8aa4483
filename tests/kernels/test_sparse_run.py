"""The sparse core, run on the CPU from its PTX against the oracle of the GPU runs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from ptx_machine import Launch, packed, parse, run
from test_compile import KIMI
from test_sparse_decode import render

from kpipe.runtime.host.compile import compile_kernel, ptx_of
from kpipe.runtime.launch_cases import small, sparse


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    for module in (small, sparse):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(sparse, "CACHE_BLOCKS", 40)
    torch.manual_seed(0)


def wrong_of(module: ModuleType, counts: list[int], splits: int) -> list[str]:
    """What the judge of GPU runs says of a launch whose rows have that many keys."""
    case = sparse.SparseDecodeCase(module)
    rows = len(counts)
    sparse.EDGES, edges = (*counts[-1:], *counts[:-1]), sparse.EDGES  # the case begins at one
    full = case.inputs(rows, 1)
    sparse.EDGES = edges
    assert full["valid"].tolist() == counts
    kernel = module.SparseDecode(splits=splits, dcp=len(case.outputs) > 1)
    specs = module.operands()
    program = parse(ptx_of(compile_kernel(kernel, specs, "sm_90a", keep_ptx=True)))
    live = [full[spec.name] for spec in specs]
    cache = live[0]
    sizes = [[], [rows], [rows], [], [], [rows], [rows], [rows]]
    given = packed([(t, size) for t, size in zip(live, sizes, strict=False)])
    given[0] = packed([(cache, [cache.shape[0]])])[0].ljust(16, b"\0")
    given[0] += int(cache.stride(0)).to_bytes(8, "little")
    tiles = module.TILES
    run([Launch(program, (splits, rows, tiles), given, live, cluster=splits)])
    return case.check(full, full, 1).wrong


@pytest.mark.parametrize(
    ("form", "dcp", "counts", "splits"),
    [
        ("fp8_tensor", None, [65, 0, 1], 2),
        ("fp8_tensor", None, [400], 1),
        ("fp8_ds_mla", None, [63, 17], 2),
        ("fp8_tensor", 2, [33], 1),
    ],
)
def test_a_launch_is_right(tmp_path: Path, form, dcp, counts, splits):
    module = render(tmp_path, form, dcp, 12, KIMI)
    assert wrong_of(module, counts, splits) == []
