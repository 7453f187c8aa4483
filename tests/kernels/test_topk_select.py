"""The exact top-k: refused flags, memory of every tactic, and bits that its search rests on."""

from __future__ import annotations

from itertools import product
from types import ModuleType

import pytest
from kernel_files import load, render

from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.runtime.host.compile import compile_kernel, ptx_of

SHARED_LIMIT = 227 * 1024
THREADS = {1: 128, 2: 1024, 4: 384, 8: 512, 16: 256}


@pytest.fixture(scope="module", params=["kimi", "small"])
def module(request, tmp_path_factory) -> ModuleType:
    folder = tmp_path_factory.mktemp(f"topk_{request.param}")
    render(folder, request.param)
    return load(folder / "topk_select.py")


def parts_of(module: ModuleType) -> list[int]:
    """The parts that this context allows."""
    return [parts for parts in module.PARTS if parts * module.MOST_KEPT >= module.CONTEXT]


def test_operands_follow_the_contract(module):
    contract = CONTRACTS["topk_select"]
    assert [spec.name for spec in module.operands()] == [o.name for o in contract.operands]
    assert contract.kernel == "topk_select" and contract.tile == ("parts", "threads")


def test_flags_are_checked(module):
    with pytest.raises(ValueError, match="tie is 'first'; choose from low_id, high_id"):
        module.TopkSelect(tie="first")
    with pytest.raises(ValueError, match="parts is 3; choose 1, 2, 4, 8 or 16"):
        module.TopkSelect(parts=3)
    with pytest.raises(ValueError, match="threads is 100; choose from 128, 256, 384, 512, 1024"):
        module.TopkSelect(threads=100)


def test_a_part_keeps_what_fits(module):
    allowed = parts_of(module)
    assert allowed == ([2, 4, 8, 16] if module.CONTEXT == 131072 else [1, 2, 4, 8, 16])
    if 1 not in allowed:
        reason = "parts is 1; a CTA keeps 81920 of 131072 keys at most: choose at least 2"
        with pytest.raises(ValueError, match=reason):
            module.TopkSelect(parts=1)
    for parts, threads in product(allowed, module.THREADS):
        kernel = module.TopkSelect(parts=parts, threads=threads)
        assert kernel.kept * parts >= module.CONTEXT
        assert kernel.kept % (kernel.warps * module.RUN) == 0


@pytest.mark.parametrize("tie", ["low_id", "high_id"])
def test_every_tactic_compiles(module, tie):
    parts_here = parts_of(module)
    if module.CONTEXT != 131072:  # not shipped: each number of parts with one of the two rules
        parts_here = parts_here[tie == "high_id" :: 2]
    for parts in parts_here:
        kernel = module.TopkSelect(parts=parts, threads=THREADS[parts], tie=tie)
        ptx = ptx_of(compile_kernel(kernel, module.operands(), "sm_90a", keep_ptx=True))
        assert ".local" not in ptx
        assert ("barrier.cluster.arrive" in ptx) == (parts > 1)
        # Two bytes a kept key; histograms, queue and candidates take less than 64 KiB.
        assert 2 * kernel.kept + 64 * 1024 <= SHARED_LIMIT


def test_ranks_are_found_to_the_last_bit(module):
    """Histograms narrow a rank down until no more than CANDIDATES can share its prefix."""
    assert module.CONTEXT <= 2**module.POSITION_BITS
    assert module.FIRST_SHIFT >= module.RANK_BITS == 32 + module.POSITION_BITS
    left = module.FIRST_SHIFT % module.BIN_BITS
    assert 2**left <= module.CANDIDATES
