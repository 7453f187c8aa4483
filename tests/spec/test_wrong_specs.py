"""One mistake per spec: the place, the sentence and the repair that a stranger gets.

The cases stand in wrong_specs.yaml.  Headlines are compared whole; the place is written there as
the text that begins at the caret, so that a line added to a shipped spec breaks no case.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from spec_project import findings_of, make_project

from kpipe.codegen.diagnostics import ALLOWED_CAP, Diagnostic, render_text
from kpipe.codegen.ops.registry import CONTRACTS

CASES = YAML(typ="safe").load(Path(__file__).with_name("wrong_specs.yaml").read_text())
ACTIONABLE = re.compile(
    "did you mean|expected|takes|is (0 or )?a positive whole number|lower-case letters|use `/`"
    "|allowed:"
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def place_of(case: dict[str, Any], text: str) -> str:
    """`line:column` of the case's `at` in the edited file."""
    if not case["at"]:
        return "1:1"
    starts = [match.start() for match in re.finditer(re.escape(case["at"]), text)]
    assert "occurrence" in case or len(starts) == 1, f"{len(starts)} times: {case['at']}"
    before = text[: starts[case.get("occurrence", 1) - 1]]
    return f"{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


def lines_of(finding: Diagnostic, start: str) -> list[str]:
    text = render_text((finding,), {})
    return [line for line in text.split("\n") if line.startswith(f"   = {start}: ")]


def ids(case: dict[str, Any]) -> str:
    return case["case"]


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_wrong_spec(case: dict[str, Any], project: Path) -> None:
    make_project(project, [(e["file"], e["old"], e["new"]) for e in case["edits"]])
    found = findings_of(f"pipelines/{case['spec']}")
    assert len(found) == case["findings"]
    path = project / case["file"]
    place = place_of(case, path.read_text() if path.is_file() else "")
    headline = f"{case['file']}:{place}: error[{case['code']}]: {case['message']}"
    assert render_text(found[:1], {}).split("\n")[0] == headline
    assert lines_of(found[0], "allowed") == allowed_line(case)
    assert lines_of(found[0], "help") == help_line(case)
    for finding in found:
        assert finding.span is not None
        assert finding.help or finding.allowed or ACTIONABLE.search(finding.message), finding
        assert not re.search("pydantic|Traceback|validation|NoneType|<class", finding.message)


def allowed_line(case: dict[str, Any]) -> list[str]:
    if "allowed" not in case:
        return []
    words = sorted(CONTRACTS) if case["allowed"] == "OPS" else case["allowed"].split(", ")
    hidden = len(words) - ALLOWED_CAP
    more = f" and {hidden} more" if hidden > 0 else ""
    return [f"   = allowed: {', '.join(words[:ALLOWED_CAP])}{more}"]


def help_line(case: dict[str, Any]) -> list[str]:
    return [f"   = help: {case['help']}"] if "help" in case else []


def test_findings_come_in_order_of_place_and_without_repetition(project: Path) -> None:
    edits = [
        ("dsa_tp.yaml", "options: {tie: low_id}", "options: {tie: lowest}"),
        ("dsa_tp.yaml", "ops: [query_norm, mla_query]", "ops: [query_nrm, mla_query]"),
        ("dsa_tp.yaml", "  o_proj: {ops: [o_proj]}", "  o_proj: {ops: [o_proj, value]}"),
    ]
    make_project(project, edits)
    found = findings_of("pipelines/dsa_tp.yaml")
    assert [f.message for f in found] == [
        "unknown op `query_nrm`",
        "`lowest` is not a value of `stages.indexer.options.tie`",
        "`value` belongs to two stages; each op is owned by one",
        "unknown op in mode `fork`: `query_norm`",
    ]
    assert list(found) == sorted(found)


def test_unknown_geometry_lists_the_known_ones(project: Path) -> None:
    make_project(project, [("dsa_tp.yaml", "geometry: kimi_k31", "geometry: smal")])
    (found,) = findings_of("pipelines/dsa_tp.yaml")
    assert found.message == "no geometry `smal`"
    assert found.help == "did you mean `small`?"
    assert {"kimi_k31", "small"} <= set(found.allowed)


def test_unedited_specs_have_no_findings(project: Path) -> None:
    make_project(project)
    for name in ("dsa_tp", "dsa_dcp", "dsa_dcp_d2"):
        assert findings_of(f"pipelines/{name}.yaml") == ()


def test_targets_may_be_spelled_as_versions(project: Path) -> None:
    old = "targets: [sm_90a, sm_100a]"
    make_project(project, [("dsa_tp.yaml", old, 'targets: [9.0a, "10.0a"]')])
    assert findings_of("pipelines/dsa_tp.yaml") == ()
