"""The command line.  Everything but click is imported inside the commands.

stdout is data, stderr is talk.  A user's mistake never shows a traceback.
"""

from __future__ import annotations

import click

from kpipe.codegen.cli_root import Root, common_options
from kpipe.codegen.cli_tune import tune
from kpipe.codegen.version import __version__

_SPECS = click.argument("specs", nargs=-1, metavar="[SPEC]...", type=click.Path())


@click.group("kpipe", cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kpipe", message="%(prog)s %(version)s")
def main() -> None:
    """Specification of a decode layer in, CuTe-DSL kernels and orchestration out."""
    from kpipe.codegen.config import check_environment

    check_environment()


@main.command()
@_SPECS
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "concise", "json", "github", "sarif"]),
    default="text",
    show_default=True,
)
@click.option("--fix", is_flag=True, help="Apply the repairs that findings carry; check again.")
@common_options
def check(specs: tuple[str, ...], form: str, fix: bool, color: str) -> int:
    """Read, validate and plan; write nothing, except with --fix.

    Without SPEC: every spec that `pipelines` in the project's settings names.
    """
    from kpipe.codegen.commands.check import run

    return run(specs, form, color, fix=fix)


@main.command()
@_SPECS
@click.option("--check", "mode", flag_value="check", help="List drift, exit 3; write nothing.")
@click.option("--diff", "mode", flag_value="diff", help="Show drift as a diff, exit 3.")
@click.option("--out", metavar="DIR", type=click.Path(), help="Output root [default: generated].")
@click.option("--force", is_flag=True, help="Overwrite files that were edited by hand.")
@common_options
def generate(
    specs: tuple[str, ...], mode: str | None, out: str | None, force: bool, color: str
) -> int:
    """Write each spec's generated folder, only files that differ.

    All or nothing: with a finding in any spec nothing is written.

    Without SPEC: every spec that `pipelines` in the project's settings names.
    """
    from kpipe.codegen.commands.generate import run

    return run(specs, mode or "write", out, force, color)


@main.command()
@_SPECS
@click.option("--against", metavar="OLD", help="What changed since a git ref, folder or file.")
@click.option("--rows", type=int, metavar="N", help="Launches of this row count.")
@click.option("--q", "q", type=int, metavar="N", help="Launches of this query length.")
@click.option("--arch", metavar="A", help="Launches on this architecture, e.g. sm_90a.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "markdown"]),
    default="text",
    show_default=True,
    help="markdown is the comment of a pull request; it needs --against.",
)
@click.option("--link", metavar="FILE", help="Bandwidth and latency measured between GPUs.")
@click.option("--timings", metavar="FILE", help="Durations that `kpipe bench --out` measured.")
@common_options
def plan(
    specs: tuple[str, ...],
    against: str | None,
    rows: int | None,
    q: int | None,
    arch: str | None,
    form: str,
    link: str | None,
    timings: str | None,
    color: str,
) -> int:
    """Show the resolved plan of SPEC: tables, memory, launches, and why.

    Launches are shown once per distinct launch list, or for the steps that --rows, --q and
    --arch select. Where ranks exchange words it also shows how many bytes travel, and predicts
    the time of a layer, with what it assumes; --link and --timings put figures in their place.

    With --against: what the schedules of all SPECs do otherwise than the old ones, whether they
    are still proved, and which generated files change.  Without SPEC: every spec that `pipelines`
    in the project's settings names.  OLD is a ref (`HEAD`, `origin/main`, `origin/main...` for
    where the two parted), a copy of the project or of its pipelines folder, or one spec.
    """
    from kpipe.codegen.commands.plan import run, run_against

    if against is not None:
        if link or timings:
            raise click.UsageError("--link and --timings do not go with --against")
        return run_against(specs, against, (rows, q, arch), form, color)
    return run(specs, rows, q, arch, form, link, timings, color)


@main.command()
@click.argument("first")
@click.argument("second")
@click.argument("spec", type=click.Path())
@click.option("--rows", type=int, metavar="N", help="Steps of this row count.")
@click.option("--q", "q", type=int, metavar="N", help="Steps of this query length.")
@click.option("--arch", metavar="A", help="Steps on this architecture, e.g. sm_90a.")
@click.option("--captured", is_flag=True, help="Answer for a captured graph only.")
@common_options
def why(
    first: str,
    second: str,
    spec: str,
    rows: int | None,
    q: int | None,
    arch: str | None,
    captured: bool,
    color: str,
) -> int:
    """Show what orders op FIRST before op SECOND, or what is missing.

    Both in one layer; where SECOND is issued ahead of FIRST it is that of the next layer. Exit 1
    where they are not ordered.
    """
    from kpipe.codegen.commands.why import run

    return run(first, second, spec, rows, q, arch, captured, color)


@main.command()
@click.argument("name", metavar="STAGE")
@click.argument("spec", required=False, type=click.Path())
@click.option("--rows", type=int, metavar="N", help="Steps of this row count.")
@click.option("--q", "q", type=int, metavar="N", help="Steps of this query length.")
@click.option("--arch", metavar="A", help="Architecture [default: the first target].")
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@click.option("--yaml", "number", type=int, metavar="N", help="Print schedule N as a mode.")
@click.option("--all", "every", is_flag=True, help="List every schedule and every rule.")
@common_options
def modes(
    name: str,
    spec: str | None,
    rows: int | None,
    q: int | None,
    arch: str | None,
    form: str,
    number: int | None,
    every: bool,
    color: str,
) -> int:
    """List every legal place of a stage or op.

    Its ops are moved to each position of each stream, and to a side stream with each fork and
    join, in the mode that the table selects. Each schedule is planned and proved in memory and
    listed with its predicted gain; the other places stand under the rule that blocks them.
    """
    from kpipe.codegen.commands.modes import run

    return run(name, spec, rows, q, arch, form, number, every, color)


@main.command()
@click.argument("view", type=click.Choice(["timeline", "graph", "streams", "buffers", "mailbox"]))
@click.argument("spec", type=click.Path())
@click.option("--rows", type=int, metavar="N", help="Steps of this row count.")
@click.option("--q", "q", type=int, metavar="N", help="Steps of this query length.")
@click.option("--arch", metavar="A", help="Steps on this architecture, e.g. sm_90a.")
@click.option("--mode", metavar="M", help="This mode, whatever the table says.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "svg", "html", "perfetto"]),
    help="[default: as FILE's name ends, else text]",
)
@click.option("--out", metavar="FILE", type=click.Path(), help="Write the picture there.")
@click.option("--timings", metavar="FILE", help="Durations that `kpipe bench --out` measured.")
@click.option("--estimated", is_flag=True, help="Durations of the model, whatever was measured.")
@common_options
def show(
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
    """Draw a plan: in time, as the captured graph, its streams, its memory.

    Of each distinct launch list, or of the steps that --rows, --q, --arch and --mode select. A
    timeline says whether its durations are estimated or measured.
    """
    from kpipe.codegen.commands.show import run

    return run(view, spec, rows, q, arch, mode, form, out, timings, estimated, color)


@main.command()
@click.argument("code")
@common_options
def explain(code: str, color: str) -> int:
    """Explain a rule: why it exists, an example, the repair."""
    from kpipe.codegen.commands.rules import run_explain

    return run_explain(code, color)


@main.command()
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "markdown"]),
    default="text",
    show_default=True,
)
@common_options
def rules(form: str, color: str) -> int:
    """List every rule."""
    from kpipe.codegen.commands.rules import run_rules

    return run_rules(form)


@main.command()
@click.option("--out", metavar="DIR", type=click.Path(), help="Write the two files there.")
@click.option(
    "--format", "form", type=click.Choice(["json", "markdown"]), default="json", show_default=True
)
@common_options
def schema(out: str | None, form: str, color: str) -> int:
    """Print or export the JSON schemas for editors (draft-07).

    As Markdown: a reference of every key.
    """
    from kpipe.codegen.commands.schema import run

    return run(out, form)


@main.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
@click.option("--from", "source", metavar="NAME", default="dsa_tp", show_default=True)
@click.option("--keep", "there", flag_value="keep", help="Keep files that are there already.")
@click.option("--force", "there", flag_value="force", help="Overwrite files that are there.")
@common_options
def new(folder: str, source: str, there: str | None, color: str) -> int:
    """Start a project in DIR from a shipped pipeline.

    With settings, hooks, editor and CI. Where a file would be overwritten nothing is written,
    unless --keep or --force says what to do.
    """
    from kpipe.codegen.commands.new import run

    return run(folder, source, there or "refuse")


_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}


@main.command(add_help_option=False, context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="FOLDER [OPTIONS]...")
def verify(arguments: tuple[str, ...]) -> int:
    """Run a generated folder against the reference."""
    return _run_runtime("verify", arguments)


@main.command(add_help_option=False, context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="FOLDER [OPTIONS]...")
def bench(arguments: tuple[str, ...]) -> int:
    """Time a generated folder on this machine's GPU, or compare two runs."""
    compares = any(word.partition("=")[0] == "--against" for word in arguments)  # without torch
    return _run_runtime("bench_against" if compares else "bench", arguments)


@main.command()
@click.argument("target", metavar="SPEC|FOLDER", type=click.Path())
@click.option("--arch", required=True, metavar="A", help="Architecture, e.g. sm_90a.")
@click.option("--out", metavar="DIR", type=click.Path(), help="[default: FOLDER/build/A]")
@click.option("--only", metavar="KERNEL,...", help="Objects of these kernels alone.")
@click.option("--check", is_flag=True, help="List what is missing or stale, exit 3; write nothing.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Processes [default: cores].")
@click.option("--ranks", metavar="N,...", help="Ranks of a group [default: all].")
@click.option("--resident", type=click.IntRange(1), metavar="N", help="CTAs a rank can count on.")
@common_options
def build(
    target: str,
    arch: str,
    out: str | None,
    only: str | None,
    check: bool,
    jobs: int | None,
    ranks: str | None,
    resident: int | None,
    color: str,
) -> int:
    """Compile every kernel that a generated folder can launch.

    No GPU is needed. The objects stand below the folder beside a manifest; `prepare()` of the
    layer loads them and compiles nothing. What is there and made of the same sources is kept.
    """
    from kpipe.codegen.commands.build import run
    from kpipe.codegen.commands.common import runtime_command

    given = {"arch": arch, "out": out, "only": only, "jobs": jobs, "ranks": ranks}
    given["resident"] = resident
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return run(target, runtime_command("build"), [*words, *(["--check"] if check else [])], color)


@main.command("verify-capture")
@click.argument("spec", type=click.Path())
@click.option("--plan", metavar="FILE", type=click.Path(), help="Write what is to be captured.")
@click.option("--captured", metavar="FILE", type=click.Path(), help="Judge what was captured.")
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@common_options
def verify_capture(spec: str, plan: str | None, captured: str | None, form: str, color: str) -> int:
    """Compare predicted CUDA graphs with captured ones.

    Three steps: --plan here, `python -m kpipe.runtime.verify_capture` on the machine with the
    GPU, --captured here. Exit 1 where a node or an edge differs.
    """
    from kpipe.codegen.commands.verify_capture import run

    return run(spec, plan, captured, form, color)


@main.command(context_settings=_PASSED_ON)
@click.option("--apply", "observed", metavar="FILE", type=click.Path(), help="Judge observations.")
@click.option(
    "--table", metavar="FILE", type=click.Path(), help="Where the table goes [ARCH-DRIVER.json]."
)
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--out FILE]")
@common_options
def probe(
    observed: str | None, table: str | None, form: str, arguments: tuple[str, ...], color: str
) -> int:
    """Measure PDL, events and graphs on this machine's GPU.

    With --out FILE the observations are made here. With --apply FILE they become the table of
    semantics that findings cite; refused where a documented order was seen broken.
    """
    if observed is None:
        return _run_runtime("probe", arguments)
    from kpipe.codegen.commands.probe import run

    return run(observed, table, form, color)


def _run_runtime(module: str, arguments: tuple[str, ...]) -> int:
    from kpipe.codegen.commands.common import run_runtime

    return run_runtime(module, arguments)


main.add_command(tune)


if __name__ == "__main__":
    main()
