"""Modes change the order and the kernels, not the result; sharding changes roundings only."""

from __future__ import annotations

import pytest
import torch
from layer_checks import TOP_K, assert_within_bounds
from layer_factory import LayerFactory

from kpipe.runtime.compare import selection_of
from kpipe.runtime.generated_folder import launches
from kpipe.runtime.layer import Layer
from kpipe.runtime.oracle.compare import declared_bounds, relative_error
from kpipe.runtime.trial import Case, Trial, run_case

TP_MODES = ("serial", "fork", "fork_split", "front", "wait", "late", "late_front")
DCP_MODES = ("serial", "fork", "front", "wait")
# Contexts beyond and below top_k, a padded request, and rows that need padding (5 to 5, q 4: 20
# rows to 32).
CASES = [Case((70, 5, 0, 129, 16), arch="sm_90a"), Case((70, 3, 0, 129, 16), q=4, arch="sm_100a")]

SEVENTH = """\
extends: dsa_tp.yaml
name: seventh
geometry: small
parallel: {tp: 2}
overlap:
  modes:
    three:
      main: [packed_gemm, fork left, fork right, join left, join right, core, value, o_proj]
      left: [mla_query]
      right: [query_norm, index_gemm, dsa_index, index_scores, topk_select]
  table:
    sm_90a: {q1: {"1-32": three, "33-64": fork_split}, q4: {"4-32": three, "33-64": fork_split}}
    sm_100a: {q1: {"1-32": three, "33-64": fork_split}, q4: {"4-32": three, "33-64": fork_split}}
"""
SEVENTH_DCP = """\
extends: dsa_dcp.yaml
name: seventh_dcp
geometry: small
parallel: {tp: 2, dcp: 2}
overlap:
  modes:
    indexer_aside:
      main: [packed_gemm, query_norm, fork side, mla_query, query_wait, join side,
             core, dcp_value, o_proj, o_reduce]
      side: [index_gemm, dsa_index, index_scores, topk_local, topk_merge]
  table:
    sm_90a: {q1: {"1-64": indexer_aside}, q4: {"4-64": indexer_aside}}
    sm_100a: {q1: {"1-64": indexer_aside}, q4: {"4-64": indexer_aside}}
"""
# The other way round than the shipped one: split for few rows, joined for many.
JOINED = """\
extends: dsa_tp.yaml
name: joined
geometry: small
parallel: {tp: 2}
stages:
  query:
    ops: [query_norm, mla_query]
    variants: {mla_query: {"1-8": mla_query_split, "9-64": mla_query}}
  value:
    ops: [value]
    variants: {value: {"1-8": [value_bmm, mla_gate], "9-64": mla_value}}
overlap:
  table:
    sm_90a: {q1: {"1-64": fork_split}, q4: {"4-64": fork_split}}
    sm_100a: {q1: {"1-64": fork_split}, q4: {"4-64": fork_split}}
"""


def _run(layer: type[Layer], case: Case) -> Trial:
    (trial,) = run_case(layer, case)
    return trial


def _ops(trial: Trial) -> frozenset[str]:
    run = trial.ranks[0]
    return frozenset(op.name for op in launches(type(run.layer), run.method))


def _assert_same_bits(one: Trial, other: Trial, *, but: tuple[str, ...] = ()) -> None:
    """Every buffer, both caches and the output of every rank, unwritten bytes included."""
    for left, right in zip(one.ranks, other.ranks, strict=True):
        for name in left.layer.MEMORY.buffers:
            same = _bytes(getattr(left.views, name)).equal(_bytes(getattr(right.views, name)))
            assert same or name in but, f"rank {left.rank}: {name} differs"
        assert left.latent.data.equal(right.latent.data), f"rank {left.rank}: latent_kv differs"
        assert left.index.data.equal(right.index.data), f"rank {left.rank}: index_kv differs"
        assert _bytes(left.out).equal(_bytes(right.out)), f"rank {left.rank}: out differs"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _assert_groups(trials: dict[str, Trial], groups: list[set[str]]) -> None:
    """Modes with the same ops form these groups, and agree in every bit."""
    by_ops: dict[frozenset[str], set[str]] = {}
    for mode, trial in trials.items():
        by_ops.setdefault(_ops(trial), set()).add(mode)
    assert sorted(map(sorted, by_ops.values())) == sorted(map(sorted, groups))
    for group in groups:
        first, *others = sorted(group)
        for mode in others:
            _assert_same_bits(trials[first], trials[mode])


@pytest.mark.parametrize("case", CASES, ids=["q1", "q4"])
def test_tensor_parallel_modes(layers: LayerFactory, case: Case) -> None:
    trials = {mode: _run(layers.tp(2, mode=mode), case) for mode in TP_MODES}
    trials["three"] = _run(layers.layer("seventh", SEVENTH), case)
    for trial in trials.values():
        assert_within_bounds([trial])
    separate = {"fork", "fork_split", "late", "three"}
    _assert_groups(trials, [{"serial", "wait"}, separate, {"front", "late_front"}])
    # The norm that mla_query computes for itself has the bits of query_norm.
    _assert_same_bits(trials["serial"], trials["fork"])


@pytest.mark.parametrize("case", CASES, ids=["q1", "q4"])
def test_context_parallel_modes(layers: LayerFactory, case: Case) -> None:
    trials = {mode: _run(layers.dcp(2, mode=mode), case) for mode in DCP_MODES}
    trials["indexer_aside"] = _run(layers.layer("seventh_dcp", SEVENTH_DCP), case)
    for trial in trials.values():
        assert_within_bounds([trial])
    _assert_groups(trials, [{"serial"}, {"wait"}, {"fork", "indexer_aside"}, {"front"}])
    _assert_same_bits(trials["serial"], trials["wait"])
    _assert_same_bits(trials["serial"], trials["fork"])


@pytest.mark.parametrize("mode", [*DCP_MODES, "indexer_aside"])
@pytest.mark.parametrize("rows", [5, 64])
def test_every_mailbox_is_armed_again(layers: LayerFactory, mode: str, rows: int) -> None:
    layer = layers.layer("seventh_dcp", SEVENTH_DCP)
    if mode != "indexer_aside":
        layer = layers.dcp(2, mode=mode)
    trial = _run(layer, Case((33,) * rows))
    for run in trial.ranks:
        for name, spec in run.layer.MEMORY.mailboxes.items():
            words = getattr(run.layer.views(rows), name).local.view(torch.int32)
            assert bool((words == spec.signed_sentinel).all()), f"rank {run.rank}: {name}"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_split_kernels_have_the_bits_of_the_joined_ones(layers: LayerFactory, arch: str) -> None:
    """mla_query_split for mla_query, value_bmm and mla_gate for mla_value: 33 rows and more."""
    case = Case((70, 5, 0, 129) * 16, arch=arch, only_ranks=(1,))
    split = _run(layers.tp(2), case)
    joined = _run(layers.layer("joined", JOINED), case)
    value = {"value_bmm", "mla_gate"} if arch == "sm_100a" else set()
    assert _ops(split) - _ops(joined) == {"mla_query_split", *value}
    assert _ops(joined) - _ops(split) == {"mla_query", *({"mla_value"} if value else ())}
    _assert_same_bits(split, joined, but=("values",))


@pytest.mark.parametrize(("one", "other"), [("front", "fork"), ("late_front", "late")])
def test_front_and_gemm_differ_by_the_rounding_of_the_index_query(
    layers: LayerFactory, one: str, other: str
) -> None:
    """index_front keeps the index query in FP32; where all keys are selected nothing is left."""
    bounds = declared_bounds()
    long = Case((70, 129, 512))
    front, gemm = (_run(layers.tp(2, mode=mode), long) for mode in (one, other))
    assert_within_bounds([front, gemm])
    error = relative_error(
        front.ranks[0].views.index_q8.double(), gemm.ranks[0].views.index_q8.double()
    )
    assert 0 < error <= bounds["index_q8"]

    short = Case((TOP_K, 5, 1))
    front, gemm = (_run(layers.tp(2, mode=mode), short) for mode in (one, other))
    assert front.ranks[0].out.equal(gemm.ranks[0].out)


@pytest.mark.parametrize(
    ("ranks", "interleave", "q", "arch"),
    [(2, 1, 1, "sm_90a"), (4, 64, 4, "sm_90a"), (8, 1, 4, "sm_100a"), (4, 64, 1, "sm_100a")],
)
def test_sharded_contexts_give_the_result_of_one_rank(
    layers: LayerFactory, ranks: int, interleave: int, q: int, arch: str
) -> None:
    """The same model on one rank with all heads: same keys, output within its bound."""
    case = Case((70, 5, 0, 129, 512), q=q, arch=arch)
    alone, sharded = _run(layers.tp(1), case), _run(layers.dcp(ranks, interleave), case)
    for row, (left, right) in enumerate(
        zip(selection_of(alone) or [], selection_of(sharded) or [], strict=True)
    ):
        assert set(left.tolist()) == set(right.tolist()), f"row {row}"
    error = relative_error(sharded.ranks[0].out, alone.ranks[0].out)
    assert 0 < error <= declared_bounds()["out"]


def test_one_rank_of_one_is_the_unsharded_layer(layers: LayerFactory) -> None:
    case = Case((70, 5, 0, 129, 512))
    alone, sharded = _run(layers.tp(1), case), _run(layers.dcp(1), case)
    assert sharded.ranks[0].out.equal(alone.ranks[0].out)
