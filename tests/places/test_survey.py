"""`kpipe modes` against a search that writes every mode out as text and runs the whole check."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import kpipe.codegen.places.survey as survey_module
from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError
from kpipe.codegen.places.describe import describe_yaml
from kpipe.codegen.places.survey import Survey, survey
from kpipe.codegen.places.words import words_of
from kpipe.codegen.plan.api import plan_pipeline, resolve_spec
from kpipe.codegen.plan.describe import matching_steps
from kpipe.codegen.plan.model import PipelinePlan
from kpipe.codegen.proof.api import prove_pipeline
from kpipe.codegen.repair.trial import Outcome

BASE = Path(__file__).resolve().parents[1] / "cases" / "_base"
MAIN = ["packed_gemm", "query_norm", "index_gemm", "dsa_index", "index_scores", "topk_select"]
MAIN += ["sparse_decode", "mla_value", "o_proj"]  # mode `fork` without the query on its side
Lists = dict[str, list[str]]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    shutil.copytree(BASE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "kpipe.toml").touch()
    return tmp_path / "base.yaml"


def surveyed(path: Path, name: str, rows: int = 8, q: int = 1) -> tuple[Survey, str]:
    """The survey of the mode of these rows, and its first schedule as YAML."""
    resolved = resolve_spec(str(path), {})
    steps = matching_steps(plan_pipeline(str(path)), rows, q, "sm_90a")
    found = survey(resolved, steps, words_of(resolved, name, steps), lambda n, total: None)
    return found, describe_yaml(resolved, found, found.legal[0], name)


def with_fork_mode(path: Path, lists: Lists) -> str:
    """The text of the spec with other lists in mode `fork`."""
    text = path.read_text()
    start, end = text.index("    fork:\n"), text.index("  table:")
    listed = "".join(f"      {name}: [{', '.join(words)}]\n" for name, words in lists.items())
    return f"{text[:start]}    fork:\n{listed}{text[end:]}"


def verdict(path: Path, lists: Lists) -> PipelinePlan | tuple[str, ...]:
    """The proved plan of the whole spec with these lists, or the codes of what is wrong."""
    other = path.with_name("other.yaml")
    other.write_text(with_fork_mode(path, lists))
    try:
        return prove_pipeline(str(other)).pipeline
    except SpecError as error:
        return tuple(finding.code for finding in error.diagnostics)


def every_layout() -> list[Lists]:
    """`mla_query` at each place of main, and on a side stream with each fork and join."""
    found: list[Lists] = []
    for place in range(len(MAIN) + 1):
        found.append({"main": [*MAIN[:place], "mla_query", *MAIN[place:]]})
    for fork in range(len(MAIN)):
        for join in range(fork + 1, len(MAIN) + 1):
            main = [*MAIN[:fork], "fork side", *MAIN[fork:join], "join side", *MAIN[join:]]
            found.append({"main": main, "side": ["mla_query"]})
    return found


def key_of(lists: Lists) -> tuple:
    """Lists in a form that does not depend on the order of streams."""
    return tuple(sorted((name, tuple(words)) for name, words in lists.items()))


def test_legal_are_those_that_the_whole_check_passes(spec: Path) -> None:
    found, _ = surveyed(spec, "mla_query")
    layouts = every_layout()
    passed = {key_of(one) for one in layouts if isinstance(verdict(spec, one), PipelinePlan)}
    legal = {
        key_of({stream: list(words) for stream, words in one.place.layout.streams})
        for one in found.legal
    }
    assert 5 < len(passed) < len(layouts)
    assert legal == passed
    assert found.illegal == len(layouts) - len(passed)


def test_blocked_places_are_refused_for_that_reason(spec: Path) -> None:
    found, _ = surveyed(spec, "query")
    checked = 0
    for block in found.blocked:
        for place in block.places[:2]:
            lists = {stream: list(words) for stream, words in place.layout.streams}
            codes = verdict(spec, lists)
            assert not isinstance(codes, PipelinePlan) and block.code in codes
            checked += 1
    assert checked >= 4


def test_blocked_names_both_accesses_and_the_way_out(spec: Path) -> None:
    found, _ = surveyed(spec, "mla_query")
    listed = [(block.code, block.sentences, block.help) for block in found.blocked]
    assert listed[0] == (
        "KP201",
        ("`sparse_decode` reads `query` before `mla_query` has written it",),
        "put `mla_query` ahead of it, or join its stream first",
    )
    assert listed[1][1] == (  # two buffers of one pair of ops are one cause
        "`mla_query` reads `kv_a` before `packed_gemm` has written it",
        "`mla_query` reads `q_a` before `packed_gemm` has written it",
    )
    # Forked at the start and joined behind the core, with three places for the join: both hold.
    assert [len(block.places) - len(block.alone) for block in found.blocked] == [3, 3]


def test_pasted_yaml_is_the_schedule_that_was_listed(spec: Path) -> None:
    found, text = surveyed(spec, "query")
    best = found.legal[0].step
    assert best is not None
    name = text.split(":\n")[0].split()[-1]  # the key behind the comment
    assert name == "fork_query"
    pasted = spec.read_text().replace("  table:", f"{text}  table:")
    pasted = pasted.replace('"5-8": fork}', f'"5-8": {name}}}')
    spec.with_name("pasted.yaml").write_text(pasted)
    plan = prove_pipeline(str(spec.with_name("pasted.yaml"))).pipeline
    step = matching_steps(plan, 8, 1, "sm_90a")[0]
    assert step.mode == name
    assert step.identity == best.identity


def test_the_mode_as_it_is_gains_nothing(spec: Path) -> None:
    found, _ = surveyed(spec, "query")
    current = [one for one in found.legal if one.current]
    assert len(current) == 1 and current[0].time == found.time
    assert [round(one.time, 2) for one in found.legal] == sorted(
        round(one.time, 2) for one in found.legal
    )


def test_one_schedule_is_listed_once(spec: Path) -> None:
    found, _ = surveyed(spec, "query")
    closures = [closure(dict(one.place.layout.streams)) for one in found.legal]
    assert len(set(closures)) == len(closures) > 10
    assert sum(one.alike for one in found.legal) > len(closures)


def closure(lists: dict[str, tuple[str, ...]]) -> frozenset:
    """Pairs of ops of which one is over before the other, and neighbours on one stream."""
    over: dict[str, set[str]] = {}
    neighbours = set()

    def walk(stream: str, done: set[str], starts: dict[str, set[str]]) -> set[str]:
        last = ""
        for word in lists[stream]:
            verb, _, name = word.rpartition(" ")
            if verb == "fork":
                starts[name] = set(done)
            elif verb == "join":
                done = done | walk(name, starts[name], starts)
            else:
                over[name] = set(done)
                neighbours.add((last, name))
                done, last = done | {name}, name
        return done

    walk("main", set(), {})
    return frozenset(neighbours | {(a, b) for b, ahead in over.items() for a in ahead})


def test_an_op_that_the_mode_lacks_is_put_in(spec: Path) -> None:
    found, _ = surveyed(spec, "query_norm", rows=4)
    assert (found.mode, found.added) == ("serial", True)
    assert all("query_norm" in one.place.layout.launches for one in found.legal)
    assert any(one.flags == ("mla_query not writes_q_c",) for one in found.legal)


def test_a_mode_that_is_refused_is_not_surveyed(spec: Path) -> None:
    lists = {"main": ["fork side", *MAIN, "join side"], "side": ["mla_query"]}
    spec.write_text(with_fork_mode(spec, lists))
    with pytest.raises(SpecError) as raised:
        surveyed(spec, "query")
    assert {finding.code for finding in raised.value.diagnostics} == {"KP201"}


def test_an_unsafe_protocol_is_told_by_its_own_finding(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial only learns that some word is lost; which one comes from the explorer."""
    unsafe = Diagnostic("KP702", "a mailbox protocol is not safe", None)
    told = Diagnostic("KP702", "mode `fork`: rank 0 loses a word", Span("base.yaml", 1, 1, 1, 2))
    trial = survey_module.proved_outcome

    def moved_to_main(pipeline: PipelinePlan, asked: tuple) -> Outcome:
        outcome = trial(pipeline, asked)
        return outcome if len(asked[0].streams) > 1 else replace(outcome, found=(unsafe,))

    monkeypatch.setattr(survey_module, "proved_outcome", moved_to_main)
    monkeypatch.setattr(survey_module, "mailbox_findings", lambda pipeline: [told])
    found, _ = surveyed(spec, "mla_query")
    block = next(block for block in found.blocked if block.code == "KP702")
    assert block.sentences == ("rank 0 loses a word",)
    assert block.alone == block.places != ()
    assert all(len(place.layout.streams) == 1 for place in block.places)
