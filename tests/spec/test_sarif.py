"""SARIF 2.1.0: the keys that a reader of the format requires, and what they hold."""

from __future__ import annotations

import json
from typing import Any

from kpipe.codegen.diagnostics import Diagnostic, Edit, Repair, Span
from kpipe.codegen.rules import RULES
from kpipe.codegen.sarif import render_sarif

HERE = Span("pipelines/my spec.yaml", 3, 5, 3, 9)
THERE = Span("/abs/base.yaml", 1, 1, 2, 4)
FOUND = (
    Diagnostic("KP306", "forked, never joined", HERE, help="join it", story=("line 1", "line 2")),
    Diagnostic("KP103", "unknown op", HERE, "warning", related=(("first", THERE),)),
    Diagnostic("KP306", "no place", None, "note"),
)

# Required and allowed keys of the objects that are written, from the published schema.
SHAPES: dict[str, tuple[set[str], set[str]]] = {
    "log": ({"version", "runs"}, {"$schema"}),
    "run": ({"tool"}, {"results", "columnKind"}),
    "driver": ({"name"}, {"version", "rules"}),
    "rule": (
        {"id"},
        {"name", "shortDescription", "fullDescription", "help", "defaultConfiguration"},
    ),
    "result": (
        {"message"},
        {"ruleId", "ruleIndex", "level", "locations", "relatedLocations", "fixes"},
    ),
    "location": ({"physicalLocation"}, {"id", "message"}),
    "place": ({"artifactLocation", "region"}, set()),
    "region": ({"startLine"}, {"startColumn", "endLine", "endColumn"}),
}


def conforms(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    required, optional = SHAPES[kind]
    assert required <= set(value) <= required | optional, (kind, sorted(value))
    return value


def run_of(text: str) -> dict[str, Any]:
    log = conforms("log", json.loads(text))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    return conforms("run", run)


def test_every_object_has_the_keys_of_the_format() -> None:
    run = run_of(render_sarif(FOUND))
    assert run["columnKind"] == "unicodeCodePoints"
    assert set(run["tool"]) == {"driver"}
    rules = conforms("driver", run["tool"]["driver"])["rules"]
    assert [conforms("rule", rule)["id"] for rule in rules] == ["KP103", "KP306"]
    for rule in rules:
        assert all(rule[key]["text"] for key in ("shortDescription", "fullDescription", "help"))
        assert rule["name"].isidentifier()
    for result in run["results"]:
        conforms("result", result)
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"]
        places = [*result.get("locations", ()), *result.get("relatedLocations", ())]
        for place in places:
            physical = conforms("place", conforms("location", place)["physicalLocation"])
            assert min(conforms("region", physical["region"]).values()) >= 1


def test_results_say_what_the_findings_say() -> None:
    first, second, third = run_of(render_sarif(FOUND))["results"]
    assert [result["level"] for result in (first, second, third)] == ["error", "warning", "note"]
    assert first["message"]["text"] == "forked, never joined\njoin it\nline 1\nline 2"
    place = first["locations"][0]["physicalLocation"]
    assert place == {
        "artifactLocation": {"uri": "pipelines/my%20spec.yaml"},
        "region": {"startLine": 3, "startColumn": 5, "endLine": 3, "endColumn": 9},
    }
    (related,) = second["relatedLocations"]
    assert related["message"] == {"text": "first"}
    assert related["physicalLocation"]["artifactLocation"]["uri"] == "file:///abs/base.yaml"
    assert "locations" not in third


def test_edits_are_a_fix() -> None:
    found = Diagnostic("KP103", "unknown op", HERE, fix=(Edit(HERE, "core"),))
    (result,) = run_of(render_sarif([found]))["results"]
    assert conforms("result", result)["fixes"] == [
        {
            "artifactChanges": [
                {
                    "artifactLocation": {"uri": "pipelines/my%20spec.yaml"},
                    "replacements": [
                        {
                            "deletedRegion": {
                                "startLine": 3,
                                "startColumn": 5,
                                "endLine": 3,
                                "endColumn": 9,
                            },
                            "insertedContent": {"text": "core"},
                        }
                    ],
                }
            ]
        }
    ]


def test_each_repair_is_a_fix_with_its_cost_and_what_it_rests_on_is_said() -> None:
    repairs = (
        Repair("join it", (Edit(HERE, "core"),), 0.0, "over the first repair"),
        Repair("move it", (Edit(HERE, "x"), Edit(THERE, "y"))),
    )
    found = Diagnostic("KP301", "race", HERE, help="join it", rests=("row 1: r",), repairs=repairs)
    (result,) = run_of(render_sarif([found]))["results"]
    assert result["message"]["text"] == "race\njoin it\nrests on: row 1: r"
    said = [fix["description"]["text"] for fix in conforms("result", result)["fixes"]]
    assert said == ["join it (+0.0 us, over the first repair)", "move it"]
    assert [len(fix["artifactChanges"]) for fix in result["fixes"]] == [1, 2]


def test_no_findings_are_an_empty_run() -> None:
    run = run_of(render_sarif(()))
    assert run["results"] == [] and run["tool"]["driver"]["rules"] == []


def test_every_rule_of_the_catalogue_has_a_name_that_is_one_word() -> None:
    found = [Diagnostic(code, "wrong", None) for code in sorted(RULES)]
    rules = run_of(render_sarif(found))["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == sorted(RULES)
    assert all(rule["name"].isidentifier() for rule in rules)
