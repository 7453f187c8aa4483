"""Findings as SARIF 2.1.0, the log format that code-scanning services read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from kpipe.codegen.diagnostics import Diagnostic, Edit, Repair, Span
from kpipe.codegen.rules import RULES
from kpipe.codegen.version import __version__

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def render_sarif(diagnostics: Iterable[Diagnostic]) -> str:
    """One run with one result per finding, in the given order, as indented JSON.

    The rules that the findings name are listed once each, sorted by code.  Columns count code
    points from 1 and ends are exclusive, as in `Span`.  A finding without a place has no
    location.  The message is the finding's sentence, then its repair, what it rests on and its
    story on lines of their own; each repair that was tried out is a fix, and so are edits that
    make the repair.
    """
    found = list(diagnostics)
    codes = sorted({diagnostic.code for diagnostic in found})
    driver = {"name": "kpipe", "version": __version__, "rules": [_rule(code) for code in codes]}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(diagnostic, codes.index(diagnostic.code)) for diagnostic in found],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(code: str) -> dict[str, Any]:
    rule = RULES.get(code)
    if rule is None:  # a finding is reported even where the catalogue lacks its rule
        return {"id": code}
    return {
        "id": code,
        "name": "".join(word[0].upper() + word[1:] for word in re.findall(r"\w+", rule.name)),
        "shortDescription": {"text": rule.name},
        "fullDescription": {"text": rule.why},
        "help": {"text": f"{rule.repair}\n\nFor example:\n{rule.bad}"},
        "defaultConfiguration": {"level": "error"},
    }


def _result(diagnostic: Diagnostic, index: int) -> dict[str, Any]:
    rests = [f"rests on: {line}" for line in diagnostic.rests]
    lines = [diagnostic.message, diagnostic.help, *rests, *diagnostic.story]
    result: dict[str, Any] = {
        "ruleId": diagnostic.code,
        "ruleIndex": index,
        "level": diagnostic.severity,  # SARIF's words are the same three
        "message": {"text": "\n".join(line for line in lines if line)},
    }
    if diagnostic.span is not None:
        result["locations"] = [{"physicalLocation": _location(diagnostic.span)}]
    if diagnostic.related:
        result["relatedLocations"] = [
            {"id": number, "message": {"text": role}, "physicalLocation": _location(span)}
            for number, (role, span) in enumerate(diagnostic.related, 1)
        ]
    if diagnostic.repairs:
        result["fixes"] = [_fix(repair) for repair in diagnostic.repairs]
    elif diagnostic.fix:
        result["fixes"] = [{"artifactChanges": [_change(edit) for edit in diagnostic.fix]}]
    return result


def _fix(repair: Repair) -> dict[str, Any]:
    cost = "" if repair.cost is None else f" ({repair.cost:+.1f} us, {repair.basis})"
    return {
        "description": {"text": f"{repair.text}{cost}"},
        "artifactChanges": [_change(edit) for edit in repair.edits],
    }


def _change(edit: Edit) -> dict[str, Any]:
    place = _location(edit.span)
    return {
        "artifactLocation": place["artifactLocation"],
        "replacements": [
            {"deletedRegion": place["region"], "insertedContent": {"text": edit.text}}
        ],
    }


def _location(span: Span) -> dict[str, Any]:
    uri = quote(span.path)
    if PurePosixPath(span.path).is_absolute():
        uri = f"file://{uri}"
    return {
        "artifactLocation": {"uri": uri},
        "region": {
            "startLine": span.line,
            "startColumn": span.column,
            "endLine": span.end_line,
            "endColumn": span.end_column,
        },
    }
