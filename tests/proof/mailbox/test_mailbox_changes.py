"""Changes to a safe protocol: each is found, or safe for a reason that the test states."""

from __future__ import annotations

import pytest
from mailbox_protocols import (
    MODES,
    dense,
    one_box,
    rearm_moved,
    shipped,
    without,
    without_rearm,
)
from mailbox_simulator import Simulator

from kpipe.codegen.proof.mailbox.explorer import explore
from kpipe.codegen.proof.mailbox.protocol import Act, Box, Op, Protocol, Split, Use
from kpipe.codegen.proof.mailbox.unrolled import Bounds
from kpipe.codegen.proof.mailbox.verdict import Verdict

LONG = Bounds(2, 4, 1)
ODD = Bounds(2, 3, 2)
BOXES = ("q_mail", "candidates", "partial_mail", "lse_mail", "o_mail", "o_gather")


def broken(
    protocol: Protocol,
    kind: str,
    rule: str,
    bounds: Bounds = LONG,
    *,
    barrier: bool = True,
    forgeable: frozenset[str] = frozenset(),
) -> Verdict:
    """The verdict, whose counterexample the independent simulator has replayed."""
    verdict = explore(protocol, bounds, init_barrier=barrier, forgeable=forgeable)
    assert (verdict.proved, verdict.kind, verdict.rule) == (False, kind, rule), verdict.what
    forged = next((event for event in verdict.counterexample if event.forged), None)
    simulator = Simulator(
        protocol, bounds, barrier=barrier, forged=forged, left_out=verdict.left_out
    )
    assert simulator.replay(verdict.counterexample)
    return verdict


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("mode", MODES)
def test_one_parity_is_enough_where_another_exchange_lies_between(mode: str, box: str) -> None:
    """Every layer has several all-to-all exchanges.

    Before a rank can publish the next layer into a copy, it has polled an exchange that each peer
    enters only behind its own re-arm of that copy.  So a single parity of one mailbox survives.
    """
    verdict = explore(shipped(mode, "two_shot").with_parities(box, 1), LONG)
    assert verdict.proved, verdict.what


@pytest.mark.parametrize("mode", MODES)
def test_one_parity_of_every_mailbox_is_enough_with_an_all_reduce(mode: str) -> None:
    """o_reduce ends a layer: a rank past it knows that all peers are past their value op.  In
    turn a rank past the next layer's first poll knows that all peers are past o_reduce."""
    protocol = shipped(mode, "two_shot")
    for box in BOXES:
        protocol = protocol.with_parities(box, 1)
    for bounds in (LONG, ODD):
        assert explore(protocol, bounds).proved


@pytest.mark.parametrize("mode", MODES)
def test_an_odd_number_of_layers_is_safe_with_an_all_reduce(mode: str) -> None:
    """Last and first layer share a parity; o_reduce lies between them as in the test above."""
    assert explore(shipped(mode), ODD).proved


def test_one_parity_of_the_gather_fails_without_an_all_reduce() -> None:
    """Rank 0 has merged the partials of rank 1, whose re-arm of the heads may still be going on."""
    verdict = broken(dense(q_parities=1), "reused", "KP702")
    assert (verdict.box, verdict.op) == ("q_mail", "mla_query")
    assert verdict.what == (
        "rank 0: `mla_query` publishes `q_mail` of layer 1 into rank 1 over the word of layer 0, "
        "which rank 1 has not re-armed yet"
    )


def test_one_parity_of_the_partials_is_enough_behind_the_gather() -> None:
    """The gather of the next layer lies between the re-arm and the next publish."""
    assert explore(dense(partial_parities=1), LONG).proved


@pytest.mark.parametrize("ranks", [2, 3])
def test_two_parities_are_enough_without_an_all_reduce(ranks: int) -> None:
    assert explore(dense(), Bounds(ranks, 4, 1)).proved


def test_an_odd_number_of_layers_fails_without_an_all_reduce() -> None:
    verdict = broken(dense(), "reused", "KP702", ODD)
    assert "`q_mail` of step 1 layer 0 into rank 1 over the word of step 0 layer 2" in verdict.what
    assert explore(dense(), Bounds(2, 3, 2, carry_parity=True)).proved
    assert explore(dense(), Bounds(2, 2, 2)).proved


@pytest.mark.parametrize("mode", MODES)
def test_the_shipped_modes_need_their_all_reduce_for_odd_layers(mode: str) -> None:
    protocol = without(shipped(mode), "o_proj", "o_reduce")
    assert explore(protocol, LONG).proved
    assert broken(protocol, "reused", "KP702", ODD).box == "q_mail"


@pytest.mark.parametrize(("parities", "proved"), [(1, False), (2, True), (3, True)])
def test_a_single_gather(parities: int, proved: bool) -> None:
    bounds = Bounds(2, parities + 2, 1)
    assert explore(one_box(parities), bounds).proved is proved


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("box", BOXES)
def test_a_mailbox_that_nothing_rearms(mode: str, box: str) -> None:
    protocol = without_rearm(shipped(mode, "two_shot"), box)
    verdict = broken(protocol, "never_rearmed", "KP701")
    assert verdict.box == box
    assert verdict.what.endswith(f"over the word of layer 0; no op re-arms `{box}`")


def test_words_that_are_left_over_at_the_end() -> None:
    """Only the first of two mailboxes of the same op is re-armed, and there is no reuse yet."""
    protocol = without_rearm(one_box(5), "m")
    verdict = broken(protocol.with_parities("m", 7), "never_rearmed", "KP701", Bounds(2, 9, 1))
    assert "over the word of layer 0" in verdict.what


@pytest.mark.parametrize("mode", ["serial", "fork", "front"])
def test_the_merge_rearms_the_heads_while_the_core_needs_them(mode: str) -> None:
    verdict = broken(rearm_moved(shipped(mode), "q_mail", "topk_merge"), "rearm", "KP704")
    assert verdict.what == (
        "rank 0: `sparse_decode` of layer 0 reads `q_mail` after a word of it has been re-armed"
    )


def test_the_merge_rearms_the_heads_ahead_of_their_poll() -> None:
    verdict = broken(rearm_moved(shipped("wait"), "q_mail", "topk_merge"), "rearm", "KP704")
    assert verdict.what == (
        "a word is re-armed before it is polled: rank 0 waits in `query_wait` of layer 0 for "
        "`q_mail` from rank 0 for ever"
    )


def test_a_rearm_beside_the_read_tears_it() -> None:
    """The core reads on one stream while the merge of another stream re-arms."""
    acts = (Use(Act.PUBLISH, "m"), Use(Act.POLL, "m", after=(0,)))
    both = (Use(Act.READ, "m"), Use(Act.REARM, "m"))
    protocol = Protocol((Box("m", 2),), (Op("query", "main", acts), Op("core", "main", both)))
    verdict = explore(protocol, LONG)
    assert (verdict.kind, verdict.rule) in {("torn", "KP704"), ("rearm", "KP704")}
    assert broken(protocol, verdict.kind, "KP704").box == "m"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("box", BOXES)
def test_a_payload_that_equals_the_sentinel(mode: str, box: str) -> None:
    protocol = shipped(mode, "two_shot")
    verdict = broken(protocol, "sentinel", "KP703", forgeable=frozenset({box}))
    assert verdict.box == box
    assert "equals the sentinel, so rank " in verdict.what
    assert sum(event.forged for event in verdict.counterexample) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_publish_ahead_of_the_peers_fill(mode: str) -> None:
    verdict = broken(shipped(mode), "init", "KP705", barrier=False)
    assert [event.act for event in verdict.counterexample] == ["fill", "publish", "fill"]
    assert verdict.what == (
        "rank 1: the first fill erases words that its peers have already published"
    )


@pytest.mark.parametrize("mode", ["fork", "front"])
def test_a_core_that_nothing_waits_for(mode: str) -> None:
    verdict = broken(without(shipped(mode), "query_wait"), "unarrived", "KP701")
    assert (verdict.box, verdict.op) == ("q_mail", "sparse_decode")
    assert "before every word has arrived" in verdict.what


def test_the_candidates_exchange_stands_in_for_the_query_wait() -> None:
    """Mode wait: a peer publishes its candidates behind its heads on one stream, so whoever has
    all candidates has all heads.  The order holds for words that are visible at a kernel's end."""
    assert explore(without(shipped("wait"), "query_wait"), LONG).proved


def test_a_poll_ahead_of_the_publish_stops_everybody() -> None:
    ops = (
        Op("wait", "main", (Use(Act.POLL, "m"),)),
        Op("send", "main", (Use(Act.PUBLISH, "m"),)),
        Op("clear", "main", (Use(Act.REARM, "m"),)),
    )
    verdict = broken(Protocol((Box("m", 2),), ops), "deadlock", "KP706")
    assert verdict.what == (
        "no rank can go on: rank 0 waits in `wait` of layer 0 for `m` from rank 0; rank 1 waits "
        "in `wait` of layer 0 for `m` from rank 0"
    )
    assert verdict.counterexample == ()


def test_two_exchanges_that_wait_for_each_other() -> None:
    ops = (
        Op("first", "main", (Use(Act.POLL, "a"), Use(Act.PUBLISH, "b", after=(0,)))),
        Op("second", "main", (Use(Act.POLL, "b"), Use(Act.PUBLISH, "a", after=(0,)))),
    )
    protocol = Protocol((Box("a", 2), Box("b", 2)), ops)
    assert broken(protocol, "deadlock", "KP706").op == "first"


def test_a_second_publish_of_the_same_layer() -> None:
    protocol = one_box(2)
    again = Op("again", "main", (Use(Act.PUBLISH, "m"),))
    doubled = Protocol(protocol.boxes, (again, *protocol.items))
    assert "a second time" in broken(doubled, "lost", "KP701").what


def test_a_search_that_is_given_up() -> None:
    verdict = explore(shipped("fork"), LONG, limit=20)
    assert (verdict.proved, verdict.counterexample, verdict.kind) == (False, None, "undecided")
    assert verdict.what.startswith("not decided within ")


def test_words_to_oneself_are_explored_where_launches_do_not_order_them() -> None:
    """Publish and re-arm of a rank's own word run side by side, and nobody polls it."""
    uses = (Use(Act.PUBLISH, "m", "self"), Use(Act.REARM, "m", "self"))
    verdict = explore(Protocol((Box("m", 2),), (Op("both", "main", uses),)), LONG)
    assert (verdict.kind, verdict.box, verdict.left_out) == ("reused", "m", ())
    ordered = (uses[0], Use(Act.REARM, "m", "self", after=(0,)))
    assert explore(Protocol((Box("m", 2),), (Op("both", "main", ordered),)), LONG).proved


def test_a_word_that_waits_for_another_layer() -> None:
    """Nobody re-arms ahead of the second poll: it takes the first layer's word for its own."""
    ops = (
        Op("wait", "main", (Use(Act.POLL, "m", "self"),)),
        Op("send", "side", (Use(Act.PUBLISH, "m", "self"),)),
    )
    protocol = Protocol((Box("m", 1),), (Split("side"), *ops))
    verdict = explore(protocol, Bounds(2, 3, 1))
    assert (verdict.kind, verdict.rule) == ("stale", "KP701")
    assert verdict.what.endswith("takes the word of layer 0 in `m` for its own")
