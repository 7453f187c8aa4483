"""dsa_dcp in small with its residual stream and AttnRes, on virtual ranks, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_checks import assert_within_bounds, compared, lengths
from layer_factory import LayerFactory

from kpipe.runtime import carried
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.trial import Case, run_case

# rows, q, ranks, adds, mix: one- and two-shot (from 33 rows on), padded rows, rows without keys.
CASES = [
    (1, 1, 2, True, ""),
    (3, 1, 4, True, "fp32"),
    (5, 1, 2, False, "fp32"),
    (9, 1, 2, True, "bf16"),
    (12, 4, 2, True, "fp32"),
    (33, 1, 2, True, "fp32"),
    (40, 1, 4, True, ""),
    (36, 4, 2, False, "bf16"),
]


@pytest.mark.parametrize(("rows", "q", "ranks", "adds", "mix"), CASES)
def test_the_stream_and_its_mixture_are_within_their_bounds(
    layers: LayerFactory, rows: int, q: int, ranks: int, adds: bool, mix: str
) -> None:
    layer = layers.residual(ranks, add_prefix=adds, mix=mix)
    case = Case((0, *lengths(rows // q, first=3)[1:]) if rows > 1 else (17,), q=q, seed=rows)
    trials = run_case(layer, replace(case, layers=3))
    wanted = {"o_proj out", *(["o_proj new_prefix"] if mix else [])}
    assert compared(assert_within_bounds(trials)) >= wanted
    for trial in trials:
        for run in trial.ranks[1:]:
            assert run.out.equal(trial.ranks[0].out), "the same bits on every rank"
    first, second = trials[:2]
    stream = first.ranks[0].new_prefix if mix else first.ranks[0].out
    assert second.batch.hidden.equal(first.ranks[0].out)
    assert second.carried.prefix.equal(stream) if adds else second.carried.prefix is None


@pytest.mark.parametrize("mix", ["", "fp32", "bf16"])
def test_the_rounding_of_the_mixture_is_bound(layers: LayerFactory, mix: str) -> None:
    ops = {op.name: op for op in layers.residual(2, mix=mix).OPS}
    assert ops["o_reduce"].constants == ({"rms_eps": 1e-6, "round_mix": mix} if mix else {})


@pytest.mark.parametrize("rows", [2, 33])
@pytest.mark.parametrize("mix", ["", "fp32"])
def test_rows_without_keys_leave_the_stream_as_it_was(
    layers: LayerFactory, mix: str, rows: int
) -> None:
    (trial,) = run_case(layers.residual(2, mix=mix), Case((0,) * rows))
    for run in trial.ranks:
        assert (run.new_prefix if mix else run.out).equal(trial.carried.prefix)
        assert bool(run.out.isfinite().all())


@pytest.mark.parametrize("blocks", [0, 1, 8])
def test_any_number_of_blocks_is_mixed(
    layers: LayerFactory, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    monkeypatch.setattr(carried, "SAVED", blocks)
    (trial,) = run_case(layers.residual(2, mix="fp32"), Case((17, 0, 70)))
    assert trial.carried.saved.shape[0] == blocks
    assert_within_bounds([trial])


def test_too_many_blocks_are_refused(layers: LayerFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "SAVED", 9)
    with pytest.raises(LayerError, match="9 saved blocks; at most 8 are mixed"):
        run_case(layers.residual(2, mix="fp32"), Case((17,)))


def forgetful(base: type[Layer], name: str) -> type[Layer]:
    """A layer whose o_reduce takes that operand for something else."""

    class Forgetful(base):  # type: ignore[misc, valid-type]
        def prepare(self, *records, **options):  # type: ignore[no-untyped-def]
            super().prepare(*records, **options)
            reduce = self.o_reduce

            def forgetting(o_mail, out, **named):  # type: ignore[no-untyped-def]
                if name == "sum":
                    for source in range(o_mail.ranks):
                        o_mail.poll((source, slice(0, out.shape[0])))  # a later word would be seen
                        o_mail.local[source, : out.shape[0]] = 0
                else:
                    named[name] = torch.zeros_like(named[name])
                reduce(o_mail, out, **named)

            self.o_reduce = forgetting

    return Forgetful


@pytest.mark.parametrize(
    ("name", "what"),
    [("sum", "o_proj new_prefix"), ("prefix", "o_proj inactive rows"), ("saved", "o_proj out")],
)
def test_what_is_left_out_is_seen(layers: LayerFactory, name: str, what: str) -> None:
    layer = forgetful(layers.residual(2, mix="fp32"), name)
    (trial,) = run_case(layer, Case((200, 512, 0)))
    with pytest.raises(AssertionError, match=what):
        assert_within_bounds([trial])


def test_a_step_says_what_it_lacks(layers: LayerFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried.Carried, "step", lambda self, step: step)
    text = r"prefix is missing: \[1, 256\] bf16; saved is missing: \[blocks, 1, 256\] bf16"
    with pytest.raises(LayerError, match=text):
        run_case(layers.residual(2, mix="fp32"), Case((17,)))
