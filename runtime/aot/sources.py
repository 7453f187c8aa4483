"""What a compiled kernel was made from, found in the sources, without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from kpipe.runtime.evidence import DEVICE, device_files, file_digest, kernel_digest

RUNTIME = Path(__file__).resolve().parents[1]
PACKAGE = "kpipe.runtime"
ITSELF = "kernel"
"""The name of the kernel's own file among its sources; the others are paths below `runtime`."""


def sources_of(kernel: Path) -> dict[str, str]:
    """Digests of what a generated kernel is made of: `kernel`, then files below `runtime`.

    The kernel's own file counts without its first line, which names its spec.  The others are the
    device building blocks that it is made of, and what it or one of them imports of the rest of
    the runtime.  As long as all of these stay the same, the list does.
    """
    paths = [kernel, *(DEVICE / name for name in device_files(kernel))]
    names = {f"device/{path.name}" for path in paths[1:]}
    for path in paths:
        names |= _rest_of_runtime(path.read_bytes())
    return {ITSELF: kernel_digest(kernel), **{n: file_digest(RUNTIME / n) for n in sorted(names)}}


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
def _rest_of_runtime(text: bytes) -> frozenset[str]:
    """Files below `runtime`, device blocks left out, that a source imports from."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name for name in names if name.startswith(f"{PACKAGE}.")}
    inner = (name.removeprefix(f"{PACKAGE}.").replace(".", "/") + ".py" for name in found)
    return frozenset(
        name for name in inner if not name.startswith("device/") and (RUNTIME / name).is_file()
    )
