"""`kpipe schema`: the JSON schemas of the language."""

from __future__ import annotations

from pathlib import Path

import click

from kpipe.codegen.config import display
from kpipe.codegen.spec.schema import FILES, schema_text


def run(out: str | None, form: str) -> int:
    """Print both schemas as one JSON object by file name, or write them into a folder.

    `form` markdown prints the reference page instead.  Raises UsageError for markdown with `out`.
    """
    if form == "markdown":
        from kpipe.codegen.spec.reference import reference_text

        if out is not None:
            raise click.UsageError("--out takes the JSON schemas; redirect the Markdown instead")
        click.echo(reference_text(), nl=False)
        return 0
    if out is None:
        import json

        both = {name: json.loads(schema_text(kind)) for name, kind in FILES.items()}
        click.echo(json.dumps(both, indent=2))
        return 0
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, kind in FILES.items():
            (folder / name).write_bytes(schema_text(kind).encode())
            click.echo(display(folder / name))
    except OSError as error:
        raise click.ClickException(f"cannot write {out}: {error.strerror}") from None
    return 0
