"""Sentences for the parts of a difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kpipe.codegen.diagnostics import Diagnostic, printable
from kpipe.codegen.plan.describe import row_list
from kpipe.codegen.review.launches import edge_text, edge_way
from kpipe.codegen.review.model import Difference, FileChange, Files, LaunchChange, ListChange
from kpipe.codegen.review.numerics import ROUNDING
from kpipe.codegen.review.side import Verdict
from kpipe.codegen.review.verdict import LONE, count, numerics_change, proof_text

NAMES_SHOWN = 8
FINDINGS_SHOWN = 4
_OVERLAP = ("start", "release")
_CAUSES = {
    "spec": "follows from the spec",
    "template": "another template",
    "tool": "another kpipe",
}


def state_line(one: Difference, base: str) -> Iterator[str]:
    """What is special about a pipeline: new, deleted, refused, or without an old side."""
    if one.state == "new":
        yield f"New pipeline: `{one.path}` is not in {base}."
    elif one.state == "deleted":
        yield f"Deleted: `{one.path}` is in {base} and no longer here."
    elif one.state == "no base":
        codes = ", ".join(dict.fromkeys(d.code for d in one.old_found))
        why = f"could not be planned ({codes})" if codes else "is a draft"
        yield f"The old side {why}, so nothing is compared; what follows is the new side alone."
    elif one.state == "refused":
        yield "The new side cannot be planned, so nothing is compared."
    elif one.state == "draft":
        yield "The new side is a draft: it is checked, and not planned yet."
    yield from (f"{fact}." for fact in one.facts)
    yield from (f"Old side: {_finding(finding)}" for finding in one.old_found[:1])
    if len(one.old_found) > 1:
        yield f"Old side: {_more(len(one.old_found) - 1)}."
    yield from (f"**{_finding(finding)}**" for finding in one.found[:FINDINGS_SHOWN])
    if len(one.found) > FINDINGS_SHOWN:
        yield f"{_more(len(one.found) - FINDINGS_SHOWN)}: `kpipe check {one.path}`."
    yield from (f"Warning: {_finding(finding)}" for finding in one.warnings)


def _more(number: int) -> str:
    return f"{number} more {'finding' if number == 1 else 'findings'}"


def _finding(finding: Diagnostic) -> str:
    place = "" if finding.span is None else f"{finding.span.place}: "
    help = f"; {finding.help}" if finding.help else ""
    return printable(f"{place}{finding.code}: {finding.message}{help}")


def proof_line(one: Difference) -> Iterator[str]:
    """The verdict of both sides, and what it rests on."""
    before, after = one.before, one.after
    if after is None:
        return
    if after.kind in ("refused", "draft"):
        was = f" (before: {proof_text(before)})" if before is not None else ""
        yield f"Proof: none, there is no plan{was}."
        return
    both = " before and after" if before == after else ""
    was = ""
    if before is not None and before != after:
        was = f"; before: {proof_text(before)}"
        if before.kind == after.kind == "proved":
            was += f", resting on {_basis(before)}"
    if after.kind == "proved":
        how = f", eager and captured; rests on {_basis(after)}"
    else:
        how = "; no document promises it" if after.kind == "assumed" else ""
    yield f"Proof: {proof_text(after)}{both}{how}{was}."


def _basis(verdict: Verdict) -> str:
    return ", ".join(f"`{word}`" for word in verdict.basis)


def numerics_line(one: Difference) -> Iterator[str]:
    """Whether results change, and why."""
    if one.state not in ("changed", "same"):
        return
    sized = {"dimension", "parallel"} & {setting.section for setting in one.settings}
    if sized:
        yield "Numerics: sizes differ between the sides, so results are not comparable."
    if not numerics_change(one):
        proved = one.after is not None and one.after.kind == "proved"
        if one.changed_ranges and proved and not sized:
            yield "Numerics: the same ops with the same tiles; results are bitwise equal."
        return
    words = [*one.numerics]
    for number, change in enumerate(one.lists):
        if change.numerics and any(entry.change == number for entry in one.ranges):
            words += change.numerics
    listed = "; ".join(dict.fromkeys(words))
    tail = "" if one.numerics else f" (the result {ROUNDING})"
    yield f"**Numerics change**: {listed}{tail}."


def file_lines(one: Difference) -> Iterator[str]:
    """Kernels first, then the other generated files, then how the working tree stands."""
    files = one.files
    if files is None:
        if one.after is not None and one.after.kind in ("racy", "assumed"):
            yield "Files: nothing can be generated from a spec that is not proved."
        return
    if one.state in LONE:
        total = count(sum(bool(change.effect) for change in files.changes), "file")
        yield f"Files: {total} below `{files.folder}`."
    else:
        yield from _kernel_line(files.kernels)
        others = [c for c in files.changes if c.effect and c not in files.kernels]
        if others:
            yield f"Other generated files: {_grouped(others)}."
        elif not files.kernels:
            yield f"Generated files: none changes against {files.compared} on the old side."
    yield from _disk_lines(one, files)


def _kernel_line(kernels: tuple[FileChange, ...]) -> Iterator[str]:
    if kernels:
        yield f"**Kernel files**: {_grouped(kernels)}."
    else:
        yield "Kernels: no kernel file changes."


def _grouped(changes: Iterable[FileChange]) -> str:
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for change in changes:
        groups.setdefault((change.effect, change.causes), []).append(change.path)
    words = []
    for (effect, causes), paths in groups.items():
        why = ", ".join(_CAUSES.get(cause, cause) for cause in causes)
        effect = "changed in comments only" if effect == "comments" else effect
        words.append(f"{_names(paths)} {effect}" + (f" ({why})" if why else ""))
    return "; ".join(words)


def _disk_lines(one: Difference, files: Files) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for change in files.changes:
        groups.setdefault(change.disk, []).append(change.path)
    again = f"`kpipe generate {one.path}`"
    if not files.written[1]:
        never = bool(one.before) and files.never_written
        how = "is generated on neither side" if never else "is not generated yet"
        yield f"`{files.folder}` {how}; {again} writes it."
        return
    if groups.get("stale"):
        yield f"Not generated yet: {_names(groups['stale'])}; run {again}."
    if groups.get("missing"):
        yield f"Missing from the working tree: {_names(groups['missing'])}; run {again}."
    if groups.get("orphan"):
        yield f"Orphan, no longer generated: {_names(groups['orphan'])}; {again} deletes it."
    if groups.get("hand edit"):
        yield (
            f"**Edited by hand**: {_names(groups['hand edit'])}; move the edit into the spec or a "
            f"template, or overwrite it with `kpipe generate --force {one.path}`."
        )


def _names(paths: Iterable[str]) -> str:
    listed = list(paths)
    shown = ", ".join(f"`{path}`" for path in listed[:NAMES_SHOWN])
    more = len(listed) - NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def evidence_lines(one: Difference) -> Iterator[str]:
    """Launches that lose or gain evidence, then the totals of the new side."""
    if one.after is None or one.after.kind != "proved" or not one.evidence_totals:
        return
    kinds: dict[str, list[str]] = {}
    for change in () if one.state in LONE else one.evidence:
        text = f"`{change.op}` on {change.arch} at {row_list(change.rows)} rows"
        if change.before == "valid" and change.after:
            kinds.setdefault("**Launches that lose valid evidence**", []).append(text)
        elif not change.before and change.after != "valid":
            kinds.setdefault("Newly launched, without evidence", []).append(text)
        elif not change.before:
            kinds.setdefault("Newly launched, with valid evidence", []).append(text)
        elif change.after == "valid":
            kinds.setdefault("Launches that gain valid evidence", []).append(text)
    if kinds:
        yield from (f"{kind}: {', '.join(listed)}." for kind, listed in kinds.items())
    elif one.state not in LONE:
        yield "Evidence: no launch loses or gains a valid GPU record."
    totals = "; ".join(text.removeprefix("evidence ") for text in one.evidence_totals)
    yield f"GPU records after the change: {totals}."


def launch_lines(changes: Iterable[LaunchChange]) -> Iterator[str]:
    """Changes of launches as sentences.

    Launches that move in a row are one sentence, and so are those whose overlap changes alike.
    """
    listed = list(changes)
    rows: list[list[LaunchChange]] = []
    for change in listed:
        if rows and _follows(change, rows[-1][-1]):
            rows[-1].append(change)
        elif change.kind not in _OVERLAP:
            rows.append([change])
    for row in rows:
        if len(row) == 1:
            yield launch_line(row[0])
        else:
            yield f"{_quoted(row)} move together: {row[0].before} -> {row[0].after}."
    alike: dict[tuple[str, ...], list[LaunchChange]] = {}
    for change in listed:
        if change.kind in _OVERLAP:
            key = (change.kind, change.effect, change.before, change.after)
            alike.setdefault(key, []).append(change)
    for (kind, effect, before, after), group in alike.items():
        what = "PDL as before" if effect == "reason" else f"PDL {effect}"
        why = ", for another reason" if effect == "reason" else ""
        yield f"{what}, {kind} of {_quoted(group)}{why}: {after} (was {before})."


def _follows(change: LaunchChange, last: LaunchChange) -> bool:
    """Whether a launch moved right behind the last one, from the same stream to the same."""
    return (
        change.kind == last.kind == "moved"
        and change.after.endswith(f", behind {last.name}")
        and _stream(change.before) == _stream(last.before)
        and _stream(change.after) == _stream(last.after)
    )


def _quoted(changes: Iterable[LaunchChange]) -> str:
    return ", ".join(f"`{change.name}`" for change in changes)


def _stream(place: str) -> str:
    return place.partition(",")[0]


def launch_line(change: LaunchChange) -> str:
    """One change of a launch other than its overlap, as a sentence."""
    name, before, after = f"`{change.name}`", change.before, change.after
    if change.kind == "moved":
        return f"{name} moves: {before} -> {after}."
    if change.kind == "replaced":
        return f"{name} replaces `{before}` ({after})."
    if change.kind == "removed":
        return f"{name} is no longer launched (was {before})."
    if change.kind == "added":
        return f"{name} is launched ({after})."
    if change.kind == "issued":
        return f"Stream {name} is issued {after}, was {before}; the device order is the same."
    if change.kind == "operands" and not (before and after):
        return f"{name} {'is now given' if after else 'is no longer given'} {after or before}."
    return f"{name} {change.kind}: {before or '-'} -> {after or '-'}."


def overlap_lines(change: ListChange) -> list[str]:
    """What may run side by side no longer, and what now may."""
    return [
        f"{word}: `{name}` with {', '.join(f'`{other}`' for other in others)}."
        for word, pairs in (
            ("No longer side by side", change.parted),
            ("Now side by side", change.met),
        )
        for name, others in pairs
    ]


def edge_lines(change: ListChange) -> Iterator[str]:
    """Edges removed, edges that changed, edges added; those that changed alike are one line."""
    alike: dict[str, list[str]] = {}
    for edge in change.edges:
        before, after = edge.before, edge.after
        if after is None and before is not None:
            still = "; other edges still order the two" if edge.implied else ""
            yield f"Edge removed: {edge_text(before)}{still}."
        elif before is not None and after is not None:
            ways = edge_way(after), edge_way(before)
            if before.event == after.event:
                ways = after.port, before.port
            elif before.port == after.port:
                ways = f"by {ways[0].partition(',')[0]}", ways[1].partition(",")[0]
            what = f"now {ways[0]} (was {ways[1]})"
            alike.setdefault(what, []).append(f"{after.first} -> {after.second}")
    for what, listed in alike.items():
        yield f"{'Edge' if len(listed) == 1 else 'Edges'} {what}: {'; '.join(listed)}."
    for edge in change.edges:
        if edge.before is None and edge.after is not None:
            known = "; they were ordered before" if edge.implied else ""
            yield f"Edge added: {edge_text(edge.after)}{known}."
