"""The ladder of a counterexample."""

from __future__ import annotations

from mailbox_protocols import dense, one_box, shipped

from kpipe.codegen.proof.mailbox.explorer import explore
from kpipe.codegen.proof.mailbox.ladder import ladder
from kpipe.codegen.proof.mailbox.unrolled import Bounds

EXPECTED = """\
     s.l    op             rank 0                               rank 1                               held
  1  0.0    gather         put m/0>1                                                                 sentinel
  2  0.0    gather                                              put m/0>0                            sentinel
  3  0.0    gather         poll m/0<1                                                                l0
  4  0.0    gather         re-arm m/0<1                                                              l0
  5  0.1    gather         put m/0>1                                                                 l0
rank 0: `gather` publishes `m` of layer 1 into rank 1 over the word of layer 0, which rank 1 has not re-armed
yet"""  # noqa: E501


def test_two_ranks() -> None:
    bounds = Bounds(2, 4, 1)
    assert ladder(explore(one_box(1), bounds), 2) == EXPECTED


def test_three_ranks_have_a_column_each_and_lines_fit() -> None:
    text = ladder(explore(dense(1), Bounds(3, 4, 1)), 3)
    assert text == ladder(explore(dense(1), Bounds(3, 4, 1)), 3)
    lines = text.splitlines()
    assert lines[0].split() == ["s.l", "op", "rank", "0", "rank", "1", "rank", "2", "held"]
    assert max(map(len, lines)) <= 110 and not any(line != line.rstrip() for line in lines)
    assert "~" not in text and "re-arm partial_mail/0<1" in text


def test_ranks_share_a_column_where_it_is_narrow() -> None:
    lines = ladder(explore(one_box(1), Bounds(2, 4, 1)), 2, width=60).splitlines()
    assert lines[0].split() == ["s.l", "op", "rank:", "act", "held"]
    assert lines[2].split() == ["2", "0.0", "gather", "1:", "put", "m/0>0", "sentinel"]
    assert max(map(len, lines)) <= 60


def test_a_forged_payload_is_marked() -> None:
    verdict = explore(shipped("fork"), Bounds(2, 4, 1), forgeable=frozenset({"candidates"}))
    assert ladder(verdict, 2).count("!") == 1


def test_a_fill_and_a_proof() -> None:
    verdict = explore(one_box(2), Bounds(2, 4, 1), init_barrier=False)
    assert ladder(verdict, 2).splitlines()[1].split() == ["1", "0.0", "fill", "fill", "sentinel"]
    proof = explore(one_box(2), Bounds(2, 4, 1))
    assert ladder(proof, 2) == proof.what
