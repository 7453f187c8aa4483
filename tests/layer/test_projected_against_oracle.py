"""dsa_dcp in small with rows that travel behind W_UV: every stage is within its bound."""

from __future__ import annotations

import pytest
import torch
from layer_checks import assert_within_bounds, compared, lengths
from layer_factory import LayerFactory

from kpipe.runtime.compare import compare_trial
from kpipe.runtime.oracle.compare import relative_error
from kpipe.runtime.reference import value
from kpipe.runtime.trial import Case, run_case

# rows, q, ranks, interleave, arch (a core of base 2, or at few rows of base e), fp8_ds_mla
CASES = [
    (1, 1, 8, 1, "sm_90a", False),
    (3, 1, 1, 1, "sm_100a", False),
    (5, 1, 4, 64, "sm_100a", False),
    (8, 1, 2, 1, "sm_90a", True),
    (8, 4, 4, 1, "sm_100a", False),
    (17, 1, 2, 64, "sm_90a", False),
    (36, 4, 4, 1, "sm_90a", False),
    (64, 1, 2, 1, "sm_100a", False),
]


@pytest.mark.parametrize(("rows", "q", "ranks", "interleave", "arch", "ds_mla"), CASES)
def test_every_stage_is_within_its_bound(
    layers: LayerFactory, rows: int, q: int, ranks: int, interleave: int, arch: str, ds_mla: bool
) -> None:
    case = Case(lengths(rows // q, first=2 * rows + q), q=q, arch=arch, seed=rows)
    trials = run_case(layers.projected(ranks, interleave, ds_mla=ds_mla), case)
    assert {"sparse_core partial", "value gated", "o_proj out"} <= compared(
        assert_within_bounds(trials)
    )
    for other in trials[0].ranks[1:]:
        assert other.out.equal(trials[0].ranks[0].out), "every rank reduces to the same bits"


def test_empty_shards_and_rows_without_keys(layers: LayerFactory) -> None:
    (trial,) = run_case(layers.projected(8), Case((1, 2, 3, 0, 5), arch="sm_90a"))
    assert_within_bounds([trial])
    for run in trial.ranks:
        assert bool((run.out[3] == 0).all()) and bool((run.views.gated[3] == 0).all())


@pytest.mark.parametrize("mode", ["", "serial", "front"])
def test_chained_layers_share_a_parity(layers: LayerFactory, mode: str) -> None:
    case = Case((70, 5, 0, 129), arch="sm_90a", layers=3)
    trials = run_case(layers.projected(2, mode=mode), case)
    assert_within_bounds(trials)


@pytest.mark.parametrize(("rows", "sends_values"), [(8, False), (16, True)])
def test_both_formats_may_stand_in_one_table(
    layers: LayerFactory, rows: int, sends_values: bool
) -> None:
    layer = layers.projected(2, by_rows=True)
    (trial,) = run_case(layer, Case(lengths(rows, first=3), arch="sm_90a"))
    assert_within_bounds([trial])
    assert trial.ranks[0].method.endswith("_projected") == sends_values
    assert {"w_uv", "w_uv_all"} <= set(layer.MEMORY.weights)


def test_rounding_is_that_of_the_format(layers: LayerFactory) -> None:
    """The two formats agree within their bounds, and differ: each rounds at other places."""
    case = Case(lengths(16, first=40), arch="sm_90a")
    (sent,) = run_case(layers.projected(4), case)
    (latents,) = run_case(layers.dcp(4), case)
    gated = [trial.ranks[0].views.gated for trial in (sent, latents)]
    assert 0 < relative_error(*gated) < 2.0**-7


def test_values_of_other_heads_are_found(
    layers: LayerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = value.head_product
    monkeypatch.setattr(value, "head_product", lambda rows, w: right(rows, w.roll(1, 0)))
    (trial,) = run_case(layers.projected(2), Case((70, 5), arch="sm_90a"))
    wrong = {error.stage for error in compare_trial(trial) if not error.ok}
    assert "value" in wrong and "sparse_core" not in wrong


def test_values_that_are_not_rounded_are_refused(layers: LayerFactory) -> None:
    with pytest.raises(ValueError, match="rows of values travel as bf16"):
        value.dcp_value_projected(
            *[torch.zeros(1)] * 5,
            *[_Box()] * 3,
            torch.zeros(1),
            w_uv_all=torch.zeros(1),
            rounds=value.Rounds(value="fp32"),
        )


class _Box:
    """As much of a mailbox as a refusal looks at."""

    ranks = 1
