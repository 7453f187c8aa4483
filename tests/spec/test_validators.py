"""Validators of the models: built on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import BaseModel

from kpipe.codegen.spec.models import Geometry, Numerics, Parallel, Pipeline, Rope, Round


def test_importing_the_models_builds_none() -> None:
    script = (
        "from kpipe.codegen.spec import models\n"
        "every = [m for m in vars(models).values() if isinstance(m, type)]\n"
        "mine = [m for m in every if issubclass(m, models.Model)]\n"
        "print(bool(mine), [m.__name__ for m in mine if m.__pydantic_complete__])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True []\n"


@pytest.mark.parametrize(
    ("owner", "field", "model"),
    [
        (Pipeline, "parallel", Parallel),
        (Pipeline, "numerics", Numerics),
        (Numerics, "round", Round),
        (Geometry, "rope", Rope),
    ],
)
def test_defaults_are_what_validation_would_make(
    owner: type[BaseModel], field: str, model: type[BaseModel]
) -> None:
    assert owner.model_fields[field].default == model.model_validate({})
