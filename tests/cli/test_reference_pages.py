"""Pages of docs/ that a command writes: they are what it writes now, and say everything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from kpipe.codegen.cli import main
from kpipe.codegen.config import SHIPPED
from kpipe.codegen.rules import RULES
from kpipe.codegen.spec.models import Geometry, Pipeline

PAGES = {
    "language-reference.md": ("schema", "--format", "markdown"),
    "rules.md": ("rules", "--format", "markdown"),
}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name: str) -> None:
    words = PAGES[name]
    text = CliRunner().invoke(main, list(words)).stdout
    page = (SHIPPED / "docs" / name).read_text()
    assert text == page, f"kpipe {' '.join(words)} > docs/{name}"
    assert f"`kpipe {' '.join(words)}`" in page


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A model and those that its fields hold, whatever stands around them."""
    yield model
    for field in model.model_fields.values():
        for inner in inside(field.annotation):
            yield from models(inner)


def inside(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from inside(part)


def sections() -> dict[str, str]:
    text = (SHIPPED / "docs" / "language-reference.md").read_text()
    parts = re.split(r"(?m)^## (.+)\n", text)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_reference_has_every_key_with_its_meaning() -> None:
    found = sections()
    titles = {"pipeline": "A pipeline file", "geometry": "A geometry file"}
    named = {
        model.__name__.lower(): model for part in (Pipeline, Geometry) for model in models(part)
    }
    assert {titles.get(name, name) for name in named} == set(found)
    for name, model in named.items():
        rows = re.findall(
            r"(?m)^\| (\**)`(\w+)`\** \| (.+?) \| (.*?) \| (.*) \|$", found[titles.get(name, name)]
        )
        assert [key for _, key, *_ in rows] == [
            field.alias or key for key, field in model.model_fields.items()
        ]
        for (bold, _, takes, default, meaning), field in zip(
            rows, model.model_fields.values(), strict=True
        ):
            assert bool(bold) is field.is_required() and takes and meaning
            if isinstance(field.default, int | str) and field.default and not bold:
                assert default.strip("`") == str(field.default).lower()


def test_links_of_the_reference_lead_to_sections() -> None:
    found = sections()
    for body in found.values():
        for target in re.findall(r"\]\(#([\w-]+)\)", body):
            assert target in found


def test_the_rules_have_all_their_parts() -> None:
    text = (SHIPPED / "docs" / "rules.md").read_text()
    assert re.findall(r"(?m)^## (KP\d+) ", text) == sorted(RULES)
    for rule in RULES.values():
        section = text.partition(f"## {rule.code} {rule.name}\n")[2].partition("\n## ")[0]
        assert all(part in section for part in (rule.why, rule.bad.expandtabs(4), rule.repair))


def test_markdown_is_not_written_by_out(tmp_path: Any) -> None:
    words = ["schema", "--format", "markdown", "--out", str(tmp_path / "x")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and "redirect the Markdown" in result.stderr
    assert not (tmp_path / "x").exists()
