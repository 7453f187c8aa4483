"""Plans of calls behind TVM-FFI: in which form operands travel, and that no form of them is old."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tvm_ffi

from kpipe.runtime.comm.device_mailbox import DeviceMailbox
from kpipe.runtime.comm.mailbox import MailboxSpec
from kpipe.runtime.formats import PagedCache, cache_format
from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.host.call_plan import CallPlan, Launch, behind_ffi, plan_call
from kpipe.runtime.host.launch import unbound_op
from kpipe.runtime.op import Call

ROOT = Path(__file__).resolve().parents[2]
ORDER = ("x", "weight", "", "view", "out")


class Kernel:
    """A function behind TVM-FFI that keeps the addresses, shapes and types that it is handed."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.function = tvm_ffi.convert(self._run)

    def _run(self, *operands: Any) -> None:
        self.seen = [shown(one) for one in map(_as_torch, operands)]


def _as_torch(one: Any) -> torch.Tensor | None:
    return None if one is None else torch.from_dlpack(one)


def shown(tensor: torch.Tensor | None) -> Any:
    """Address, shape, strides and dtype."""
    if tensor is None:
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), str(tensor.dtype)


def planned(
    kernel: Any, named: dict[str, Any], bound: dict[str, Any], own: list[Any], order=ORDER
) -> CallPlan:
    return plan_call(
        named.items(),
        2,
        bound,
        lambda value: any(value is one for one in own),
        lambda flags: [Launch(kernel, order, False)],
    )


def run(plan: CallPlan, *values: Any) -> list[Any]:
    """Launches the plan; the arguments of its one kernel."""
    assert plan.fits(values)
    ((kernel, constants, pick, _),) = plan.launches
    arguments = pick(values + constants) if pick else constants
    kernel(*arguments)
    return list(arguments)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    made = {name: torch.full((2, 4), float(n)) for n, name in enumerate(("x", "out", "w"))}
    return {**made, "view": torch.zeros(3, 9).narrow(0, 0, 2).narrow(1, 3, 4)}


def test_own_operands_are_converted_once_and_all_others_at_each_call(tensors) -> None:
    kernel = Kernel()
    x, view, out, weight = (tensors[name] for name in ("x", "view", "out", "w"))
    named = {"x": x, "view": view, "out": out, "release": True}
    plan = planned(kernel.function, named, {"weight": weight}, [view, out])
    for _ in range(2):
        handed = run(plan, x, view, out, True)
        kinds = [type(one) for one in handed]
        assert kinds == [torch.Tensor, torch.Tensor, type(None), tvm_ffi.Tensor, tvm_ffi.Tensor]
        assert kernel.seen == [shown(one) for one in (x, weight, None, view, out)]
    other = torch.zeros(2, 4)
    run(plan, other, view, out, True)
    assert kernel.seen[0] == shown(other)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_launch_has_a_torch_tensor_that_tells_the_stream(tensors, place: int) -> None:
    """A kernel of nothing but the layer's own, and of one tensor that is not, at each place."""
    kernel = Kernel()
    named = {name: tensors[name] for name in ("x", "view", "out")}
    own = list(named.values())
    plan = planned(kernel.function, named, {}, own, ("x", "view", "out"))
    kinds = [type(one) for one in run(plan, *own)]
    assert kinds == [torch.Tensor, tvm_ffi.Tensor, tvm_ffi.Tensor]
    others = own[:place] + own[place + 1 :]
    plan = planned(kernel.function, named, {}, others, ("x", "view", "out"))
    kinds = [type(one) for one in run(plan, *own)]
    assert [kind is torch.Tensor for kind in kinds] == [n == place for n in range(3)]


def test_memory_put_behind_a_weight_or_a_step_tensor_is_what_is_launched_on(tensors) -> None:
    kernel = Kernel()
    x, view, weight = (tensors[name] for name in ("x", "view", "w"))
    plan = planned(kernel.function, {"x": x, "view": view}, {"weight": weight}, [view])
    run(plan, x, view)
    weight.data, x.data = torch.ones(2, 4), torch.ones(2, 4)
    run(plan, x, view)
    assert kernel.seen == [shown(one) for one in (x, weight, None, view, None)]


def test_a_plan_fits_the_objects_that_it_was_made_for(tensors) -> None:
    x, view, out = (tensors[name] for name in ("x", "view", "out"))
    named = {"x": x, "view": view, "out": out, "pdl": False, "prefix": None}
    plan = planned(Kernel().function, named, {}, [view])
    assert plan.again and plan.fits((x, view, out, False, None))
    assert plan.fits((x.clone(), view, out.clone(), False, None))
    for wrong in (
        (x, view.clone(), out, False, None),
        (x, view, out, True, None),
        (x, view, out, False, x),
        (x.half(), view, out, False, None),
        (x, view, None, False, None),
        (x, view, "out", False, None),
    ):
        assert not plan.fits(wrong)


def test_codes_and_caches_travel_as_bytes(tensors) -> None:
    kernel = Kernel()
    codes = torch.zeros(2, 16, dtype=torch.float8_e4m3fn)
    form = cache_format("index_fp8", kv_lora=32, pe=16, index_dim=32)
    cache = PagedCache(torch.zeros(2, 4, form.row_bytes, dtype=torch.uint8), form)
    plan = planned(kernel.function, {"x": codes, "view": cache}, {}, [codes, cache])
    assert plan.again
    run(plan, codes, cache)
    assert kernel.seen[0] == shown(codes.view(torch.uint8))
    assert kernel.seen[3] == shown(cache.data)
    # Not the layer's own: what was found holds for this call.
    for own in ([], [codes], [cache]):
        plan = planned(kernel.function, {"x": codes, "view": cache}, {}, own)
        assert not plan.again
        run(plan, codes, cache)
        assert kernel.seen[0] == shown(codes.view(torch.uint8))
        assert kernel.seen[3] == shown(cache.data)


@pytest.mark.parametrize("own", [True, False])
def test_a_mailbox_travels_as_three_operands(own: bool) -> None:
    kernel = Kernel()
    spec = MailboxSpec("x", (4, 16), torch.float8_e4m3fn, 0xFFFFFFFF)
    local = torch.zeros(4, 16, dtype=torch.float8_e4m3fn)
    peers, fault = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    box = DeviceMailbox(spec, 0, 0, 2, local, peers, fault)
    order = ("fault", "x_peers", "x")
    plan = planned(kernel.function, {"x": box}, {}, [box] if own else [], order)
    assert plan.again == own
    run(plan, box)
    assert kernel.seen == [shown(fault), shown(peers), shown(local[:2].view(torch.uint8))]


class Derived(tvm_ffi.Function):
    """As one of the compiler's classes: looks at its arguments in Python ahead of each call."""

    looked = 0
    execution_args = SimpleNamespace(has_pointer_address_arg_specs=False)

    def __call__(self, *operands: Any) -> Any:
        type(self).looked += 1
        return tvm_ffi.Function.__call__(self, *operands)


class Wrapped:
    """As the other one: holds the function, which it has only where a device is."""

    looked = 0
    execution_args = SimpleNamespace(has_pointer_address_arg_specs=False)

    def __init__(self, function: tvm_ffi.Function | None = None) -> None:
        self.function = function

    def __call__(self, *operands: Any, **named: Any) -> Any:
        type(self).looked += 1
        return self.function(*operands, **named)

    def __tvm_ffi_object__(self) -> tvm_ffi.Function | None:
        return self.function


def compiled(kind: type, kernel: Kernel) -> Any:
    if kind is Wrapped:
        return Wrapped(kernel.function)
    made = Derived()
    made.__move_handle_from__(kernel.function)
    return made


@pytest.mark.parametrize("kind", [Derived, Wrapped])
def test_a_compiled_kernel_is_called_without_what_its_object_looks_at(kind, tensors) -> None:
    kernel = Kernel()
    made = compiled(kind, kernel)
    kind.looked = 0
    plan = planned(made, {"x": tensors["x"], "view": tensors["view"]}, {}, [tensors["view"]])
    handed = run(plan, tensors["x"], tensors["view"])
    assert kernel.seen == [shown(tensors["x"]), None, None, shown(tensors["view"]), None]
    assert kind.looked == 0 and type(handed[3]) is tvm_ffi.Tensor
    made(tensors["x"])
    assert kind.looked == 1


@pytest.mark.parametrize("kind", [Derived, Wrapped])
def test_what_is_not_known_to_take_tensors_alone_is_called_as_it_is(
    kind, tensors, monkeypatch
) -> None:
    for arguments in (SimpleNamespace(has_pointer_address_arg_specs=True), None):
        monkeypatch.setattr(kind, "execution_args", arguments)
        kernel = Kernel()
        made = compiled(kind, kernel)
        assert behind_ffi(made) is None
        kind.looked = 0
        view = tensors["view"]
        plan = planned(made, {"x": tensors["x"], "view": view}, {}, [view])
        assert run(plan, tensors["x"], view)[3] is view and kind.looked == 1
        assert kernel.seen[3] == shown(view)


def test_a_kernel_that_is_not_loaded_says_so_itself() -> None:
    assert behind_ffi(Derived()) is None and behind_ffi(Wrapped()) is None
    assert behind_ffi(print) is None


def test_the_compilers_object_is_one_of_those(tmp_path) -> None:
    """What is asked of it is there: whether it takes addresses, and the function that it holds."""
    layer_class = load_layer(ROOT / "generated" / "dsa_tp")
    op = next(op for op in layer_class.OPS if op.name == "query_norm")
    kernel = unbound_op(layer_class, op, "sm_90a").variants(Call("query_norm", 1, ()))[0].load()
    assert kernel.execution_args.has_pointer_address_arg_specs is False
    assert isinstance(kernel, tvm_ffi.Function) or hasattr(kernel, "__tvm_ffi_object__")
