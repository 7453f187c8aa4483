"""The sparse core: forms, limits of its splits, and the arithmetic that its layouts rest on."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import ModuleType

import pytest
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from kernel_files import ARCHS, KIMI, SMALL, assert_waits, context, load

from kpipe.codegen.ops.contract import Kind
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.runtime.device import latent_rows, ldmatrix, memory, slots, softmax, split_sums
from kpipe.runtime.formats import cache_format
from kpipe.runtime.host.compile import compile_kernel, ptx_of

ROOT = Path(__file__).parents[2]
BANKS = 32
BANK_BYTES = 4
SHARED_LIMIT = 227 * 1024
FORMS = tuple(itertools.product(("fp8_tensor", "fp8_ds_mla"), (None, 8)))
HEADS = {"tp8": 12, "tp16": 6, "tp1": 96}


def render(folder: Path, form: str, dcp: int | None, heads: int, dims: dict) -> ModuleType:
    """The kernel of a cache format, with or without context parallelism."""
    given = context({**dims, "heads": heads})
    given["formats"]["latent_kv"] = form
    given["parallel"] = {"tp": 8, "dcp": dcp}
    loader = FileSystemLoader(ROOT / "templates")
    environment = Environment(
        loader=loader,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
    )
    path = folder / f"sparse_{form}_{dcp}_{heads}_{dims['kv_lora']}.py"
    text = environment.get_template("kernels/sparse_decode.py.jinja").render(given)
    path.write_text(text)
    return load(path)


@pytest.fixture(scope="module")
def forms(tmp_path_factory) -> dict[tuple, ModuleType]:
    """(cache format, dcp) -> kernel with 12 heads a rank."""
    folder = tmp_path_factory.mktemp("forms")
    return {(form, dcp): render(folder, form, dcp, 12, KIMI) for form, dcp in FORMS}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms_wait(forms, form, arch):
    module = forms[form]
    # The number that is shipped where the form is; another one where it is not.
    kernel = module.SparseDecode() if form != FORMS[-1] else module.SparseDecode(splits=4)
    ptx = ptx_of(compile_kernel(kernel, module.operands(), arch, keep_ptx=True))
    names = [spec.name for spec in module.operands()]
    weights = {"q_scale", "k_scale"} if form[0] == "fp8_tensor" else set()
    assert_waits(ptx, names, weights)
    assert "mbarrier.try_wait.parity.acquire.cluster" in ptx, "peers' sums must be acquired"
    # What feeds the tensor cores: all codes of the group's keys, and all values of the fragments.
    steps = (KIMI["kv_lora"] if weights == set() else 576) // 16 * module.SCORE_OCTETS
    steps += 2 * module.WARP_WINDOWS * softmax.FRAGMENTS
    assert ptx.count("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32") == steps
    position = 0 if weights else KIMI["pe"] // 16 * module.SCORE_OCTETS
    assert ptx.count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") == position
    copies = [line for line in ptx.splitlines() if "cp.async" in line]
    # One a group of a batch, for all batches whose indices a warp holds.
    batches = -(-kernel.groups.most(module.TOP_K) // module.GATHER.batch)
    assert len(copies) == min(module.AHEAD, batches) * module.GATHER.batch
    assert all("cp.async.bulk.shared::cluster.global" in line for line in copies)
    assert re.search(rf"mul\.wide\.[su]32\s+%rd\d+, %r\d+, {module.ROWS.row_bytes};", ptx), (
        "the byte offset of a row must be a 64-bit product"
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_operands_follow_the_contract(forms, form):
    dropped = "!dcp" if form[1] else "dcp"
    contract = CONTRACTS["sparse_decode"]
    expected = [o.name for o in contract.operands if o.when != dropped]
    assert [spec.name for spec in forms[form].operands()] == expected
    assert contract.kernel == "sparse_decode" and contract.scratch == ()
    scales = [o.name for o in contract.operands if o.kind is Kind.WEIGHT]
    assert scales == ["q_scale", "k_scale"]


def test_rows_are_those_of_the_cache():
    for name, rows in latent_rows.FORMATS.items():
        assert rows(512, 64).row_bytes == cache_format(name, kv_lora=512, pe=64).row_bytes


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_every_split_fits(tmp_path, heads):
    module = render(tmp_path, "fp8_tensor", None, heads, KIMI)
    for splits in range(1, 17):
        kernel = module.SparseDecode(splits=splits)
        used = kernel.slots * slots.slot_bytes(module.ROWS.pitch)
        used += split_sums.received_bytes(module.WINDOWS, splits, module.TILE_HEADS)
        assert used + module.RESERVE <= SHARED_LIMIT
        assert 1 <= kernel.slots <= -(-module.TOP_K // (softmax.GROUP * splits))
        whole = kernel.slots == kernel.groups.most(module.TOP_K)
        assert whole or kernel.slots % module.TEAMS == 0
        owned = split_sums.owned_windows(module.WINDOWS, splits)
        assert owned * splits >= module.WINDOWS


def test_flags_are_checked(forms, tmp_path):
    plain, gathered = forms["fp8_tensor", None], forms["fp8_tensor", 8]
    for splits in (0, 17):
        with pytest.raises(ValueError, match=f"splits {splits} is not within 1..16"):
            plain.SparseDecode(splits=splits)
    with pytest.raises(ValueError, match="generated without context parallelism"):
        plain.SparseDecode(dcp=True)
    with pytest.raises(ValueError, match="generated for context parallelism"):
        gathered.SparseDecode(dcp=False)
    assert gathered.HEADS == 8 * plain.HEADS == 96


def test_small_rows_compile(tmp_path):
    module = render(tmp_path, "fp8_tensor", None, 2, SMALL)
    assert module.ROWS.row_bytes == 144 and module.SparseDecode().slots == 1
    compile_kernel(module.SparseDecode(splits=3), module.operands(), "sm_90a")


@pytest.mark.parametrize("rows", [latent_rows.Fp8TensorRows, latent_rows.Fp8DsMlaRows])
def test_lanes_hit_distinct_banks(rows):
    pitch = rows(512, 64).pitch
    assert pitch >= rows(512, 64).row_bytes and pitch % memory.VECTOR_BYTES == 0

    def banks(addresses: list[int]) -> list[int]:
        starts = [address // BANK_BYTES for address in addresses]
        return sorted((start + word) % BANKS for start in starts for word in range(4))

    # Sixteen bytes a lane go eight lanes at a time: two key columns g, four lanes t.
    for first in range(0, 8, 2):
        lanes = itertools.product((first, first + 1), range(4))
        found = banks([softmax.key_of_column(g) * pitch + 16 * t for g, t in lanes])
        assert found == list(range(BANKS))
    matrix = [softmax.key_of_column(row) * pitch for row in range(ldmatrix.MATRIX_ROWS)]
    assert banks(matrix) == list(range(BANKS))


def test_columns_are_a_permutation_of_keys():
    columns = [softmax.key_of_column(column) for column in range(softmax.OCTET)]
    assert sorted(columns) == list(range(softmax.OCTET))
    held = [key for lane in range(4) for key in softmax.lane_keys(lane)]
    assert sorted(held) == list(range(softmax.GROUP))
    # C holds columns 2t and 2t + 1 in lane t.
    for lane in range(4):
        assert softmax.lane_keys(lane)[:2] == columns[2 * lane : 2 * lane + 2]
