"""What travels between ranks, for people and for tools: the `wire` section of a plan."""

from __future__ import annotations

from typing import Any

from kpipe.codegen.plan.columns import columns, wrap
from kpipe.codegen.plan.wire import Post
from kpipe.codegen.plan.wire_report import StepWire, WireReport


def wire_text(report: WireReport) -> str:
    """Three tables (bytes, launches, predicted time) and the assumptions, a line each."""
    peers = report.ranks - 1
    title = f"wire, {report.arch}, q {report.q}: bytes that a rank sends to {_peers(peers)} a layer"
    parts = [
        [f"{title}; it receives as many", *_bytes(report)],
        ["  instead, bytes per row (computed; no op of this plan does it)", *_instead(report)],
        [
            "launches a layer, beside the same kernels with a library's collectives (one launch "
            "each)",
            *_launches(report),
        ],
        ["predicted time of a layer, us", *_predicted(report)],
        ["assumptions", *(line for text in report.assumptions for line in _item(text))],
    ]
    return "\n".join("\n".join(part) + "\n" for part in parts)


def _peers(count: int) -> str:
    return f"its {count} peers" if count > 1 else "its peer"


def _bytes(report: WireReport) -> list[str]:
    found: dict[tuple[str, str, int], dict[int, int]] = {}
    for one in report.steps:
        for post in one.posts:
            cells = found.setdefault((_label(post), post.dtype, post.sent), {})
            cells[one.step.rows] = post.sent * one.step.rows
    counts = [one.step.rows for one in report.steps]
    rows = [("mailbox", "dtype", "per row", *(_rows(count) for count in counts))]
    for (label, dtype, sent), cells in found.items():
        sizes = (f"{cells[count]:,}" if count in cells else "" for count in counts)
        rows.append((label, dtype, f"{sent:,}", *sizes))
    rows.append(("total", "", "", *(f"{one.sent:,}" for one in report.steps)))
    return columns(rows, right=tuple(range(2, 3 + len(counts))))


def _label(post: Post) -> str:
    return f"{post.mailbox}, owned columns" if post.scattered else post.mailbox


def _rows(count: int) -> str:
    return f"{count} rows" if count > 1 else "1 row"


def _instead(report: WireReport) -> list[str]:
    return columns([(f"  {other.what}", f"{other.sent:,}") for other in report.alternatives], (1,))


def _launches(report: WireReport) -> list[str]:
    rows = [("rows", "launches", "streams", "of them only wait, or sum", "with collectives")]
    for one in report.steps:
        known = one.count
        rows.append(
            (
                str(one.step.rows),
                str(known.launches),
                str(known.streams),
                ", ".join(known.waiting) or "none",
                f"{known.collective_form}, {len(known.collectives)} of them collectives",
            )
        )
    named = dict.fromkeys(name for one in report.steps for name in one.count.collectives)
    return [*columns(rows), *wrap(", ".join(named), "  collectives: ", "    ")]


def _predicted(report: WireReport) -> list[str]:
    rows = [("rows", "layer", "words always there", "waiting for words", "durations")]
    for one in report.steps:
        known = one.prediction
        rows.append(
            (
                str(one.step.rows),
                f"{known.layer:.1f}",
                f"{known.words_there:.1f}",
                f"{known.waiting:.1f}",
                _durations(one),
            )
        )
    return columns(rows, right=(1, 2, 3))


def _durations(one: StepWire) -> str:
    known = one.prediction
    if not known.measured:
        return "estimated"
    some = "" if known.measured == known.launches else f"{known.measured} of {known.launches} "
    return f"{some}measured on {known.gpu}"


def _item(text: str) -> list[str]:
    return wrap(text, "  ", "    ")


def wire_json(report: WireReport) -> dict[str, Any]:
    """The same as plain data; bytes are those of one rank to all its peers."""
    return {
        "arch": report.arch,
        "q": report.q,
        "ranks": report.ranks,
        "link": {
            "name": report.link.name,
            "peer_store_gb_s": report.link.peer_store_gb_s,
            "one_way_latency_us": report.link.one_way_latency_us,
            "source": report.link.source,
        },
        "steps": [_step_json(one) for one in report.steps],
        "alternatives": [
            {"what": other.what, "bytes_per_row": other.sent} for other in report.alternatives
        ],
        "assumptions": list(report.assumptions),
    }


def _step_json(one: StepWire) -> dict[str, Any]:
    known, launches = one.prediction, one.step.launches
    return {
        "rows": one.step.rows,
        "bytes": one.sent,
        "mailboxes": [
            {
                "name": post.mailbox,
                "dtype": post.dtype,
                "scattered": post.scattered,
                "writer": launches[post.writer].name,
                "pollers": [launches[at].name for at in post.pollers],
                "bytes_per_row": post.sent,
                "bytes_per_row_to_one_peer": post.to_peer,
            }
            for post in one.posts
        ],
        "launches": one.count.launches,
        "streams": one.count.streams,
        "waiting_launches": list(one.count.waiting),
        "collectives": list(one.count.collectives),
        "launches_with_collectives": one.count.collective_form,
        "predicted_us": round(known.layer, 3),
        "predicted_us_words_there": round(known.words_there, 3),
        "predicted_us_waiting": round(known.waiting, 3),
        "critical_path": list(known.path),
        "measured_launches": known.measured,
        "measured_on": known.gpu or None,
    }
