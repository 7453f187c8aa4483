"""Validators of the models: built on first use, without plugins of pydantic."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
from pydantic import BaseModel, ConfigDict

from kpipe.codegen.spec import validate as module
from kpipe.codegen.spec.models import Geometry, Numerics, Parallel, Pipeline, Rope, Round

LOADER = "pydantic.plugin._loader"


def deferred() -> type[BaseModel]:
    class Late(BaseModel):
        model_config = ConfigDict(defer_build=True)
        number: int

    return Late


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, LOADER, raising=False)
    late = deferred()
    module._build(late)
    assert LOADER not in sys.modules
    assert late.__pydantic_complete__
    assert late.model_validate({"number": 3}).number == 3


def test_a_loader_that_is_there_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    loader = ModuleType(LOADER)
    loader.get_plugins = lambda: asked.append(1) or ()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, LOADER, loader)
    module._build(deferred())
    assert asked and sys.modules[LOADER] is loader


def test_a_pydantic_that_asks_for_more_gets_its_own_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, LOADER, raising=False)
    late = deferred()
    seen = []

    def rebuild() -> None:
        seen.append(LOADER in sys.modules)
        if seen[-1]:
            raise ImportError("cannot import name")

    monkeypatch.setattr(late, "model_rebuild", rebuild)
    module._build(late)
    assert seen == [True, False]


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
