"""The warning of a mode whose captured graph would be replayed on a new stream for every layer."""

from __future__ import annotations

from kpipe.codegen.diagnostics import Diagnostic
from kpipe.codegen.plan.model import MAIN, Fork, Join, Launch, PipelinePlan, StepPlan
from kpipe.codegen.proof import program as model
from kpipe.codegen.proof.lanes import replay_streams
from kpipe.codegen.proof.lower import BETWEEN_LAYERS

LAYERS = 61  # that the warning counts on: a graph holds all layers of a model


def replay_warnings(pipeline: PipelinePlan) -> tuple[Diagnostic, ...]:
    """One warning per mode in which the replay is predicted to use more streams than the mode."""
    found: dict[str, Diagnostic] = {}
    known: dict[tuple, int] = {}
    for method in pipeline.methods:
        step = method.plan
        if len(step.streams) == 1 or step.mode in found:
            continue
        pattern = tuple((type(i).__name__, *_streams(i)) for i in step.items)
        if pattern not in known:
            known[pattern] = predicted_streams(step)
        if known[pattern] > len(step.streams):
            found[step.mode] = _warning(step, known[pattern])
    return tuple(found.values())


def predicted_streams(step: StepPlan, layers: int = LAYERS) -> int:
    """Streams that the replay of a graph of so many layers in a row is predicted to use."""
    streams = {name: number for number, name in enumerate(step.streams)}
    between = model.Launch(streams[MAIN], model.Kernel(BETWEEN_LAYERS))
    layer: list[model.Action] = []
    for event, item in enumerate(step.items):
        first, *others = _streams(item)
        if not others:
            layer.append(model.Launch(streams[first], model.Kernel("")))
            continue
        layer += [model.Record(streams[first], event), model.Wait(streams[others[0]], event)]
    return replay_streams([*layer, between] * layers)


def _streams(item: Launch | Fork | Join) -> tuple[str, ...]:
    """The stream of a launch; of a fork or join the stream ahead of it and the one behind."""
    if isinstance(item, Launch):
        return (item.stream,)
    if isinstance(item, Fork):
        return item.origin, item.stream
    return item.stream, item.target


def _warning(step: StepPlan, count: int) -> Diagnostic:
    """Names the first stream that has been issued ahead of the work that its join waits beside."""
    last: dict[str, int] = {}
    early = None
    for position, item in enumerate(step.items):
        if isinstance(item, Launch):
            last[item.stream] = position
        elif isinstance(item, Join) and not early:
            ahead = last.get(item.stream, position) < last.get(item.target, -1)
            early = item if ahead else None
    forks = {item.stream: item for item in step.items if isinstance(item, Fork)}
    name = early.stream if early else next(iter(forks))
    wanted = len(step.streams)
    return Diagnostic(
        "KP501",
        f"mode `{step.mode}` issues stream `{name}` ahead of the work beside it: the replay of a "
        f"graph of {LAYERS} layers would use {count} streams, not {wanted}",
        forks[name].span,
        "warning",
        help=f"delete `issue {name}`: a stream is issued right ahead of its join; keep it only "
        "where layers run eagerly and the host is what they wait for",
        related=(("join", early.span),) if early else (),
    )
