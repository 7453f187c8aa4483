"""A counterexample as a ladder: one step a line, one column a rank."""

from __future__ import annotations

from kpipe.codegen.proof.mailbox.unrolled import READ_END
from kpipe.codegen.proof.mailbox.verdict import Event, Verdict

WIDTH = 110
_NUMBER, _PLACE, _OP, _HELD, _GAP = 3, 5, 13, 8, 2
_NARROWEST = 22  # a rank's column; with less than that the ranks share one
_WORDS = {"publish": "put", "rearm": "re-arm", READ_END: "end read"}


def ladder(verdict: Verdict, ranks: int, *, width: int = WIDTH) -> str:
    """The counterexample as text without trailing spaces, at most `width` characters a line.

    One line per step: its number, step.layer, the op, in its rank's column the act with mailbox,
    parity and peer (`>` into, `<` from; `!` behind a payload that equals the sentinel), and what
    the word held before.  What does not fit ends in `~`.  The last lines say what is wrong; a
    proof is that alone.
    """
    if verdict.counterexample is None:
        return "\n".join(_wrapped(verdict.what, width))
    rest = width - _NUMBER - _PLACE - _OP - _HELD - 3 * _GAP
    column = rest // ranks - _GAP
    shared = column < _NARROWEST
    heads = ["rank: act"] if shared else [f"rank {rank}" for rank in range(ranks)]
    column = rest - _GAP if shared else column
    lines = [_line("", "s.l", "op", heads, "held", column)]
    for number, event in enumerate(verdict.counterexample, 1):
        cells = [""] * len(heads)
        cells[0 if shared else event.rank] = f"{event.rank}: " * shared + _act(event)
        place = f"{event.step}.{event.layer}"
        lines.append(_line(str(number), place, event.op, cells, event.held, column))
    return "\n".join([*lines, *_wrapped(verdict.what, width)])


def _act(event: Event) -> str:
    if not event.box:
        return event.act
    act = _WORDS.get(event.act, event.act)
    peer = "" if event.peer < 0 else f"{'>' if event.act == 'publish' else '<'}{event.peer}"
    return f"{act} {event.box}/{event.parity}{peer}" + "!" * event.forged


def _line(number: str, place: str, op: str, cells: list[str], held: str, column: int) -> str:
    parts = [number.rjust(_NUMBER), _cut(place, _PLACE), _cut(op, _OP)]
    parts += [_cut(cell, column) for cell in cells]
    return (" " * _GAP).join([*parts, _cut(_short(held), _HELD)]).rstrip()


def _short(held: str) -> str:
    return held.replace("step ", "s").replace("layer ", "l")


def _cut(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "~"


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()[:width]
    return lines
