"""The committed layers at the model's own dimensions: one step each against the oracle."""

from __future__ import annotations

import pytest
import torch
from layer_checks import assert_within_bounds
from layer_factory import REPOSITORY

from kpipe.runtime.generated_folder import geometry_of, load_layer
from kpipe.runtime.oracle.geometry import KIMI_K31
from kpipe.runtime.trial import Case, run_case


def test_context_parallel_over_eight_ranks() -> None:
    """More keys than top_k, a short context, a padded request; 3 rows, natural logarithms."""
    layer = load_layer(REPOSITORY / "generated" / "dsa_dcp")
    assert geometry_of(layer) == KIMI_K31 and layer.RANKS == 8
    (trial,) = run_case(layer, Case((2500, 40, 0), arch="sm_100a"))
    assert_within_bounds([trial])
    counts = torch.stack([run.views.valid for run in trial.ranks])
    assert counts.sum(0).tolist() == [2048, 40, 0]
    assert int((counts[:, 1] == 5).sum()) == 8, "40 keys dealt to 8 ranks"
    assert all(run.out.equal(trial.ranks[0].out) for run in trial.ranks)


def test_tensor_parallel_rank_three() -> None:
    """A request of four verify rows around top_k, and one shorter than they are."""
    layer = load_layer(REPOSITORY / "generated" / "dsa_tp")
    assert geometry_of(layer) == KIMI_K31 and layer.RANKS == 8
    (trial,) = run_case(layer, Case((2050, 2), q=4, arch="sm_90a", only_ranks=(3,)))
    assert_within_bounds([trial])
    assert trial.ranks[0].views.valid.tolist() == [2047, 2048, 2048, 2048, 0, 0, 1, 2]


@pytest.mark.parametrize(("name", "requests"), [("dsa_tp_ds", 2), ("dsa_tp_flashmla", 34)])
def test_latents_with_group_scales(name: str, requests: int) -> None:
    """Both cores over fp8_ds_mla rows; beyond 32 rows the values are a product of their own."""
    layer = load_layer(REPOSITORY / "generated" / name)
    assert layer.MEMORY.cache_format("latent_kv").row_bytes == 512 + 4 * 4 + 2 * 64
    lengths = (2050, *(place % 3 for place in range(requests - 1)))
    (trial,) = run_case(layer, Case(lengths, arch="sm_90a", only_ranks=(5,)))
    assert_within_bounds([trial])
    assert trial.ranks[0].views.valid[:2].tolist() == [2048, 0]
    assert trial.ranks[0].views.query.dtype == torch.bfloat16
