"""The one line that a reviewer reads first."""

from __future__ import annotations

from collections.abc import Sequence

from kpipe.codegen.plan.describe import row_list
from kpipe.codegen.review.model import Difference, Review, RowRange
from kpipe.codegen.review.side import Verdict

LONE = ("new", "no base")  # there is no old side to compare with
_RACES = ("KP3", "KP4")  # rules about order; others are about declarations and mailboxes
VISIBLE = 0.05  # us; less is no predicted change


def verdict_line(review: Review) -> str:
    """The whole review in one line: what changed, proof, numbers, kernels, evidence, time."""
    parts = [_what(review), _proof(review.pipelines)]
    if any(numerics_change(one) for one in review.pipelines):
        parts.append("numerics change")
    parts += [*_kernels(review.pipelines), *_evidence(review.pipelines)]
    parts += [_time(review.pipelines), *_disk(review.pipelines)]
    return f"kpipe: {'; '.join(part for part in parts if part)}"


def proof_text(verdict: Verdict) -> str:
    """A verdict in a few words."""
    if verdict.kind == "proved":
        return "proved"
    if verdict.kind == "assumed":
        return f"not proved, safe only under {verdict.basis[0]} ({verdict.basis[-1]})"
    if verdict.kind == "draft":
        return "a draft"
    word = "refused"
    if verdict.kind == "racy":
        races = any(code.startswith(_RACES) for code in verdict.codes)
        word = "not proved, racy" if races else "not proved"
    return f"{word} ({', '.join(verdict.codes)})"


def numerics_change(one: Difference) -> bool:
    """Whether results of some rows may differ in their bits."""
    used = {entry.change for entry in one.ranges}
    return bool(one.numerics) or any(
        change.numerics for number, change in enumerate(one.lists) if number in used
    )


def count(number: int, noun: str) -> str:
    """`1 pipeline`, `2 pipelines`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _what(review: Review) -> str:
    states: dict[str, list[Difference]] = {}
    for one in review.pipelines:
        states.setdefault(one.state, []).append(one)
    words = []
    changed = states.get("changed", [])
    if changed:
        ranges = [entry for one in changed for entry in one.ranges]
        moved = [entry for entry in ranges if entry.state != "same"]
        schedule = f"schedule of {len(moved)} of {count(len(ranges), 'row range')}"
        words.append(f"{count(len(changed), 'pipeline')} changed")
        words.append(schedule if moved else "no schedule change")
    for state, word in (("new", "new"), ("deleted", "deleted"), ("refused", "refused")):
        if states.get(state):
            codes = [code for one in states[state] for code in (one.after or one.before).codes]
            why = f" ({', '.join(dict.fromkeys(codes))})" if state == "refused" else ""
            words.append(f"{count(len(states[state]), 'pipeline')} {word}{why}")
    if states.get("no base"):
        words.append(f"{count(len(states['no base']), 'pipeline')} without a usable old side")
    if words:
        return ", ".join(words)
    total = count(len(review.pipelines), "pipeline")
    return f"no schedule change in {total} against {review.base}"


def _proof(pipelines: Sequence[Difference]) -> str:
    after = [one.after for one in pipelines if one.after is not None]
    after = [verdict for verdict in after if verdict.kind not in ("refused", "draft")]
    bad = [verdict for verdict in after if verdict.kind != "proved"]
    if bad:
        return ", ".join(dict.fromkeys(proof_text(verdict) for verdict in bad))
    if not after:
        return ""
    was = [
        one.before
        for one in pipelines
        if one.state in ("changed", "same") and one.before and one.before.kind != "proved"
    ]
    texts = ", ".join(dict.fromkeys(proof_text(verdict) for verdict in was))
    return f"proved (was {texts})" if was else "proved"


def _kernels(pipelines: Sequence[Difference]) -> list[str]:
    files = [one.files for one in pipelines if one.files is not None and one.state not in LONE]
    if not files:
        return []
    effects: dict[str, int] = {}
    for folder in files:
        for change in folder.kernels:
            effects[change.effect] = effects.get(change.effect, 0) + 1
    words = {"changed": "changed", "comments": "changed in comments", "new": "new"}
    parts = [
        f"{count(effects[effect], 'kernel file')} {words.get(effect, effect)}"
        for effect in ("changed", "comments", "new", "removed")
        if effect in effects
    ]
    text = ", ".join(parts) if parts else "no kernel file changes"
    return [text]


def _disk(pipelines: Sequence[Difference]) -> list[str]:
    """How the working tree's generated files stand to what kpipe would write."""
    folders = [one.files for one in pipelines if one.files is not None]
    disks = [
        change.disk
        for folder in folders
        if folder.written[1]
        for change in folder.changes
        if change.disk != "current"
    ]
    bare = sum(not f.written[1] for f in folders) - sum(
        one.state != "new" and one.files is not None and one.files.never_written
        for one in pipelines
    )
    edited = disks.count("hand edit")
    stale = len(disks) - edited
    words = [f"{count(bare, 'pipeline')} not generated yet"] if bare else []
    words += [f"{count(stale, 'generated file')} not up to date"] if stale else []
    return [*words, *([f"{count(edited, 'file')} edited by hand"] if edited else [])]


def _evidence(pipelines: Sequence[Difference]) -> list[str]:
    lost = sum(
        len(change.rows)
        for one in pipelines
        for change in one.evidence
        if change.before == "valid" and change.after not in ("", "valid")
    )
    bare = sum(
        len(change.rows)
        for one in pipelines
        if one.state not in LONE
        for change in one.evidence
        if not change.before and change.after != "valid"
    )
    words = (
        [f"{count(lost, 'launch').replace('launchs', 'launches')} lose evidence"] if lost else []
    )
    if bare:
        words.append(f"{bare} newly activated without evidence")
    return words


def _time(pipelines: Sequence[Difference]) -> str:
    """The largest predicted gain and the largest predicted loss."""
    timed = [(entry, one) for one in pipelines for entry in one.ranges if entry.timed]
    if not timed:
        return ""
    gain = min(timed, key=lambda pair: min(pair[0].deltas))
    loss = max(timed, key=lambda pair: max(pair[0].deltas))
    words = []
    if min(gain[0].deltas) < -VISIBLE:
        words.append(_at(min(gain[0].deltas), *gain, several=len(pipelines) > 1))
    if max(loss[0].deltas) > VISIBLE:
        words.append(_at(max(loss[0].deltas), *loss, several=len(pipelines) > 1))
    if words:
        return f"predicted {', '.join(words)}"
    moved = any(entry.state == "changed" for entry, _ in timed)
    return "predicted time unchanged" if moved else ""


def _at(delta: float, entry: RowRange, one: Difference, *, several: bool) -> str:
    whose = f"{one.name}, " if several else ""
    rows = "row" if entry.rows == (1,) else "rows"
    up_to = "" if max(entry.deltas) - min(entry.deltas) < 2 * VISIBLE else "up to "
    return (
        f"{up_to}{delta:+.1f} us at {row_list(entry.rows)} {rows} ({whose}{entry.arch} q {entry.q})"
    )
