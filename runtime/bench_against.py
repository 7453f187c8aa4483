"""`kpipe bench --against OLD`: two runs of bench, time by time, as ratios with their spread.

A run has the medians of several rounds for every time.  The ratio of two runs lies between the
best new median over the worst old one and the worst over the best; a time has moved where 1 lies
outside of that.  Times are compared only where GPU, dimensions, rows and context are the same;
what is left out is named.  Needs neither torch nor a GPU for two files.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = "kpipe.bench_comparison/1"
LEAST = 0.01  # a ratio nearer to 1 than this is no move, whatever the rounds say
LEAST_US = 0.35  # nor is that much of a small launch: so far apart were two runs of one kernel
ASSUMED = 0.03  # half the spread of a time, where neither file has one
LAYER = "layer"
_WHERE = ("pipeline", "what", "rows", "q", "context")
_KINDS = {"pipeline": str, "what": str, "method": str, "rows": int, "q": int, "context": int}


class UnusableRun(ValueError):
    """A file that is no run of bench, or two that cannot be compared; the text says why."""


@dataclass(frozen=True)
class Run:
    """One file of `kpipe bench --out`: the machine, the dimensions, times by what was timed."""

    path: str
    gpu: str
    geometry: Mapping[str, Any]  # empty in files of before it was written down
    kernels: Mapping[str, Any]
    times: Mapping[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Pair:
    """One time in both runs: us, the ratio new over old and the ends of where it may lie."""

    what: str
    rows: int
    q: int
    context: int
    methods: tuple[str, str]
    old_us: float
    new_us: float
    low: float
    high: float
    assumed: bool  # neither file has the spread of this time
    kernel: str  # "same", "changed", or "" where the files do not say

    @property
    def ratio(self) -> float:
        """New over old; above 1 is slower."""
        return self.new_us / self.old_us

    @property
    def verdict(self) -> str:
        """slower, faster, or empty for what lies within the spread."""
        if abs(self.new_us - self.old_us) < LEAST_US:
            return ""
        if self.low > 1 + LEAST:
            return "slower"
        return "faster" if self.high < 1 - LEAST else ""

    @property
    def place(self) -> str:
        """What was timed, in words."""
        return f"{self.what} ({_step(self.rows, self.q, self.context)})"


@dataclass(frozen=True)
class Comparison:
    """What two runs share, and in words what is not compared."""

    old: Run
    new: Run
    pairs: tuple[Pair, ...]
    left_out: tuple[str, ...]

    def moved(self, verdict: str) -> list[Pair]:
        """Pairs of that verdict, the largest move first, whole layers ahead of launches."""
        found = [pair for pair in self.pairs if pair.verdict == verdict]
        return sorted(found, key=lambda pair: (pair.what != LAYER, -abs(pair.ratio - 1)))


def read_run(path: Path) -> Run:
    """A run from its file.  Raises UnusableRun that names the file."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise UnusableRun(f"`{path}` cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise UnusableRun(f"`{path}` is not JSON") from None
    found = data.get("timings") if isinstance(data, dict) else None
    if not isinstance(found, list) or not isinstance(data.get("gpu"), str):
        raise UnusableRun(f"`{path}` is not what `kpipe bench --out` writes: no `gpu` or `timings`")
    times = {}
    for entry in found:
        if not isinstance(entry, dict) or not _complete(entry):
            raise UnusableRun(f"`{path}`: entry {entry!r:.60} lacks a name, a number or its time")
        times[tuple(entry[key] for key in _WHERE)] = entry
    return Run(str(path), data["gpu"], data.get("geometry") or {}, data.get("kernels") or {}, times)


def _complete(entry: Mapping[str, Any]) -> bool:
    known = all(isinstance(entry.get(key), kind) for key, kind in _KINDS.items())
    times = [entry.get("us"), *(entry.get("medians") or ())]
    return known and all(isinstance(us, int | float) and us > 0 for us in times)


def compare(old: Run, new: Run) -> Comparison:
    """Every time that both runs have of the same thing.

    Raises UnusableRun where the GPUs or the dimensions differ, or nothing is in both.
    """
    if old.gpu != new.gpu:
        raise UnusableRun(f"nothing to compare: {_differ('GPU', old, new, old.gpu, new.gpu)}")
    shared = set(old.geometry) & set(new.geometry)
    for name in sorted(shared):
        values = old.geometry[name], new.geometry[name]
        if values[0] != values[1]:
            raise UnusableRun(f"nothing to compare: {_differ(f'`{name}`', old, new, *values)}")
    pairs = [_pair(old, new, key) for key in new.times if key in old.times]
    left_out = (*_only(old, new), *_only(new, old))
    if not pairs:
        raise UnusableRun(f"nothing to compare: {'; '.join(left_out) or 'both files are empty'}")
    return Comparison(old, new, tuple(pairs), left_out)


def _differ(what: str, old: Run, new: Run, before: object, after: object) -> str:
    return f"{what} is {before} in {old.path} and {after} in {new.path}"


def _only(one: Run, other: Run) -> tuple[str, ...]:
    """What only the first run has: by step, where the other has none of it, else by name."""
    steps: dict[tuple[Any, ...], list[str]] = {}
    for pipeline, what, *step in (key for key in one.times if key not in other.times):
        steps.setdefault((pipeline, *step), []).append(what)
    there = {(pipeline, *step) for pipeline, _, *step in other.times}
    return tuple(
        f"{pipeline} {_step(*step)}{'' if whole else ': ' + ', '.join(names)} only in {one.path}"
        for (pipeline, *step), names in steps.items()
        for whole in [(pipeline, *step) not in there]
    )


def _pair(old: Run, new: Run, key: tuple[Any, ...]) -> Pair:
    before, after = old.times[key], new.times[key]
    spreads = [_spread(entry) for entry in (before, after)]
    known = [spread for spread in spreads if spread is not None]
    least, most = known[0] if known else (1 - ASSUMED, 1 + ASSUMED)
    (low0, high0), (low1, high1) = (spread or (least, most) for spread in spreads)
    ratio = after["us"] / before["us"]
    _, what, rows, q, context = key
    return Pair(
        what,
        rows,
        q,
        context,
        (before["method"], after["method"]),
        before["us"],
        after["us"],
        ratio * low1 / high0,
        ratio * high1 / low0,
        not known,
        _kernel(old, new, what),
    )


def _spread(entry: Mapping[str, Any]) -> tuple[float, float] | None:
    """The least and the largest median over the time itself; None for a single round."""
    medians = entry.get("medians") or ()
    return (min(medians) / entry["us"], max(medians) / entry["us"]) if len(medians) > 1 else None


def _kernel(old: Run, new: Run, what: str) -> str:
    if what not in old.kernels or what not in new.kernels:
        return ""
    return "same" if old.kernels[what] == new.kernels[what] else "changed"


def _step(rows: int, q: int, context: int) -> str:
    return f"{rows} rows, q{q}, {context // 1024}K"


def as_text(found: Comparison) -> str:
    """The comparison for people: every pair, then what moved, then what was left out."""
    rows = [("", "old us", "new us", "ratio", "between", "")]
    for pair in found.pairs:
        between = f"{pair.low:.3f} and {pair.high:.3f}{' ?' if pair.assumed else ''}"
        us = f"{pair.old_us:.1f}", f"{pair.new_us:.1f}"
        rows.append((pair.place, *us, f"{pair.ratio:.3f}", between, pair.verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"{found.old.path} -> {found.new.path}, {found.new.gpu}"]
    for row in rows:
        first, *others = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join((first, *others)).rstrip())
    lines.append("")
    for verdict in ("slower", "faster"):
        moved = [_moved(pair) for pair in found.moved(verdict)]
        lines.append(f"{verdict}: {'; '.join(moved) or 'nothing'}")
    if any(pair.assumed for pair in found.pairs):
        percent = f"{100 * ASSUMED:.0f} %"
        lines.append(f"?: no spread in either file; {percent} of each time are taken for it")
    lines += [f"not compared: {what}" for what in found.left_out]
    return "\n".join(lines) + "\n"


def _moved(pair: Pair) -> str:
    notes = []
    if pair.methods[0] != pair.methods[1] and pair.what == LAYER:
        notes.append(f"{pair.methods[0]} -> {pair.methods[1]}")
    if pair.kernel:
        notes.append(f"kernel {'changed' if pair.kernel == 'changed' else 'is the same'}")
    return f"{pair.place} x{pair.ratio:.3f}{f' ({said})' if (said := ', '.join(notes)) else ''}"


def as_json(found: Comparison) -> str:
    """The comparison for tools."""
    pairs = [
        {
            "what": pair.what,
            "rows": pair.rows,
            "q": pair.q,
            "context": pair.context,
            "methods": list(pair.methods),
            "old_us": pair.old_us,
            "new_us": pair.new_us,
            "ratio": round(pair.ratio, 5),
            "between": [round(pair.low, 5), round(pair.high, 5)],
            "assumed": pair.assumed,
            "kernel": pair.kernel,
            "verdict": pair.verdict or "within",
        }
        for pair in found.pairs
    ]
    payload = {
        "schema": SCHEMA,
        "gpu": found.new.gpu,
        "old": found.old.path,
        "new": found.new.path,
        "pairs": pairs,
        "not_compared": list(found.left_out),
    }
    return json.dumps(payload, indent=1) + "\n"


def asks_for_comparison(argv: Sequence[str]) -> bool:
    """Whether the words of a command line are for this module."""
    return any(word.partition("=")[0] == "--against" for word in argv)


def main(argv: list[str]) -> int:
    """Compare; returns 0, 1 (something is slower), 2 (unusable input) or what bench returns."""
    parser = argparse.ArgumentParser(prog="kpipe bench", description=__doc__.partition("\n")[0])
    parser.add_argument("new", help="a file of --out, or a generated folder to be timed now")
    parser.add_argument("--against", required=True, metavar="OLD", help="a file of --out")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--out", metavar="FILE", help="of a folder: keep the times")
    options, others = parser.parse_known_args(argv)
    new = Path(options.new)
    try:
        old = read_run(Path(options.against))
        if new.is_dir():
            code, run = _measured(new, options.out, others)
            if run is None:
                return code
        elif others or options.out:
            word = others[0] if others else "--out"
            raise UnusableRun(f"`{word}` is for a folder that is timed now, and `{new}` is none")
        else:
            run = read_run(new)
        found = compare(old, run)
    except UnusableRun as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(as_json(found) if options.format == "json" else as_text(found), end="")
    return 1 if found.moved("slower") else 0


def _measured(folder: Path, out: str | None, others: Sequence[str]) -> tuple[int, Run | None]:
    """What bench returns for the folder, and its run where that is 0."""
    from contextlib import redirect_stdout

    from kpipe.runtime.bench import main as measure

    with tempfile.TemporaryDirectory() as place:
        path = Path(out) if out else Path(place) / "now.json"
        with redirect_stdout(sys.stderr):
            code = measure([str(folder), *others, "--out", str(path)])
        return code, None if code else read_run(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
