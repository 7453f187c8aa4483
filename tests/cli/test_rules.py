"""The catalogue: complete against the sources, and without dead entries."""

from __future__ import annotations

import re

from kpipe.codegen.config import SHIPPED
from kpipe.codegen.rules import RULES


def used_codes() -> set[str]:
    return {
        code
        for path in (SHIPPED / "codegen").rglob("*.py")
        if not path.name.endswith("rules.py")
        for code in re.findall(r"\"(KP\d{3})\"", path.read_text())
    } | {
        code
        for path in (SHIPPED / "codegen").rglob("*.py")
        if not path.name.endswith("rules.py")
        for listed in re.findall(r"\"((?:KP\d{3} )+KP\d{3})\"\.split", path.read_text())
        for code in listed.split()
    }


def test_every_code_has_a_rule_and_every_rule_a_use() -> None:
    assert used_codes() == set(RULES)


def test_entries_are_filled_in() -> None:
    names = [rule.name for rule in RULES.values()]
    assert len(set(names)) == len(names)
    for rule in RULES.values():
        assert rule.name and rule.bad
        assert rule.why.endswith(".") and len(rule.why) > 60, rule.code
        assert rule.repair.endswith("."), rule.code
