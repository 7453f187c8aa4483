"""A review as a comment of a pull request: verdict line first, under the size that fits."""

from __future__ import annotations

from collections.abc import Sequence

from kpipe.codegen.review.model import Review
from kpipe.codegen.review.sections import Bullets, Picture, Section, Table, sections_of
from kpipe.codegen.review.verdict import count, verdict_line

LIMIT = 64 * 1024  # bytes that a comment may have
MARK = "<!-- kpipe plan --against -->"  # by which a bot finds its comment again
_ROOM = 1024  # for the last lines


def render_markdown(review: Review) -> str:
    """The comment; detail sections are dropped from the last on where it would be too long."""
    sections = list(sections_of(review))
    texts = [_section(section) for section in sections]
    head = f"{_inert(verdict_line(review))}\n"
    left_out = _dropped(sections, texts, LIMIT - _ROOM - _size(head))
    tail = [f"Compared with {_inert(review.base)} by `{review.command}`.", MARK]
    if left_out:
        more = f"{count(left_out, 'section')} left out to keep this comment under 64 KB"
        tail.insert(0, f"{more}; `{review.command} --format text` shows all.")
    kept = [text for text in texts if text]
    return "\n".join([head, *kept, "\n".join(tail), ""])


def _dropped(sections: Sequence[Section], texts: list[str], room: int) -> int:
    """Empties texts until they fit: details from the last on, then anything from the last on."""
    dropped, size = 0, sum(_size(text) + 1 for text in texts)
    for details in (True, False):
        for number in range(len(texts) - 1, -1, -1):
            if size <= room:
                return dropped
            if texts[number] and (sections[number].detail or not details):
                size -= _size(texts[number])
                texts[number] = ""
                dropped += 1
    return dropped


def _size(text: str) -> int:
    return len(text.encode("utf-8"))


def _section(section: Section) -> str:
    blocks = "\n\n".join(_block(block) for block in section.blocks)
    if section.folded:
        title = _html(section.title)
        return f"<details><summary>{title}</summary>\n\n{blocks}\n\n</details>\n"
    return f"{'##' if section.level == 1 else '###'} {_inert(section.title)}\n\n{blocks}\n"


def _block(block: Table | Bullets | Picture) -> str:
    if isinstance(block, Bullets):
        return "\n".join(f"- {_inert(line)}" for line in block.lines)
    if isinstance(block, Picture):
        return "\n".join([f"```{block.language}", *block.lines, "```"])
    rows = [block.header, ("---",) * len(block.header), *block.rows]
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows)


def _cell(text: str) -> str:
    return _inert(text).replace("|", "\\|")


def _inert(text: str) -> str:
    """Words of a spec may be a stranger's: outside of code no markup and no mention of anybody."""
    parts = text.split("`")
    code = len(parts) % 2  # every backtick has its partner
    return "`".join(p if code and n % 2 else _escaped(p) for n, p in enumerate(parts))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("@", "&#64;")


def _html(title: str) -> str:
    """Backticks mean nothing inside a summary."""
    parts = _escaped(title).split("`")
    return "".join(f"<code>{p}</code>" if n % 2 else p for n, p in enumerate(parts))
