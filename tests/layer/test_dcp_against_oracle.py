"""dsa_dcp in small, on virtual ranks: every stage is within its bound of the oracle."""

from __future__ import annotations

import pytest
from layer_checks import TOP_K, assert_within_bounds, compared, lengths
from layer_factory import LayerFactory

from kpipe.runtime.compare import selection_of
from kpipe.runtime.trial import Case, run_case

STAGES = {
    "projection q_a",
    "projection gate",
    "query q_c",
    "query latent_kv rows",
    "indexer index_kv rows",
    "indexer index_q8",
    "indexer index_w",
    "indexer selection",
    "sparse_core partial",
    "value gated",
    "o_proj out",
}

# rows, q, ranks, interleave, arch, fp8_ds_mla: pairs of all axes, few rows where there are many
# ranks.  Rows that are not declared are padded: 9 to 16, 33 to 64, 12 to 16, 20 to 32.
CASES = [
    (1, 1, 8, 1, "sm_90a", False),
    (1, 1, 2, 64, "sm_100a", False),
    (2, 1, 4, 64, "sm_90a", True),
    (2, 1, 8, 1, "sm_100a", False),
    (3, 1, 1, 1, "sm_100a", True),
    (3, 1, 8, 64, "sm_90a", False),
    (4, 1, 4, 1, "sm_100a", False),
    (4, 1, 2, 1, "sm_90a", True),
    (5, 1, 8, 64, "sm_100a", False),
    (5, 1, 4, 1, "sm_90a", False),
    (6, 1, 2, 64, "sm_90a", False),
    (7, 1, 4, 64, "sm_100a", False),
    (8, 1, 8, 1, "sm_90a", True),
    (9, 1, 2, 1, "sm_100a", False),
    (16, 1, 4, 1, "sm_90a", False),
    (16, 1, 2, 64, "sm_100a", False),
    (17, 1, 1, 64, "sm_90a", False),
    (32, 1, 2, 1, "sm_100a", True),
    (33, 1, 2, 64, "sm_90a", True),
    (64, 1, 2, 1, "sm_100a", False),
    (63, 1, 1, 1, "sm_90a", False),
    (4, 4, 8, 1, "sm_100a", False),
    (4, 4, 4, 64, "sm_90a", True),
    (8, 4, 8, 64, "sm_90a", False),
    (8, 4, 4, 1, "sm_100a", False),
    (12, 4, 2, 1, "sm_90a", False),
    (16, 4, 4, 64, "sm_100a", False),
    (20, 4, 1, 64, "sm_100a", True),
    (32, 4, 2, 64, "sm_90a", False),
    (36, 4, 4, 1, "sm_100a", False),
    (60, 4, 8, 1, "sm_100a", False),
    (64, 4, 2, 1, "sm_90a", True),
    (64, 1, 4, 64, "sm_90a", False),
]


@pytest.mark.parametrize(("rows", "q", "ranks", "interleave", "arch", "ds_mla"), CASES)
def test_every_stage_is_within_its_bound(
    layers: LayerFactory,
    rows: int,
    q: int,
    ranks: int,
    interleave: int,
    arch: str,
    ds_mla: bool,
) -> None:
    case = Case(
        lengths(rows // q, first=2 * rows + q),
        q=q,
        arch=arch,
        seed=rows,
        block_rows=96 if rows % 2 else None,
    )
    trials = run_case(layers.dcp(ranks, interleave, ds_mla=ds_mla), case)
    errors = assert_within_bounds(trials)
    if any(case.lengths):
        assert compared(errors) >= STAGES
    for other in trials[0].ranks[1:]:
        assert other.out.equal(trials[0].ranks[0].out), "every rank reduces to the same bits"


@pytest.mark.parametrize(
    ("ranks", "interleave", "contexts"),
    [(8, 1, (1, 2, 3, 5, 8)), (4, 1, (3, 1, 0)), (4, 64, (40, 64, 65)), (8, 64, (300, 512, 17))],
)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_empty_shards_weigh_nothing(
    layers: LayerFactory, ranks: int, interleave: int, contexts: tuple[int, ...], arch: str
) -> None:
    (trial,) = run_case(layers.dcp(ranks, interleave), Case(contexts, arch=arch))
    assert_within_bounds([trial])
    counts = [run.views.valid[: len(contexts)].tolist() for run in trial.ranks]
    totals = [sum(column) for column in zip(*counts, strict=True)]
    assert totals == [min(context, TOP_K) for context in contexts]
    assert any(0 in rank and total for rank, total in zip(counts, totals, strict=False))
    for run in trial.ranks:
        empty = run.views.valid == 0
        assert bool((run.views.partial[empty] == 0).all())
        assert bool((run.views.partial_lse[empty] == -float("inf")).all())


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_rows_without_any_key_are_zero(layers: LayerFactory, arch: str) -> None:
    (trial,) = run_case(layers.dcp(4, 1), Case((0, 0, 0, 0, 0), arch=arch))
    assert_within_bounds([trial])
    for run in trial.ranks:
        assert bool((run.out == 0).all()) and bool((run.views.valid == 0).all())
        assert bool((run.views.selected == -1).all())


@pytest.mark.parametrize(
    ("ranks", "interleave", "arch", "q", "count"),
    [(2, 1, "sm_90a", 1, 3), (4, 64, "sm_100a", 4, 3), (2, 64, "sm_100a", 1, 5)],
)
def test_an_odd_number_of_chained_layers(
    layers: LayerFactory, ranks: int, interleave: int, arch: str, q: int, count: int
) -> None:
    """Layers 0 and 2 share a parity, and so do their mailboxes."""
    case = Case((70, 5, 0, 129), q=q, arch=arch, layers=count)
    trials = run_case(layers.dcp(ranks, interleave), case)
    assert_within_bounds(trials)
    outs = [trial.ranks[0].out for trial in trials]
    assert all(not a.equal(b) for a, b in zip(outs, outs[1:], strict=False))


def test_the_selection_is_the_same_for_every_sharding(layers: LayerFactory) -> None:
    case = Case((70, 512, 16), seed=5)
    chosen = []
    for ranks, interleave in ((1, 1), (2, 64), (8, 1)):
        (trial,) = run_case(layers.dcp(ranks, interleave), case)
        chosen.append([sorted(row.tolist()) for row in selection_of(trial) or []])
    assert chosen[0] == chosen[1] == chosen[2]


def test_an_lse_read_to_the_wrong_base_is_seen(layers: LayerFactory) -> None:
    """prims_ts writes natural logarithms; a merge that takes them for base 2 is off."""
    base = layers.dcp(2, 64)

    class WrongBase(base):  # type: ignore[misc, valid-type]
        def prepare(self, *records, **options):  # type: ignore[no-untyped-def]
            super().prepare(*records, **options)
            merge = self.dcp_value
            self.dcp_value = lambda *a, lse_base, **named: merge(*a, lse_base="2", **named)

    (trial,) = run_case(WrongBase, Case((200, 512), arch="sm_100a"))
    with pytest.raises(AssertionError, match="value gated"):
        assert_within_bounds([trial])
