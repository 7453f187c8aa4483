"""What a compiled kernel was made from, found in the sources, without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from kpipe.runtime.evidence import file_digest, kernel_digest

RUNTIME = Path(__file__).resolve().parents[1]
PACKAGE = "kpipe.runtime"
ITSELF = "kernel"
"""The name of the kernel's own file among its sources; the others are paths below `runtime`."""


def sources_of(kernel: Path) -> dict[str, str]:
    """Digests of what a generated kernel is made of: `kernel`, then files below `runtime`.

    The kernel's own file counts without its first line, which names its spec.  The others are what
    it imports of the runtime, directly or through one another.  As long as all of these stay the
    same, the list does.
    """
    found: set[str] = set()
    waiting = set(_imported(kernel.read_bytes(), ""))
    while waiting:
        name = waiting.pop()
        found.add(name)
        folder = name.rpartition("/")[0]
        waiting |= _imported((RUNTIME / name).read_bytes(), folder) - found
    return {ITSELF: kernel_digest(kernel), **{n: file_digest(RUNTIME / n) for n in sorted(found)}}


def digest_now(kernel: Path, name: str) -> str:
    """The digest of one of a kernel's sources as it stands; empty where it is gone."""
    path = kernel if name == ITSELF else RUNTIME / name
    if not path.is_file():
        return ""
    return kernel_digest(path) if name == ITSELF else file_digest(path)


def changed_sources(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names of sources that were added, taken away or changed; the kernel's own comes first."""
    names = sorted({*before, *now}, key=lambda name: (name != ITSELF, name))
    return [name for name in names if before.get(name) != now.get(name)]


def shown_sources(kernel: str, names: Iterable[str]) -> str:
    """Sources by their places: below the generated folder, or below the runtime."""
    shown = [f"kernels/{kernel}.py" if name == ITSELF else f"runtime/{name}" for name in names]
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ", ".join(shown[:3]) + more


@cache
def _imported(text: bytes, folder: str) -> frozenset[str]:
    """Files below `runtime` that a source imports; `folder` is its own, below `runtime`."""
    here = ".".join(filter(None, [PACKAGE, folder.replace("/", ".")]))
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = here.split(".")
            above = parts[: len(parts) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    inner = {name.removeprefix(f"{PACKAGE}.") for name in found if name.startswith(f"{PACKAGE}.")}
    files = (f"{name.replace('.', '/')}.py" for name in inner)
    return frozenset(name for name in files if (RUNTIME / name).is_file())
