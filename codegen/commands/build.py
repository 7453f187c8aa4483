"""`kpipe build`: finds the generated folder, and draws a bar while the runtime compiles it.

Compiling needs the GPU compiler and the layer itself, so it runs in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from kpipe.codegen.commands.common import Progress, exit_code, show_findings
from kpipe.codegen.config import display, load_config
from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.render.unchanged import unchanged_folder

DRIFT = 3


def run(target: str, command: Sequence[str], options: Sequence[str], color: str) -> int:
    """Build a generated folder, or that of a spec, by `command`; returns its exit code.

    3 where the folder of a spec is not what `kpipe generate` would write.
    """
    try:
        folder = _folder(target)
    except SpecError as error:
        show_findings(error.diagnostics, {}, "text", color=color, err=True)
        return exit_code(error.diagnostics)
    if folder is None:
        click.echo(
            f"error: the generated folder of {target} is not up to date: kpipe generate {target}",
            err=True,
        )
        return DRIFT
    words = [*command, display(folder), *options]
    if not sys.stderr.isatty():
        return subprocess.run(words, check=False).returncode
    return _with_bar(words)


def _folder(target: str) -> Path | None:
    """The folder that is meant; None where a spec's is not up to date."""
    path = Path(target)
    if path.is_dir():
        return path
    if not path.is_file():
        raise click.UsageError(f"`{target}` is neither a spec nor a generated folder")
    config = load_config(path)
    return unchanged_folder(path, config, config.output)


def _with_bar(words: Sequence[str]) -> int:
    """Run the command; its events move the bar, and what it says stands above it."""
    progress = Progress(delay=0.0)
    results = []
    with subprocess.Popen([*words, "--events"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if "number" in event:
                progress.step(event["number"], event["what"], event["total"])
            elif "line" in event:
                progress.say(event["line"])
            else:
                results.append(event["result"])
    progress.close()
    for line in results:
        click.echo(line)
    return process.returncode
