"""What a plan was made from, section by section, so that a stale result can say what changed.

What tuning itself writes is left out: tables, tactics, modes.  They are compared one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kpipe.codegen.config import load_config
from kpipe.codegen.evidence import DEVICE
from kpipe.codegen.plan.model import PipelinePlan
from kpipe.codegen.plan.resolve import Resolved
from kpipe.codegen.render.manifest import digest, templates_of
from kpipe.codegen.spec.load import plain

_TUNED = ("table", "table_unfused", "modes")
_IGNORED = ("doc",)


def made_from(resolved: Resolved, plan: PipelinePlan) -> dict[str, Any]:
    """Digests of the spec's sections, the geometry, the templates and the building blocks."""
    config = load_config(Path(resolved.source.path))
    return {
        "spec": _sections(plain(resolved.source.root)),
        "geometry": _digest(plain(resolved.geometry_source.root)),
        "templates": templates_of(plan, config.template_folders),
        "device": digest("".join(digest(p.read_bytes()) for p in sorted(DEVICE.glob("*.py")))),
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, in words; empty where a result still holds."""
    found = [f"section `{name}`" for name in _differing(before.get("spec"), now["spec"])]
    if before.get("geometry") != now["geometry"]:
        found.append("the geometry")
    found += [
        f"template `{name}`" for name in _differing(before.get("templates"), now["templates"])
    ]
    if before.get("device") != now["device"]:
        found.append("the building blocks in runtime/device")
    return found


def _differing(before: Any, now: Mapping[str, str]) -> list[str]:
    known = before if isinstance(before, Mapping) else {}
    return sorted(name for name in {*known, *now} if known.get(name) != now.get(name))


def _sections(spec: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: _digest(_untuned(name, section))
        for name, section in spec.items()
        if name not in _IGNORED
    }


def _untuned(name: str, section: Any) -> Any:
    if name == "overlap":
        return {key: value for key, value in section.items() if key not in _TUNED}
    if name == "stages":
        return {
            stage: {key: value for key, value in entry.items() if key != "tactics"}
            for stage, entry in section.items()
        }
    return section


def _digest(value: Any) -> str:
    return digest(json.dumps(value, sort_keys=True, default=str))
