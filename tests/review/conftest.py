"""Plans of the shipped pipelines, proved once."""

from __future__ import annotations

import pytest
from spec_project import make_project, plan_of

from kpipe.codegen.plan.model import PipelinePlan


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PipelinePlan]:
    root = make_project(tmp_path_factory.mktemp("shown"))
    return {name: plan_of(root, name) for name in ("dsa_tp", "dsa_dcp")}
