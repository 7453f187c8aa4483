"""Files that come back from a GPU: reading them, and what is said of bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kpipe.codegen.config import display
from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError

if TYPE_CHECKING:
    from kpipe.codegen.plan.links import Link
    from kpipe.codegen.review.timings import Timings


def read_measured(path: str, schema: str) -> dict[str, Any]:
    """A JSON document of that schema.  Raises SpecError KP820 that names the file."""
    try:
        data = json.loads(Path(path).read_bytes().decode("utf-8"))
    except OSError as error:
        raise wrong_document(path, f"cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise wrong_document(path, "is not JSON", getattr(error, "lineno", 1)) from None
    found = data.get("schema") if isinstance(data, dict) else None
    if found != schema:
        raise wrong_document(path, f"`schema` is {found!r}, not {schema!r}")
    return data


def wrong_document(path: str, what: str, line: int = 1) -> SpecError:
    """The finding about a file of observations that cannot be used."""
    shown = display(Path(path))
    span = Span(shown, line, 1, line, 2)
    help = "measure again with this version of kpipe, on the machine with the GPU"
    return SpecError([Diagnostic("KP820", f"observations `{shown}`: {what}", span, help=help)])


def read_times(path: Path) -> Timings:
    """The file of `--timings`.  Raises click.ClickException where it holds no times."""
    from kpipe.codegen.review.timings import TimingsError, read_timings

    try:
        found = read_timings(path)
    except TimingsError as error:
        raise click.ClickException(f"--timings {display(path)}: {error}") from None
    if found is None:
        raise click.ClickException(
            f"--timings {display(path)}: it holds no times; `kpipe bench FOLDER --out FILE` "
            "writes them"
        )
    return found


def read_link(path: Path, arch: str) -> Link:
    """The file of `--link`: what was measured between GPUs of that architecture.

    Raises click.ClickException where it cannot be read or lacks a figure.
    """
    from kpipe.codegen.plan.links import measured_link

    try:
        data = json.loads(path.read_bytes())
        return measured_link(data, arch, f"measured, {display(path)}")
    except OSError as error:
        reason = error.strerror or "cannot be read"
    except (UnicodeDecodeError, json.JSONDecodeError):
        reason = "it is not JSON"
    except ValueError as error:
        reason = str(error)
    raise click.ClickException(f"--link {display(path)}: {reason}")
