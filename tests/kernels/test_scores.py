"""The scorer: its ring, its products on both targets, its refusals."""

from __future__ import annotations

import itertools
import re
from types import ModuleType

import pytest
from kernel_files import GEOMETRIES, build, load, render
from ptx_flow import parameter_registers

from kpipe.runtime.device import warpgroup

GROUPS = (1, 2, 3)
SHARED_BYTES = 227 * 1024


@pytest.fixture(scope="module")
def modules(tmp_path_factory) -> dict[str, ModuleType]:
    """geometry -> module."""
    made = {}
    for geometry in GEOMETRIES:
        folder = tmp_path_factory.mktemp(geometry)
        render(folder, geometry)
        made[geometry] = load(folder / "index_scores.py")
    return made


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(("groups", "stages"), list(itertools.product(GROUPS, (3, 4, 7, 18))))
def test_a_place_of_the_ring_serves_one_group(modules, geometry, groups, stages):
    module = modules[geometry]
    ring = module.IndexScores(groups=groups, stages=stages).ring
    assert groups <= ring <= stages and stages - ring < groups
    owners = {}
    for page in range(4 * ring):
        owners.setdefault(page % ring, set()).add(page % groups)
    assert all(len(groups_of_place) == 1 for groups_of_place in owners.values())
    operand = 2 * module.MAX_QUERIES * module.ROW_COLUMNS * module.INDEX_DIM
    assert ring * module.PAGE_BYTES + operand + 2048 <= SHARED_BYTES


@pytest.mark.parametrize(("n", "steps"), [(32, 8), (64, 8), (128, 8), (8, 2), (16, 5)])
def test_operand_words(n, steps):
    places = {
        (row, step, half, pair): warpgroup.word_of(n, row, step, half, pair)
        for row in range(n)
        for step in range(steps)
        for half in range(2)
        for pair in range(4)
    }
    assert len(set(places.values())) == len(places)
    assert 0 <= min(places.values()) <= max(places.values()) < warpgroup.operand_words(n, steps)
    for (row, step, half, pair), place in places.items():
        # The layout before the swizzle: rows of 64 FP16 numbers, 128 bytes; n rows for the first
        # 64 columns, then n rows for the next ones.
        column = 16 * step + 8 * half + 2 * pair
        address = (column // 64 * n + row) * 128 + column % 64 * 2
        # The swizzle of 128 bytes: address bits 7..9 are added to bits 4..6 without a carry.
        assert 4 * place == address ^ (address >> 3 & 0x70)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_product_of_hopper(modules, geometry):
    module = modules[geometry]
    ptx = build(module, "index_scores", "sm_90a")
    steps = module.INDEX_DIM // 16
    for queries in (1, 2, 4):
        shape = f"wgmma.mma_async.sync.aligned.m64n{queries * module.ROW_COLUMNS}k16.f32.f16.f16"
        assert ptx.count(shape) == steps
    assert "mma.sync" not in ptx
    # Every product is fenced from what filled its registers, and waited for.
    assert ptx.count("wgmma.fence.sync.aligned;") == 3
    assert ptx.count("wgmma.wait_group.sync.aligned 0;") == 3
    # The query reaches the tensor core through another proxy than that of its stores.
    assert "fence.proxy.async.shared::cta;" in ptx


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_product_of_codes(modules, geometry):
    module = modules[geometry]
    ptx = build(module, "index_scores", "sm_90a", product="e4m3")
    for queries in (1, 2, 4):
        shape = f"wgmma.mma_async.sync.aligned.m64n{queries * module.ROW_COLUMNS}k32.f32.e4m3.e4m3"
        assert ptx.count(shape) == module.INDEX_DIM // 32
    assert "cvt.rn.f16x2.e4m3x2" not in ptx
    with pytest.raises(Exception, match="the e4m3 product of a warpgroup exists on sm_90a only"):
        build(module, "index_scores", "sm_100a", product="e4m3")


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_product_elsewhere(modules, geometry):
    module = modules[geometry]
    ptx = build(module, "index_scores", "sm_100a")
    steps = module.INDEX_DIM // 16 * module.HEAD_TILES * (1 + 2 + 4)
    assert ptx.count("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32") == steps
    assert "wgmma" not in ptx


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_page_is_one_copy_at_a_64_bit_address(modules, geometry):
    module = modules[geometry]
    ptx = build(module, "index_scores", "sm_90a")
    copies = re.findall(r"cp\.async\.bulk\.shared\S+ \[\S+\], \[\S+\], (%r\d+), ", ptx)
    assert copies
    for register in set(copies):
        assert re.search(rf"mov\.b32\s+{register}, {module.PAGE_BYTES};", ptx)
    cache = [spec.name for spec in module.operands()].index("index_kv")
    (stride,) = parameter_registers(ptx, cache, 16)
    products = [line for line in ptx.splitlines() if re.search(rf"m(ul|ad)\..*{stride}\b", line)]
    assert products and all(".lo.s64" in line for line in products), products


def test_a_share_of_the_context_is_compiled_in(modules):
    module = modules["kimi"]
    share = build(module, "index_scores", "sm_90a", rank=5, ranks=7, interleave=64)
    whole = build(module, "index_scores", "sm_90a")
    # The first key of this rank in every period of 7 * 64.
    assert re.search(r"-320;", share) and not re.search(r"-320;", whole)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"groups": 0}, "groups 0 is none of 1, 2, 3"),
        ({"groups": 4}, "groups 4 is none of 1, 2, 3"),
        ({"stages": 2}, "stages 2 is outside 3..23: a stage a group, all in shared memory"),
        ({"stages": 40}, "stages 40 is outside 3..23: a stage a group, all in shared memory"),
        ({"product": "bf16"}, "unknown product 'bf16'; choose from f16, e4m3"),
        ({"ctas": 0}, "ctas 0: at least one is needed"),
        ({"ahead": 84, "lead": -1}, "ahead 84 and lead -1: neither is negative"),
        ({"rank": 2, "ranks": 2}, "rank 2 is outside 0..1"),
        ({"ranks": 2, "interleave": 0}, "interleave 0 must be at least 1"),
    ],
)
def test_refusals(modules, flags, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        modules["kimi"].IndexScores(**flags)
