"""The base of every generated layer: preparation, dispatch, padding.

A generated class adds what is its own: declarations of memory and ops, the total table, and one
straight-line method per distinct launch list.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kpipe.runtime.aot.opened import AUTO, gathered, open_build
from kpipe.runtime.comm.choice import comm_for
from kpipe.runtime.formats import PagedCache
from kpipe.runtime.host.entered import entered
from kpipe.runtime.library.catalogue import LibraryOp, UnusedOp, refusals
from kpipe.runtime.library.site import site_of
from kpipe.runtime.memory import Memory, Scratch
from kpipe.runtime.metadata import (
    STEP_OUTPUTS,
    Caches,
    LayerError,
    Step,
    Weights,
    check_tensors,
    given,
)
from kpipe.runtime.op import Call, Op, ReferenceOp
from kpipe.runtime.padding import padded_step
from kpipe.runtime.recording import HostStream, recorded
from kpipe.runtime.scales import check_latent_scales, check_scale
from kpipe.runtime.sharding import Shard
from kpipe.runtime.step_check import StepCheck
from kpipe.runtime.storage import block_of


class StopRun(Exception):
    """Ends a run behind a stage; raised and caught by the layer itself."""


class Layer:
    """One attention layer of a pipeline; see the generated subclass for its schedule."""

    NAME: ClassVar[str]
    backend = "reference"
    MEMORY: ClassVar[Memory]
    OPS: ClassVar[tuple[Op, ...]]
    RANKS: ClassVar[int]  # tensor-parallel ranks
    INTERLEAVE: ClassVar[int] = 1
    CONTEXT_PARALLEL: ClassVar[bool] = False
    ROWS_CAP: ClassVar[int]
    STREAMS: ClassVar[Mapping[str, int]] = {}  # side streams and their priority
    PACKAGE: ClassVar[str] = ""  # the generated package, whose `kernels` hold the CUDA kernels
    TABLE: ClassVar[Mapping[tuple[str, int], Mapping[int, str]]]  # (arch, q) -> rows -> method

    def prepare(
        self,
        weights: Weights,
        caches: Caches,
        *,
        backend: str = "reference",
        arch: str = "",
        layer: int = 0,
        comm: Any = None,
        scratch: Scratch | None = None,
        build: str | Path | None = AUTO,
    ) -> None:
        """Bind weights and caches, size every buffer, make every op callable.

        `layer` counts the layers of this kind and decides the mailboxes' parity; `comm` is this
        rank's end of its group, whose ranks must all prepare the same; layers of one kind share one
        `scratch`.  With the backend `cuda` every kernel that a declared step can launch is made
        ready here: loaded from `build`, the path of a build or "auto" for the one in the generated
        folder; compiled where that folder has none, or `build` is None.  Raises LayerError that
        names everything that does not fit.
        """
        self.arch = arch or next(iter(self.TABLE))[0]
        if all(self.arch != known for known, _ in self.TABLE):
            known = ", ".join(dict.fromkeys(a for a, _ in self.TABLE))
            raise LayerError(f"{self.NAME}: no plan for {self.arch}; generated for {known}")
        if backend not in ("reference", "cuda"):
            raise LayerError(f"{self.NAME}: backend {backend!r} is not one of reference, cuda")
        if backend == "reference" and build not in (AUTO, None):
            raise LayerError(f"{self.NAME}: the reference backend runs no build: {build}")
        self.backend = backend
        if backend == "cuda":
            self.refuse_missing_kernels()
        self._weights = self._checked_weights(weights)
        self._device = device = next(iter(self._weights.values())).device
        self.comm = comm_for(self, comm, device)
        self.comm.agree(self, layer)
        self.shard = Shard()
        if self.CONTEXT_PARALLEL:
            self.shard = Shard(self.comm.rank, self.RANKS, self.INTERLEAVE)
        self._bind_caches(caches)
        scratch = scratch or Scratch(device)
        self._bind_memory(scratch, layer)
        self._check_storage()
        self._sized: dict[int, SimpleNamespace] = {}  # rows -> views, which prepare() has settled
        self._stop_after = ""
        if backend == "cuda":
            self._prepare_cuda(device, scratch, build)
        else:
            for stream in ("main", *self.STREAMS):
                setattr(self, stream, HostStream(stream))
            for op in self.OPS:
                setattr(self, op.name, ReferenceOp(op, self._bound(op), self._enter))
        # Nobody polls for one that still compiles.
        self.comm.barrier(f"{self.NAME}, layer {layer}: prepared")

    def run(self, step: Step, *, stop_after: str = "") -> str:
        """Run one step and return the name of the method that ran.

        Rows are padded up to the next declared size; padding rows see nothing and insert
        nothing.  With `stop_after` the run ends behind that stage's last op.  Raises LayerError
        for rows beyond the largest declared size, and for tensors that do not fit.
        """
        size = self.declared_rows(step)
        self._step_check.check(step)
        padded = step if size == step.rows else self._padded(step, size)
        method = self.TABLE[(self.arch, step.q)][size]
        if size not in self._sized:
            self._sized[size] = self.views(size)
        self._views = self._sized[size]
        if self.backend == "cuda":
            self.main = self._current_stream(step)
        self._stop_after = stop_after
        self._remaining = self._sequence(method, padded) if stop_after else []
        try:
            getattr(self, method)(padded, self._views)
        except StopRun:
            pass
        finally:
            self._stop_after = ""
        self.comm.stage = ""
        if padded is not step:
            for name in STEP_OUTPUTS:
                if (written := getattr(step, name)) is not None:
                    written.copy_(getattr(padded, name)[: step.rows])
        return method

    def views(self, rows: int) -> SimpleNamespace:
        """Every buffer and column cut to `rows`, and the mailboxes of this layer's parity."""
        views = SimpleNamespace(rows=rows, **self._mailboxes)
        for name, spec in self.MEMORY.buffers.items():
            view = self.buffers[name].narrow(spec.rows_axis, 0, rows)
            setattr(views, name, view)
            for column, (offset, width) in (spec.columns or {}).items():
                setattr(views, column, view.narrow(-1, offset, width))
        return views

    def on(self, stream: HostStream) -> AbstractContextManager[object]:
        """Launches inside the block go to that stream; on the CPU everything is in host order.

        Behind it what was current when the step began is current again.
        """
        return nullcontext(stream) if isinstance(stream, HostStream) else entered(stream, self.main)

    def calls(self, arch: str = "") -> tuple[Call, ...]:
        """Every distinct launch of every declared step on `arch`; nothing is executed."""
        found: dict[Call, None] = {}
        for (target, _), sizes in self.TABLE.items():
            if target == (arch or self.arch):
                for rows, method in sizes.items():
                    found.update(dict.fromkeys(recorded(self, method, rows)))
        return tuple(found)

    # -- preparation ---------------------------------------------------------------------------

    def refuse_missing_kernels(self) -> None:
        """Raises LayerError naming ops of this arch's plans that cannot be launched on a GPU."""
        launched = {call.op for call in self.calls()}
        used = [op for op in self.OPS if op.name in launched]
        missing = [op.name for op in used if not op.kernel and op.source == "kpipe"]
        if missing:
            raise LayerError(
                f"{self.NAME}: these ops have no CUDA kernel yet: {', '.join(missing)}; use "
                'backend="reference"'
            )
        if found := refusals(used):
            raise LayerError(f"{self.NAME}: {'; '.join(found)}")

    def _prepare_cuda(
        self, device: torch.device, scratch: Scratch, build: str | Path | None
    ) -> None:
        _refuse_host(self.NAME, device)
        opened = open_build(self.NAME, Path(inspect.getfile(type(self))).parent, self.arch, build)
        from kpipe.runtime.host import launch  # late: the reference backend does without it

        comm = self.comm if self.CONTEXT_PARALLEL else None
        for name, priority in self.STREAMS.items():
            group = comm.key if comm else 0
            setattr(self, name, launch.side_stream(device, name, priority, group))
        self.main = torch.cuda.current_stream(device)
        calls = self.calls()
        problems: list[str] = []
        for op in self.OPS:
            bound, mine = self._bound(op), [call for call in calls if call.op == op.name]
            ready: Any = UnusedOp(op)
            if op.kernel and (mine or opened is None):
                with gathered(problems):
                    source = opened.kernel(op.kernel) if opened else None
                    ready = launch.CudaOp(
                        *(op, self.PACKAGE, bound, self.arch),
                        *(self._enter, comm, source, self._owns),
                    )
                    for call in mine:
                        with gathered(problems):
                            ready.compile(call)
            elif mine:
                ready = LibraryOp(op, bound, site_of(self, scratch), calls, self._enter)
            setattr(self, op.name, ready)
        if opened and problems:
            raise opened.error(problems)
        self.main.synchronize()  # steps may run on another stream than what was made ready here

    def _checked_weights(self, weights: Weights) -> dict[str, Tensor]:
        tensors = given(weights)
        specs = dict(self.MEMORY.weights)
        derived = {
            name: specs.pop(name) for name in ("q_scale_inv", "k_scale_inv") if name in specs
        }
        for name in derived:
            specs.setdefault(name.removesuffix("_inv"), derived[name])
        check_tensors(f"{self.NAME} weights", tensors, specs, {}, optional=("v_scale",))
        for name in ("q_scale", "k_scale", "v_scale"):
            if name in tensors:
                check_scale(name, float(tensors[name]))
        if "v_scale" in tensors and "k_scale" in tensors:
            check_latent_scales(float(tensors["k_scale"]), float(tensors["v_scale"]))
        for name in derived:
            tensors[name] = tensors[name.removesuffix("_inv")].reciprocal()
        return tensors

    def _bind_caches(self, caches: Caches) -> None:
        tensors = given(caches)
        problems = [name for name in self.MEMORY.caches if name not in tensors]
        if problems:
            raise LayerError(f"{self.NAME} caches: missing {', '.join(problems)}")
        for name, spec in self.MEMORY.caches.items():
            tensor = tensors[name]
            if tensor.dim() != 3 or tensor.shape[1] != spec.page:
                raise LayerError(
                    f"{self.NAME} caches: {name} is {list(tensor.shape)}, not "
                    f"[blocks, {spec.page}, row bytes]"
                )
            setattr(self, name, PagedCache(tensor, self.MEMORY.cache_format(name), name))

    def _bind_memory(self, scratch: Scratch, layer: int) -> None:
        self.buffers = {
            name: scratch.buffer(
                name, spec, self.ROWS_CAP, layer, kind=self.NAME, model=self.MEMORY.model
            )
            for name, spec in self.MEMORY.buffers.items()
        }
        self._mailboxes = {
            name: self.comm.mailbox(spec, layer % spec.parities)
            for name, spec in self.MEMORY.mailboxes.items()
        }

    def _check_storage(self) -> None:
        """Everything that prepare() binds must lie on bytes of its own."""
        caches = {name: getattr(self, name).data for name in self.MEMORY.caches}
        mailboxes = {name: box.local for name, box in self._mailboxes.items()}
        blocks = [
            *(block_of(f"weight {n}", t, written=False) for n, t in self._weights.items()),
            *(block_of(f"cache {n}", t) for n, t in caches.items()),
            *(block_of(f"buffer {n}", t) for n, t in self.buffers.items()),
            *(block_of(f"mailbox {n}", t) for n, t in mailboxes.items()),
        ]
        self._step_check = StepCheck(self.NAME, self.MEMORY.step, blocks)

    def _bound(self, op: Op) -> dict[str, Any]:
        bound: dict[str, Any] = {name: self._weights[name] for name in op.weights}
        bound.update(op.constants)
        if op.needs_shard:
            bound["shard"] = self.shard
        return bound

    # -- one step ------------------------------------------------------------------------------

    def declared_rows(self, step: Step) -> int:
        """The declared size that a step is padded to; LayerError beyond the largest."""
        return self.declared_rows_of(step.rows, step.q)

    def declared_rows_of(self, rows: int, q: int) -> int:
        """The declared size that `rows` with `q` rows a request are padded to, or LayerError."""
        if rows in self.TABLE.get((self.arch, q), ()):
            return rows
        queries = [known for arch, known in self.TABLE if arch == self.arch]
        if q not in queries:
            raise LayerError(
                f"{self.NAME}: q {q} is not declared; declared: {', '.join(map(str, queries))}"
            )
        sizes = self.TABLE[(self.arch, q)]
        size = next((size for size in sorted(sizes) if size >= rows), None)
        if size is None or rows < 1:
            raise LayerError(f"{self.NAME}: {rows} rows; declared for q {q} are 1 to {max(sizes)}")
        return size

    def _current_stream(self, step: Step) -> torch.cuda.Stream:
        """The caller's stream; LayerError for a step that lies on another device."""
        if step.hidden.device != self._device:
            raise LayerError(
                f"{self.NAME} step: hidden lies on {step.hidden.device}, the layer was prepared on "
                f"{self._device}"
            )
        return torch.cuda.current_stream(self._device.index)

    def _padded(self, step: Step, size: int) -> Step:
        """The step with padding rows: length 0, page 0, slot -1; all other rows are zero."""
        return padded_step(step, size)

    def _sequence(self, method: str, step: Step) -> list[str]:
        """Stages in the order in which a method enters them; nothing is executed."""
        by_name = {op.name: op.stage for op in self.OPS}
        stages = [by_name[call.op] for call in recorded(self, method, step.rows)]
        if self._stop_after not in stages:
            known = ", ".join(dict.fromkeys(stages))
            raise LayerError(f"{self.NAME}: no stage {self._stop_after!r}; stages: {known}")
        return stages

    def _owns(self, value: object) -> bool:
        """Whether an operand is a view, a mailbox or a cache of this layer."""
        mine = (*vars(self._views).values(), *(getattr(self, n) for n in self.MEMORY.caches))
        return any(value is one for one in mine)

    def _enter(self, op: Op) -> int:
        """Called ahead of every op: names the stage for errors, ends a run cut short; the rows."""
        if self._stop_after:
            if self._stop_after not in self._remaining:
                raise StopRun
            self._remaining.pop(0)
        self.comm.stage = op.name
        return self._views.rows


def _refuse_host(name: str, device: torch.device) -> None:
    if device.type != "cuda":
        raise LayerError(
            f"{name}: the weights lie on {device}, and the cuda backend runs where they are; move "
            "them to a CUDA device"
        )
