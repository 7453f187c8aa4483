"""The specs that tests edit are the shipped ones but for what `kpipe tune` writes."""

from __future__ import annotations

from typing import Any

import pytest
from ruamel.yaml import YAML
from spec_project import SHIPPED, UNTUNED


def without_tuning(text: str, modes: set[str]) -> Any:
    """A spec without its tables and tiles, and with these modes alone."""
    spec = YAML(typ="safe").load(text)
    del spec["overlap"]["table"]
    for stage in spec["stages"].values():
        stage.pop("tactics", None)
    spec["overlap"]["modes"] = {k: v for k, v in spec["overlap"]["modes"].items() if k in modes}
    return spec


@pytest.mark.parametrize("path", sorted(UNTUNED.glob("*.yaml")), ids=lambda path: path.stem)
def test_only_what_tuning_writes_differs(path) -> None:  # noqa: ANN001
    text = path.read_text()
    modes = set(YAML(typ="safe").load(text)["overlap"]["modes"])
    shipped = (SHIPPED / path.name).read_text()
    assert without_tuning(text, modes) == without_tuning(shipped, modes)
