"""No dead settings: every field of the language, changed once, changes an output openly.

An output is a generated file or the plan as JSON.  Each field of the models is listed below with
one legal other value; a field without an entry fails `test_every_field_is_listed`.
"""

from __future__ import annotations

import json
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from spec_project import Edit, edit, findings_of, make_project, plan_of, render

from kpipe.codegen.plan.describe_json import describe_json
from kpipe.codegen.plan.model import PipelinePlan
from kpipe.codegen.spec.models import Geometry, Pipeline

TP, DCP, GEOMETRY = "dsa_tp.yaml", "dsa_dcp.yaml", "geometry/kimi_k31.yaml"
ENVIRONMENT = "environment: {between_layers: waits}"
LATENT = "latent_kv: {format: fp8_tensor, page: 64}"
QUERY = "query:    {shape: [rows, heads, latent], dtype: fp8}"
Q_C = "q_c:      {shape: [rows, q_lora], dtype: bf16}"
O_PROJ = "  o_proj: {ops: [o_proj]}"
CANDIDATES = "sentinel: 0xFFFFFFFF, parities: 2, rearmed_by: topk_merge"
SCALARS = "softmax_dim: qk_head"

# field -> edits of one spec; the first edit's file says which spec is planned.
CHANGED: dict[str, list[Edit]] = {
    "name": [(TP, "name: dsa_tp\n", "name: dsa_other\n")],
    "doc": [(TP, "doc: Kimi K3.1", "doc: Kimi K3.2")],
    "geometry": [(TP, "geometry: kimi_k31", "geometry: small")],
    "parallel.tp": [(TP, "{tp: 8}", "{tp: 16}")],
    "parallel.dcp": [(DCP, "tp: 8, dcp: 8", "tp: 4, dcp: 4")],
    "parallel.interleave": [(DCP, "interleave: 1", "interleave: 16")],
    "parallel.transport": [(DCP, "peer_store", "multicast")],
    "targets": [(DCP, "[sm_90a, sm_100a]", "[sm_100a, sm_90a]")],
    "rows.batches": [(TP, '"1-8, 16, 32, 64"', '"1-8, 16, 32, 48, 64"')],
    "rows.queries": [(TP, "queries: [1, 4]", "queries: [4, 1]")],
    "rows.wide": [(TP, "queries: [1, 4]}", 'queries: [1, 4], wide: "12"}')],
    "features.fused_indexer": [(TP, "{fused_indexer: true}  ", "{fused_indexer: false}  ")],
    "environment.between_layers": [(TP, ENVIRONMENT, ENVIRONMENT.replace("waits", "full"))],
    "environment.spin_overlap": [(DCP, "waits}", "waits, spin_overlap: allow}")],
    "numerics.round.kv_norm": [(TP, "kv_norm: bf16", "kv_norm: fp32")],
    "numerics.round.query_b": [(TP, "query_b: bf16", "query_b: fp32")],
    "numerics.round.absorb": [(TP, "absorb: bf16", "absorb: fp32")],
    "numerics.round.merged": [(DCP, "merged: bf16", "merged: fp32")],
    "numerics.round.value": [(TP, "value: bf16", "value: fp32")],
    "numerics.round.mix": [(DCP, "value: bf16}", "value: bf16, mix: bf16}")],
    "numerics.sigmoid": [(TP, "sigmoid: refined", "sigmoid: exact")],
    "numerics.index_quant": [(TP, "index_quant: ue8m0", "index_quant: ue8m0_bf16")],
    "buffers.*.shape": [(TP, "q_c:      {shape: [rows, q_lora]", "q_c:      {shape: [rows, 1536]")],
    "buffers.*.dtype": [
        (TP, QUERY, QUERY.replace("fp8", "bf16")),
        (TP, LATENT, LATENT.replace("fp8_tensor", "fp8_ds_mla")),
        (TP, '{"1-15": prims_ts, "16-64": trtllm_gen}', "sparse_decode"),
    ],
    "buffers.*.scope": [(TP, Q_C, Q_C.replace("bf16", "bf16, scope: model"))],
    "buffers.*.columns": [(TP, "wk: index_dim, wv: index_heads", "wv: index_heads, wk: index_dim")],
    "buffers.*.pad_to": [(TP, "    columns: {q_a", "    pad_to: 64\n    columns: {q_a")],
    "buffers.*.init": [(TP, Q_C, Q_C.replace("bf16", "bf16, init: zeros"))],
    "mailboxes.*.shape": [(DCP, "[dcp, rows_cap, top_k, 2]", "[tp, rows_cap, top_k, 2]")],
    "mailboxes.*.dtype": [
        (DCP, "tp * heads, latent], dtype: fp8", "tp * heads, latent], dtype: bf16"),
        (DCP, LATENT, LATENT.replace("fp8_tensor", "fp8_ds_mla")),
        (DCP, '{"1-15": prims_ts, "16-64": trtllm_gen}', "sparse_decode"),
    ],
    "mailboxes.*.sentinel": [
        (
            DCP,
            "o_gather:     {shape: [rows_cap, hidden], dtype: bf16, sentinel: 0x80000000",
            "o_gather:     {shape: [rows_cap, hidden], dtype: bf16, sentinel: 0xFFFFFFFF",
        )
    ],
    "mailboxes.*.parities": [(DCP, CANDIDATES, CANDIDATES.replace("parities: 2", "parities: 3"))],
    "caches.*.format": [
        (TP, LATENT, LATENT.replace("fp8_tensor", "fp8_ds_mla")),
        (TP, QUERY, QUERY.replace("fp8", "bf16")),
        (TP, '{"1-15": prims_ts, "16-64": trtllm_gen}', "sparse_decode"),
    ],
    "caches.*.page": [(TP, LATENT, LATENT.replace("64", "128"))],
    "caches.*.manager_page": [(TP, LATENT, LATENT.replace("64", "64, manager_page: 2048"))],
    "caches.*.max_blocks": [(TP, LATENT, LATENT.replace("64", "64, max_blocks: 4096"))],
    "streams.*.priority": [(TP, "\nstages:\n", "\nstreams: {side: {priority: -1}}\nstages:\n")],
    "stages.*.ops": [
        (TP, "ops: [query_norm, mla_query]", "ops: [query_norm, mla_query, mla_query_split]"),
        (TP, "  fallback:", "    split:\n      main: [query_norm, mla_query_split]\n  fallback:"),
    ],
    "stages.*.variants": [(TP, '{"1-32": mla_value, "33-64"', '{"1-16": mla_value, "17-64"')],
    "stages.*.options": [(TP, "{tie: low_id}", "{tie: high_id}")],
    "stages.*.tactics": [
        (TP, 'packed_gemm: {"1-8": {tile_n: 32', 'packed_gemm: {"1-8": {tile_n: 64')
    ],
    "stages.*.with": [
        (TP, O_PROJ, O_PROJ[:-1] + ", with: {gated: gated_rows}}"),
        (TP, "  gated:    {shape", "  gated_rows: {shape"),
        (TP, "    ops: [value]\n", "    ops: [value]\n    with: {gated: gated_rows}\n"),
    ],
    "stages.*.pdl": [(TP, O_PROJ, O_PROJ[:-1] + ", pdl: {o_proj: off}}")],
    "overlap.modes": [
        (
            TP,
            "    fork:\n      main: [packed_gemm, fork side, query_norm, index_gemm",
            "    fork:\n      main: [packed_gemm, query_norm, fork side, index_gemm",
        )
    ],
    "overlap.table": [
        (TP, '{q1: {"1-4": front, "5-32": fork', '{q1: {"1-4": serial, "5-32": fork')
    ],
    "overlap.table_unfused": [
        (TP, "  table:\n", '  table_unfused: {"1-32": serial, "33-64": fork_split}\n  table:\n'),
    ],
    "overlap.fallback": [(TP, "late_front: front}", "late_front: fork}")],
}
# Read only where the deployment lacks the fused indexer; both sides of the comparison lack it.
UNFUSED = ("overlap.table_unfused", "overlap.fallback")
FIXED = {
    "kpipe": "the version of the language has one value",
    "mailboxes.*.rearmed_by": "a promise that is checked: one value is true (KP704)",
}
# Part of the language that is refused, openly, until it is generated (KP130).
REFUSED = {
    "step": "step: {extra: {ops: [query_wait]}}",
    "external": "external: {hook: {reads: [q_c]}}",
    "prefetch": 'prefetch: [{after: core, weights: [o_proj.o_proj], rows: "1-8"}]',
    "draft": "draft: {missing: [some_op]}",
}

GEOMETRY_CHANGED: dict[str, tuple[str, str]] = {
    "geometry": ("geometry: kimi_k31", "geometry: renamed"),
    "dims": ("top_k: 2048", "top_k: 1024"),
    "scalars.rms_eps": ("rms_eps: 1.0e-6", "rms_eps: 1.0e-5"),
    "scalars.index_eps": ("index_eps: 1.0e-6", "index_eps: 1.0e-5"),
    "scalars.softmax_dim": (SCALARS, "softmax_dim: nope"),
    "scalars.softmax_mscale": (SCALARS, f"{SCALARS}, softmax_mscale: 1.5"),
}
ROPE = ("query_pe", "key_pe", "index_q", "index_k")
GEOMETRY_FIXED = {
    "kpipe": "the version of the language has one value",
    "doc": "for readers of the file",
    **{f"rope.{name}": "refused until an op rotates" for name in ROPE},
}


def fields_of(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every field below a model, dotted; `*` stands for the keys of a mapping of models."""
    found = []
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        inner, many = inner_model(field.annotation)
        top = path.partition(".")[0]
        if inner is None or top in REFUSED:
            found.append(path)
        else:
            found += fields_of(inner, f"{path}.*." if many else f"{path}.")
    return found


def inner_model(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    arguments = typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    if typing.get_origin(annotation) is dict:
        return inner_model(arguments[1])[0], True
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((inner_model(a) for a in arguments if inner_model(a)[0]), (None, False))
    return None, False


def outputs(plan: PipelinePlan) -> dict[str, str]:
    """Generated files, and the plan without the places in the spec."""
    payload = json.loads(describe_json(plan))
    payload.pop("spec")
    for step in payload["steps"]:
        for item in step["items"]:
            item.pop("place")
    files = {path: text for path, text in render(plan).items() if path != "SCHEDULE.md"}
    files["layer.py"] = "\n".join(line.partition("#")[0] for line in files["layer.py"].split("\n"))
    return {**files, "plan.json": json.dumps(payload), "caches": repr(plan.caches)}


def test_every_field_is_listed() -> None:
    assert sorted(fields_of(Pipeline)) == sorted([*CHANGED, *FIXED, *REFUSED])
    assert sorted(fields_of(Geometry)) == sorted([*GEOMETRY_CHANGED, *GEOMETRY_FIXED])


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    root = make_project(tmp_path_factory.mktemp("project"))
    return {name: outputs(plan_of(root, name)) for name in ("dsa_tp", "dsa_dcp")}


def unfused(root: Path) -> None:
    edit(root, TP, "{fused_indexer: true}  ", "{fused_indexer: false}  ")


@pytest.mark.parametrize("field", CHANGED)
def test_a_changed_field_changes_an_output(
    field: str, tmp_path: Path, unchanged: dict[str, dict[str, str]]
) -> None:
    name = CHANGED[field][0][0].removesuffix(".yaml")
    root = make_project(tmp_path)
    before = unchanged[name]
    if field in UNFUSED:
        unfused(root)
        before = outputs(plan_of(root, name))
    for change in CHANGED[field]:
        edit(root, *change)
    after = outputs(plan_of(root, name))
    assert [path for path in {**before, **after} if before.get(path) != after.get(path)]


@pytest.mark.parametrize("field", GEOMETRY_CHANGED)
def test_a_changed_field_of_the_geometry_changes_an_output(
    field: str, tmp_path: Path, unchanged: dict[str, dict[str, str]]
) -> None:
    root = make_project(tmp_path)
    edit(root, GEOMETRY, *GEOMETRY_CHANGED[field])
    if field == "geometry":
        (root / "pipelines" / GEOMETRY).rename(root / "pipelines" / "geometry" / "renamed.yaml")
        edit(root, TP, *GEOMETRY_CHANGED[field])
    assert outputs(plan_of(root)) != unchanged["dsa_tp"]


@pytest.mark.parametrize("section", REFUSED)
def test_what_is_not_generated_yet_is_refused(section: str, tmp_path: Path) -> None:
    root = make_project(tmp_path, [(DCP, "\nstages:\n", f"\n{REFUSED[section]}\nstages:\n")])
    if section == "step":
        edit(root, DCP, "ops: [query_norm, mla_query, query_wait]", "ops: [query_norm, mla_query]")
        path = root / "pipelines" / DCP
        path.write_text(path.read_text().replace("mla_query, query_wait]", "mla_query]"))
        path.write_text(
            path.read_text().replace("topk_merge, query_wait, core", "topk_merge, core")
        )
    found = findings_of(str(root / "pipelines" / DCP))
    assert {finding.code for finding in found} == {"KP130"}


@pytest.mark.parametrize("name", ROPE)
def test_rotation_is_refused(name: str, tmp_path: Path) -> None:
    root = make_project(tmp_path, [(GEOMETRY, f"{name}: none", f"{name}: neox")])
    (found,) = findings_of(str(root / "pipelines" / TP))
    assert found.code == "KP130"
    assert found.message == f"`rope.{name}: neox` is part of the language, but no op rotates yet"
