"""Reads the race benchmark: programs with the races that each must show.

The form is described in racebench/README.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kpipe.codegen.ops.contract import Role, early_roles
from kpipe.codegen.proof.program import (
    Access,
    Action,
    Copy,
    Kernel,
    Launch,
    Program,
    Record,
    Reuse,
    Segment,
    Wait,
)
from kpipe.codegen.proof.races import Race
from kpipe.codegen.proof.unroll import place, unroll
from kpipe.codegen.proof.zeros import Dirty
from kpipe.codegen.spec.document import read_document, to_plain

FOLDER = Path(__file__).parent / "racebench"

_KEYS = {"steps", "slots", "modes", "kernels", "order", "races"}
_ACCESSES = {  # key of a kernel -> writes, early, zero, path
    "reads": (False, False, False, "generic"),
    "writes": (True, False, False, "generic"),
    "reads_early": (False, True, False, "generic"),
    "writes_early": (True, True, False, "generic"),
    "zeros": (True, False, True, "generic"),
    "reads_tma": (False, False, False, "async"),
    "writes_tma": (True, False, False, "async"),
}
_KERNEL = {"copy", "pdl", "waits", "trigger", "fenced", "proxy_fenced", "roles", *_ACCESSES}
_TRIGGERS = {"never": "never", "early": "early", "after_wait": "after_wait", "some": "never"}
_ROLE = {"waits", "after", "reads", "writes"}
_RACE = ("first", "second", "buffer", "kind", "verdict")
_BUFFER = re.compile(r"(\w+)(?: (\d+):(\d+))?")
_EVENT = re.compile(r"(\w+) -> (\w+)")
_NAMED = re.compile(r"(\w+) on (\w+)")
_FREED = re.compile(r"(\w+(?: \d+:\d+)?) on (\w+)")
_SEGMENT = re.compile(r"eager|captured on (\w+)")

# first, second, buffer, kind, verdict
Expected = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Bench:
    """One file: a program per mode (eager, captured, mixed), and the races of each."""

    path: Path
    steps: int
    programs: Mapping[str, Program]
    races: Mapping[str, frozenset[Expected]]

    def name(self, mode: str, position: int) -> str:
        """A launch as the file calls it: its kernel, with the step where there are several."""
        launches = self.programs[mode].launches
        step = place(position, len(launches) // self.steps)[0]
        kernel = launches[position].node.name
        return f"{kernel} of step {step}" if self.steps > 1 else kernel

    def say(self, mode: str, race: Race) -> Expected:
        """A race that was found, as the file would state it."""
        verdict = f"assumed:{race.assumption}" if race.assumption else race.verdict
        first, second = (self.name(mode, site[0]) for site in (race.first, race.second))
        return first, second, race.buffer, race.kind, verdict

    def say_dirty(self, mode: str, found: Dirty) -> Expected:
        """Memory that is expected to be zero and is not, as the file would state it."""
        first, second = (self.name(mode, site[0]) for site in (found.first, found.second))
        return first, second, found.buffer, "ZERO", "dirty"


def program_lines(path: Path) -> list[str]:
    """The lines of a file in front of the races that it states."""
    return path.read_text().partition("races:\n")[0].splitlines()


def load(path: Path) -> Bench:
    """Reads one file; ValueError for anything outside the form, with the file's name."""
    root = to_plain(read_document(path, path.read_bytes()))
    _only(path, root, _KEYS)
    kernels = {name: _kernel(path, name, entry) for name, entry in root["kernels"].items()}
    reader = _Order(path, kernels)
    segments = reader.read(root["order"])
    steps, slots = root.get("steps", 1), root.get("slots", {})
    modes = root.get("modes", "both")
    if modes not in ("both", "eager"):
        raise ValueError(f"{path}: modes is {modes!r}, not both or eager")
    if len(segments) > 1 or segments[0].captured:
        if steps > 1 or slots or modes != "both":
            raise ValueError(f"{path}: segments leave no room for steps, slots or modes")
        programs = {"mixed": Program(segments)}
    else:
        actions = segments[0].actions
        programs = {"eager": unroll(actions, slots, steps)}
        if modes == "both":
            programs["captured"] = unroll(Segment(actions, True, 0), slots, steps)
    return Bench(path, steps, programs, _races(path, root.get("races", {}), programs))


def _only(path: Path, given: Mapping[str, Any], known: set[str]) -> None:
    for key in given:
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r}; known: {', '.join(sorted(known))}")


def _kernel(path: Path, name: str, entry: Mapping[str, Any]) -> Kernel | Copy:
    _only(path, entry, _KERNEL)
    accesses = tuple(
        Access(buffer, write, early, box, zero, proxy, write and entry.get("proxy_fenced", False))
        for key, (write, early, zero, proxy) in _ACCESSES.items()
        for buffer, box in (_buffer(path, text) for text in entry.get(key, ()))
    )
    if "roles" in entry:
        if "waits" in entry:
            raise ValueError(f"{path}: {name} has roles, and they say who waits")
        accesses += _roles(path, entry["roles"])
    if entry.get("copy"):
        _only(path, entry, {"copy", *_ACCESSES})
        return Copy(name, accesses)
    trigger = entry.get("trigger", "never")
    if trigger not in _TRIGGERS:
        raise ValueError(f"{path}: trigger is {trigger!r}, not never, early, after_wait or some")
    waits = any(role.get("waits", False) for role in entry.get("roles", {}).values())
    return Kernel(
        name,
        accesses,
        pdl=entry.get("pdl", False),
        waits=entry.get("waits", waits),
        trigger=_TRIGGERS[trigger],
        fenced=entry.get("fenced", False),
    )


def _roles(path: Path, roles: Mapping[str, Mapping[str, Any]]) -> tuple[Access, ...]:
    """What the warps of each role touch; who of them is early is the contract's rule."""
    for entry in roles.values():
        _only(path, entry, _ROLE)
    declared = (Role(n, e.get("waits", False), (), e.get("after", "")) for n, e in roles.items())
    early = early_roles(tuple(declared))
    return tuple(
        Access(buffer, write, role in early, box)
        for role, entry in roles.items()
        for key, write in (("reads", False), ("writes", True))
        for buffer, box in (_buffer(path, text) for text in entry.get(key, ()))
    )


def _buffer(path: Path, text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    name, begin, end = _match(path, _BUFFER, text)
    return name, ((int(begin), int(end)),) if begin else ()


def _match(path: Path, pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    found = pattern.fullmatch(text)
    if found is None:
        raise ValueError(f"{path}: {text!r} does not read as {pattern.pattern}")
    return found.groups()


class _Order:
    """Numbers streams and events while the order is read; main is stream 0."""

    def __init__(self, path: Path, kernels: Mapping[str, Kernel | Copy]) -> None:
        self.path = path
        self.kernels = kernels
        self.streams = {"main": 0}
        self.events: dict[str, int] = {}
        self.launched: set[str] = set()

    def read(self, items: list[Mapping[str, str]]) -> tuple[Segment, ...]:
        """Segments in host order; without a `segment` item there is one eager segment."""
        segments: list[Segment] = []
        begun: tuple[bool, int] = (False, 0)
        actions: list[Action] = []
        for number, item in enumerate(items):
            ((word, text),) = item.items()
            if word != "segment":
                actions += self._actions(word, text, f"event {number}")
                continue
            (stream,) = _match(self.path, _SEGMENT, text)
            if actions:
                segments.append(Segment(tuple(actions), *begun))
            begun, actions = (bool(stream), self._stream(stream or "main")), []
        idle = sorted(set(self.kernels) - self.launched)
        if idle:
            raise ValueError(f"{self.path}: never launched: {', '.join(idle)}")
        return (*segments, Segment(tuple(actions), *begun))

    def _actions(self, word: str, text: str, anonymous: str) -> list[Action]:
        if word == "event":
            source, target = map(self._stream, _match(self.path, _EVENT, text))
            event = self._event(anonymous)
            return [Record(source, event), Wait(target, event)]
        if word in ("record", "wait"):
            name, stream = _match(self.path, _NAMED, text)
            action = Record if word == "record" else Wait
            return [action(self._stream(stream), self._event(name))]
        if word == "free":
            given, stream = _match(self.path, _FREED, text)
            buffer, box = _buffer(self.path, given)
            reuse = Reuse(f"reuse of {buffer}", (Access(buffer, True, box=box),))
            return [Launch(self._stream(stream), reuse)]
        return [self._launch(self._stream(word), name) for name in text.split()]

    def _launch(self, stream: int, name: str) -> Launch:
        if name not in self.kernels or name in self.launched:
            why = "launched twice" if name in self.launched else "no kernel of the file"
            raise ValueError(f"{self.path}: {name!r} is {why}")
        self.launched.add(name)
        return Launch(stream, self.kernels[name])

    def _stream(self, name: str) -> int:
        return self.streams.setdefault(name, len(self.streams))

    def _event(self, name: str) -> int:
        return self.events.setdefault(name, len(self.events))


def _races(
    path: Path, stated: Mapping[str, Any], programs: Mapping[str, Program]
) -> dict[str, frozenset[Expected]]:
    _only(path, stated, {*programs, "both"} if "captured" in programs else set(programs))
    races: dict[str, frozenset[Expected]] = {}
    for mode in programs:
        listed = stated.get(mode, stated.get("both", []))
        for race in listed:
            _only(path, race, set(_RACE))
        races[mode] = frozenset(tuple(race[key] for key in _RACE) for race in listed)
    return races


def pairs() -> Iterator[tuple[str, Path, Path]]:
    """Every pair as (rule/number, racy file, fixed file), sorted."""
    for racy in sorted(FOLDER.glob("*/*_racy.yaml")):
        number = racy.name.removesuffix("_racy.yaml")
        yield f"{racy.parent.name}/{number}", racy, racy.with_name(f"{number}_fixed.yaml")
