"""The frame of the command line: help, exit codes, and the options that every command has."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

FINE, FINDINGS, USAGE, DRIFT, ENVIRONMENT, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 4, 70, 130

DAILY = ("check", "generate", "plan")
EXIT_CODES = (
    ("0", "fine: nothing to report"),
    ("1", "findings: the spec is wrong, or a file was edited by hand"),
    ("2", "usage, settings or input that cannot be read"),
    ("3", "drift: generated files or built objects differ (--check, --diff)"),
    ("4", "the environment lacks something"),
    ("70", "internal error"),
)


class Root(click.Group):
    """The group: help in sections, and one place that turns exceptions into exit codes."""

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The daily verbs, the other commands, the exit codes."""
        names = self.list_commands(context)
        others = [name for name in names if name not in DAILY]
        for title, group in (("Commands", DAILY), ("More commands", others)):
            with formatter.section(title):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(80)) for name in group]
                )
        with formatter.section("Exit codes"):
            formatter.write_dl(EXIT_CODES)

    def invoke(self, context: click.Context) -> Any:
        """Run the command; a reader of the pipe that has seen enough is no error."""
        try:
            return super().invoke(context)
        except BrokenPipeError:
            import os

            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FINE

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run and leave with one of the documented exit codes."""
        words = list(sys.argv[1:] if args is None else args)
        own = args is None  # a process of its own, which leaves its garbage to the system
        if own:
            gc.disable()  # collecting it would cost a tenth of the time,
        extra["standalone_mode"] = False
        code = FINE
        try:
            result = super().main(words, prog_name or "kpipe", **extra)
            code = result if isinstance(result, int) else FINE
            sys.stdout.flush()
        except Exception as error:
            code = _exit_code_of(error, debug="--debug" in words)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            code = INTERRUPTED
        if own:
            gc.freeze()  # and the interpreter's own collection at the end another
        sys.exit(code)


def _exit_code_of(error: Exception, *, debug: bool) -> int:
    from kpipe.codegen.diagnostics import SpecError

    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.Abort):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        error.show()
        return USAGE
    if isinstance(error, SpecError):
        from kpipe.codegen.commands.common import exit_code, show_findings

        show_findings(error.diagnostics, {}, "text", color="auto", err=True)
        return exit_code(error.diagnostics)
    if debug:
        import traceback

        click.echo(traceback.format_exc(), err=True, nl=False)
    first = str(error).partition("\n")[0]
    hint = "" if debug else ", with the output of the same command and --debug"
    click.echo(f"internal error: {type(error).__name__}: {first}; please report{hint}", err=True)
    return INTERNAL


def common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options that every command has."""
    debug = click.option(
        "--debug", is_flag=True, expose_value=False, help="Show a traceback for an internal error."
    )
    color = click.option(
        "--color",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="Colour; auto is on for a terminal, unless NO_COLOR is set.",
    )
    return color(debug(function))
