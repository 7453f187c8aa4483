"""Latent pages of 2048 tokens beside index pages of 64, in both latent formats."""

from __future__ import annotations

import pytest
from layer_checks import assert_within_bounds
from layer_factory import LayerFactory

from kpipe.runtime.trial import Case, run_case

PAGE = 2048
TEXT = """\
extends: {base}.yaml
name: {name}
geometry: small_long
parallel: {{tp: 4}}
caches:
  latent_kv: {{format: {form}, page: 2048}}
"""


@pytest.mark.parametrize(("base", "form"), [("dsa_tp", "fp8_tensor"), ("dsa_tp_ds", "fp8_ds_mla")])
@pytest.mark.parametrize("block_rows", [None, PAGE + 64])
def test_contexts_of_several_pages(
    layers: LayerFactory, base: str, form: str, block_rows: int | None
) -> None:
    """Contexts that end in front of, at and behind the end of a page."""
    folder = layers.root / "pipelines" / "geometry"
    text = (folder / "small.yaml").read_text().replace("geometry: small", "geometry: small_long")
    (folder / "small_long.yaml").write_text(text.replace("context: 512", "context: 4608"))
    name = f"paged_{base}"
    layer_class = layers.layer(name, TEXT.format(base=base, name=name, form=form))
    assert layer_class.MEMORY.caches["latent_kv"].page == PAGE
    assert layer_class.MEMORY.caches["index_kv"].page == 64
    lengths = (PAGE - 1, PAGE, PAGE + 1, 0, 2 * PAGE + 3, 1)
    case = Case(lengths, seed=4, only_ranks=(0, 3), block_rows=block_rows)
    (trial,) = run_case(layer_class, case)
    assert_within_bounds([trial])
    run = trial.ranks[0]
    # The new token of the longest context lies in its third page, that of the third in its second.
    assert (run.latent.slots[[2, 4]] % PAGE).tolist() == [0, 2]
