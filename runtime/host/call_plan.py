"""A call of an op, worked out once: which operand goes to which place of which kernel.

A generated method hands an op the same views, caches and flags in every step; only the step's own
tensors are others each time. So the way from operands to kernel arguments is kept, together with
the objects that it was found for, and used again for as long as those very objects come back.

Views and mailboxes belong to the layer, and nobody puts other memory behind them: a kernel behind
TVM-FFI is handed its own form of them, made once. Weights, caches and the step's tensors are the
engine's; they are converted at each call, so that what is launched on is what they are then. The
first torch tensor of a call also tells it torch's current stream, so every launch has one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kpipe.runtime.comm.device_mailbox import DeviceMailbox
from kpipe.runtime.formats import PagedCache

Values = tuple[Any, ...]


@dataclass(frozen=True)
class Launch:
    """A compiled kernel, the names of its operands in order, and whether it polls."""

    kernel: Callable[..., None]
    order: tuple[str, ...]
    polls: bool


class PlannedLaunch(NamedTuple):
    """A kernel and its arguments, which `pick` takes out of a call's values and the `constants`
    behind them; without `pick` they are the constants."""

    kernel: Callable[..., None]
    constants: Values
    pick: Callable[[Values], Values] | None
    polls: bool


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What a call launches whose values are the `held` objects at their places.

    `moving` are the places of tensors that may be others each time, and their dtypes.  A plan
    with `again` False holds for one call only.
    """

    launches: tuple[PlannedLaunch, ...]
    held: tuple[tuple[int, Any], ...]
    moving: tuple[tuple[int, torch.dtype], ...]
    again: bool

    def fits(self, values: Values) -> bool:
        """Whether the plan holds for a call with these values, as many as it was made for."""
        for place, one in self.held:
            if values[place] is not one:
                return False
        try:
            for place, dtype in self.moving:
                if values[place].dtype is not dtype:
                    return False
        except AttributeError:  # no tensor
            return False
        return True


@dataclass(frozen=True)
class _Source:
    """Where a kernel's argument comes from: the call's value at `place`, or else `tensor`.

    `own` says that the tensor is one of the layer's own.
    """

    tensor: Tensor | None
    place: int = -1
    own: bool = False


def plan_call(
    named: Iterable[tuple[str, Any]],
    rows: int,
    bound: Mapping[str, Any],
    owned: Callable[[Any], bool],
    compiled: Callable[[tuple[tuple[str, Any], ...]], Iterable[Launch]],
) -> CallPlan:
    """The plan of one call.

    `named` are its values by the names of the operands, in order; `bound` what the op holds;
    `owned` says of a value whether the layer keeps it for good; `compiled` gives the launches for
    the call's flags, sorted by name.  What `compiled` and a mailbox's `operands` raise passes
    through.
    """
    values = tuple(named)
    sources: dict[str, _Source] = {}
    flags, held, moving = [], [], []
    again = True
    for place, (name, value) in enumerate(values):
        keep = True
        if isinstance(value, DeviceMailbox):
            keep = owned(value)
            for part, tensor in value.operands(rows).items():
                sources[part] = _Source(tensor, own=keep)
        elif isinstance(value, Tensor | PagedCache):
            keep = owned(value)
            sources[name] = _Source(as_bytes(value), own=keep and isinstance(value, Tensor))
            if not keep and sources[name].tensor is value:
                sources[name] = _Source(None, place)
                moving.append((place, value.dtype))
                continue
        else:
            flags.append((name, value))
        again = again and keep
        held.append((place, value))
    launches = tuple(
        _planned(launch, sources, bound, len(values)) for launch in compiled(tuple(sorted(flags)))
    )
    return CallPlan(launches, tuple(held), tuple(moving), again)


def _planned(
    launch: Launch, sources: Mapping[str, _Source], bound: Mapping[str, Any], count: int
) -> PlannedLaunch:
    """One launch of a call with `count` values."""
    call = behind_ffi(launch.kernel)
    found = [sources.get(name) or _Source(bound.get(name)) for name in launch.order]
    torch_tensors = any(s.place >= 0 or (s.tensor is not None and not s.own) for s in found)
    constants: list[Any] = []
    places = []
    for source in found:
        if source.place >= 0:
            places.append(source.place)
            continue
        places.append(count + len(constants))
        convert = call is not None and source.own and torch_tensors
        constants.append(converted(source.tensor) if convert else source.tensor)
        torch_tensors = torch_tensors or source.tensor is not None
    pick = picker(places) if len(constants) < len(places) else None
    return PlannedLaunch(call or launch.kernel, tuple(constants), pick, launch.polls)


def as_bytes(value: Tensor | PagedCache) -> Tensor:
    """What a kernel is handed: caches and FP8 tensors travel as bytes."""
    tensor = value.data if isinstance(value, PagedCache) else value
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def picker(places: Sequence[int]) -> Callable[[Values], Values]:
    """A function that takes the values at these places out of a tuple, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


def behind_ffi(kernel: Callable[..., None]) -> Callable[..., None] | None:
    """The call of a kernel behind TVM-FFI and nothing ahead of it; None of any other callable.

    The compiler's own object first looks, in Python and at each call, at whether it is loaded, for
    addresses among its arguments and for names and defaults: a kernel of tensors alone, called by
    place, has none of them.
    """
    ffi = sys.modules.get("tvm_ffi")  # whoever made such a kernel has loaded it
    if ffi is None:
        return None
    if type(kernel) is ffi.Function:
        return kernel
    arguments = getattr(kernel, "execution_args", None)
    if getattr(arguments, "has_pointer_address_arg_specs", True):
        return None
    if isinstance(kernel, ffi.Function):
        return ffi.Function.__call__.__get__(kernel) if kernel.__chandle__() else None
    inner = kernel.__tvm_ffi_object__() if hasattr(kernel, "__tvm_ffi_object__") else None
    return inner if isinstance(inner, ffi.Function) else None


def converted(tensor: Tensor | None) -> Any:
    """The form of a tensor in which TVM-FFI takes it with least work; None stays None.

    Only where torch hands its tensors over without touching a stream, so that nothing of it can
    end up in a graph that is being captured; else the tensor itself.
    """
    if tensor is None or not hasattr(Tensor, "__dlpack_c_exchange_api__"):
        return tensor
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor)
