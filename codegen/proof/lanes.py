"""On how many streams a captured graph is replayed, by a rule that fits what was observed.

No document says how the nodes of a graph are spread over streams.  Reports of serving engines, with
their own traces, agree on this much: where branches meet, the work goes on in the lane of the
branch that was recorded first.  A side stream that is recorded ahead of the main work beside it
thus takes the main chain along into its lane, and the next layer opens a new lane.
"""

from __future__ import annotations

from collections.abc import Iterable

from kpipe.codegen.proof.program import Action, Launch, Record, Wait


def replay_streams(actions: Iterable[Action]) -> int:
    """Streams that a replay of the captured actions is predicted to use.

    A node goes on in the lane of the parent that was recorded first among those that are the last
    of their lane, and opens a lane where there is none.  Where branches meet the same is done for
    the meeting point, whether or not work follows at once.  Waits on events that the actions do not
    record count for nothing.
    """
    return _Lanes().run(actions)


class _Lanes:
    """Nodes are numbered as they are recorded; meeting points are nodes as well, as old as the
    oldest branch that meets there."""

    def __init__(self) -> None:
        self.fronts: dict[int, tuple[int, ...]] = {}  # stream -> what its next node depends on
        self.events: dict[int, tuple[int, ...]] = {}
        self.lanes: list[int] = []  # node -> lane
        self.before: list[int] = []  # node -> it and its ancestors, as a bit set
        self.ages: list[int] = []  # node -> number of the launch that it counts as old as
        self.tails: list[int] = []  # lane -> its last node

    def run(self, actions: Iterable[Action]) -> int:
        for action in actions:
            front = self.fronts.get(action.stream, ())
            if isinstance(action, Launch):
                self.fronts[action.stream] = (self._node(front),)
            elif isinstance(action, Record):
                self.events[action.event] = front
            else:
                self._wait(action, front)
        return len(self.tails)

    def _wait(self, wait: Wait, front: tuple[int, ...]) -> None:
        joined = tuple(dict.fromkeys((*front, *self.events.get(wait.event, ()))))
        latest = [n for n in joined if not any(self.before[m] >> n & 1 for m in joined if m != n)]
        if len(latest) > 1:
            joined = (self._node(joined, min(self.ages[node] for node in latest)),)
        self.fronts[wait.stream] = joined

    def _node(self, parents: tuple[int, ...], age: int | None = None) -> int:
        node = len(self.lanes)
        self.ages.append(node if age is None else age)
        oldest = sorted(parents, key=self.ages.__getitem__)
        free = [parent for parent in oldest if self.tails[self.lanes[parent]] == parent]
        lane = self.lanes[free[0]] if free else len(self.tails)
        self.tails[lane : lane + 1] = [node]
        self.lanes.append(lane)
        row = 1 << node
        for parent in parents:
            row |= self.before[parent]
        self.before.append(row)
        return node
