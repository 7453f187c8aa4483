"""The products that stream their weights: tiles, ring, order of loads and release, refusals."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import ModuleType

import pytest
from kernel_files import KERNELS, build, load, render
from ptx_flow import RELEASE, WAIT

from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.runtime.device import skinny
from kpipe.runtime.device.gapped import GappedGemm
from kpipe.runtime.device.skinny import SkinnyGemm
from kpipe.runtime.device.tiles import TileShape

PRODUCTS = {
    "packed_gemm": (3808, 7168),
    "gate_gemm": (1536, 7168),
    "index_gemm": (4096, 1536),
    "o_proj": (7168, 1536),
}
SHAPES = {
    **PRODUCTS,
    "packed_gemm tp16": (3040, 7168),
    "packed_gemm tp1": (14560, 7168),
    "o_proj tp16": (7168, 768),
    "o_proj tp1": (7168, 12288),
    "small packed_gemm": (372, 256),
    "small o_proj": (256, 64),
}
LOAD = "cp.async.bulk.tensor"
COPY = "cp.async.cg.shared.global"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, ModuleType]:
    """Modules of the three products at the dimensions of tensor parallelism over 8 ranks."""
    folder: Path = tmp_path_factory.mktemp("products")
    render(folder, "kimi")
    return {name: load(folder / f"{name}.py") for name in PRODUCTS}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile_n", [8, 24, 32, 56, 64, 128, 256])
@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
def test_a_tile_covers_the_product_and_fits(shape, tile_n, tokens):
    outputs, inputs = SHAPES[shape]
    product = SkinnyGemm(outputs, inputs, tile_n, tokens)
    # Columns: stages times slices times warps of a group, nothing left over.
    assert product.chunks * product.stage_columns == inputs
    assert product.column_groups * product.warp_slices * 32 == product.stage_columns
    # Outputs: every one has a warp, and no warp is without.
    assert product.row_groups * 32 >= tile_n > (product.row_groups - 1) * 32
    assert 1 <= product.warps == product.row_groups * product.column_groups <= 8
    assert product.threads == 32 * (1 + max(1, tokens // 16) + product.warps)
    # CTAs: enough of them, none without outputs or tokens.
    for rows in (1, 8, 33, 64, 100):
        x, y, z = product.grid(rows)
        assert (x - 1) * tile_n < outputs <= x * tile_n
        assert (y - 1) * tokens < rows <= y * tokens
        assert z == 1
    # The ring: within the shared memory of a CTA, three stages at least or all of them.
    stage = (tile_n + tokens) * product.stage_columns * 2
    assert product.stages * (stage + 16) <= 227 * 1024
    assert min(3, product.chunks) <= product.stages <= product.chunks
    # A store is one vector that neither the row nor the tile cuts.
    assert outputs % product.width == tile_n % product.width == 0


@pytest.mark.parametrize(
    ("name", "tile_n", "tokens"),
    [*itertools.product(("packed_gemm", "index_gemm"), (32,), (8, 16, 32, 64)), ("o_proj", 64, 64)],
)
def test_the_ring_keeps_memory_busy(name, tile_n, tokens):
    """Little's law: 4.3 TB/s times about 1.1 us is 36 KB of weights in each of 132 SMs."""
    product = SkinnyGemm(*PRODUCTS[name], tile_n, tokens)
    assert product.stages * tile_n * product.stage_columns * 2 >= 36 * 1024


def test_small_tiles_are_requested_whole_ahead_of_the_wait():
    for name, tile_n in {"index_gemm": 32, "o_proj": 64}.items():
        product = SkinnyGemm(*PRODUCTS[name], tile_n, 8)
        assert product.stages == product.chunks


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        ({"tile_n": 12}, "tile_n 12 is not a multiple of 8 from 8 to 256"),
        ({"tile_n": 0}, "tile_n 0 is not a multiple of 8 from 8 to 256"),
        ({"tile_n": 264}, "tile_n 264 is not a multiple of 8 from 8 to 256"),
        ({"tokens": 24}, "tokens 24 is not one of 8, 16, 32, 64"),
        ({"tokens": 0}, "tokens 0 is not one of 8, 16, 32, 64"),
    ],
)
def test_unknown_tiles_are_refused(kernels, tile, message):
    for name, module in kernels.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            getattr(module, KERNELS[name])(**tile)


@pytest.mark.parametrize(
    ("ring", "columns", "stages"), [(227, 256, 11), (104, 256, 5), (41, 128, 4), (11, 64, 2)]
)
def test_a_ring_holds_what_it_may(ring, columns, stages):
    """40 rows of weights and tokens a stage, narrower ones where three would not fit."""
    product = SkinnyGemm(*PRODUCTS["packed_gemm"], 32, 8, ring)
    assert (product.stage_columns, product.stages) == (columns, stages)
    assert stages * (40 * columns * 2 + 16) <= ring * 1024


@pytest.mark.parametrize("ring", [0, 9, 228])
def test_rings_of_less_than_two_stages_are_refused(ring):
    message = f"ring {ring} is not 2 stages of tile_n 32 and tokens 8, or more than 227 KiB"
    with pytest.raises(ValueError, match=re.escape(message)):
        SkinnyGemm(*PRODUCTS["packed_gemm"], 32, 8, ring)


def test_half_a_ring_fits_twice():
    """228 KiB of an SM, of which each CTA costs one."""
    (_, few), *_ = CONTRACTS["packed_gemm"].tactics
    ring = dict(few)["ring"]
    assert 2 * (ring + 1) <= 228


@pytest.mark.parametrize(
    ("tile_n", "window", "flying"),
    [(24, 0, 14), (24, 64, 5), (24, 8, 1), (64, 64, 2), (64, 1000, 6)],
)
def test_a_window_bounds_what_is_on_its_way(tile_n, window, flying):
    product = SkinnyGemm(*PRODUCTS["packed_gemm"], tile_n, 8, window=window)
    assert product.in_flight == flying <= product.stages
    assert not window or flying == 1 or flying * product.weight_tile.bytes <= window * 1024
    # A third barrier a stage, for the weights alone.
    stage = product.weight_tile.bytes + product.token_tile.bytes
    assert product.stages * (stage + (24 if window else 16)) <= 227 * 1024


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_window_is_compiled_in(kernels, name):
    """Its stages at once, every other one behind an earlier one; all ahead of the wait."""
    ptx = build(kernels[name], name, "sm_90a", tile_n=64, tokens=8, window=64)
    product = SkinnyGemm(*PRODUCTS[name], 64, 8, window=64)
    assert ptx.count(LOAD) == product.in_flight + 1
    assert ptx.count("mbarrier.init") == 3 * product.stages
    assert max(ptx.find(LOAD), ptx.rfind(LOAD)) < ptx.find(WAIT)


@pytest.mark.parametrize("tile_n", [16, 24, 32, 64])
def test_a_gap_takes_its_tiles_away(tile_n):
    """2112 outputs, the gate's 1536, 160: CTAs of the first and of the last, none of the gate."""
    whole = SkinnyGemm(3808, 7168, tile_n, 8)
    gapped = GappedGemm(3808, 7168, tile_n, 8, gap_at=2112, gap=1536)
    assert gapped.grid(9) == [whole.grid(9)[0] - 1536 // tile_n, 2, 1]
    assert (gapped.stages, gapped.threads) == (whole.stages, whole.threads)


@pytest.mark.parametrize(("tile_n", "gap_at", "gap"), [(40, 2112, 1536), (64, 2112, 1528)])
def test_a_gap_within_a_tile_is_refused(tile_n, gap_at, gap):
    message = f"outputs {gap_at} to {gap_at + gap} are not whole tiles of tile_n {tile_n}"
    with pytest.raises(ValueError, match=message):
        GappedGemm(3808, 7168, tile_n, 8, gap_at=gap_at, gap=gap)


def test_odd_columns_are_refused():
    with pytest.raises(ValueError, match="96 columns are not a multiple of 64"):
        SkinnyGemm(64, 96, 32, 8)


def test_publishing_is_refused(kernels):
    with pytest.raises(ValueError, match=r"o_proj writes `out`; publishing .* has no kernel yet"):
        kernels["o_proj"].OProj(dcp=True)
    kernels["o_proj"].OProj(two_shot=True)  # says how to publish, and nothing is published


@pytest.mark.parametrize(
    ("name", "tile_n", "tokens", "arch"),
    [
        ("packed_gemm", 32, 8, "sm_90a"),
        ("packed_gemm", 128, 32, "sm_100a"),
        ("index_gemm", 24, 16, "sm_90a"),
        ("o_proj", 64, 64, "sm_90a"),
        ("o_proj", 56, 64, "sm_100a"),
    ],
)
def test_what_a_tile_compiles_to(kernels, name, tile_n, tokens, arch):
    ptx = build(kernels[name], name, arch, tile_n=tile_n, tokens=tokens)
    product = SkinnyGemm(*PRODUCTS[name], tile_n, tokens)
    assert ".local" not in ptx, "a register array went to local memory"
    # One instruction for 16 outputs, 8 tokens and 16 columns; a warp has 32 outputs.
    assert ptx.count("mma.sync.aligned.m16n8k16") == 2 * (tokens // 8) * product.warp_slices * 2
    # Weights of every stage of the ring, and of a later one where there is one.
    later = product.chunks > product.stages
    assert ptx.count(LOAD) == product.stages + later
    # Tokens of a stage: 512 bytes a warp at once, rows past the last one not at all.
    copies = re.findall(rf"(@%p\d+)? *{COPY}", ptx)
    assert len(copies) * 512 * product.copying_warps == tokens * product.stage_columns * 2
    assert all(copies)
    # Only weights are read once: the ring's tokens are read by all CTAs.
    assert ptx.count("createpolicy.fractional.L2::evict_first") > 0
    # Two barriers a stage.
    assert ptx.count("mbarrier.init") == 2 * product.stages


@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_tokens_are_copied_to_where_the_engine_would_store_them(columns, tokens):
    """Every word once: 128-byte rows of a block behind each other, words mixed with the row."""
    tile = TileShape(tokens, columns)
    words = columns // 8
    found = {(r, w): 16 * tile.word_place(r, w) for r in range(tokens) for w in range(words)}
    for (row, word), place in found.items():
        block, inner = divmod(word, 8)
        address = block * tokens * 128 + row * 128 + inner * 16
        assert place == address ^ (address >> 3 & 0x70)  # the engine's 128-byte swizzle
    assert len(set(found.values())) == tile.bytes // 16


@pytest.mark.parametrize("name", PRODUCTS)
def test_release_lies_behind_wait_and_copies(kernels, name):
    """In the text of the warps that copy tokens, which have no jump back past them."""
    lines = build(kernels[name], name, "sm_90a").splitlines()
    release = next(number for number, line in enumerate(lines) if RELEASE in line)
    wait = next(number for number, line in enumerate(lines) if WAIT in line)
    copies = [number for number, line in enumerate(lines) if COPY in line]
    assert wait < min(copies) and max(copies) < release


def test_as_many_weights_as_the_ring_holds_come_ahead_of_the_wait(kernels):
    lines = build(kernels["o_proj"], "o_proj", "sm_90a", tokens=8).splitlines()
    wait = next(number for number, line in enumerate(lines) if WAIT in line)
    assert sum(LOAD in line for line in lines[:wait]) == 1536 // 256
    assert not any(LOAD in line for line in lines[wait:])


def test_shared_memory_is_what_hopper_has():
    # The most that a CTA may ask for, on sm_90 and sm_100.
    assert skinny.MOST_SHARED * skinny.KIB == 232448
