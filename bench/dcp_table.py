"""Tables of docs/numbers.md about layers whose ranks exchange words.

    python bench/dcp_table.py [RESULT.json ...] [--link FILE] [--into docs/numbers.md]

Without RESULT: what is computed from the plans of the shipped pipelines, bytes and launches.  A
RESULT is what `kpipe bench FOLDER --out` wrote on a GPU: its section has the measured times and
the time that the model predicts over the link from them.  `--into` puts each RESULT's section at
the end of "Words between ranks", in place of an older one of the same ranks.  Runs without a GPU
and without torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kpipe.codegen.plan.links import Link, measured_link
from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.plan.wire import alternatives, posts
from kpipe.codegen.plan.wire_report import ROWS, Durations, WireReport, wire_report
from kpipe.codegen.proof.api import prove_pipeline
from kpipe.codegen.review.timings import LAYER, Timings, measured_step, read_timings

ROOT = Path(__file__).resolve().parents[1]
PIPELINES = ("dsa_dcp_d2", "dsa_dcp_d4", "dsa_dcp")
SECTION = "## Words between ranks"
LOCKSTEP = "lockstep"


def plan_of(name: str) -> PipelinePlan:
    """The proved plan of a shipped pipeline."""
    return prove_pipeline(str(ROOT / "pipelines" / f"{name}.yaml")).pipeline


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ranks_head(plans: Iterable[PipelinePlan]) -> list[str]:
    return [f"{plan.parallel['dcp']} ranks" for plan in plans]


def bytes_table(plans: Sequence[PipelinePlan]) -> str:
    """Bytes of a token row in one layer, by mailbox and format; then other formats."""
    found: dict[str, list[str]] = {}
    few, many = [], []
    for plan in plans:
        one_shot, two_shot = (posts(plan, _step(plan, rows)) for rows in (1, 64))
        listed = {(p.mailbox, p.scattered): p for p in (*one_shot, *two_shot)}
        for (name, scattered), post in listed.items():
            label = f"{name}, {post.dtype}{', two-shot: owned columns' if scattered else ''}"
            found.setdefault(label, []).append(f"{post.sent:,}")
        few.append(f"**{sum(p.sent for p in one_shot):,}**")
        many.append(f"**{sum(p.sent for p in two_shot):,}**")
    rows = [["bytes of a row, sent and received", *ranks_head(plans)]]
    rows += [[label, *cells] for label, cells in found.items()]
    rows += [["**a layer, one-shot sum**", *few], ["**a layer, two-shot sum**", *many]]
    return markdown([*rows, *_instead(plans)])


def _instead(plans: Sequence[PipelinePlan]) -> list[list[str]]:
    found: dict[str, list[str]] = {}
    for plan in plans:
        for other in alternatives(plan, posts(plan, _step(plan, 1))):
            found.setdefault(other.what, []).append(f"{other.sent:,}")
    return [[f"instead: {what}", *cells] for what, cells in found.items()]


def layer_table(plans: Sequence[PipelinePlan]) -> str:
    """KiB that a rank sends in one layer, and the launches, by token rows."""
    reports = [_report(plan) for plan in plans]
    rows = [["", *(_rows(count) for count in ROWS)]]
    for plan, report in zip(plans, reports, strict=True):
        cells = [f"{one.sent / 1024:,.0f}" for one in report.steps]
        rows.append([f"KiB sent a layer, {plan.parallel['dcp']} ranks", *cells])
    counts = [one.count for one in reports[-1].steps]
    rows.append(["launches", *(str(count.launches) for count in counts)])
    rows.append(["streams", *(str(count.streams) for count in counts)])
    what = ["launches with collectives: kernels + collectives"]
    for count in counts:
        kernels = count.collective_form - len(count.collectives)
        what.append(f"{kernels} + {len(count.collectives)}")
    return markdown([*rows, what])


def _report(plan: PipelinePlan) -> WireReport:
    report = wire_report(plan)
    assert report is not None, f"{plan.name} exchanges no words"
    return report


def _step(plan: PipelinePlan, rows: int) -> StepPlan:
    arch, q = plan.targets[0], plan.rows[0][0]
    return next(s for s in plan.plans if (s.arch, s.q, s.rows) == (arch, q, rows))


def _rows(count: int) -> str:
    return f"{count} rows" if count > 1 else "1 row"


def measured_section(path: Path, link: Link | None = None) -> str:
    """Heading, sentence and table of one file of measured times.

    Raises ValueError for a file without times of a pipeline whose ranks exchange words.
    """
    timings = read_timings(path)
    data = json.loads(path.read_bytes())
    if timings is None or "ranks" not in data:
        raise ValueError(f"{path}: no times of ranks that exchange words")
    plan = plan_of(timings.entries[0]["pipeline"])
    where = f"bench/results/{path.name}"
    entries = timings.entries
    counts = sorted({entry["rows"] for entry in entries})
    context = entries[0]["context"]
    text = (
        f"`kpipe bench generated/{plan.name} --out {where}`: one {timings.gpu}, {context} tokens a "
        f"request over {data['ranks']} ranks, q {entries[0]['q']}; us, and in brackets percent of "
        f"the floor. **{data['note'][0].upper()}{data['note'][1:]}.**"
    )
    table = markdown(_measured_rows(timings, plan, counts, link))
    return f"### {_heading(data['ranks'])}\n\n{text}\n\n{table}\n"


def _heading(ranks: int) -> str:
    return f"One of {ranks} ranks, on one GPU"


def _measured_rows(
    timings: Timings, plan: PipelinePlan, counts: Sequence[int], link: Link | None
) -> list[list[str]]:
    times = {(e["what"], e["rows"]): e for e in timings.entries}

    def line(title: str, what: str, share: bool = False) -> list[str]:
        cells = []
        for rows in counts:
            entry = times.get((what, rows))
            text = f"{entry['us']:.1f}" if entry else "-"
            if entry and share and entry["floor_us"]:
                text += f" ({100 * entry['floor_us'] / entry['us']:.0f})"
            cells.append(text)
        return [title, *cells]

    whats = dict.fromkeys(e["what"] for e in timings.entries)
    found = [
        ["", *(_rows(rows) for rows in counts)],
        line("**layer of one rank, its words there**", LAYER, share=True),
        line("all ranks in lockstep, divided by the ranks: upper bound", LOCKSTEP),
        *(line(what, what, share=True) for what in whats if what not in (LAYER, LOCKSTEP)),
    ]
    return [*found, *_predicted_rows(timings, plan, counts, link)]


def _predicted_rows(
    timings: Timings, plan: PipelinePlan, counts: Sequence[int], link: Link | None
) -> list[list[str]]:
    names = {method.plan.identity: method.name for method in plan.methods}
    folder = ROOT / "generated" / plan.name
    q = timings.entries[0]["q"]

    def durations(step: StepPlan) -> Durations:
        found = measured_step((timings,), plan, step, names[step.identity], folder)
        return Durations(found.launches, found.gpu) if found else Durations()

    layers, there = [], []
    used = link
    for rows in counts:
        report = wire_report(plan, rows, q, timings.arch, link, durations)
        known = report.steps[0].prediction if report and report.steps else None
        used = report.link if report else used
        whole = known is not None and known.measured == known.launches
        layers.append(f"{known.layer:.1f}" if known and whole else "-")
        there.append(f"{known.words_there:.1f}" if known and whole else "-")
    source = (
        f"{used.peer_store_gb_s:g} GB/s, {used.one_way_latency_us:g} us, {used.source}"
        if used
        else ""
    )
    return [
        ["predicted from these launches, words always there", *there],
        [f"**predicted over {used.name if used else 'the link'}** ({source})", *layers],
    ]


def with_section(text: str, section: str) -> str:
    """A document with that part at the end of SECTION, in place of one of the same heading.

    Raises ValueError for a document without SECTION.
    """
    heading = section.partition("\n")[0]
    lines = text.split("\n")
    if SECTION not in lines:
        raise ValueError(f"the document has no `{SECTION}`")
    if heading in lines:
        start = lines.index(heading)
        end = next(
            (n for n in range(start + 1, len(lines)) if lines[n].startswith("#")), len(lines)
        )
        lines[start:end] = []
    start = lines.index(SECTION)
    end = next((n for n in range(start + 1, len(lines)) if lines[n].startswith("## ")), len(lines))
    before = "\n".join(lines[:end]).rstrip("\n")
    after = "\n".join(lines[end:])
    return f"{before}\n\n{section}" + (f"\n{after}" if after else "")


def main(argv: Sequence[str]) -> int:
    """Print the tables, or put those of measured files into a document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULT")
    parser.add_argument("--link", type=Path, metavar="FILE", help="measured between GPUs")
    parser.add_argument("--into", type=Path, metavar="FILE", help="a document with the section")
    options = parser.parse_args(argv)
    link = None
    if options.link:
        data = json.loads(options.link.read_bytes())
        link = measured_link(data, "sm_90a", f"measured, {options.link.name}")
    if not options.results:
        plans = [plan_of(name) for name in PIPELINES]
        print(bytes_table(plans), layer_table(plans), sep="\n\n")
    for path in options.results:
        section = measured_section(path, link)
        if options.into:
            options.into.write_text(with_section(options.into.read_text(), section))
        else:
            print(section)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
