"""What the three programs that run schedules share: files in, files out, errors as exit codes."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

FINE, FINDINGS, USAGE, ENVIRONMENT = 0, 1, 2, 4
DRY_ARCH = "sm_90a"


class UsageError(ValueError):
    """A file that cannot be used."""


def read_document(path: Path, schema: str) -> dict[str, Any]:
    """A JSON document of that schema; UsageError that names the file otherwise."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"`{path}` cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != schema:
        found = data.get("schema") if isinstance(data, dict) else None
        raise UsageError(f"`{path}` is not of schema {schema}: {found!r}")
    return data


def write_document(path: Path, data: dict[str, Any]) -> None:
    """Write a document; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data) + "\n")


class Attempts:
    """Runs one trial after the other: what one of them raises takes no other along.

    `refused` says of each trial that raised what it was, and its `error`.
    """

    def __init__(self) -> None:
        self.refused: list[dict[str, Any]] = []

    def run(self, work: Callable[[], Any], **trial: Any) -> Any:
        """What `work` returns, or None where it raised; `trial` says what it was."""
        from kpipe.runtime.host.driver import DriverError
        from kpipe.runtime.metadata import LayerError

        try:
            return work()
        except Exception as error:
            known = isinstance(error, DriverError | LayerError)
            if not known and not self.refused:  # once: a device that is lost refuses all others
                traceback.print_exc()
            said = str(error) if known else f"{type(error).__name__}: {error}"
            self.refused.append({**trial, "error": said})
            print(f"refused: {', '.join(map(str, trial.values()))}: {said}", file=sys.stderr)
            return None

    @property
    def code(self) -> int:
        """The exit code: 1 where a trial was refused."""
        return FINDINGS if self.refused else FINE


def parser(program: str, doc: str, plan: bool) -> argparse.ArgumentParser:
    """The options that all of them have."""
    made = argparse.ArgumentParser(prog=program, description=doc.partition("\n")[0])
    if plan:
        made.add_argument("--plan", type=Path, required=True, metavar="FILE")
    made.add_argument("--out", type=Path, metavar="FILE", help="where the observations go")
    made.add_argument("--repetitions", type=int, metavar="N", help="of every schedule")
    made.add_argument(
        "--dry-run", action="store_true", help="compile and lay out everything; run nothing"
    )
    return made


def main(options: argparse.Namespace, work: Callable[[argparse.Namespace], int]) -> int:
    """Run; 2 for a file that cannot be used, 4 without a GPU or where the driver refuses."""
    import torch

    from kpipe.runtime.host.driver import DriverError
    from kpipe.runtime.metadata import LayerError

    if not options.dry_run and options.out is None:
        print("error: --out FILE says where the observations go", file=sys.stderr)
        return USAGE
    if not options.dry_run and not torch.cuda.is_available():
        print("error: this machine has no CUDA device; --dry-run needs none", file=sys.stderr)
        return ENVIRONMENT
    try:
        return work(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except (DriverError, LayerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return ENVIRONMENT
