"""How the objects of a build stand against those that the generated folder needs now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kpipe.runtime.aot.manifest import Manifest, ObjectEntry
from kpipe.runtime.aot.sources import changed_sources, shown_sources
from kpipe.runtime.aot.wanted import Wanted

CURRENT = "current"


@dataclass(frozen=True)
class State:
    """One wanted object: current, missing, stale or damaged, and why."""

    wanted: Wanted
    kind: str
    why: str = ""
    entry: ObjectEntry | None = None


def states_of(wanted: Iterable[Wanted], manifest: Manifest | None, folder: Path) -> list[State]:
    """The state of every wanted object in a build folder whose manifest is given."""
    return [_state(one, manifest, folder) for one in wanted]


def _state(wanted: Wanted, manifest: Manifest | None, folder: Path) -> State:
    entry = manifest.objects.get(wanted.id) if manifest else None
    if manifest is None or entry is None:
        return State(wanted, "missing", "never built")
    if entry.key != wanted.key:
        return State(wanted, "stale", _why_stale(wanted, manifest))
    if why := entry.damage(folder):
        return State(wanted, "damaged", why)
    return State(wanted, CURRENT, entry=entry)


def _why_stale(wanted: Wanted, manifest: Manifest) -> str:
    if manifest.dsl != wanted.parts["dsl"]:
        return f"built by CuTe DSL {manifest.dsl}, this is {wanted.parts['dsl']}"
    if manifest.options != wanted.parts["options"]:
        return f"built with `{manifest.options}`, not `{wanted.parts['options']}`"
    before = manifest.kernels[wanted.kernel].sources
    if changed := changed_sources(before, wanted.parts["sources"]):
        return f"{shown_sources(wanted.kernel, changed)} changed"
    return "its operands changed"
