"""Candidates of a tuning plan on a device: bound to the same inputs, compared, captured, timed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kpipe.runtime.bench import LAYERS, REPLAYS, captured, graphed, replay_us
from kpipe.runtime.bench_inputs import Inputs, TimedLayer, make_inputs
from kpipe.runtime.bench_peers import NOTE, Peers
from kpipe.runtime.evidence import versions
from kpipe.runtime.generated_folder import layer_in, load_layer
from kpipe.runtime.layer import Layer
from kpipe.runtime.memory import Scratch
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.sharding import Shard
from kpipe.runtime.tune_compile import compile_ahead, jobs_of, kernels_of
from kpipe.runtime.tune_plan import Candidate, Plan, Step


def header(plan: Plan, schema: str) -> dict[str, Any]:
    """The first line of a file of results: the machine, what is timed, and the whole plan.

    Raises LayerError for a folder without a layer.
    """
    layer = load_layer(plan.folder)
    alone = f"; rank 0 of {layer.RANKS} alone, {NOTE}" if layer.CONTEXT_PARALLEL else ""
    return {
        "schema": schema,
        "gpu": torch.cuda.get_device_name(),
        "arch": plan.arch,
        "date": date.today().isoformat(),
        "versions": versions(),
        "metric": f"us of one of {LAYERS} captured layers; median of {REPLAYS} replays{alone}",
        "plan": plan.document,
    }


Run = Callable[[], object]


@dataclass(frozen=True)
class Machine:
    """Where layers run and how a chain of runs is timed; the default is this machine's GPU.

    `capture` makes a graph of runs and `replay_us` times one of them, with what comes ahead of each
    replay as `before`; `graphed` makes one run fit to be that.
    """

    device: str = "cuda"
    backend: str = "cuda"
    capture: Callable[..., Any] = captured
    replay_us: Callable[..., float] = replay_us
    graphed: Callable[[Run], Run] = graphed
    synchronize: Callable[[], object] = torch.cuda.synchronize


@dataclass(frozen=True)
class Captured:
    """A candidate in one graph of `runs` runs; `before` comes ahead of each replay."""

    graph: Any
    runs: int
    difference: float
    machine: Machine
    before: Run | None = None

    def us(self) -> float:
        """Median microseconds of one run."""
        return self.machine.replay_us(self.graph, self.runs, before=self.before)


class DeviceBench:
    """The candidates of one plan; steps of one (q, rows) share weights, caches and tensors.

    Of a layer whose ranks exchange data rank 0 runs, with words that are made up once a (q, rows)
    and lengths.  Raises LayerError for a folder without a layer, and for another architecture than
    the plan's.
    """

    def __init__(self, plan: Plan, machine: Machine | None = None, layers: int = LAYERS) -> None:
        self.plan, self.machine, self.layers = plan, machine or Machine(), layers
        self.base = load_layer(plan.folder)
        if self.machine.backend == "cuda":
            from kpipe.runtime.host.launch import arch_of

            arch = arch_of(torch.device("cuda"))
            if arch != plan.arch:
                raise LayerError(f"the plan is for {plan.arch}, this machine is {arch}")
        self._place: tuple[int, int] = (0, 0)
        self._inputs: list[Inputs] = []
        self._scratch = Scratch(self.machine.device)
        self._shard, self._peers = Shard(), None
        if self.base.CONTEXT_PARALLEL:
            self._shard = Shard(0, self.base.RANKS, self.base.INTERLEAVE)
            self._peers = Peers(self.base, layers, self.machine.device, self.machine.backend)

    def layer_class(self, step: Step, candidate: Candidate) -> type[Layer]:
        """The class of a candidate: its module's, cut down to the step, with the tile in place."""
        if not step.op:
            return self._cut(step, candidate.module, candidate.method, {})
        tile = {(self.plan.arch, step.rows): dict(candidate.tactic)}
        ops = tuple(replace(op, tactics=tile) if op.name == step.op else op for op in self.base.OPS)
        return self._cut(step, candidate.module, candidate.method, {"OPS": ops})

    def _cut(self, step: Step, module: str, method: str, changed: Mapping[str, Any]) -> type[Layer]:
        """The class of a module with a table of this step alone, and other attributes changed."""
        found = layer_in(self.base, module)
        table = {(self.plan.arch, step.q): {step.rows: method}}
        return type(found.__name__, (found,), {"TABLE": table, **changed})

    def open(self, step: Step, names: Sequence[str]) -> Mapping[str, Captured | str]:
        """Every candidate ready to be timed, or why it is not; the first name is the present."""
        self._open_inputs(step)
        candidates = {one.name: one for one in step.candidates}
        outputs: list[Tensor] = []
        ready: dict[str, Captured | str] = {}
        for name in names:
            try:
                layers = self._bound(self.layer_class(step, candidates[name]))
                found = self._outputs(layers)
                outputs = outputs or found
                ready[name] = self._captured(layers, difference(found, outputs))
            except Exception as error:  # a candidate that cannot run is a result
                error = next(iter(self._peers.timeouts() if self._peers else ()), error)
                ready[name] = f"{type(error).__name__}: {error}"
                if name == step.present or not self.alive():
                    break  # nothing to compare with, or nothing that could run
        return ready

    def alive(self) -> bool:
        """Whether the device answers: an error of a launch shows here."""
        try:
            self.machine.synchronize()
        except RuntimeError:
            return False
        return True

    @contextmanager
    def compiling(
        self, steps: Sequence[Step], jobs: int, say: Callable[[str], None]
    ) -> Iterator[None]:
        """Inside, the kernels of these steps are compiled, as far as other processes could."""
        comm = self._comm(0)
        kernels = [
            found
            for step in steps
            for candidate in step.candidates
            for found in kernels_of(self.layer_class(step, candidate), self.plan.arch, comm)
        ]
        known = jobs_of(self.plan.folder, kernels, self.plan.arch)
        with compile_ahead(known, self.plan.arch, jobs, say):
            yield

    def _open_inputs(self, step: Step) -> None:
        if self._place == (step.q, step.rows):
            return
        self._inputs.clear()
        if self._peers:
            self._peers.forget()
        gc.collect()
        generator = torch.Generator(self.machine.device).manual_seed(0)
        where = step.rows, step.q, self.plan.context, generator, self._shard
        self._inputs += [make_inputs(self.base, *where) for _ in range(self.layers)]
        self._place = (step.q, step.rows)

    def _comm(self, number: int) -> Any:
        """The layer's end of its group; None for a layer whose ranks exchange nothing."""
        return self._peers.comm(number) if self._peers else None

    def _bound(self, layer_class: type[Layer]) -> list[TimedLayer]:
        """Layers of that class on the weights, caches and tensors of the step's inputs."""
        found = []
        for number, inputs in enumerate(self._inputs):
            layer = layer_class()
            layer.prepare(
                inputs.weights,
                inputs.caches,
                backend=self.machine.backend,
                arch=self.plan.arch,
                layer=number,
                scratch=self._scratch,
                comm=self._comm(number),
            )
            found.append(TimedLayer(layer, inputs.step, inputs))
        return found

    def _outputs(self, layers: Sequence[TimedLayer]) -> list[Tensor]:
        """What the whole layers store where every visible key is selected.

        With longer contexts scores that are rounded otherwise select other keys, which is no
        error.  Raises LayerError where such a step leaves anything that is not finite.
        """
        most = int(self.base.MEMORY.geometry["top_k"])
        if not all(bool(out.isfinite().all()) for out in self._run(layers)):
            raise LayerError("its output is not finite")
        kept = [one.step.lengths.clone() for one in layers]
        for one in layers:
            one.step.lengths.clamp_(max=most)
        found = self._run(layers)
        for one, lengths in zip(layers, kept, strict=True):
            one.step.lengths.copy_(lengths)
        return found

    def _run(self, layers: Sequence[TimedLayer]) -> list[Tensor]:
        """One step of each layer, from outputs that held NaN."""
        if self._peers:
            self._peers.words(layers)()
        for one in layers:
            one.step.out.fill_(torch.nan)
            one.run()
        self.machine.synchronize()
        return [one.step.out.float() for one in layers]

    def _captured(self, layers: Sequence[TimedLayer], difference: float) -> Captured:
        runs = [one.run for one in layers]
        before = self.machine.graphed(self._peers.words(layers)) if self._peers else None
        graph = self.machine.capture(runs, before=before)
        return Captured(graph, len(runs), difference, self.machine, before)


def difference(found: Sequence[Tensor], present: Sequence[Tensor]) -> float:
    """Largest relative distance of two layers' outputs: the norm of the difference over that of
    the present choice's; NaN where either holds one."""
    pairs = zip(found, present, strict=True)
    distances = [float((one - other).norm() / other.norm()) for one, other in pairs]
    return next((d for d in distances if d != d), max(distances))


host_machine = partial(
    Machine, "cpu", "reference", graphed=lambda run: run, synchronize=lambda: None
)
"""A machine without a GPU; it takes how runs are captured and timed, by name."""
