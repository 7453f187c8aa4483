"""The wide sparse core: forms, limits, what its instructions are, and its softmax."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from kernel_files import KIMI, assert_waits, context, load
from torch import Tensor

from kpipe.codegen.ops import contract as contract_terms
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.render.api import environment
from kpipe.runtime.device import mma, quads, wide_rows, wide_softmax, wide_stages, wide_sums
from kpipe.runtime.formats import cache_format
from kpipe.runtime.host.compile import compile_kernel, ptx_of

SHARED_LIMIT = 227 * 1024
SLACK = 256  # alignment of what lies between the arrays
FORMS = tuple(itertools.product(("fp8_tensor", "fp8_ds_mla"), (None, 8)))
STEPS = {"fp8_tensor": (36, 0), "fp8_ds_mla": (32, 4)}
REGISTERS = 65536
STARTS = (-torch.inf, -torch.inf, 0.0)  # of maxima, references and masses


def render(folder: Path, form: str, dcp: int | None, heads: int) -> ModuleType:
    """The kernel of a cache format, with or without context parallelism."""
    given = context({**KIMI, "heads": heads // 8 if dcp else heads}, form)
    given["parallel"] = {"tp": 8, "dcp": dcp}
    path = folder / f"wide_{form}_{dcp}_{heads}.py"
    template = environment(()).get_template("kernels/sparse_decode_wide.py.jinja")
    path.write_text(template.render(given))
    return load(path)


@pytest.fixture(scope="module")
def forms(tmp_path_factory) -> dict[tuple, ModuleType]:
    """(cache format, dcp) -> kernel with 96 heads."""
    folder = tmp_path_factory.mktemp("wide")
    return {(form, dcp): render(folder, form, dcp, 96) for form, dcp in FORMS}


def ptx_text(module: ModuleType, **flags) -> str:
    """PTX of a kernel."""
    kernel = module.SparseDecodeWide(**flags)
    return ptx_of(compile_kernel(kernel, module.operands(), "sm_90a", keep_ptx=True))


# Every pair of cache format, context parallelism and whether a cluster shares a row.
@pytest.mark.parametrize(
    ("form", "splits"), [(form, (8, 1)[n in (1, 2)]) for n, form in enumerate(FORMS)], ids=str
)
def test_forms_wait(forms, form, splits):
    module = forms[form]
    ptx = ptx_text(module, splits=splits)
    names = [spec.name for spec in module.operands()]
    assert_waits(ptx, names, {"q_scale", "k_scale"} if form[0] == "fp8_tensor" else set())
    assert ".local" not in ptx
    latent, position = STEPS[form[0]]
    assert ptx.count("m64n64k16.f32.f16.f16 ") == latent
    assert ptx.count("m64n64k16.f32.bf16.bf16 ") == position
    assert ptx.count("m64n128k16.f32.f16.f16 ") == 8, "four steps, two halves of 256 columns"
    assert re.search(rf"mul\.wide\.[su]32\s+%rd\d+, %r\d+, {module.ROWS.row_bytes};", ptx), (
        "the byte offset of a row must be a 64-bit product"
    )
    assert ("ld.shared::cluster.v4.f32" in ptx) == (splits > 1)


@pytest.mark.parametrize("parts, columns, products", [(2, 128, 4), (4, 64, 4)])
def test_parts_share_the_columns(forms, parts, columns, products):
    """Two warpgroups of a CTA sum up 512 columns over the parts, in four steps of 16 keys."""
    ptx = ptx_text(forms["fp8_tensor", None], splits=16, parts=parts)
    values = re.findall(r"m64n(\d+)k16\.f32\.f16\.f16 [^;]*, 1, 1, 0, 1;", ptx)
    assert values == [str(columns)] * products
    assert ".local" not in ptx


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_operands_follow_the_contract(forms, form):
    dropped = "!dcp" if form[1] else "dcp"
    contract = CONTRACTS["sparse_decode_wide"]
    expected = [o.name for o in contract.operands if o.when != dropped]
    assert [spec.name for spec in forms[form].operands()] == expected
    assert contract.kernel == "sparse_decode_wide"
    narrow = CONTRACTS["sparse_decode"].operands
    cache, *others = contract.operands
    # It reads rows by plain loads, the other core by bulk copies.
    assert (cache, others) == (
        replace(narrow[0], path=contract_terms.Path.GENERIC),
        list(narrow[1:]),
    )


def test_release_may_be_held(forms):
    ptx = ptx_text(forms["fp8_tensor", None], release=False)
    assert "griddepcontrol.wait" in ptx and "launch_dependents" not in ptx


def test_other_targets_are_refused(forms):
    module = forms["fp8_tensor", None]
    with pytest.raises(Exception, match="wgmma exists on sm_90a only, not on sm_100a"):
        compile_kernel(module.SparseDecodeWide(), module.operands(), "sm_100a")


def test_flags_are_checked(forms):
    plain, gathered = forms["fp8_tensor", None], forms["fp8_tensor", 8]
    for splits in (0, 17):
        with pytest.raises(ValueError, match=f"splits {splits} is not within 1..16"):
            plain.SparseDecodeWide(splits=splits)
    for parts in (0, 3, 8):
        with pytest.raises(ValueError, match=f"parts {parts} is none of 1, 2, 4"):
            plain.SparseDecodeWide(parts=parts)
    with pytest.raises(ValueError, match="generated without context parallelism"):
        plain.SparseDecodeWide(dcp=True)
    with pytest.raises(ValueError, match="generated for context parallelism"):
        gathered.SparseDecodeWide(dcp=False)
    assert gathered.HEADS == plain.HEADS == 96 and plain.TILES == 2


def test_rows_are_those_of_the_cache(monkeypatch):
    """The lanes of a warp load eight rows, whole."""
    loaded: list[int] = []
    shuffle = SimpleNamespace(shuffle_sync=lambda index, lane: lane // 4)
    monkeypatch.setattr(wide_rows, "cute", SimpleNamespace(arch=shuffle))
    monkeypatch.setattr(wide_rows, "Int64", int)
    monkeypatch.setattr(wide_rows, "load_vector", lambda at: loaded.append(at) or [0] * 4)
    for name, rows in wide_rows.FORMATS.items():
        assert rows(512, 64).row_bytes == cache_format(name, kv_lora=512, pe=64).row_bytes
        assert rows(512, 64).blocks == 9
        loaded.clear()
        for lane in range(32):
            rows(512, 64).fill({}, 0, lane // 4, lane)
        assert set(range(0, 8 * rows(512, 64).row_bytes, 16)) == set(loaded)


@pytest.mark.parametrize("heads", [64, 96, 128])
def test_everything_fits(tmp_path, heads):
    module = render(tmp_path, "fp8_ds_mla", None, heads)
    assert 64 * (module.TILES - 1) < heads <= 64 * module.TILES
    assert wide_stages.shared_bytes(module.ROWS.blocks) + SLACK <= SHARED_LIMIT
    sums = module.KV_LORA // 8 * wide_sums.TILE_BYTES
    assert sums <= 28 * 8192, "they take the place of the stages"
    warps = module.SCORE_WARPS, module.VALUE_WARPS, module.GATHER_WARPS
    registers = module.SCORE_REGISTERS, module.VALUE_REGISTERS, module.GATHER_REGISTERS
    assert sum(w * r for w, r in zip(warps, registers, strict=True)) * 32 <= REGISTERS
    assert all(count % 4 == 0 for count in warps), "registers move between warpgroups"


# A "scalar" of the code under test is a tensor here, one element a lane of a warp.


@pytest.fixture
def lanes(monkeypatch) -> Tensor:
    """The lanes of a warp, on which the softmax then runs."""

    def over_quads(value: Tensor, lanes: int) -> Tensor:
        return value.view(-1, lanes).amax(1, keepdim=True).expand(-1, lanes).reshape(-1)

    def exponent_above(value: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(value.clamp_min(2.0**-100))
        return exponent - (mantissa == 0.5).double()

    arch = SimpleNamespace(exp2=torch.exp2, fmax=torch.maximum)
    stub = SimpleNamespace(arch=arch, math=SimpleNamespace(fma=lambda a, b, c: a * b + c))
    scalar = SimpleNamespace(
        select=lambda where, a, b: torch.where(where, a, torch.as_tensor(b, dtype=torch.float64)),
        ceiling=torch.ceil,
        exponent_above=exponent_above,
    )
    for module in (wide_softmax, wide_rows):
        monkeypatch.setattr(module, "cute", stub)
        monkeypatch.setattr(module, "scalar", scalar)
        monkeypatch.setattr(module, "reduce", SimpleNamespace(lanes_max=over_quads))
    return torch.arange(32)


def held(matrix: Tensor, lanes: Tensor) -> list[Tensor]:
    """C fragments of [16, 64] values, an element a lane."""
    group, group_lane = mma.fragment_place(lanes)
    return [
        matrix[group + 8 * side, key]
        for tile in range(wide_softmax.TILES)
        for side in range(2)
        for key in wide_softmax.tile_keys(tile, group_lane)
    ]


def whole(fragments: list[Tensor], lanes: Tensor) -> Tensor:
    """[16, 64] values of C fragments."""
    matrix = torch.zeros(16, 64, dtype=torch.float64)
    places = held(torch.arange(16 * 64).view(16, 64), lanes)
    for place, value in zip(places, fragments, strict=True):
        matrix.view(-1)[place] = value
    return matrix


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_ds_mla"])
def test_softmax_over_groups(lanes, name):
    """Three groups, the last one short, with a maximum that moves: sums as a softmax has them."""
    rows, scale = wide_rows.FORMATS[name](512, 64), 0.37
    generator = torch.Generator().manual_seed(3)
    count, group_lane = 150, lanes % 4
    raw = torch.randn(16, 192, generator=generator, dtype=torch.float64) * 9
    raw[:, 64:] += 5
    raw[:, count:] = 1e6  # what lies behind the last key
    own = torch.exp2(torch.randint(-9, 9, (192,), generator=generator).double())
    own = own if name == "fp8_ds_mla" else torch.ones_like(own)
    top, references, mass = ([torch.full((32,), start).double()] * 2 for start in STARTS)
    sums = torch.zeros(16, dtype=torch.float64)
    values = torch.randn(192, generator=generator, dtype=torch.float64)
    for first in range(0, 192, 64):
        scores = held(raw[:, first : first + 64], lanes)
        weights = wide_softmax.soften(scores, count - first, scale, top, mass, group_lane)
        moves = rows.weigh(weights, top, references, own[first : first + 64], group_lane)
        weights = whole(weights, lanes)
        assert weights.max() <= 1.0
        by_row = torch.cat([move[::4] for move in moves])
        assert torch.isin(torch.frexp(by_row)[0], torch.tensor([0.0, 0.5])).all()
        # The codes of a key are its values over the key's power of two.
        codes = values[first : first + 64] / own[first : first + 64]
        sums = sums * by_row + (weights * codes).sum(1)
    total = torch.cat([part.view(8, 4).sum(1) for part in mass])
    last = torch.cat([(r - t)[::4] for r, t in zip(references, top, strict=True)])
    logits = raw[:, :count] * (scale * math.log(2.0))
    expected = torch.softmax(logits, 1) @ values[:count]
    torch.testing.assert_close(sums * torch.exp2(last) / total, expected)


def test_quads_transpose(monkeypatch):
    """Lane t of a quad ends with word t of its four lanes."""
    lanes = torch.arange(32)
    arch = SimpleNamespace(shuffle_sync_bfly=lambda value, distance: value[lanes ^ distance])
    monkeypatch.setattr(quads, "cute", SimpleNamespace(arch=arch))
    monkeypatch.setattr(quads, "scalar", SimpleNamespace(choose=torch.where))
    monkeypatch.setattr(quads, "Uint32", lambda value: value)
    words = quads.transposed([100 * lanes + place for place in range(4)], lanes % 4)
    first = lanes // 4 * 4
    for place, word in enumerate(words):
        assert torch.equal(word, 100 * (first + place) + lanes % 4)
