"""A step's plan as a program: layers in a row, steps in a row, eager and captured.

What the plan says in operands and streams becomes kernels with accesses, records and waits.
What runs between layers and what the engine writes between steps is made explicit, because a
schedule is safe only together with its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kpipe.codegen.ops.contract import Access as Touch
from kpipe.codegen.ops.contract import Kind, Path, Phase, Release
from kpipe.codegen.plan.flags import polled_operands
from kpipe.codegen.plan.model import MAIN, Binding, Fork, Launch, PipelinePlan, StepPlan
from kpipe.codegen.proof import program as model
from kpipe.codegen.proof.program import (
    Access,
    Action,
    Box,
    Copy,
    Kernel,
    Program,
    Reuse,
    Segment,
)

# Three layers in a step and two steps: one more copy than two parities need, and the odd number
# makes the last layer of a step and the first of the next share a parity.
LAYERS, STEPS = 3, 2
BETWEEN_LAYERS = "between layers"
RELEASE = "release of step tensors"
WORKSPACE = "workspace "  # in front of the names of private workspaces
INPUTS = ("lengths", "slots", "index_slots", "block_table", "index_table")
# What a layer leaves to the engine behind it, and what it takes from the engine ahead of it.
HANDED_ON, TAKEN = ("out", "new_prefix"), ("hidden", "prefix", "saved")
_TRIGGERS: Mapping[Release, model.Trigger] = {
    Release.NEVER: "never",
    Release.SOME_BLOCKS: "never",  # nobody starts before the last block has exited
    Release.AFTER_WEIGHTS: "early",
    Release.AFTER_WAIT: "after_wait",
    Release.AFTER_LOADS: "after_wait",
    Release.LIBRARY: "early",  # where a library releases is not ours to know: the weakest case
}


def lower(
    pipeline: PipelinePlan,
    step: StepPlan,
    *,
    captured: bool,
    layers: int = LAYERS,
    steps: int = STEPS,
    released: bool = False,
    bodies: Sequence[list[Action]] = (),
) -> Program:
    """The program of `steps` steps of `layers` layers each.

    Eager: everything is issued on the streams.  Captured: each step's layers are one graph; the
    engine's writes of step inputs stay outside it.  With `released` the engine gives each layer's
    step tensors back to its allocator as soon as the layer has been issued.  `bodies` are the
    layers where the caller has them, from `lower_layers`.
    """
    main = step.streams.index(MAIN)
    inputs = Segment((model.Launch(0, _engine_inputs([pipeline])),))
    body: list[Action] = []
    for actions in bodies or lower_layers(pipeline, step, layers):
        given_back = [model.Launch(main, _release(pipeline, actions))] if released else []
        body += [*actions[:-1], *given_back, actions[-1]]
    return Program((inputs, Segment(tuple(body), captured=captured)) * steps)


def behind_the_engine(program: Program, positions: Iterable[int]) -> bool:
    """Whether one of these launches is what runs between two layers."""
    return any(program.launches[position].node.name == BETWEEN_LAYERS for position in positions)


def lower_layers(
    pipeline: PipelinePlan, step: StepPlan, layers: int, lowering: Lowering | None = None
) -> list[list[Action]]:
    """What each layer issues, between layers included; eager and captured programs share it.

    `lowering` is the pipeline's, where the caller lowers more than one step of it.
    """
    streams = {name: number for number, name in enumerate(step.streams)}
    lowering = lowering or Lowering(pipeline)
    return [lowering.layer(step, number, streams) for number in range(layers)]


def lower_together(
    layers: Sequence[tuple[PipelinePlan, StepPlan]], *, captured: bool, own_streams: bool
) -> Program:
    """The program of `STEPS` steps in which layers of several pipelines follow each other.

    `layers` are one step's, in order; their pipelines declare the same `between_layers`.  Memory
    that a pipeline has for itself, and the names of its launches, carry the pipeline's name.  Side
    streams of equal name are one stream, or with `own_streams` one of each pipeline.
    """
    streams: dict[str, int] = {MAIN: 0}
    lowerings: dict[str, Lowering] = {}
    counts: dict[str, int] = {}
    body: list[Action] = []
    for pipeline, step in layers:
        own = f"@{pipeline.name}" if own_streams else ""
        names = {name: MAIN if name == MAIN else f"{name}{own}" for name in step.streams}
        for name in names.values():
            streams.setdefault(name, len(streams))
        lowering = lowerings.setdefault(pipeline.name, Lowering(pipeline, pipeline.name))
        number = counts.setdefault(pipeline.name, 0)
        counts[pipeline.name] += 1
        body += lowering.layer(step, number, {n: streams[known] for n, known in names.items()})
    inputs = Segment((model.Launch(0, _engine_inputs([pipeline for pipeline, _ in layers])),))
    return Program((inputs, Segment(tuple(body), captured=captured)) * STEPS)


def _engine_inputs(pipelines: Sequence[PipelinePlan]) -> Copy:
    """The engine's copies of the step's lengths, slots and tables, in stream order."""
    names = {tensor.name for pipeline in pipelines for tensor in pipeline.step}
    return Copy("step inputs", tuple(Access(n, write=True) for n in INPUTS if n in names))


def between_layers(pipeline: PipelinePlan) -> Kernel:
    """What runs between two layers, as the spec declares it.

    `waits` and `full` turn what the layer hands over (`out`) into what the next one takes
    (`hidden`, and the residual stream where the layer adds to it).  `silent` may start early and
    never waits; how the engine orders its own reads of `out` is then its own affair, so it touches
    nothing here.
    """
    kind = str(pipeline.environment["between_layers"])
    if kind == "silent":
        return Kernel(BETWEEN_LAYERS, pdl=True, trigger="early")
    declared = {"out", "hidden"} | {tensor.name for tensor in pipeline.step}
    accesses = (
        *(Access(name, write=False) for name in HANDED_ON if name in declared),
        *(Access(name, write=True) for name in TAKEN if name in declared),
    )
    if kind == "full":
        return Kernel(BETWEEN_LAYERS, accesses)
    return Kernel(BETWEEN_LAYERS, accesses, pdl=True, waits=True, trigger="after_wait")


def _release(pipeline: PipelinePlan, layer: Sequence[Action]) -> Reuse:
    """What may come in the place of the step tensors that a layer has used."""
    names = {tensor.name for tensor in pipeline.step}
    used = {
        access.buffer
        for action in layer[:-1]  # the last one is the engine's own
        if isinstance(action, model.Launch)
        for access in action.node.accesses
        if access.buffer.partition(" of layer ")[0] in names
    }
    return Reuse(RELEASE, tuple(Access(name, write=True) for name in sorted(used)))


@dataclass(frozen=True)
class _Lowered:
    """A launch whose accesses are known, and its kernels by (attribute, release)."""

    launch: Launch
    accesses: tuple[Access, ...]
    kernels: dict[tuple[bool, bool], Kernel] = field(default_factory=dict)

    def serves(self, launch: Launch) -> bool:
        """Whether the other launch touches the same memory in the same way."""
        known = self.launch
        return (
            known.contract is launch.contract
            and known.flags == launch.flags
            and known.bindings == launch.bindings
        )


class Lowering:
    """Names of memory and kernels while steps of one pipeline are lowered.

    A kernel is made once: the lists of a pipeline launch mostly the same ones, and the trials of
    synthesis differ in the overlap of one launch.  `owner` is the pipeline's name where several
    share a program: it is put behind the names of what the pipeline has for itself.
    """

    def __init__(self, pipeline: PipelinePlan, owner: str = "") -> None:
        self.pipeline = pipeline
        self.owner = owner
        self.own = f"@{owner}" if owner else ""
        self.between = between_layers(pipeline)
        self.known: dict[tuple[str, int], list[_Lowered]] = {}  # name and layer of a launch
        self.columns = {
            name: (buffer.name, (offset, offset + width))
            for buffer in pipeline.buffers
            for name, offset, width in buffer.columns
        }
        self.whole = {
            buffer.name: (0, sum(width for _, _, width in buffer.columns))
            for buffer in pipeline.buffers
            if buffer.columns
        }
        self.parities = {mailbox.name: mailbox.parities for mailbox in pipeline.mailboxes}
        self.silent = pipeline.environment["between_layers"] == "silent"
        self.scopes = {buffer.name: buffer.scope for buffer in pipeline.buffers}

    def layer(self, step: StepPlan, number: int, streams: Mapping[str, int]) -> list[Action]:
        """One layer's actions; `number` counts the layers of the kind."""
        actions: list[Action] = []
        event = 0
        for item in step.items:
            if isinstance(item, Launch):
                actions.append(model.Launch(streams[item.stream], self.kernel(item, number)))
                continue
            fork = isinstance(item, Fork)
            before, behind = (item.origin, item.stream) if fork else (item.stream, item.target)
            actions.append(model.Record(streams[before], event))
            actions.append(model.Wait(streams[behind], event))
            event += 1
        actions.append(model.Launch(streams[MAIN], self.between))
        return actions

    def kernel(self, launch: Launch, number: int) -> Kernel:
        """One launch with its accesses."""
        lowered = self.lowered(launch, number)
        overlap = launch.pdl.attribute, launch.pdl.release
        kernel = lowered.kernels.get(overlap)
        if kernel is None:
            release = launch.contract.release
            released = launch.pdl.release or release is Release.LIBRARY
            kernel = lowered.kernels[overlap] = Kernel(
                f"{self.owner}.{launch.name}" if self.owner else launch.name,
                lowered.accesses,
                pdl=launch.pdl.attribute,
                waits=launch.contract.waits,
                trigger=_TRIGGERS[release] if released else "never",
            )
        return kernel

    def lowered(self, launch: Launch, number: int) -> _Lowered:
        """What is known of a launch in layer `number`, or of one that touches the same."""
        known = self.known.setdefault((launch.name, number), [])
        for one in known:
            if one.serves(launch):
                return one
        known.append(_Lowered(launch, tuple(self.touches(launch, number))))
        return known[-1]

    def touches(self, launch: Launch, number: int) -> list[Access]:
        """All accesses of a launch, in the order of its operands, scratch last."""
        accesses: list[Access] = []
        polled = polled_operands(launch.contract, dict(launch.flags))
        for binding in launch.bindings:
            if binding.kind is not Kind.WEIGHT and binding.access is not Touch.LAYOUT:
                found = self.accesses(binding, number, binding.operand in polled)
                if binding.path is not Path.GENERIC:
                    found = [replace(access, path=binding.path.value) for access in found]
                elif binding.operand in launch.contract.proxy_fence:
                    found = [replace(access, fenced=access.write) for access in found]
                accesses += found
        return accesses + [
            Access(
                f"{WORKSPACE}{launch.op}.{scratch.name}{self.own}",
                write=True,
                zero=scratch.zero_once,
            )
            for scratch in launch.contract.scratch
        ]

    def accesses(self, binding: Binding, number: int, polls: bool) -> list[Access]:
        """The accesses behind one operand."""
        buffer, box = self.place(binding, number)
        early = binding.phase is Phase.PROLOGUE
        touch = binding.access
        if binding.target not in self.parities:
            write = touch.writes
            found = [Access(buffer, write, early, box)]
            if touch is Touch.UPDATE:
                found.append(Access(buffer, False, early, box))
            return found
        # A poll that returns is what later plain reads of the words rest on.
        arrived = f"{buffer} arrived"
        found = []
        if touch.publishes:
            found.append(Access(buffer, True, early))
        if polls:
            found += [Access(buffer, False, early), Access(arrived, True, early)]
        if touch is Touch.READ:
            found += [Access(buffer, False, early), Access(arrived, False, early)]
        if touch.rearms:
            found.append(Access(buffer, True, early))
        return found

    def place(self, binding: Binding, number: int) -> tuple[str, Box]:
        """Memory and region of an operand in layer `number`."""
        target = binding.target
        if target in self.parities:
            return f"{target}@{number % self.parities[target]}{self.own}", ()
        # What the engine makes of it behind a silent neighbour is its own affair.
        handed_over = self.silent and target in (*HANDED_ON, *TAKEN)
        if binding.kind is Kind.CACHE or handed_over:
            return f"{target} of layer {number}{self.own}", ()
        if target in self.columns:
            buffer, span = self.columns[target]
            return self.scoped(buffer, number), (span,)
        if target in self.whole:
            return self.scoped(target, number), (self.whole[target],)
        return self.scoped(target, number), ()

    def scoped(self, buffer: str, number: int) -> str:
        """Memory of a buffer in layer `number`, by its scope.

        layer: each layer's own.  kind: one for all layers of the pipeline.  model, device: one
        for all pipelines that declare it.  Step tensors have no scope: the engine's, by name.
        """
        scope = self.scopes.get(buffer)
        if scope == "layer":
            return f"{buffer} of layer {number}{self.own}"
        return f"{buffer}{self.own}" if scope == "kind" else buffer
