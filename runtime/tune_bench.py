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

from kpipe.runtime.bench import LAYERS, REPLAYS, captured, replay_us
from kpipe.runtime.bench_inputs import TimedLayer, build
from kpipe.runtime.evidence import versions
from kpipe.runtime.generated_folder import layer_in, load_layer
from kpipe.runtime.layer import Layer
from kpipe.runtime.memory import Scratch
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.tune_compile import compile_ahead, kernels_of
from kpipe.runtime.tune_plan import Candidate, Plan, Step


def header(plan: Plan, schema: str) -> dict[str, Any]:
    """The first line of a file of results: the machine, what is timed, and the whole plan."""
    return {
        "schema": schema,
        "gpu": torch.cuda.get_device_name(),
        "arch": plan.arch,
        "date": date.today().isoformat(),
        "versions": versions(),
        "metric": f"us of one of {LAYERS} captured layers; median of {REPLAYS} replays",
        "plan": plan.document,
    }


@dataclass(frozen=True)
class Machine:
    """Where layers run and how a chain of runs is timed; the default is this machine's GPU."""

    device: str = "cuda"
    backend: str = "cuda"
    capture: Callable[[Sequence[Callable[[], object]]], Any] = captured
    replay_us: Callable[[Any, int], float] = replay_us
    synchronize: Callable[[], object] = torch.cuda.synchronize


@dataclass(frozen=True)
class Captured:
    """A candidate in one graph of `runs` runs."""

    graph: Any
    runs: int
    difference: float
    machine: Machine

    def us(self) -> float:
        """Median microseconds of one run."""
        return self.machine.replay_us(self.graph, self.runs)


class DeviceBench:
    """The candidates of one plan; steps of one (q, rows) share weights, caches and tensors.

    Raises LayerError for a folder without a layer, for another architecture than the plan's, and
    for a layer whose ranks exchange data.
    """

    def __init__(self, plan: Plan, machine: Machine | None = None, layers: int = LAYERS) -> None:
        self.plan, self.machine, self.layers = plan, machine or Machine(), layers
        self.base = load_layer(plan.folder)
        if self.base.CONTEXT_PARALLEL:
            raise LayerError(
                f"{self.base.NAME}: its ranks exchange data, and one rank alone cannot be timed; "
                "tune a layer without context parallelism"
            )
        if self.machine.backend == "cuda":
            from kpipe.runtime.host.launch import arch_of

            arch = arch_of(torch.device("cuda"))
            if arch != plan.arch:
                raise LayerError(f"the plan is for {plan.arch}, this machine is {arch}")
        self._place: tuple[int, int] = (0, 0)
        self._inputs: list[TimedLayer] = []
        self._scratch = Scratch(self.machine.device)

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
        kernels = [
            found
            for step in steps
            for candidate in step.candidates
            for found in kernels_of(self.layer_class(step, candidate), self.plan.arch)
        ]
        with compile_ahead(self.plan.folder, kernels, self.plan.arch, jobs, say):
            yield

    def _open_inputs(self, step: Step) -> None:
        if self._place == (step.q, step.rows):
            return
        self._inputs.clear()
        gc.collect()
        self._inputs = build(
            self._whole(step) if step.op else self.layer_class(step, step.candidates[0]),
            arch=self.plan.arch,
            rows=step.rows,
            q=step.q,
            context=self.plan.context,
            count=self.layers,
            device=self.machine.device,
            backend=self.machine.backend,
        )
        self._place = (step.q, step.rows)

    def _whole(self, step: Step) -> type[Layer]:
        """The layer of a tile step as the spec has it."""
        return self._cut(step, step.module, step.method, {})

    def _bound(self, layer_class: type[Layer]) -> list[TimedLayer]:
        """Layers of that class on the weights, caches and tensors of the step's inputs."""
        found = []
        for number, one in enumerate(self._inputs):
            layer = layer_class()
            layer.prepare(
                one.inputs.weights,
                one.inputs.caches,
                backend=self.machine.backend,
                arch=self.plan.arch,
                layer=number,
                scratch=self._scratch,
            )
            found.append(TimedLayer(layer, one.step, one.inputs))
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
        for one in layers:
            one.step.out.fill_(torch.nan)
            one.run()
        self.machine.synchronize()
        return [one.step.out.float() for one in layers]

    def _captured(self, layers: Sequence[TimedLayer], difference: float) -> Captured:
        runs = [one.run for one in layers]
        return Captured(self.machine.capture(runs), len(runs), difference, self.machine)


def difference(found: Sequence[Tensor], present: Sequence[Tensor]) -> float:
    """Largest relative distance of two layers' outputs: the norm of the difference over that of
    the present choice's; NaN where either holds one."""
    pairs = zip(found, present, strict=True)
    distances = [float((one - other).norm() / other.norm()) for one, other in pairs]
    return next((d for d in distances if d != d), max(distances))


host_machine = partial(Machine, "cpu", "reference", synchronize=lambda: None)
"""A machine without a GPU; it takes how runs are captured and timed, by name."""
