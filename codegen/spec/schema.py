"""JSON schemas (draft-07) of the language, for editors.

Derived from the models: what the models gain, the schemas gain.  A file that extends another may
leave out what the other says, and may remove an entry with null.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from pydantic import BaseModel

from kpipe.codegen.spec.load import _MERGED_SECTIONS as MERGED_SECTIONS
from kpipe.codegen.spec.models import Geometry, Pipeline

DRAFT = "http://json-schema.org/draft-07/schema#"
FILES = {"pipeline.v1.json": "pipeline", "geometry.v1.json": "geometry"}
_NULL = {"type": "null"}
_EXTENDS = {
    "description": "relative path of the pipeline file that this one changes",
    "type": "string",
}
# Fields whose meaning is plain to a reader of the models, but not to the reader of a tooltip.
_DESCRIPTIONS = {
    "*.doc": "one sentence for people",
    "Pipeline.name": "name of the pipeline, of its folder and of its class",
    "Pipeline.parallel": "how one layer is spread over ranks",
    "Pipeline.rows": "the steps that the layer is sized for",
    "Pipeline.features": "what the deployment has",
    "Pipeline.environment": "what kpipe may assume about code that it does not generate",
    "Pipeline.numerics": "rounding points and quantisers, part of the result",
    "Pipeline.buffers": "scratch memory by name",
    "Pipeline.mailboxes": "memory that peers write and this rank polls",
    "Pipeline.caches": "paged caches that outlive the step",
    "Pipeline.streams": "attributes of the streams beside main",
    "Pipeline.external": "opaque ops of the engine",
    "Pipeline.stages": "stage -> its ops, variants, options and tactics",
    "Pipeline.overlap": "which op runs on which stream in which order, by rows",
    "Pipeline.prefetch": "weights requested into L2 ahead of their use",
    "Pipeline.draft": "marks a spec that cannot be generated yet",
    "Numerics.round": "intermediates that are rounded to BF16, or kept in FP32",
    "*.dtype": "element type",
    "Cache.format": "byte format of one token",
    "External.reads": "buffers that it reads",
    "External.writes": "buffers that it writes",
    "Prefetch.cap_mib": "largest request in MiB",
    "Prefetch.grid": "CTAs of the request",
    "Geometry.kpipe": "version of the language",
    "Geometry.geometry": "name of the geometry",
    "Geometry.dims": "dimension -> number or expression over other dimensions",
    "Geometry.scalars": "real numbers of the model",
    "Geometry.rope": "which tensors are rotated, and how",
    "Rope.query_pe": "rotation of the query's positional part",
    "Rope.key_pe": "rotation of the key's positional part",
    "Rope.index_q": "rotation of the indexer's query",
    "Rope.index_k": "rotation of the indexer's key",
    "Scalars.rms_eps": "epsilon of the RMS norms",
    "Scalars.index_eps": "epsilon of the indexer's key norm",
}


def geometry_schema() -> dict[str, Any]:
    """Draft-07 schema of a geometry file."""
    return {"$schema": DRAFT, **_draft07(Geometry)}


def pipeline_schema() -> dict[str, Any]:
    """Draft-07 schema of a pipeline file, with or without `extends`."""
    whole = _draft07(Pipeline)
    definitions = whole.pop("definitions")
    relaxed = _relaxed(whole, definitions)
    return {
        "$schema": DRAFT,
        "title": "Pipeline",
        "description": whole["description"],
        "if": {"type": "object", "required": ["extends"]},
        "then": {"$ref": "#/definitions/Extension"},
        "else": {"$ref": "#/definitions/Pipeline"},
        "definitions": dict(sorted({**definitions, "Pipeline": whole, **relaxed}.items())),
    }


def schema_text(kind: str) -> str:
    """The text of a schema file: `pipeline` or `geometry`."""
    schema = pipeline_schema() if kind == "pipeline" else geometry_schema()
    return json.dumps(schema, indent=2, ensure_ascii=True) + "\n"


def _draft07(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(by_alias=True)
    definitions = {name: _described(name, part) for name, part in schema.pop("$defs", {}).items()}
    root = _described(model.__name__, schema)
    return _rewritten({**root, "definitions": definitions})


def _described(model: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Every field with a description, none with a title (which only repeats its name)."""
    schema = copy.deepcopy(schema)
    for name, field in schema.get("properties", {}).items():
        field.pop("title", None)
        text = _DESCRIPTIONS.get(f"{model}.{name}") or _DESCRIPTIONS.get(f"*.{name}")
        field.setdefault("description", text or "")
        if (model, name) == ("Pipeline", "targets"):
            field["items"] = {"type": ["string", "number"]}  # `9.0a` and 9.0 are read as text
    return schema


def _rewritten(node: Any) -> Any:
    """`$defs` become `definitions`; a `$ref` with neighbours is wrapped, as draft-07 needs."""
    if isinstance(node, list):
        return [_rewritten(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _rewritten(value) for key, value in node.items()}
    # Names outside the pattern are refused by the models; JSON schema lets them pass by default.
    if "patternProperties" in node and "additionalProperties" not in node:
        node["additionalProperties"] = False
    reference = node.get("$ref")
    if isinstance(reference, str):
        node["$ref"] = reference.replace("#/$defs/", "#/definitions/")
        if len(node) > 1:
            node["allOf"] = [{"$ref": node.pop("$ref")}]
    return node


def _relaxed(whole: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Definitions for a file that extends another: nothing is required, null removes."""
    extension = copy.deepcopy(whole)
    extension.pop("required", None)
    extension["title"] = "Extension"
    found: dict[str, Any] = {}
    for name, field in extension["properties"].items():
        if name in MERGED_SECTIONS:
            field = _partial(field, definitions, found)
        extension["properties"][name] = _or_null(field)
    extension["properties"] = {"extends": _EXTENDS, **extension["properties"]}
    return {"Extension": extension, **found}


def _partial(
    field: dict[str, Any], definitions: dict[str, Any], found: dict[str, Any]
) -> dict[str, Any]:
    """A merged section: each of its entries may be left out, replaced or removed."""
    field = copy.deepcopy(field)
    if "patternProperties" in field:
        patterns = field["patternProperties"]
        field["patternProperties"] = {key: _or_null(value) for key, value in patterns.items()}
        return field
    name = field.get("$ref", field.get("allOf", [{}])[0].get("$ref", "")).rpartition("/")[2]
    if name and f"Partial{name}" not in found:
        part = copy.deepcopy(definitions[name])
        part.pop("required", None)
        found[f"Partial{name}"] = part
        for key, inner in part["properties"].items():
            nested = name in ("Numerics", "Overlap") and key in ("round", "modes")
            part["properties"][key] = _or_null(
                _partial(inner, definitions, found) if nested else inner
            )
    kept = {key: value for key, value in field.items() if key not in ("$ref", "allOf")}
    return {**kept, "allOf": [{"$ref": f"#/definitions/Partial{name}"}]}


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    outer = {key: field[key] for key in ("description", "default") if key in field}
    inner = {key: value for key, value in field.items() if key not in outer}
    if not inner:
        return field  # takes anything already
    return {**outer, "anyOf": [inner, _NULL]}
