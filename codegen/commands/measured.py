"""Files of observations that come back from a GPU: reading them, and what is said of bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kpipe.codegen.config import display
from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError


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
