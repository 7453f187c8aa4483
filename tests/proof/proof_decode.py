"""A decode-like schedule of any length, safe by the documents, for speed."""

from __future__ import annotations

from proof_chains import MAIN, SIDE, event, on, pdl, reads, writes

from kpipe.codegen.proof.program import Access, Action, Kernel, Launch, Program, Segment

PER_LAYER = 8


def decode(launches: int, captured: bool = False, waits: bool = True) -> Program:
    """Layers of 8 launches: a chain of programmatic launches on main, two launches aside that a
    fork and a join enclose, and buffers that every layer uses again.

    With `waits` off, the fifth launch of each layer never waits, which makes races.
    """
    parts = []
    for _ in range(-(-launches // PER_LAYER)):
        parts += [
            on(MAIN, _kernel("norm", reads("h") + writes("n"))),
            on(MAIN, _kernel("proj", reads("n") + writes("q", "kv"))),
            event(0, MAIN, SIDE),
            on(SIDE, _kernel("index", reads("q") + writes("scores"))),
            on(SIDE, _kernel("topk", reads("scores") + writes("tk"))),
            on(MAIN, _kernel("rope", reads("q", "kv") + writes("rotated", "cache"), waits)),
            event(1, SIDE, MAIN),
            on(MAIN, _kernel("core", reads("rotated", "cache", "tk") + writes("o"))),
            on(MAIN, _kernel("value", reads("o") + writes("v"))),
            on(MAIN, _kernel("out", reads("v", "h") + writes("h"))),
        ]
    return _cut(tuple(action for part in parts for action in part), launches, captured)


def _kernel(name: str, accesses: tuple[Access, ...], waits: bool = True) -> Kernel:
    return pdl(name, accesses, waits=waits, trigger="after_wait")


def _cut(actions: tuple[Action, ...], launches: int, captured: bool) -> Program:
    """The actions up to the launch with which there are `launches`."""
    positions = [n for n, action in enumerate(actions) if isinstance(action, Launch)]
    return Program((Segment(actions[: positions[launches - 1] + 1], captured),))
