"""A rank that does not keep the protocol: the others stop with an error that says what is missing.

A group whose ranks all wait is stuck for ever; it is noticed at once, so no test waits for a
deadline.
"""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from layer_factory import LayerFactory

from kpipe.runtime.comm.mailbox import MailboxError, MailboxTimeout
from kpipe.runtime.layer import Layer
from kpipe.runtime.trial import Case, run_case

CASE = Case((70, 1, 64, 129, 33))  # 5 rows: fork, one_shot


def _skipping(layer_class: type[Layer], rank: int, op: str) -> type[Layer]:
    """The layer, in which one rank never runs an op."""

    class Skipping(layer_class):  # type: ignore[misc, valid-type]
        def prepare(self, *records: Any, **options: Any) -> None:
            super().prepare(*records, **options)
            if self.comm.rank == rank:
                setattr(self, op, lambda *operands, **named: None)

    return Skipping


def _forgetting(layer_class: type[Layer], rank: int, mailbox: str) -> type[Layer]:
    """The layer, in which one rank never re-arms a mailbox."""

    class Forgetting(layer_class):  # type: ignore[misc, valid-type]
        def views(self, rows: int) -> SimpleNamespace:
            views = super().views(rows)
            if self.comm.rank == rank:
                getattr(views, mailbox).rearm = lambda index: None
            return views

    return Forgetting


def _failure(layer_class: type[Layer], case: Case, error: type[Exception]) -> Any:
    """The error that ends the run; no thread is left behind."""
    before = threading.active_count()
    with pytest.raises(error) as caught:
        run_case(layer_class, case)
    assert threading.active_count() == before
    return caught.value


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize(
    ("op", "mailbox", "stage"),
    [
        ("o_proj", "o_mail", "o_reduce"),
        ("mla_query", "q_mail", "query_wait"),
        ("topk_local", "candidates", "topk_merge"),
    ],
)
def test_a_publish_that_never_comes(
    layers: LayerFactory, guilty: int, op: str, mailbox: str, stage: str
) -> None:
    error = _failure(_skipping(layers.dcp(2), guilty, op), CASE, MailboxTimeout)
    assert (error.mailbox, error.stage, error.peers) == (mailbox, stage, (guilty,))
    assert re.match(
        rf"mailbox {mailbox}, parity 0, stage {stage}, rank {error.rank}: "
        rf"rank {guilty} has not written \(every rank waits or has ended\); first missing word ",
        str(error),
    )
    assert f"raised by rank {error.rank} of 2" in error.__notes__


def test_two_shot_names_the_owner_that_did_not_gather(layers: LayerFactory) -> None:
    """64 rows: rank 1 sums its columns, but never hands them on."""
    base = layers.dcp(2)

    class Silent(base):  # type: ignore[misc, valid-type]
        def views(self, rows: int) -> SimpleNamespace:
            views = super().views(rows)
            if self.comm.rank == 1:
                views.o_gather.store = lambda peer, index, value: None
            return views

    error = _failure(Silent, Case((3,) * 64), MailboxTimeout)
    assert (error.mailbox, error.stage, error.peers) == ("o_gather", "o_reduce", (1,))


def test_a_rank_that_stops_early(layers: LayerFactory) -> None:
    base = layers.dcp(4, 64)

    class Early(base):  # type: ignore[misc, valid-type]
        def run(self, step: Any, *, stop_after: str = "") -> str:
            return super().run(step, stop_after="query" if self.comm.rank == 2 else "")

    error = _failure(Early, CASE, MailboxTimeout)
    assert error.stage == "dcp_value" and error.mailbox == "lse_mail"
    assert error.peers == (2,) and error.rank != 2


def test_a_rank_that_fails_is_the_one_that_is_reported(layers: LayerFactory) -> None:
    base = layers.dcp(4, 64)

    class Failing(base):  # type: ignore[misc, valid-type]
        def prepare(self, *records: Any, **options: Any) -> None:
            super().prepare(*records, **options)
            if self.comm.rank == 3:
                self.index_gemm = self._fail

        def _fail(self, *operands: Any, **named: Any) -> None:
            raise ArithmeticError("index_gemm of rank 3 broke")

    error = _failure(Failing, CASE, ArithmeticError)
    assert str(error) == "index_gemm of rank 3 broke"
    assert error.__notes__ == ["raised by rank 3 of 4"]


@pytest.mark.parametrize(
    ("mailbox", "stage"),
    [
        ("q_mail", "mla_query"),
        ("candidates", "topk_local"),
        ("partial_mail", "dcp_value"),
        ("lse_mail", "dcp_value"),
        ("o_mail", "o_proj"),
    ],
)
def test_a_mailbox_that_is_not_armed_again(layers: LayerFactory, mailbox: str, stage: str) -> None:
    """Layers 0 and 2 share a parity: the third layer would overwrite words that look unread."""
    forgetting = _forgetting(layers.dcp(2), 1, mailbox)
    run_case(forgetting, Case(CASE.lengths, layers=2))
    error = _failure(forgetting, Case(CASE.lengths, layers=3), MailboxError)
    assert not isinstance(error, MailboxTimeout)
    assert re.fullmatch(
        rf"mailbox {mailbox}, parity 0, stage {stage}, rank [01]: (\d+) of \1 words in rank 1 "
        r"are overwritten before rank 1 has re-armed them",
        str(error),
    )


def test_ranks_that_count_their_layers_differently(layers: LayerFactory) -> None:
    """Rank 1 begins with layer 1: it writes into the other parity, and everybody waits."""
    base = layers.dcp(2)

    class Shifted(base):  # type: ignore[misc, valid-type]
        def prepare(self, *records: Any, comm: Any, layer: int, **options: Any) -> None:
            super().prepare(*records, comm=comm, layer=layer + comm.rank, **options)

    error = _failure(Shifted, CASE, MailboxTimeout)
    assert (error.mailbox, error.stage) == ("candidates", "topk_merge")
    assert error.peers == (1 - error.rank,)


def test_ranks_with_different_rows(layers: LayerFactory) -> None:
    """Rank 1 runs 5 rows and waits for queries of rank 0, which waits for a sixth list."""
    base = layers.dcp(2)

    class Fewer(base):  # type: ignore[misc, valid-type]
        def declared_rows(self, step: Any) -> int:
            return 8 if self.comm.rank == 0 else 5

    error = _failure(Fewer, CASE, MailboxTimeout)
    found = error.mailbox, error.rank, error.peers, error.word[:2]
    assert found in [("candidates", 0, (1,), (1, 5)), ("q_mail", 1, (0,), (0, 0))]
