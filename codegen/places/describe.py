"""A survey for people, for tools, and as YAML to paste."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from kpipe.codegen.places.layout import Layout, launches
from kpipe.codegen.places.survey import Blocked, Legal, Survey
from kpipe.codegen.plan.columns import WIDTH
from kpipe.codegen.plan.describe import row_list
from kpipe.codegen.plan.resolve import Resolved

SHOWN = 10  # legal schedules, and rules, without --all
YAML_WIDTH = 100
_NAME = re.compile(r"`\w+`")
PREDICTION = "times are predictions of the cost model, no run; gain is over the mode as it is"


def describe_text(surveys: Sequence[Survey], name: str, *, every: bool) -> str:
    """Legal schedules by predicted time and the rules that block the other places, mode by mode.

    Schedules are numbered through all modes, as `--yaml` takes them.
    """
    blocks, number = [], 0
    for survey in surveys:
        blocks.append("\n".join(_section(survey, name, number, every)) + "\n")
        number += len(survey.legal)
    return "\n".join(blocks)


def _section(survey: Survey, name: str, number: int, every: bool) -> list[str]:
    lines = _wrap(f"{name} in mode {_modes(survey)}, for {_uses(survey)}", "", "  ")
    lines += _streams(survey.layout)
    lines += [f"  predicted {survey.time:.1f} us a layer"]
    if survey.added:
        lines += [f"  the mode does not launch `{name}`: it is put in"]
    lines += ["", *_wrap(f"legal: {_legal_count(survey)}; {PREDICTION}", "  ", "    ")]
    shown = survey.legal if every else survey.legal[:SHOWN]
    rows = [("#", "gain us", "layer us", "ops", "place")] if shown else []
    for place, legal in enumerate(shown, number + 1):
        gain = "now" if legal.current else f"{_gain(survey, legal):+.1f}"
        rows.append((str(place), gain, f"{legal.time:.1f}", *_ops_and_place(survey, legal)))
    lines += _table(rows)
    if len(shown) < len(survey.legal):
        lines += [f"    {len(survey.legal) - len(shown)} more with --all"]
    lines += ["", f"  illegal: {_count(survey.illegal, 'place') if survey.illegal else 'none'}"]
    rules = survey.blocked if every else survey.blocked[:SHOWN]
    for block in rules:
        lines += _rule(block)
    if len(rules) < len(survey.blocked):
        lines += [f"    {len(survey.blocked) - len(rules)} more with --all"]
    return lines


def _legal_count(survey: Survey) -> str:
    places = sum(legal.alike for legal in survey.legal)
    return f"{_count(len(survey.legal), 'schedule')} at {_count(places, 'place')}"


def _ops_and_place(survey: Survey, legal: Legal) -> tuple[str, str]:
    whole = set(legal.place.moved) == set(survey.ops) and len(survey.ops) > 1
    ops = "all" if whole else ", ".join(legal.place.moved)
    notes = [f"flags: {', '.join(legal.flags)}"] if legal.flags else []
    return ops, "; ".join((legal.place.text, *notes))


def _rule(block: Blocked) -> list[str]:
    alone = f", {len(block.alone)} of them for this alone" if block.alone else ""
    first, *others = block.sentences
    names = dict.fromkeys(n for other in others for n in _NAME.findall(other) if n not in first)
    also = f" (also {', '.join(names)})" if names else ""
    head = f"{block.code}  {first}{also}: {_count(len(block.places), 'place')}{alone}"
    lines = _wrap(head, "    ", "           ")
    if block.help:
        lines += _wrap(f"to unblock: {block.help}", "           ", "             ")
    return lines + _wrap(f"e.g. {_example(block)}", "           ", "             ")


def describe_json(surveys: Sequence[Survey], name: str) -> dict[str, object]:
    """Everything that was found, for tools; rows are lists of counts by query length."""
    number, modes = 0, []
    for survey in surveys:
        legal = []
        for one in survey.legal:
            number += 1
            legal.append(_legal_dict(survey, one, number))
        modes.append(
            {
                "mode": survey.mode,
                "asked": list(survey.asked),
                "arch": survey.steps[0].arch,
                "rows": {str(q): rows for q, rows in _rows(survey).items()},
                "ops": list(survey.ops),
                "added": survey.added,
                "streams": _stream_dict(survey.layout),
                "predicted_us": round(survey.time, 3),
                "legal": legal,
                "illegal": survey.illegal,
                "blocked": [_blocked_dict(block) for block in survey.blocked],
            }
        )
    return {"schema": "kpipe.modes/1", "name": name, "note": PREDICTION, "modes": modes}


def _legal_dict(survey: Survey, legal: Legal, number: int) -> dict[str, object]:
    return {
        "number": number,
        "current": legal.current,
        "gain_us": round(_gain(survey, legal), 3) + 0.0,
        "predicted_us": round(legal.time, 3),
        "ops": list(legal.place.moved),
        "place": legal.place.text,
        "places": legal.alike,
        "flags": list(legal.flags),
        "streams": _stream_dict(legal.place.layout),
    }


def _blocked_dict(block: Blocked) -> dict[str, object]:
    return {
        "code": block.code,
        "messages": list(block.sentences),
        "help": block.help,
        "places": len(block.places),
        "alone": len(block.alone),
        "example": _example(block),
    }


def _example(block: Blocked) -> str:
    place = (block.alone or block.places)[0]
    return f"{', '.join(place.moved)} {place.text}"


def _stream_dict(layout: Layout) -> dict[str, list[str]]:
    return {stream: list(words) for stream, words in layout.streams}


def describe_yaml(resolved: Resolved, survey: Survey, legal: Legal, name: str) -> str:
    """The schedule as a mode to paste below `overlap: modes:`, under a name that is free.

    A comment says which cells of the table would select it.
    """
    mode = resolved.modes[survey.mode]
    free, number = f"{survey.mode}_{name.replace('@', '_')}", 1
    while free in resolved.modes:
        number += 1
        free = f"{survey.mode}_{name.replace('@', '_')}_{number}"
    margin = " " * (mode.span.column - 1)
    head = f"{margin}# {', '.join(legal.place.moved)} {legal.place.text}: predicted gain "
    lines = textwrap.wrap(
        f"{head}{_gain(survey, legal):+.1f} us a layer, {_uses(survey)}",
        YAML_WIDTH,
        subsequent_indent=f"{margin}# ",
    )
    lines += mode_lines(free, legal.place.layout.streams, mode.requires, margin)
    lines.append(f"{margin}# to select it: write `{free}` in `overlap.table` for {_uses(survey)}")
    return "\n".join(lines) + "\n"


def mode_lines(
    name: str,
    streams: Sequence[tuple[str, Sequence[str]]],
    requires: Sequence[tuple[str, bool]],
    margin: str,
) -> list[str]:
    """A mode as it stands below `overlap: modes:`, each line behind the margin."""
    lines = [f"{margin}{name}:"]
    for stream, words in streams:
        start = f"{margin}  {stream}: ["
        lines += textwrap.wrap(
            f"{', '.join(word.replace(' ', _GLUE) for word in words)}]",
            YAML_WIDTH,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_long_words=False,
        )
    if requires:
        pairs = ", ".join(f"{fact}: {str(value).lower()}" for fact, value in requires)
        lines.append(f"{margin}  requires: {{{pairs}}}")
    return [line.replace(_GLUE, " ") for line in lines]


_GLUE = "\x00"  # keeps `join side` on one line


def _gain(survey: Survey, legal: Legal) -> float:
    return round(survey.time - legal.time, 3) + 0.0


def _modes(survey: Survey) -> str:
    asked = [mode for mode in survey.asked if mode != survey.mode]
    return f"{survey.mode} (in place of {', '.join(asked)})" if asked else survey.mode


def _rows(survey: Survey) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for step in survey.steps:
        rows.setdefault(step.q, []).append(step.rows)
    return rows


def _uses(survey: Survey) -> str:
    listed = (f"q {q} rows {row_list(counts)}" for q, counts in _rows(survey).items())
    return f"{survey.steps[0].arch} {'; '.join(listed)}"


def _streams(layout: Layout) -> list[str]:
    width = max(len(stream) for stream, _ in layout.streams)
    lines = []
    for stream, words in layout.streams:
        text = "  ".join(w if launches(w) else f"[{w.replace(' ', _GLUE)}]" for w in words)
        lines += _wrap(text, f"  {stream:<{width}}  ", " " * (width + 4))
    return [line.replace(_GLUE, " ") for line in lines]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows in columns, numbers to the right, the last column wrapped."""
    widths = [max(len(row[column]) for row in rows) for column in range(4)] if rows else []
    lines = []
    for row in rows:
        cells = [
            f"{cell:>{width}}" if column < 3 else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        start = "    " + "  ".join(cells) + "  "
        lines += _wrap(row[4], start, " " * len(start))
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
