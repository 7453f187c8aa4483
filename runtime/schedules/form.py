"""A schedule as data: launches, records and waits in host order, and its JSON form.

The generator writes the same form from what it proves, and reads it back; the two share no code.
Launches are named by their position in host order, over all segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = "kpipe.schedule/1"


@dataclass(frozen=True)
class Touch:
    """One access: a read or a write of the words [first, end) of a buffer, or of all of them.

    `early` ones stand in front of the launch's wait.  `zero`: zeros are expected and left.
    """

    buffer: str
    write: bool
    early: bool = False
    zero: bool = False
    first: int = 0
    end: int = 0  # 0: the whole buffer


@dataclass(frozen=True)
class Launch:
    """A stand-in for a kernel, or a copy: `kind` is kernel, memset or memcpy."""

    stream: int
    name: str
    kind: str = "kernel"
    pdl: bool = False
    waits: bool = False
    trigger: str = "never"  # early, after_wait, some
    touches: tuple[Touch, ...] = ()
    ctas: int = 1


@dataclass(frozen=True)
class Record:
    """Binds an event to what the stream holds now."""

    stream: int
    event: int


@dataclass(frozen=True)
class Wait:
    """The stream waits for the event's latest record."""

    stream: int
    event: int


Action = Launch | Record | Wait


@dataclass(frozen=True)
class Segment:
    """Actions issued eagerly, or captured into one graph that is launched on `stream`."""

    actions: tuple[Action, ...]
    captured: bool = False
    stream: int = 0


@dataclass(frozen=True)
class Schedule:
    """Segments in host order; `words` are the sizes of buffers that are not WORDS long."""

    segments: tuple[Segment, ...]
    words: Mapping[str, int] = field(default_factory=dict)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Every launch in host order."""
        return tuple(
            action
            for segment in self.segments
            for action in segment.actions
            if isinstance(action, Launch)
        )

    @property
    def streams(self) -> int:
        """How many streams are used; they are numbered from 0, the first is main."""
        used = [action.stream for segment in self.segments for action in segment.actions]
        return 1 + max((*used, *(segment.stream for segment in self.segments)), default=0)


_KINDS = {"launch": Launch, "record": Record, "wait": Wait}


def as_json(schedule: Schedule) -> dict[str, Any]:
    """The schedule as plain data."""
    names = {kind: name for name, kind in _KINDS.items()}
    segments = [
        {
            "captured": segment.captured,
            "stream": segment.stream,
            "actions": [{"do": names[type(one)], **asdict(one)} for one in segment.actions],
        }
        for segment in schedule.segments
    ]
    return {"schema": SCHEMA, "segments": segments, "words": dict(schedule.words)}


def from_json(data: Mapping[str, Any]) -> Schedule:
    """The schedule behind plain data.  Raises ValueError for another schema or an unknown key."""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"not a schedule of this version: schema {data.get('schema')!r}")
    segments = tuple(
        Segment(
            tuple(_action(item) for item in segment["actions"]),
            bool(segment["captured"]),
            int(segment["stream"]),
        )
        for segment in data["segments"]
    )
    return Schedule(segments, dict(data.get("words", {})))


def _action(item: Mapping[str, Any]) -> Action:
    values = dict(item)
    word = values.pop("do", None)
    if word not in _KINDS:
        raise ValueError(f"{word!r} is no action; known: {', '.join(_KINDS)}")
    if word == "launch":
        values["touches"] = tuple(Touch(**touch) for touch in values.get("touches", ()))
    try:
        return _KINDS[word](**values)
    except TypeError as error:
        raise ValueError(f"action {word!r}: {error}") from None
