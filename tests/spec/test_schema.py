"""The JSON schemas: checked in, draft-07, described, and true to the models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from kpipe.codegen.config import SHIPPED
from kpipe.codegen.spec.document import read_document, to_plain
from kpipe.codegen.spec.schema import FILES, schema_text

PIPELINES = sorted((SHIPPED / "pipelines").rglob("*.yaml"))
BASE = Path(__file__).resolve().parents[1] / "cases" / "_base" / "base.yaml"


def schema(kind: str) -> dict[str, Any]:
    return json.loads(schema_text(kind))


def errors(kind: str, text: str) -> list[str]:
    data = to_plain(read_document("x.yaml", text.encode()))
    return [error.message for error in Draft7Validator(schema(kind)).iter_errors(data)]


@pytest.mark.parametrize("name", FILES)
def test_checked_in_files_are_the_export(name: str) -> None:
    assert (SHIPPED / "schemas" / name).read_text() == schema_text(FILES[name])


@pytest.mark.parametrize("kind", FILES.values())
def test_is_draft_07(kind: str) -> None:
    found = schema(kind)
    assert found["$schema"] == "http://json-schema.org/draft-07/schema#"
    Draft7Validator.check_schema(found)
    text = json.dumps(found)
    for word in ("$defs", "prefixItems", "unevaluatedProperties", "dependentRequired"):
        assert word not in text


@pytest.mark.parametrize("kind", FILES.values())
def test_every_field_is_described(kind: str) -> None:
    def walk(node: Any, place: str) -> None:
        if isinstance(node, dict):
            for name, field in node.get("properties", {}).items():
                assert field.get("description"), f"{place}.{name}"
            for key, value in node.items():
                walk(value, f"{place}.{key}")
            if "$ref" in node:
                assert list(node) == ["$ref"], place  # draft-07 ignores what stands beside it
        elif isinstance(node, list):
            for item in node:
                walk(item, place)

    walk(schema(kind), kind)


@pytest.mark.parametrize("path", [*PIPELINES, BASE], ids=lambda path: path.stem)
def test_shipped_files_validate(path: Path) -> None:
    kind = "geometry" if path.parent.name == "geometry" else "pipeline"
    assert errors(kind, path.read_text()) == []


@pytest.mark.parametrize(
    "change",
    [
        "parallel: {tp: 8, dpc: 8}",
        "parallel: {tp: '8'}",
        "rows: {queries: [1]}",
        "buffers: {Query: {shape: [rows], dtype: bf16}}",
        "buffers: {query: null}",
        "environment: {between_layers: wait}",
        "extra: 1",
    ],
)
def test_refuses_what_the_models_refuse(change: str) -> None:
    key = change.partition(":")[0]
    kept = [block for block in blocks(BASE.read_text()) if not block.startswith(f"{key}:")]
    assert errors("pipeline", "".join([*kept, change, "\n"]))


def blocks(text: str) -> list[str]:
    """Top-level entries of a file."""
    found: list[str] = []
    for line in text.splitlines(keepends=True):
        if line[0].isalpha() or not found:
            found.append("")
        found[-1] += line
    return found


def test_an_extension_may_leave_out_and_remove() -> None:
    assert errors("pipeline", "extends: base.yaml\nrows: {queries: [1]}\n") == []
    removed = "buffers: {q_c: null}\nmailboxes: null\noverlap: {modes: {late: null}}\n"
    assert errors("pipeline", f"extends: base.yaml\n{removed}") == []
    assert errors("pipeline", "extends: base.yaml\nrows: {querys: [1]}\n")
    assert errors("pipeline", "extends: base.yaml\nbuffers: {q_c: {dtype: bf16}}\n")
    assert errors("pipeline", "extends: 3\n")
    assert errors("pipeline", "name: alone\n")


def test_targets_may_look_like_numbers() -> None:
    text = BASE.read_text().replace("[sm_90a, sm_100a]", "[9.0a, 10.0]")
    assert errors("pipeline", text) == []
