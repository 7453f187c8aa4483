"""dsa_tp in small: every stage of every kind of step is within its bound of the oracle."""

from __future__ import annotations

import pytest
from layer_checks import TOP_K, assert_within_bounds, compared, lengths
from layer_factory import LayerFactory

from kpipe.runtime.trial import Case, run_case

STAGES = {
    "projection q_a",
    "projection kv_a",
    "projection wk",
    "projection wv",
    "projection gate",
    "query query",
    "query latent_kv rows",
    "indexer index_kv rows",
    "indexer index_q8",
    "indexer index_w",
    "indexer selection",
    "sparse_core latent",
    "value gated",
    "o_proj out",
}
DECLARED = {1: (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64), 4: (4, 8, 16, 32, 64)}
UNDECLARED = {1: (9, 17, 33, 63), 4: (12, 20, 36, 60)}


def _cases() -> list[tuple[int, int, str, bool, int]]:
    """Every row count with q; the other axes go round with different periods."""
    cases = []
    for q in (1, 4):
        for rows in DECLARED[q] + UNDECLARED[q]:
            turn = len(cases)
            arch = ("sm_90a", "sm_100a")[turn % 2]
            cases.append((rows, q, arch, turn % 3 == 2, (4, 1, 8, 2)[turn % 4]))
    # The other architecture for the steps where it takes another path.
    other = [(2, 1, "sm_90a"), (16, 1, "sm_100a"), (64, 1, "sm_100a"), (8, 4, "sm_100a")]
    cases += [(rows, q, arch, False, 2) for rows, q, arch in other]
    return cases


@pytest.mark.parametrize(("rows", "q", "arch", "ds_mla", "tp"), _cases())
def test_every_stage_is_within_its_bound(
    layers: LayerFactory, rows: int, q: int, arch: str, ds_mla: bool, tp: int
) -> None:
    case = Case(
        lengths(rows // q, first=rows + q),
        q=q,
        arch=arch,
        seed=rows,
        only_ranks=tuple(sorted({0, tp - 1})),
        block_rows=96 if rows % 2 else None,
    )
    errors = assert_within_bounds(run_case(layers.tp(tp, ds_mla=ds_mla), case))
    if any(case.lengths):
        assert compared(errors) >= STAGES


@pytest.mark.parametrize("context", [TOP_K - 1, TOP_K, TOP_K + 1, 0, 1, 63, 64, 65, 128, 512])
def test_one_request_of_every_edge_length(layers: LayerFactory, context: int) -> None:
    (trial,) = run_case(layers.tp(4), Case((context,), seed=context))
    assert_within_bounds([trial])
    assert trial.ranks[0].views.valid.tolist() == [min(context, TOP_K)]


@pytest.mark.parametrize(("arch", "q"), [("sm_90a", 1), ("sm_100a", 4)])
def test_chained_layers_share_their_scratch(layers: LayerFactory, arch: str, q: int) -> None:
    case = Case((70, 5, 0, 129), q=q, arch=arch, layers=3, only_ranks=(0, 1))
    trials = run_case(layers.tp(2), case)
    assert_within_bounds(trials)
    first, second, third = (trial.ranks[0] for trial in trials)
    assert not first.out.equal(second.out) and not second.out.equal(third.out)
    assert first.layer.buffers["gated"].data_ptr() == third.layer.buffers["gated"].data_ptr()


def test_a_wrong_weight_shows_in_the_first_stage_that_uses_it(layers: LayerFactory) -> None:
    """The comparison itself can fail, and says where."""
    base = layers.tp(4)

    class Swapped(base):  # type: ignore[misc, valid-type]
        def prepare(self, weights, caches, **options):  # type: ignore[no-untyped-def]
            weights.w_uv = weights.w_uv.flip(0)
            super().prepare(weights, caches, **options)

    (trial,) = run_case(Swapped, Case((70, 1)))
    with pytest.raises(AssertionError, match=r"layer 0, value gated, rank 0: .*\n.*o_proj out"):
        assert_within_bounds([trial])
