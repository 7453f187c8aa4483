"""The query kernels: what flags and cache formats change, and the layouts that they rest on."""

from __future__ import annotations

import itertools
import re

import pytest
from kernel_files import (
    ARCHS,
    GEOMETRIES,
    SMALL,
    WEIGHTS,
    assert_waits,
    build,
    load,
    names_of,
    operands_of,
    render,
)
from ptx_flow import global_accesses, parameter_registers

from kpipe.runtime.device import mma
from kpipe.runtime.device.head_query import HeadQuery
from kpipe.runtime.device.index_query import IndexQuery
from kpipe.runtime.device.latent_cache import LatentRow
from kpipe.runtime.device.split_product import SplitProduct

FORMATS = ("fp8_tensor", "fp8_ds_mla")
QUERIES = ("mla_query", "mla_query_split")


@pytest.fixture(scope="module")
def modules(tmp_path_factory) -> dict:
    """(cache format, kernel) -> imported module of the Kimi geometry."""
    made = {}
    for cache_format in FORMATS:
        folder = tmp_path_factory.mktemp(cache_format)
        render(folder, "kimi", cache_format)
        for name in (*QUERIES, "index_front"):
            made[cache_format, name] = load(folder / f"{name}.py")
    return made


def touched(module, name: str, **flags) -> set[str]:
    names = names_of(operands_of(module, flags))
    accesses = global_accesses(build(module, name, "sm_90a", **flags))
    return {names[number] for access in accesses for number in access.parameters}


@pytest.mark.parametrize("name", QUERIES)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_cache_with_group_scales(modules, name, arch):
    module = modules["fp8_ds_mla", name]
    specs = {spec.name: spec for spec in module.operands() if spec}
    assert specs["query"].dtype == "bf16"
    assert specs["latent_kv"].shape[1:] == (64, 512 + 4 * 4 + 2 * 64)
    ptx = build(module, name, arch)
    assert_waits(ptx, names_of(module.operands()), WEIGHTS[name])
    assert "div.rn.f32" in ptx, "a group's scale is divided, not multiplied by a reciprocal"


def test_scales_belong_to_the_format(modules):
    by_format = {f: touched(modules[f, "mla_query"], "mla_query") for f in FORMATS}
    scales = {"q_scale_inv", "k_scale_inv"}
    assert by_format["fp8_tensor"] - by_format["fp8_ds_mla"] == scales


def test_q_c_is_written_where_somebody_reads_it(modules):
    module = modules["fp8_tensor", "mla_query"]
    assert module.operands()[-1] is None
    assert module.operands(writes_q_c=True)[-1].name == "q_c"
    assert "q_c" not in touched(module, "mla_query")
    assert "q_c" in touched(module, "mla_query", writes_q_c=True)
    ptx = build(module, "mla_query", "sm_90a", writes_q_c=True)
    assert_waits(ptx, names_of(module.operands(writes_q_c=True)), WEIGHTS["mla_query"])


@pytest.mark.parametrize("normalized", [True, False])
def test_the_front_reads_one_of_two_rows(modules, normalized):
    module = modules["fp8_tensor", "index_front"]
    q_a, q_c, q_norm, *_ = module.operands(normalized=normalized)
    assert (q_a is None, q_c is None, q_norm.name) == (normalized, not normalized, "q_norm")
    seen = touched(module, "index_front", normalized=normalized)
    assert {"q_a", "q_c", "q_norm"} & seen == ({"q_c"} if normalized else {"q_a", "q_norm"})


@pytest.mark.parametrize(
    ("name", "cache"), [*((name, "latent_kv") for name in QUERIES), ("index_front", "index_kv")]
)
def test_slot_addresses_are_64_bit(modules, name, cache):
    module = modules["fp8_tensor", name]
    ptx = build(module, name, "sm_90a")
    number = names_of(module.operands()).index(cache)
    (stride,) = parameter_registers(ptx, number, 16)
    products = [line for line in ptx.splitlines() if stride in line and "ld.param" not in line]
    assert products and all(".lo.s64" in line for line in products), products


@pytest.mark.parametrize("name", [*QUERIES, "index_front"])
def test_e4m3_saturates(modules, name):
    ptx = build(modules["fp8_tensor", name], name, "sm_90a")
    conversions = [line for line in ptx.splitlines() if "e4m3" in line]
    assert conversions and all("cvt.rn.satfinite.e4m3x2.f32" in line for line in conversions)


@pytest.mark.parametrize("name", [*QUERIES, "index_front"])
def test_a_receiver_sees_what_its_peers_sent(modules, name):
    ptx = build(modules["fp8_tensor", name], name, "sm_90a")
    assert "st.async.shared::cluster.mbarrier::complete_tx::bytes" in ptx
    assert "mbarrier.try_wait.parity.acquire.cluster" in ptx
    # A barrier of the cluster publishes the inboxes; the flushing kind would cost what it saves.
    assert set(re.findall(r"barrier\.cluster\.arrive\S*", ptx)) == {
        "barrier.cluster.arrive.relaxed;"
    }


NARROW = {**SMALL, "q_lora": 64, "kv_lora": 64, "index_dim": 128}


@pytest.mark.parametrize(("name", "flags"), [("mla_query", {}), ("index_front", {"tile_n": 128})])
def test_few_warps_send_all_rows(tmp_path, monkeypatch, name, flags):
    """With 64 threads and 4 outputs a thread a tile of 16 rows takes several turns."""
    monkeypatch.setitem(GEOMETRIES, "narrow", NARROW)
    render(tmp_path, "narrow")
    ptx = build(load(tmp_path / f"{name}.py"), name, "sm_90a", **flags)
    outputs = NARROW["index_dim"] if flags else NARROW["nope"] + NARROW["pe"]
    assert ptx.count("st.async.shared::cluster") == 16 * outputs // 4 // 64


@pytest.mark.parametrize("name", QUERIES)
def test_every_weight_is_loaded_once(modules, name):
    module = modules["fp8_tensor", name]
    accesses = global_accesses(build(module, name, "sm_90a"))
    q_b = names_of(module.operands()).index("q_b")
    loads = [access for access in accesses if access.parameters == {q_b}]
    # 24 rows of 1536 in 16-byte loads of 256 threads.
    assert len(loads) == 24 * 1536 * 2 // 16 // 256
    assert all("L2::cache_hint.v4.b32" in access.text for access in loads)


@pytest.mark.parametrize("name", QUERIES)
def test_a_head_by_fewer_ctas_has_weights_in_two_places(modules, name):
    """48 rows of Q_B a CTA: 40 in registers, the last eight in shared memory, a copy a row."""
    module = modules["fp8_tensor", name]
    ptx = build(module, name, "sm_90a", tokens=16, parts=4)
    assert ".local" not in ptx
    names = names_of(module.operands())
    assert_waits(ptx, names, WEIGHTS[name])
    own = [a for a in global_accesses(ptx) if a.parameters == {names.index("q_b")}]
    copies = [access for access in own if "cp.async.bulk" in access.text]
    assert len(copies) == 1 and len(own) - 1 == 40 * 1536 * 2 // 16 // 256


# Weight rows in registers and in shared memory: two CTAs an SM, and a wide CTA in a cluster of two.
SPLIT_FORMS = [
    ({"tokens": 8, "held": 16}, 16, 16),
    ({"tokens": 8, "held": 8}, 8, 24),
    ({"tile_n": 64, "tokens": 8, "held": 24}, 24, 40),
    ({"tokens": 64, "held": 16}, 16, 16),
]


@pytest.mark.parametrize(
    ("flags", "held", "staged", "arch"),
    # Both targets for the first; the others take turns.
    [(*SPLIT_FORMS[0], ARCHS[0]), *((*f, ARCHS[n % 2 == 0]) for n, f in enumerate(SPLIT_FORMS))],
)
def test_weights_in_two_places_are_all_requested_ahead_of_the_wait(
    modules, flags, held, staged, arch
):
    module = modules["fp8_tensor", "index_front"]
    ptx = build(module, "index_front", arch, **flags)
    names = names_of(module.operands())
    assert_waits(ptx, names, WEIGHTS["index_front"])
    assert ".local" not in ptx
    matrix = names.index("index_q_b")
    own = [a for a in global_accesses(ptx) if a.parameters == {matrix}]
    copies = [access for access in own if "cp.async.bulk" in access.text]
    # A lane copies a row of 3072 bytes, at most 32 at once; the rest as in the form without.
    assert len(copies) == -(-staged // 32)
    assert len(own) - len(copies) == held * 1536 * 2 // 16 // 256
    front = module.IndexFront(**flags)
    assert front._query.staged == staged and front._query.product.staged_bytes == staged * 3072


@pytest.mark.parametrize(
    ("flags", "resident"),
    [
        ({"tokens": 8, "held": 16}, 2),
        ({"tokens": 8, "held": 8}, 2),
        ({"tokens": 16, "held": 16}, 1),
        ({"tokens": 8}, 1),
        ({"tile_n": 64, "tokens": 8, "held": 24}, 1),
    ],
)
def test_two_ctas_where_registers_and_shared_memory_allow(modules, flags, resident):
    front = modules["fp8_tensor", "index_front"].IndexFront(**flags)
    # 228 KiB of an SM, of which each CTA costs one.
    assert front._resident == resident
    assert resident == 1 or 2 * (front._shared_bytes + 1024) <= 228 * 1024


def test_eight_rows_need_half_of_the_sums(modules):
    """Rows 8 to 15 of the tensor cores are zeros that nobody loads and sums that nobody stores."""
    module = modules["fp8_tensor", "index_front"]
    counts = {
        tokens: build(module, "index_front", "sm_90a", tokens=tokens).count("st.shared.v2")
        for tokens in (8, 16)
    }
    assert counts[16] == 2 * counts[8] > 0


def test_few_rows_are_normed_by_all_warps(modules):
    """A row has six runs of 32 vectors: up to four rows a warp has three runs, half a row."""
    module = modules["fp8_tensor", "index_front"]
    tiles = module.IndexFront(tokens=8)._tiles
    assert (tiles.norm.vectors, tiles.product.warps) == (6, 8)
    assert [tiles.spreads(rows) for rows in range(1, 9)] == [True] * 4 + [False] * 4
    meetings = {
        flags: len(re.findall(r"bar(?:rier)?\.sync\s+1,|barrier\.sync\.aligned 1,", text))
        for flags, text in (
            (few, build(module, "index_front", "sm_90a", tokens=8 if few else 16))
            for few in (True, False)
        )
    }
    assert meetings[True] == meetings[False] + 1  # between the sums of runs and their use


@pytest.mark.parametrize("name", ["index_front", "dsa_index", *QUERIES])
@pytest.mark.parametrize("release", [True, False])
def test_rows_are_fenced_ahead_of_the_release(dsa_index, modules, name, release):
    """Scorer and core read them by bulk copies; held, the end of the kernel does it."""
    module = dsa_index if name == "dsa_index" else modules["fp8_tensor", name]
    lines = [line.strip() for line in build(module, name, "sm_90a", release=release).splitlines()]
    names = names_of(module.operands())
    cache = names.index("latent_kv" if name in QUERIES else "index_kv")
    fences = [n for n, line in enumerate(lines) if line.startswith("fence.proxy.async.global")]
    releases = [n for n, line in enumerate(lines) if "launch_dependents" in line]
    assert len(fences) == len(releases) == release
    text = "\n".join(lines)
    stores = [
        lines.index(a.text)
        for a in global_accesses(text)
        if not a.is_load and a.parameters == {cache}
    ]
    assert stores
    if release:
        assert max(stores) < fences[0] < releases[0]
        assert any("bar.warp.sync" in line for line in lines[fences[0] : releases[0]])


@pytest.fixture(scope="module")
def dsa_index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dsa_index")
    render(folder, "kimi")
    return load(folder / "dsa_index.py")


def test_flags_are_checked(modules):
    module = modules["fp8_tensor", "mla_query"]
    for tokens in (8, 24):
        with pytest.raises(ValueError, match=f"tokens {tokens} is not a multiple of 16"):
            module.MlaQuery(tokens=tokens)
    with pytest.raises(ValueError, match="parts 0: a head needs a CTA"):
        module.MlaQuery(parts=0)
    message = "tokens 128 and parts 4 need 24.* bytes of shared memory, 232448 are there"
    with pytest.raises(ValueError, match=message):
        module.MlaQuery(tokens=128, parts=4)
    front = modules["fp8_tensor", "index_front"]
    for tokens in (0, 24):
        message = f"tokens {tokens} is neither 8 nor a multiple of 16"
        with pytest.raises(ValueError, match=message):
            front.IndexFront(tokens=tokens)
    with pytest.raises(ValueError, match="tile_n is 24; choose from 16, 32, 64, 128$"):
        front.IndexFront(tile_n=24)
    with pytest.raises(ValueError, match="tile_n is 64; choose from 16, 32$"):
        front.IndexFront(tile_n=64, held=64)
    with pytest.raises(ValueError, match="held 12 is not a multiple of 8"):
        front.IndexFront(held=12)
    message = "tile_n 64, tokens 64 and held 24 need 2.* bytes of shared memory, 232448 are there"
    with pytest.raises(ValueError, match=message):
        front.IndexFront(tile_n=64, tokens=64, held=24)
    for pe in (7, 66):
        with pytest.raises(ValueError, match=f"pe {pe} is not even and at most 64"):
            LatentRow(512, pe, 1e-6)


def test_transposed_columns_meet_their_rows():
    """ldmatrix gives lane (g, t) rows 8m + 2t and 8m + 2t + 1 of a slice as word m, and word m of
    a lane's 16 bytes of A holds columns 8t + 2m and 8t + 2m + 1; the two must be the same."""
    for first, t, m, b in itertools.product((0, 32, 96), range(4), range(4), range(2)):
        assert mma.slice_row(first + 8 * t + 2 * m + b) == first + 8 * m + 2 * t + b


@pytest.mark.parametrize(
    ("head", "cluster"),
    [
        (HeadQuery(1536, 128, 64, 512), 8),
        (HeadQuery(1536, 128, 64, 512, 4), 4),
        (HeadQuery(1536, 128, 64, 512, 3), 1),
        (HeadQuery(128, 32, 16, 128), 2),
        (HeadQuery(64, 32, 16, 64), 1),
    ],
)
def test_a_cluster_covers_a_head(head, cluster):
    assert head.cluster == cluster
    assert head.cluster * head.product.outputs == head.nope + head.pe
    assert head.cluster * head.latents == head.kv_lora
    assert head.product.outputs % mma.TILE_N == 0
    assert head.latents % (mma.TILE_N * head.product.warps) == 0


@pytest.mark.parametrize("columns", [32, 96, 128, 1536, 7168])
def test_warps_share_the_columns(columns):
    product = SplitProduct(columns, 8)
    assert product.warps * product.slices * mma.K_SLICE == columns
    assert product.warps <= 8
    # Rows g and g + 1 of the operand begin half of the 128 bytes of all banks apart.
    assert product.pitch * 2 % 128 == 64


@pytest.mark.parametrize(("share", "cluster"), [(16, 8), (32, 4)])
def test_an_index_head_is_shared(share, cluster):
    query = IndexQuery(1536, 128, share)
    assert query.cluster == cluster
    assert query.inbox_bytes(3) == 3 * cluster * 4
