"""A project with a small spec, its tuning plan, and files of results with chosen times."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kpipe.codegen.tune.model import Options, Tuning
from kpipe.codegen.tune.plan import plan_tuning

BASE = Path(__file__).resolve().parent / "cases" / "_base"
ROUNDS = 4
STEADY = 50.0
"""Microseconds of every candidate that nothing else is said of."""


def project(folder: Path, *changes: tuple[str, str]) -> Path:
    """A project with `base.yaml`, in which texts have been replaced; the path of the spec."""
    shutil.copytree(BASE, folder, dirs_exist_ok=True)
    (folder / "kpipe.toml").touch()
    spec = folder / "base.yaml"
    change(spec, *changes)
    return spec


def change(spec: Path, *changes: tuple[str, str]) -> None:
    """Replace texts that occur once."""
    text = spec.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    spec.write_text(text)


def planned(spec: Path, **asked: Any) -> Tuning:
    """The tuning plan of a spec for rows 2 and 8, unless something else is asked."""
    options = Options(**{"rows": (2, 8), "context": 256, **asked})
    return plan_tuning(str(spec), {}, options, lambda name: None)


_KNOWN: dict[tuple[Any, ...], str] = {}


def document(spec: Path, **asked: Any) -> dict[str, Any]:
    """The plan as data; equal texts are planned once, which takes a second."""
    texts = [path.read_text() for path in sorted(spec.parent.glob("*.yaml"))]
    key = (spec.name, *texts, *sorted(asked.items()))
    if key not in _KNOWN:
        _KNOWN[key] = json.dumps(planned(spec, **asked).as_json())
    return json.loads(_KNOWN[key])


def record(
    path: Path,
    plan: Mapping[str, Any],
    faster: Mapping[str, tuple[str, float]],
    *,
    scatter: float = 0.001,
    failed: Mapping[str, str] | None = None,
    lines: tuple[Any, ...] = (),
) -> Path:
    """A file of results in which a step's named candidate has that time, and all others STEADY.

    Times grow by `scatter` from round to round, for candidates other than the present one only:
    so large is the spread of their ratio.  `failed` are candidates by step; `lines` come last.
    """
    header = {
        "schema": "kpipe.tune_results/1",
        "gpu": "NVIDIA X1",
        "arch": plan["arch"],
        "date": "2026-11-30",
        "plan": plan,
    }
    found: list[Any] = [header]
    for step in plan["steps"]:
        key, gone = step["key"], (failed or {}).get(step["key"], "")
        if gone:
            found.append({"step": key, "failed": gone, "error": "ValueError: no room"})
        name, us = faster.get(key, (step["present"], STEADY))
        assert name in [one["name"] for one in step["candidates"]], f"{key}: no candidate {name}"
        for number in range(ROUNDS):
            times = {}
            for one in step["candidates"]:
                if one["name"] == gone:
                    continue
                drift = 0.0 if one["name"] == step["present"] else scatter * number
                times[one["name"]] = (us if one["name"] == name else STEADY) * (1 + drift)
            found.append({"step": key, "round": number, "us": times})
    text = "".join(json.dumps(line) + "\n" for line in (*found, *lines))
    path.write_text(text)
    return path
