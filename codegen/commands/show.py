"""`kpipe show`: a plan as a picture, in the terminal or as a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kpipe.codegen.commands.common import exit_code, show_findings
from kpipe.codegen.commands.measured import read_times
from kpipe.codegen.config import display, load_config
from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.review.selection import Chosen, Selection, distinct, select

if TYPE_CHECKING:
    from kpipe.codegen.plan.model import PipelinePlan
    from kpipe.codegen.review.timed_schedule import TimedSchedule
    from kpipe.codegen.review.timings import Timings

_SUFFIXES = {".svg": "svg", ".html": "html", ".htm": "html", ".json": "perfetto"}


def run(
    view: str,
    spec: str,
    rows: int | None,
    q: int | None,
    arch: str | None,
    mode: str | None,
    form: str | None,
    out: str | None,
    timings: str | None,
    estimated: bool,
    color: str,
) -> int:
    """Print or write the picture; returns the exit code.

    Raises click exceptions, exit code 2, for a format that the view does not have, for times that
    cannot be read and for an output that cannot be written.
    """
    form = form or _SUFFIXES.get(Path(out or "").suffix.lower(), "text")
    _check_form(view, form)
    if view != "timeline" and (timings or estimated):
        raise click.UsageError(f"`show {view}` has no times: drop --timings and --estimated")
    if timings and estimated:
        raise click.UsageError("choose one of --timings and --estimated")
    texts: dict[str, str] = {}
    try:
        selection = select(spec, texts, rows, q, arch, mode)
        shown = (
            _timeline(selection, spec, form, timings, estimated)
            if view == "timeline"
            else _structure(view, selection, form)
        )
    except SpecError as error:
        show_findings(error.diagnostics, texts, "text", color=color, err=True)
        planned = {finding.code for finding in error.diagnostics} - {"KP104", "KP808"}
        if mode and None in (rows, q, arch) and planned:
            hint = f"mode `{mode}` may suit some steps only: select them with --rows, --q, --arch"
            click.echo(hint, err=True)
        return exit_code(error.diagnostics)
    if out is None:
        click.echo(shown, nl=False)
    else:
        _write(Path(out), shown)
    return 0


def _check_form(view: str, form: str) -> None:
    if form == "perfetto" and view != "timeline":
        raise click.UsageError(
            f"`show {view}` has no times, so there is no perfetto trace of it: "
            "use --format text, svg or html"
        )


def _write(path: Path, text: str) -> None:
    try:
        path.write_bytes(text.encode("utf-8"))
    except OSError as error:
        reason = error.strerror or "it cannot be written"
        raise click.ClickException(f"cannot write {display(path)}: {reason}") from None


def _formatted(form: str, title: str, text: Callable[[], str], picture: Callable[[], str]) -> str:
    if form == "text":
        return text()
    if form == "svg":
        return picture()
    from kpipe.codegen.review.page import html_page

    return html_page(title, picture(), text())


def _timeline(
    selection: Selection, spec: str, form: str, timings: str | None, estimated: bool
) -> str:
    from kpipe.codegen.review.timeline_picture import timeline_svg
    from kpipe.codegen.review.timeline_text import timeline_text

    schedules = _schedules(selection, spec, timings, estimated)
    if form == "perfetto":
        from kpipe.codegen.review.trace import trace_json

        return trace_json(schedules)
    return _formatted(
        form,
        f"{selection.plan.name}: timeline",
        lambda: timeline_text(schedules),
        lambda: timeline_svg(schedules),
    )


def _schedules(
    selection: Selection, spec: str, timings: str | None, estimated: bool
) -> list[TimedSchedule]:
    """Every chosen step in time, with what was measured where there is something."""
    from kpipe.codegen.review.timed_schedule import timed_schedule
    from kpipe.codegen.review.timings import evidence_timings, measured_step

    folder = load_config(Path(spec)).output / selection.plan.name
    if timings is not None:
        known: tuple[Timings, ...] = (read_times(Path(timings)),)
    else:
        known = () if estimated else evidence_timings(folder)
    schedules = []
    for one in distinct(selection, sizes=True):
        measured = measured_step(known, selection.plan, one.step, one.method, folder)
        schedules.append(timed_schedule(selection.plan, one.step, one.method, measured))
    if timings is not None:
        _say_what_lacks(selection, schedules, known, timings)
    return schedules


def _say_what_lacks(
    selection: Selection,
    schedules: list[TimedSchedule],
    known: tuple[Timings, ...],
    timings: str,
) -> None:
    """On stderr: the steps for which the named file has nothing, and what it has."""
    from kpipe.codegen.plan.describe import row_list
    from kpipe.codegen.review.timed_schedule import ESTIMATED
    from kpipe.codegen.review.timings import measured_rows

    lacking = [schedule.caption.step for schedule in schedules if schedule.label == ESTIMATED]
    if not lacking:
        return
    name = selection.plan.name
    there = [
        f"rows {row_list(rows)} on {arch}"
        for arch in selection.plan.targets
        if (rows := measured_rows(known, name, arch))
    ]
    has = f"it has {'; '.join(there)}" if there else f"it has none of {name}"
    for step in lacking:
        click.echo(f"{timings}: no times for {step}, so they are estimated; {has}", err=True)


def _structure(view: str, selection: Selection, form: str) -> str:
    """The views without times, of each distinct launch list."""
    text, picture = _VIEWS[view](selection.plan, distinct(selection, sizes=False))
    return _formatted(form, f"{selection.plan.name}: {view}", text, picture)


_Pair = tuple[Callable[[], str], Callable[[], str]]


def _graph(plan: PipelinePlan, chosen: tuple[Chosen, ...]) -> _Pair:
    from kpipe.codegen.review.captions import caption_of
    from kpipe.codegen.review.captured_graph import captured_graph
    from kpipe.codegen.review.graph_picture import GraphView, graph_svg, graph_text

    views = [
        GraphView(caption_of(plan, one.step, one.method), captured_graph(plan, one.step))
        for one in chosen
    ]
    return lambda: graph_text(views), lambda: graph_svg(views)


def _streams(plan: PipelinePlan, chosen: tuple[Chosen, ...]) -> _Pair:
    from kpipe.codegen.review.captions import caption_of
    from kpipe.codegen.review.streams_picture import StreamsView, streams_svg, streams_text

    views = [StreamsView(caption_of(plan, one.step, one.method), one.step) for one in chosen]
    return lambda: streams_text(views), lambda: streams_svg(views)


def _buffers(plan: PipelinePlan, chosen: tuple[Chosen, ...]) -> _Pair:
    from kpipe.codegen.review.buffer_lifetimes import lifetimes
    from kpipe.codegen.review.captions import caption_of
    from kpipe.codegen.review.memory_pictures import buffers_view, memory_svg, memory_text

    views = [
        buffers_view(
            caption_of(plan, one.step, one.method), lifetimes(plan, one.step), plan.rows_cap
        )
        for one in chosen
    ]
    return lambda: memory_text(views), lambda: memory_svg(views, "lifetimes of buffers")


def _mailbox(plan: PipelinePlan, chosen: tuple[Chosen, ...]) -> _Pair:
    if not plan.mailboxes:
        raise click.ClickException(f"{plan.name} has no mailboxes: there is nothing to show")
    from kpipe.codegen.review.captions import caption_of
    from kpipe.codegen.review.mailbox_phases import phases
    from kpipe.codegen.review.memory_pictures import mailbox_view, memory_svg, memory_text

    views = [
        mailbox_view(caption_of(plan, one.step, one.method), phases(plan, one.step))
        for one in chosen
    ]
    return lambda: memory_text(views), lambda: memory_svg(views, "mailboxes over layers")


_VIEWS = {"graph": _graph, "streams": _streams, "buffers": _buffers, "mailbox": _mailbox}
