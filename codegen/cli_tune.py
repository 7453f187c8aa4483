"""The command line of `kpipe tune`.  Everything but click is imported inside the commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kpipe.codegen.cli_root import common_options


class _Tune(click.Group):
    """`tune plan`, `tune apply`, and `tune SPEC` for both with the measurement between them."""

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """A first word that is no step is a SPEC."""
        if args and args[0] not in self.commands:
            args = ["all", *args]
        return super().resolve_command(context, args)


@click.group("tune", cls=_Tune, subcommand_metavar="plan | apply | SPEC [OPTIONS]...")
def tune() -> None:
    """Find the best modes and tiles by measuring them.

    `plan SPEC` lists what to measure, `python3 -m kpipe.runtime.tune` measures it on a machine
    with a GPU, `apply SPEC RESULTS` writes the winners into the spec. With a SPEC alone all three
    run here.
    """


def _tune_options(command: Callable[..., int]) -> Callable[..., int]:
    """What a plan is asked for."""
    options = (
        click.option("--arch", metavar="A", help="Architecture [default: the first target]."),
        click.option("--rows", metavar="N,N,...", help="Row counts to measure [all declared]."),
        click.option("--q", "queries", metavar="N,N,...", help="Query lengths [all declared]."),
        click.option(
            "--modes",
            type=click.IntRange(1),
            default=8,
            show_default=True,
            help="Most modes of a step; 1: none.",
        ),
        click.option(
            "--tiles",
            type=click.IntRange(1),
            default=5,
            show_default=True,
            help="Most tiles of a launch; 1: none.",
        ),
        click.option(
            "--context",
            type=click.IntRange(1),
            default=32768,
            show_default=True,
            help="Keys of a request.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@tune.command("plan")
@click.argument("spec", type=click.Path())
@click.option("--out", metavar="DIR", required=True, type=click.Path(), help="Folder of the plan.")
@_tune_options
@common_options
def tune_plan(spec: str, out: str, color: str, **asked: Any) -> int:
    """List what to measure for SPEC, with the code that runs.

    For each row count the modes of the spec and those that moving one stage gives, all proved,
    by predicted time; for each launch the nearest tiles. What is left out is named.
    """
    from kpipe.codegen.commands.tune import run_plan

    return run_plan(spec, out, _asked(**asked), color)


@tune.command("apply")
@click.argument("spec", type=click.Path())
@click.argument("results", type=click.Path())
@click.option("--diff", is_flag=True, help="Show what would change; write nothing.")
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@common_options
def tune_apply(spec: str, results: str, diff: bool, form: str, color: str) -> int:
    """Write the winners of RESULTS into the tables of SPEC.

    Only where one is better than the present choice by more than the spread of the run; the new
    spec is planned and proved before it is written.
    """
    from kpipe.codegen.commands.tune import Shown, run_apply

    return run_apply(spec, results, Shown(form, color, write=not diff))


@tune.command("all", hidden=True)
@click.argument("spec", type=click.Path())
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(),
    default="tuning",
    show_default=True,
    help="Folder of the plan and the results.",
)
@click.option("--minutes", type=float, metavar="N", help="Stop measuring after that long.")
@_tune_options
@common_options
def tune_all(spec: str, out: str, minutes: float | None, color: str, **asked: Any) -> int:
    """Plan, measure on this machine's GPU, apply."""
    from kpipe.codegen.commands.tune import Shown, run_all

    return run_all(spec, out, _asked(**asked), minutes, Shown(color=color))


def _asked(
    arch: str | None,
    rows: str | None,
    queries: str | None,
    modes: int,
    tiles: int,
    context: int,
) -> Any:
    from kpipe.codegen.tune.model import Options

    listed = {"--rows": rows, "--q": queries}
    counts = {}
    for name, text in listed.items():
        words = text.split(",") if text else []
        if not all(word.strip().isdecimal() for word in words):
            raise click.UsageError(f"{name} {text}: write row counts like 1,4,16")
        counts[name] = tuple(int(word) for word in words)
    return Options(arch or "", counts["--rows"], counts["--q"], modes, tiles, context)
