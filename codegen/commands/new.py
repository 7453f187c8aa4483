"""`kpipe new`: the start of a project."""

from __future__ import annotations

from pathlib import Path

import click

from kpipe.codegen.config import display
from kpipe.codegen.diagnostics import did_you_mean
from kpipe.codegen.scaffold.project import SETTINGS, pipelines, project_files

_OTHER = "kpipe.toml"  # holds the settings where there is a pyproject.toml already
_KPIPE = "[tool.kpipe]"


def run(target: str, source: str, there: str) -> int:
    """Write the files of a project that starts from pipeline `source`; returns the exit code.

    Where one is there already: `refuse` writes nothing, `keep` writes the others, `force` all.
    A pyproject.toml always stays as it is: the settings go to kpipe.toml, or nowhere if it has
    them.  Raises UsageError.
    """
    if source not in pipelines():
        near = did_you_mean(source, pipelines())
        hint = f"did you mean `{near}`? " if near else ""
        raise click.UsageError(f"no pipeline `{source}`; {hint}there are {', '.join(pipelines())}")
    folder = Path(target)
    files = _placed(folder, project_files(source))
    found = [name for name in sorted(files) if (folder / name).exists()]
    if found and there == "refuse":
        listed = "".join(f"\n  {display(folder / name)}" for name in found)
        raise click.UsageError(f"these files are there; add --keep or --force:{listed}")
    kept = found if there == "keep" else []
    _write(folder, {name: text for name, text in files.items() if name not in kept})
    for name in sorted(files):
        click.echo(f"{display(folder / name)}{'  kept' if name in kept else ''}")
    start = "" if folder.resolve() == Path.cwd() else f"cd {display(folder)} && "
    click.echo(f"next: {start}kpipe check && kpipe generate", err=True)
    return 0


def _placed(folder: Path, files: dict[str, str]) -> dict[str, str]:
    """The files with the settings where they can stand beside a pyproject.toml of the user."""
    own = folder / SETTINGS
    if not own.exists():
        return files
    text = files[SETTINGS]
    others = {name: given for name, given in files.items() if name != SETTINGS}
    if _KPIPE in own.read_text("utf-8", errors="replace"):
        return others
    return {**others, _OTHER: text.removeprefix(f"{_KPIPE}\n")}


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        except OSError as error:
            raise click.UsageError(
                f"cannot write `{display(path)}`: {error.strerror or error}"
            ) from None
