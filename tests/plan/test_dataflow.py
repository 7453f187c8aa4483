"""Writers ahead of readers, mailboxes polled and re-armed; random modes never crash."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_project import findings_edited, make_project, plan_of, render

from kpipe.codegen.diagnostics import SpecError

FRONT = (
    "main: [packed_gemm, fork side, index_front, index_scores, topk_select, join side, core, "
    "value, o_proj]"
)
WAIT = (
    "main: [packed_gemm, mla_query, index, index_scores, topk_local, topk_merge, query_wait, "
    "core, dcp_value, o_proj, o_reduce]"
)


@pytest.mark.parametrize(
    ("name", "old", "new", "code", "message"),
    [
        (
            "dsa_tp",
            FRONT,
            FRONT.replace("join side, core", "core, join side"),
            "KP201",
            "mode `front`: `sparse_decode` reads `query` before `mla_query` has written it",
        ),
        (
            "dsa_tp",
            FRONT,
            FRONT.replace("topk_select, ", ""),
            "KP201",
            "mode `front`: `sparse_decode` reads `selected`, which no op of the mode writes",
        ),
        (
            "dsa_tp",
            FRONT,
            FRONT.replace("index_front", "query_norm, index_gemm, dsa_index, index_front"),
            "KP201",
            "mode `front`: `dsa_index` and `index_front` both write `index_q8`",
        ),
        (
            "dsa_dcp",
            WAIT,
            WAIT.replace("query_wait, core", "core, query_wait"),
            "KP701",
            "mode `wait`: `sparse_decode` reads mailbox `q_mail` and nothing ahead of it waits "
            "for the peers' words",
        ),
        (
            "dsa_dcp",
            WAIT,
            WAIT.replace("mla_query, index", "query_wait, mla_query, index").replace(
                "topk_merge, query_wait", "topk_merge"
            ),
            "KP701",
            "mode `wait`: `query_wait` waits for mailbox `q_mail`, which this rank has not "
            "published by then: every rank would wait for ever",
        ),
        (
            "dsa_dcp",
            WAIT,
            WAIT.replace(", o_reduce", ""),
            "KP704",
            "mode `wait`: mailbox `o_mail` is re-armed by no op, the spec says `o_reduce`",
        ),
    ],
)
def test_refusals(name: str, old: str, new: str, code: str, message: str, tmp_path: Path) -> None:
    found = findings_edited(tmp_path, name, (old, new))
    assert (code, message) in [(f.code, f.message) for f in found]


def test_a_column_counts_as_written_with_its_buffer(tmp_path: Path) -> None:
    found = findings_edited(tmp_path, "dsa_tp", (FRONT, FRONT.replace("packed_gemm, ", "")))
    readers = {f.message for f in found}
    assert "mode `front`: `mla_query` reads `q_a`, which no op of the mode writes" in readers


WORDS = {
    "dsa_tp": "packed_gemm query_norm mla_query index index_front index_gemm dsa_index "
    "index_scores topk_select core value o_proj",
    "dsa_dcp": "packed_gemm query_norm mla_query query_wait index index_front index_gemm "
    "dsa_index index_scores topk_local topk_merge core dcp_value o_proj o_reduce",
}
LEGAL = {
    "dsa_tp": [
        "packed_gemm mla_query index index_scores topk_select core value o_proj",
        "packed_gemm query_norm mla_query index_gemm dsa_index index_scores topk_select core "
        "value o_proj",
        "packed_gemm index_front index_scores topk_select mla_query core value o_proj",
    ],
    "dsa_dcp": [
        "packed_gemm mla_query index index_scores topk_local topk_merge query_wait core "
        "dcp_value o_proj o_reduce",
        "packed_gemm mla_query index index_scores topk_local topk_merge core dcp_value o_proj "
        "o_reduce",
    ],
}


def random_mode(name: str, dice: random.Random) -> str:
    """A legal list with up to three changes, some of it perhaps on a side stream."""
    words = dice.choice(LEGAL[name]).split()
    for _ in range(dice.choice((0, 0, 0, 1, 2))):
        change, at = dice.choice(("swap", "drop", "insert")), dice.randrange(len(words))
        if change == "swap":
            other = dice.randrange(len(words))
            words[at], words[other] = words[other], words[at]
        elif change == "drop" and len(words) > 1:
            del words[at]
        else:
            words.insert(at, dice.choice(WORDS[name].split()))
    side: list[str] = []
    if dice.random() < 0.6:
        moved = dice.sample(range(len(words)), dice.choice((0, 1, 1, 2)) % len(words))
        side = [word for i, word in enumerate(words) if i in moved]
        words = [word for i, word in enumerate(words) if i not in moved]
        first, second = sorted(dice.randrange(len(words) + 1) for _ in range(2))
        for at, verb in ((second, "join side"), (first, "fork side")):
            if dice.random() < 0.95:
                words.insert(at, verb)
    lines = [f"main: [{', '.join(words)}]"]
    return "; ".join(lines + ([f"side: [{', '.join(side)}]"] if side else []))


@pytest.mark.parametrize("name", ["dsa_tp", "dsa_dcp"])
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 1 << 32))
def test_random_modes_plan_or_are_refused_with_a_code(name: str, seed: int, tmp_path: Path) -> None:
    """Never an exception of another type; what plans also renders to Python."""
    mode = random_mode(name, random.Random(seed))
    lines = "".join(f"      {line}\n" for line in mode.split("; "))
    make_project(tmp_path)
    path = tmp_path / "pipelines" / f"{name}.yaml"
    text = path.read_text().replace("  modes:", f"  modes:\n    random:\n{lines}#", 1)
    text = text.replace("queries: [1, 4]", "queries: [1]")
    head, _, _ = text.partition("  table:\n")
    rest = "fork_split" if name == "dsa_tp" else "fork"
    path.write_text(f'{head}  table: {{"1-32": random, "33-64": {rest}}}\n')
    try:
        plan = plan_of(tmp_path, name)
    except SpecError as error:
        assert {d.code for d in error.diagnostics} <= CODES, error
    else:
        ast.parse(render(plan)["layer.py"])


CODES = {"KP103", "KP104", "KP109", "KP112", "KP201", "KP306", "KP701", "KP704"}
