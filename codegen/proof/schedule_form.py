"""Programs in the JSON form in which a GPU runs them, and back.

The runtime has a reader and writer of its own (`runtime/schedules/form.py`); the two share the
form and no code.  Copies become memsets; both kinds of copy are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kpipe.codegen.proof.program import (
    Access,
    Action,
    Copy,
    Kernel,
    Launch,
    Program,
    Record,
    Segment,
    Wait,
)

SCHEMA = "kpipe.schedule/1"
_TRIGGERS = {"some": "never"}  # nobody starts before the last CTA has exited


def encode(program: Program, *, touches: bool) -> dict[str, Any]:
    """The program as plain data, with its accesses or (where only orders matter) without.

    Raises ValueError for an access that no stand-in can make: through the async proxy, or of a
    region with several axes.
    """
    segments = [
        {
            "captured": segment.captured,
            "stream": segment.stream,
            "actions": [_encoded(action, touches) for action in segment.actions],
        }
        for segment in program.segments
    ]
    return {"schema": SCHEMA, "segments": segments, "words": {}}


def _encoded(action: Action, touches: bool) -> dict[str, Any]:
    if not isinstance(action, Launch):
        word = "record" if isinstance(action, Record) else "wait"
        return {"do": word, "stream": action.stream, "event": action.event}
    node = action.node
    found = {
        "do": "launch",
        "stream": action.stream,
        "name": node.name,
        "kind": "kernel" if isinstance(node, Kernel) else "memset",
        "pdl": isinstance(node, Kernel) and node.pdl,
        "waits": isinstance(node, Kernel) and node.waits,
        "trigger": node.trigger if isinstance(node, Kernel) else "never",
        "touches": [_touch(access) for access in node.accesses] if touches else [],
        "ctas": 1,
    }
    return found


def _touch(access: Access) -> dict[str, Any]:
    if access.path == "async":
        raise ValueError(f"`{access.buffer}` is reached through the async proxy")
    if len(access.box) > 1:
        raise ValueError(f"the region of `{access.buffer}` has {len(access.box)} axes")
    first, end = access.box[0] if access.box else (0, 0)
    return {
        "buffer": access.buffer,
        "write": access.write,
        "early": access.early,
        "zero": access.zero,
        "first": first,
        "end": end,
    }


def decode(data: Mapping[str, Any]) -> Program:
    """The program behind plain data.  Raises ValueError or KeyError for what is no schedule."""
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema {data['schema']!r} is not {SCHEMA}")
    return Program(
        tuple(
            Segment(
                tuple(_decoded(item) for item in segment["actions"]),
                segment["captured"],
                segment["stream"],
            )
            for segment in data["segments"]
        )
    )


def _decoded(item: Mapping[str, Any]) -> Action:
    if item["do"] == "record":
        return Record(item["stream"], item["event"])
    if item["do"] == "wait":
        return Wait(item["stream"], item["event"])
    if item["do"] != "launch":
        raise ValueError(f"{item['do']!r} is no action")
    accesses = tuple(
        Access(
            touch["buffer"],
            touch["write"],
            touch["early"],
            ((touch["first"], touch["end"]),) if touch["end"] else (),
            touch["zero"],
        )
        for touch in item["touches"]
    )
    if item["kind"] != "kernel":
        return Launch(item["stream"], Copy(item["name"], accesses))
    trigger = _TRIGGERS.get(item["trigger"], item["trigger"])
    kernel = Kernel(item["name"], accesses, item["pdl"], item["waits"], trigger)
    return Launch(item["stream"], kernel)
