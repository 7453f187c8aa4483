"""Mailbox protocols as findings of a spec: the ladder, the repair, verdicts between runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from spec_project import edit, findings_of, make_project

from kpipe.codegen.diagnostics import Diagnostic, render_text
from kpipe.codegen.plan.api import plan_pipeline
from kpipe.codegen.proof import mailboxes
from kpipe.codegen.proof.prove import prove


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KPIPE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mailboxes"


def without_all_reduce(root: Path, **parities: int) -> tuple[Diagnostic, ...]:
    """dsa_dcp whose layers end with the value: nothing makes all ranks wait at the end."""
    make_project(root)
    path = root / "pipelines" / "dsa_dcp.yaml"
    kept, skipped = [], False
    for line in path.read_text().splitlines():
        skipped = line.startswith("  o_proj:") or (skipped and line.startswith("    "))
        if not skipped and not line.startswith(("  o_mail:", "  o_gather:")):
            kept.append(line.replace(", o_proj, o_reduce]", "]"))
    path.write_text("\n".join(kept) + "\n")
    for name, count in parities.items():
        line = next(line for line in kept if line.startswith(f"  {name}:"))
        edit(root, "dsa_dcp.yaml", line, line.replace("parities: 2", f"parities: {count}"))
    return findings_of(str(path))


def test_without_an_exchange_at_the_end_an_odd_step_reuses_the_parity(tmp_path: Path) -> None:
    found = without_all_reduce(tmp_path)
    assert {finding.code for finding in found} == {"KP702"}
    finding = found[0]
    assert finding.message == (
        "mode `fork`: rank 0: `mla_query` publishes `q_mail` of step 1 layer 0 into rank 1 over "
        "the word of step 0 layer 2, which rank 1 has not re-armed yet"
    )
    assert finding.help.startswith("raise `parities`, or end the layer with an exchange")
    text = render_text(found[:1], {})
    assert "   |      s.l    op" in text and "put q_mail/0>1" in text
    assert max(map(len, finding.story)) <= 110


def test_three_parities_carry_it_over_the_step(tmp_path: Path) -> None:
    boxes = ("q_mail", "candidates", "partial_mail", "lse_mail")
    assert without_all_reduce(tmp_path, **dict.fromkeys(boxes, 3)) == ()


def test_the_shipped_protocols_are_explored_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_project(tmp_path)
    plan = plan_pipeline(str(root / "pipelines" / "dsa_dcp.yaml"))
    prove(plan)
    verdicts = len(list(cache.iterdir()))
    assert verdicts == 6  # wait, fork, fork two-shot; each as one long step and as an odd one

    def explored(*given: object) -> None:
        raise AssertionError("explored again")

    monkeypatch.setattr(mailboxes, "explore", explored)
    prove(plan)
    monkeypatch.setattr(mailboxes, "_explorer_digest", lambda: "another explorer")
    with pytest.raises(AssertionError, match="explored again"):
        prove(plan)


def test_a_failure_is_not_remembered(tmp_path: Path, cache: Path) -> None:
    first = without_all_reduce(tmp_path / "a")
    assert first == findings_of(str(tmp_path / "a" / "pipelines" / "dsa_dcp.yaml"))
