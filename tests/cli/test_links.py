"""What the README and the documents point to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("text", sorted(TEXTS))
def test_every_link_leads_to_a_file(text: str) -> None:
    path = ROOT / text
    links = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    files = [link.partition("#")[0] for link in links if not re.match(r"https?:|#", link)]
    assert [name for name in files if not (path.parent / name).exists()] == []
