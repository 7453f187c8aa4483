"""Launches the generated kernels of a layer: operands by name, flags from the call, streams.

A call of the generated layer names operands in contract order, which is the order of the op's
reference function; the kernel's own `operands()` says which of them it takes, and in which order.
Every (op, flags, tactic) that a layer can launch is compiled in prepare(), so that nothing is
compiled, allocated or looked up on the device while a CUDA graph is captured.

A mailbox travels as up to three operands: `NAME`, this rank's buffer cut to the rows of the step;
`NAME_peers`, the addresses of this rank's share in every rank's; `fault`, where a poll that gives
up leaves its record.  A kernel polls where it takes `fault`, and publishes where it takes peers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from kpipe.runtime.comm.device_comm import SMS_PER_GPC
from kpipe.runtime.host.call_plan import CallPlan, Launch, plan_call
from kpipe.runtime.host.kernel_file import (
    HALVES,
    KernelFile,
    KernelSource,
    Variant,
    polls,
    publishes,
)
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.op import Call, Op
from kpipe.runtime.sharding import Shard

MOST_PLANS = 8
"""Plans that an op keeps for calls of one form: methods and views of the same rows."""


class CudaOp:
    """The kernel of one op: made ready per structure, called with the step's tensors.

    `bound` are weights and constants; `enter` is told of every call and gives the rows of the step
    that is running; `comm` is this rank's end of a group on the device, None for a rank alone;
    `source` is a build of the kernel, None for its file in the generated `package`, which is then
    compiled here; `owned` says of an operand whether the layer keeps it, and so may this op.
    """

    def __init__(
        self,
        op: Op,
        package: str,
        bound: Mapping[str, Any],
        arch: str,
        enter: Callable[[Op], int],
        comm: Any = None,
        source: KernelSource | None = None,
        owned: Callable[[Any], bool] = lambda value: False,
    ) -> None:
        self.op = op
        self.source = source or KernelFile(package, op.kernel, arch)
        self._bound = dict(bound)
        self._arch = arch
        self._enter = enter
        self._names = tuple(inspect.signature(op.reference).parameters)
        self._fields = self.source.fields
        self._comm = comm
        self._owned = owned
        self._ready: dict[tuple, tuple[Launch, ...]] = {}
        self._plans: dict[tuple, list[CallPlan]] = {}

    def compile(self, call: Call) -> None:
        """Make the kernel of that call ready; what the compiler raises passes through.

        Raises LayerError for a kernel that publishes and polls with more CTAs than this rank can
        count on to run at the same time, and for one that a build does not have as it is needed.
        """
        self._compiled(call.rows, call.flags)

    def __call__(self, *operands: Any, **named: Any) -> None:
        rows = self._enter(self.op)
        values = (*operands, *named.values()) if named else operands
        for plan in self._plans.get((rows, len(operands), *named), ()):
            if plan.fits(values):
                break
        else:
            plan = self._planned(rows, operands, named)
        for kernel, constants, pick, waits in plan.launches:
            if waits and self._comm is not None:
                self._comm.before_poll()
            kernel(*(pick(values + constants) if pick else constants))

    @property
    def module(self) -> Any:
        """The generated file of the kernel; AttributeError of a build, which does not import it."""
        return self.source.module

    def kernel(self, rows: int, flags: Iterable[tuple[str, Any]] = ()) -> Any:
        """The kernel object that such a call launches, its fields are its flags; not of a build."""
        return self.source.variant(self._values(rows, flags)).kernel

    def variants(self, call: Call) -> tuple[Variant, ...]:
        """Every kernel that such a call launches, however its group is driven.

        One, and the two halves of one that publishes and then polls.
        """
        values = self._values(call.rows, call.flags)
        whole = self.source.variant(values)
        return (whole, *self._halves(values)) if self._exchanges(whole) else (whole,)

    def _planned(self, rows: int, operands: tuple[Any, ...], named: Mapping[str, Any]) -> CallPlan:
        """The plan of a call that none of the plans fits; kept unless it is for this call only."""
        if len(operands) > len(self._names):
            raise TypeError(
                f"{self.op.name} takes {len(self._names)} operands at most, {len(operands)} given"
            )
        pairs = (*zip(self._names, operands, strict=False), *named.items())
        plan = plan_call(
            pairs, rows, self._bound, self._owned, lambda flags: self._compiled(rows, flags)
        )
        if plan.again:
            plans = self._plans.setdefault((rows, len(operands), *named), [])
            plans.insert(0, plan)
            del plans[MOST_PLANS:]
        return plan

    def _values(self, rows: int, flags: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """What this op, its place and the call say of the kernel's flags."""
        values: dict[str, Any] = {
            name: value for name, value in self._bound.items() if name in self._fields
        }
        if "shard" in self._bound:
            shard = self._bound["shard"]
            place = {"rank": shard.rank, "ranks": shard.ranks, "interleave": shard.interleave}
            values.update({name: value for name, value in place.items() if name in self._fields})
        if self._comm is not None:
            place = {"rank": self._comm.rank, "resident": self._comm.resident}
            values.update({name: value for name, value in place.items() if name in self._fields})
        widest = self._comm.widest_cluster if self._comm is not None else SMS_PER_GPC
        values.update(self.op.tactic_within(self._arch, rows, widest))
        values.update({name: value for name, value in flags if name in self._fields})
        return values

    def _compiled(self, rows: int, flags: Iterable[tuple[str, Any]]) -> tuple[Launch, ...]:
        flags = tuple(pair for pair in flags if pair[0] in self._fields)
        key = (rows, flags)
        if key not in self._ready:
            values = self._values(rows, flags)
            whole = self.source.variant(values)
            exchanges = self._exchanges(whole)
            if exchanges and self._comm is not None and self._comm.in_halves:
                variants = self._halves(values)
            else:
                self._refuse_crowd(whole, rows, exchanges)
                variants = (whole,)
            self._ready[key] = tuple(_launch(variant) for variant in variants)
        return self._ready[key]

    def _exchanges(self, whole: Variant) -> bool:
        """Whether one launch publishes and then polls."""
        names = whole.operands
        return "half" in self._fields and polls(names) and publishes(names)

    def _halves(self, values: Mapping[str, Any]) -> tuple[Variant, ...]:
        return tuple(self.source.variant({**values, "half": half}) for half in HALVES)

    def _refuse_crowd(self, variant: Variant, rows: int, exchanges: bool) -> None:
        """CTAs that wait for words which CTAs behind them would send wait for ever."""
        if self._comm is None:
            return
        widest, ctas = self._comm.widest_cluster, variant.cluster_ctas
        if ctas > widest:
            raise LayerError(
                f"{self.op.name} at {rows} rows: a cluster of {ctas} CTAs, and beside what the "
                f"other ranks have waiting on this device there is room for {widest}; drive the "
                "ranks in lockstep, or take other rows"
            )
        if not exchanges:
            return
        needed = variant.resident_ctas(rows)
        if needed > self._comm.resident:
            raise LayerError(
                f"{self.op.name} publishes and polls: {needed} CTAs have to run at the same time, "
                f"rank {self._comm.rank} can count on {self._comm.resident} multiprocessors; drive "
                "the ranks in lockstep, or give them more of a device"
            )


def unbound_op(layer_class: Any, op: Op, arch: str, comm: Any = None) -> CudaOp:
    """The kernel of an op of a generated class, without weights: to be compiled or looked at.

    `comm` is the place in a group, as far as it decides flags; rank 0 without one.
    """
    bound = dict(op.constants)
    if op.needs_shard:
        ranks = layer_class.RANKS if layer_class.CONTEXT_PARALLEL else 1
        bound["shard"] = Shard(comm.rank if comm else 0, ranks, layer_class.INTERLEAVE)
    return CudaOp(op, layer_class.PACKAGE, bound, arch, lambda op: 1, comm)


def _launch(variant: Variant) -> Launch:
    return Launch(variant.load(), variant.operands, polls(variant.operands))


_STREAMS: dict[tuple[torch.device, str, int, int], torch.cuda.Stream] = {}


def side_stream(
    device: torch.device, name: str, priority: int, group: int = 0
) -> torch.cuda.Stream:
    """The side stream of that name: one per device, shared by all layers of a `group`."""
    key = (device, name, priority, group)
    if key not in _STREAMS:
        _STREAMS[key] = torch.cuda.Stream(device, priority=priority)
    return _STREAMS[key]


def arch_of(device: torch.device) -> str:
    """The target of a device, for example sm_90a; LayerError for a GPU that has none here."""
    major, minor = torch.cuda.get_device_capability(device)
    known = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
    if (major, minor) not in known:
        raise LayerError(f"no kernels for compute capability {major}.{minor}")
    return known[major, minor]
