"""Every key of the language as a Markdown page, from the JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kpipe.codegen.spec.schema import geometry_schema, pipeline_schema

COMMAND = "kpipe schema --format markdown"
_Schema = Mapping[str, Any]
_TITLES = {"Pipeline": "A pipeline file", "Geometry": "A geometry file"}
_PLAIN = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false"}
_ANYTHING = "table"  # what JSON schema cannot say; and where it stands for something else:
_OTHERS = {"Overlap.modes": "name to stream to list of words"}


def reference_text() -> str:
    """The page: one table of keys for each kind of mapping, in the order of a file."""
    head = (
        "# Language reference\n\n"
        f"Every key of a pipeline and of a geometry. Written by `{COMMAND}`; "
        "[the language](language.md) says how they work together.\n\n"
        "A *name* is lower-case letters, digits and `_`, a letter first, and no word of Python. An "
        "*expression* is a number or a shape expression such as `heads * v_dim`. A *table* is a "
        "value, or row ranges to values, keyed above that by architecture and query length where "
        "needed. A key in **bold** must be there, unless the file `extends` another.\n"
    )
    pipeline, geometry = pipeline_schema(), geometry_schema()
    known = pipeline["definitions"]
    sections = [
        *_sections("Pipeline", known["Pipeline"], known),
        *_sections("Geometry", geometry, geometry["definitions"]),
    ]
    return "\n".join([head, *sections])


def _sections(first: str, schema: _Schema, known: Mapping[str, _Schema]) -> Iterator[str]:
    """The section of a mapping, then those that its keys lead to, each once."""
    waiting, seen = [(first, schema)], {first}
    while waiting:
        name, part = waiting.pop(0)
        yield _section(name, part, known)
        for other in _named(part["properties"]):
            if other not in seen and "properties" in known[other]:
                seen.add(other)
                waiting.append((other, known[other]))


def _section(name: str, schema: _Schema, known: Mapping[str, _Schema]) -> str:
    title = _TITLES.get(name, name.lower())
    lines = [f"## {title}", "", schema.get("description", "").replace("\n", " "), ""]
    lines += ["| key | takes | default | meaning |", "|---|---|---|---|"]
    required = schema.get("required", ())
    for key, field in schema["properties"].items():
        shown = f"**`{key}`**" if key in required else f"`{key}`"
        default = "" if key in required else _default(field, known)
        meaning = field.get("description", "").replace("|", "\\|")
        takes = _OTHERS.get(f"{name}.{key}") or _type(field)
        lines.append(f"| {shown} | {takes} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _named(node: Any) -> Iterator[str]:
    """Definitions that a schema refers to, in order."""
    if isinstance(node, Mapping):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"].rpartition("/")[2]
        for value in node.values():
            yield from _named(value)
    elif isinstance(node, list):
        for value in node:
            yield from _named(value)


def _type(field: _Schema) -> str:
    """What a key takes, in words."""
    if reference := next(_named({k: field[k] for k in ("$ref", "allOf") if k in field}), ""):
        return f"[{reference.lower()}](#{reference.lower()})"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{word}`" for word in field["enum"])
    if "anyOf" in field:
        return _union(field["anyOf"])
    kind = field.get("type")
    if isinstance(kind, list):
        return _PLAIN[kind[0]]
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}"
    if kind == "object":
        return f"name to {_type(_values(field))}"
    if kind is None:
        return _ANYTHING
    return "name" if "pattern" in field else f"{_PLAIN[kind]}{_range(field)}"


def _union(parts: list[_Schema]) -> str:
    kinds = [part.get("type") for part in parts]
    if sorted(map(str, kinds)) == ["integer", "string"]:
        return "expression"
    return " or ".join(_type(part) for part in parts if part.get("type") != "null")


def _values(field: _Schema) -> _Schema:
    """What the values of a mapping by name are."""
    patterns = field.get("patternProperties")
    if patterns:
        return next(iter(patterns.values()))
    more = field.get("additionalProperties")
    return more if isinstance(more, Mapping) else {}


def _range(field: _Schema) -> str:
    low = field.get("minimum", field.get("exclusiveMinimum"))
    high = field.get("maximum", field.get("exclusiveMaximum"))
    if low is not None and high is not None:
        return f" {low} to {high}" if high != 0xFFFFFFFF else " of 32 bits"
    if low is not None:
        return f" from {low}" if "minimum" in field else f" above {low}"
    return ""


def _default(field: _Schema, known: Mapping[str, _Schema]) -> str:
    """The default as YAML says it; empty for one that leaves the key out."""
    value = field.get("default")
    if value in (None, "", [], {}):
        return ""
    if isinstance(value, Mapping) and any(name in known for name in _named(field)):
        return "its defaults"
    return f"`{json.dumps(value) if not isinstance(value, str) else value}`"
