"""Proofs between runs: the same decisions, under a key of everything that they rest on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from spec_project import make_project

from kpipe.codegen.plan.api import plan_pipeline
from kpipe.codegen.plan.model import PipelinePlan
from kpipe.codegen.proof import proved
from kpipe.codegen.proof.prove import prove
from kpipe.codegen.proof.proved import remembered


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelinePlan:
    monkeypatch.setenv("KPIPE_CACHE_DIR", str(tmp_path / "cache"))
    return plan_pipeline(str(make_project(tmp_path) / "pipelines" / "dsa_tp.yaml"))


def test_a_remembered_proof_decides_the_same(plan: PipelinePlan) -> None:
    assert remembered(plan) is None
    fresh = prove(plan)
    again = remembered(plan)
    assert again is not None
    assert again.pipeline == fresh.pipeline and again.assumes == fresh.assumes


def test_whatever_the_proof_looks_at_is_part_of_the_key(
    plan: PipelinePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove(plan)
    silent = replace(plan, environment={**plan.environment, "between_layers": "silent"})
    buffers = (replace(plan.buffers[0], scope="layer"), *plan.buffers[1:])
    ops = (replace(plan.ops[0], waits=False), *plan.ops[1:])
    for other in (silent, replace(plan, buffers=buffers), replace(plan, ops=ops)):
        assert remembered(other) is None
    monkeypatch.setattr(proved, "tool_digest", lambda: "other sources")
    assert remembered(plan) is None


def test_a_broken_file_is_no_proof(plan: PipelinePlan, tmp_path: Path) -> None:
    prove(plan)
    [kept] = (tmp_path / "cache" / "proofs").iterdir()
    for text in ("", "[]", '{"a": 1}', "[[]]"):
        kept.write_text(text)
        assert remembered(plan) is None
