"""The products that stream their weights: tiles, ring, order of the sum, refusals."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import ModuleType

import pytest
from ptx_flow import RELEASE, WAIT
from test_compile import KERNELS, build, load, render

from kpipe.runtime.device import skinny
from kpipe.runtime.device.skinny import SkinnyGemm

PRODUCTS = {"packed_gemm": (3808, 7168), "index_gemm": (4096, 1536), "o_proj": (7168, 1536)}
TILES = (8, 24, 32, 56, 64, 112, 128, 256)
LAST_LOAD = "cp.async.bulk"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, ModuleType]:
    """Modules of the three products at the dimensions of tensor parallelism over 8 ranks."""
    folder: Path = tmp_path_factory.mktemp("products")
    render(folder, "kimi")
    return {name: load(folder / f"{name}.py") for name in PRODUCTS}


every_tile = pytest.mark.parametrize(
    ("name", "tile_n", "split_k", "tokens"),
    list(itertools.product(PRODUCTS, TILES, (1, 2, 4, 8), (8, 16, 32, 64))),
)


@every_tile
def test_a_tile_covers_the_product_and_fits(name, tile_n, split_k, tokens):
    outputs, inputs = PRODUCTS[name]
    try:
        product = SkinnyGemm(outputs, inputs, tile_n, split_k, tokens)
    except ValueError as error:
        assert "shared memory" in str(error) and tile_n + tokens > 256
        return
    # Columns: ranks times stages times slices times warps of a group, nothing left over.
    warp_columns = product.warp_slices * 32
    assert split_k * product.chunks * product.column_groups * warp_columns == inputs
    assert product.row_groups * 32 >= tile_n > (product.row_groups - 1) * 32
    assert 1 <= product.warps == product.row_groups * product.column_groups <= skinny.WARPS
    # Outputs and tokens: enough CTAs, none of them empty, a cluster never cut.
    ctas = product.grid_x // split_k
    assert (ctas - 1) * tile_n < outputs <= ctas * tile_n
    assert product.grid_x % split_k == 0
    # The ring: in shared memory, at least two stages unless one is all, copies of whole runs.
    pitch = 2 * (product.stage_columns + 32)
    rows = max(tile_n + tokens, 32 * product.row_groups)
    assert product.stages * (rows * pitch + 16) <= 227 * 1024
    assert min(2, product.chunks) <= product.stages <= product.chunks
    assert product.stage_columns * 2 % 16 == 0
    # Two neighbouring rows of a fragment lie half of the banks apart.
    assert pitch % 128 == 64


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_ring_keeps_memory_busy(name):
    """Little's law: 4.3 TB/s times about 1.1 us is 36 KB of weights for each of 132 SMs."""
    outputs, inputs = PRODUCTS[name]
    for tile_n, split_k, tokens in ((32, 1, 8), (64, 2, 16), (64, 2, 32), (128, 4, 64)):
        product = SkinnyGemm(outputs, inputs, tile_n, split_k, tokens)
        in_flight = product.stages * tile_n * product.stage_columns * 2
        assert in_flight >= 36 * 1024


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        ({"tile_n": 12}, "tile_n 12 is not a multiple of 8 from 8 to 256"),
        ({"tile_n": 0}, "tile_n 0 is not a multiple of 8 from 8 to 256"),
        ({"tile_n": 264}, "tile_n 264 is not a multiple of 8 from 8 to 256"),
        ({"tokens": 24}, "tokens 24 is not one of 8, 16, 32, 64"),
        (
            {"split_k": 3},
            "split_k 3 does not divide 1536 columns into slices of 32; choose from 1, 2, 4, 8",
        ),
        (
            {"split_k": 16},
            "split_k 16 does not divide 1536 columns into slices of 32; choose from 1, 2, 4, 8",
        ),
    ],
)
def test_unknown_tiles_are_refused(kernels, tile, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kernels["o_proj"].OProj(**tile)
    with pytest.raises(ValueError, match=re.escape(message)):
        kernels["index_gemm"].IndexGemm(**tile)


def test_odd_shapes_are_refused():
    with pytest.raises(ValueError, match="1520 columns into slices of 32; choose from none"):
        SkinnyGemm(64, 1520, 32, 1, 8)
    with pytest.raises(ValueError, match="choose from 1, 2$"):
        SkinnyGemm(64, 64, 32, 4, 8)
    with pytest.raises(ValueError, match="split_k 2 needs outputs in fours, not 66 by tiles of 32"):
        SkinnyGemm(66, 64, 32, 2, 8)


def test_publishing_is_refused(kernels):
    with pytest.raises(ValueError, match=r"o_proj writes `out`; publishing .* has no kernel yet"):
        kernels["o_proj"].OProj(dcp=True)
    assert kernels["o_proj"].OProj(two_shot=True) != kernels["o_proj"].OProj()


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("tile", [(32, 1, 8), (64, 2, 16), (128, 4, 64)])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_what_a_tile_compiles_to(kernels, name, tile, arch):
    tile_n, split_k, tokens = tile
    flags = {"tile_n": tile_n, "split_k": split_k, "tokens": tokens}
    ptx = build(kernels[name], name, arch, **flags)
    product = SkinnyGemm(*PRODUCTS[name], **flags)
    assert ".local" not in ptx, "a register array went to local memory"
    # One product of 16 outputs, 8 tokens and 16 columns an instruction.
    assert ptx.count("mma.sync") == 2 * (tokens // 8) * product.warp_slices * 2
    # A cluster, and remote sums, only where the columns are divided.
    assert ptx.count("ld.shared::cluster.v4.f32") == (
        split_k * product.column_groups if split_k > 1 else 0
    )
    assert ptx.count("barrier.cluster.arrive") == (2 if split_k > 1 else 0)


@pytest.mark.parametrize("name", PRODUCTS)
def test_release_lies_behind_wait_and_loads(kernels, name):
    """In the text of the only warp that requests, which has no jump back past them."""
    lines = build(kernels[name], name, "sm_90a").splitlines()
    release = next(n for n, line in enumerate(lines) if RELEASE in line)
    assert next(n for n, line in enumerate(lines) if WAIT in line) < release
    assert max(n for n, line in enumerate(lines) if LAST_LOAD in line) < release


def test_products_are_among_the_kernels():
    assert set(PRODUCTS) < set(KERNELS)
