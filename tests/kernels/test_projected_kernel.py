"""The kernels that merge the ranks' rows, run on the CPU from their PTX; small geometry, two ranks.

dcp_value, which has run on GPUs, vouches for the machine that runs them.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernel_files import GEOMETRIES, context, load
from ptx_flow import global_accesses
from ptx_machine import Launch, OutOfMemory, packed, parse, run
from torch import Tensor

from kpipe.codegen.render.api import environment
from kpipe.runtime.host.compile import compile_kernel, ptx_of
from kpipe.runtime.host.kernel_file import operands_of
from kpipe.runtime.launch_cases import boxes, exchange, projected, small

RANKS, RESIDENT, TILE_M = 2, 132, 16
NAMES = {"dcp_value": "DcpValue", "dcp_value_projected": "DcpValueProjected"}
CASES = {"dcp_value": exchange.DcpValueCase, **projected.CASES}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    for module in (boxes, exchange, small):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    torch.manual_seed(0)


def text_of(name: str) -> str:
    template = environment(()).get_template(f"kernels/{name}.py.jinja")
    return template.render(context(GEOMETRIES["small"], ranks=RANKS))


@pytest.fixture(scope="module")
def modules(tmp_path_factory) -> dict[str, ModuleType]:
    return {name: module_of(tmp_path_factory.mktemp("value"), name) for name in NAMES}


def module_of(folder: Path, name: str, *edit: str) -> ModuleType:
    """The generated file, its only occurrence of a text replaced."""
    text = text_of(name)
    assert not edit or text.count(edit[0]) == 1
    (folder / f"{name}.py").write_text(text.replace(*edit) if edit else text)
    return load(folder / f"{name}.py")


def grid_of(module: ModuleType, name: str, rows: int) -> tuple[int, int, int]:
    heads = module.GATHERED if name == "dcp_value_projected" else module.HEADS
    return heads, min(-(-rows // TILE_M), RESIDENT // heads), 1


def launch_of(
    module: ModuleType, name: str, live: dict[str, Tensor], memory: list[Tensor], **flags
) -> Launch:
    """A launch on those operands, which may touch them and `memory`."""
    kernel = getattr(module, NAMES[name])(**flags)
    specs = operands_of(module, kernel)
    program = parse(ptx_of(compile_kernel(kernel, specs, "sm_90a", keep_ptx=True)))
    tensors = [live[spec.name] for spec in specs if spec]
    shapes = [spec.shape for spec in specs if spec]
    sizes = [
        [
            size
            for size, declared in zip(tensor.shape, shape, strict=True)
            if not isinstance(declared, int)
        ]
        for tensor, shape in zip(tensors, shapes, strict=True)
    ]
    given = packed(list(zip(tensors, sizes, strict=True)))
    return Launch(program, grid_of(module, name, live["gated"].shape[0]), given, tensors + memory)


def copied(tensor: Tensor) -> Tensor:
    """A tensor of the same strides on storage of its own."""
    whole = tensor.untyped_storage().clone()
    fresh = torch.empty(0, dtype=tensor.dtype)
    return fresh.set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


def wrong_of(module: ModuleType, name: str, rows: int, q: int, *halves: str, **flags) -> list[str]:
    """What the judge of GPU runs says of a launch, or of its halves one behind the other."""
    case = CASES[name](module)
    full = case.inputs(rows, q)
    live = {n: copied(t) if n in case.outputs else t for n, t in full.items()}
    tables = (full["partial_mail_peers"], full["lse_mail_peers"])
    memory = [box for table in tables for box in case.boxes.of(table)]
    for half in halves or ("whole",):
        run([launch_of(module, name, live, memory, half=half, **flags)])
    defaults = {"pushes": False, "lse_base": "2", **flags}
    verdict = case.check(full, live, q, **{flag: defaults[flag] for flag in case.judged_flags})
    assert verdict.wrong or 0 < verdict.error < verdict.bound or not full["lengths"].any()
    return verdict.wrong


@pytest.mark.parametrize(("rows", "q"), [(1, 1), (20, 4)])
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("dcp_value", {"pushes": True}),
        ("dcp_value", {"lse_base": "e"}),
        ("dcp_value_projected", {}),
        ("dcp_value_projected", {"lse_base": "e"}),
    ],
)
def test_a_launch_is_right(modules, name, flags, rows, q):
    assert wrong_of(modules[name], name, rows, q, **flags) == []


def test_its_halves_are_right_as_well(modules):
    name = "dcp_value_projected"
    assert wrong_of(modules[name], name, 5, 1, "publish", "collect") == []


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("                    mailbox.rearm(address, mailbox.NEGATIVE_ZERO)\n", "", "not re-armed"),
        ("peers[gathered // HEADS] + offset, values", "peers[0] + offset, values", "not sent"),
        ("matrix = w_uv_all[gathered,", "matrix = w_uv_all[0,", "rows sent: error"),
        ("filled = valid[row] > 0", "filled = valid[row] > -1", "rows sent: error inf"),
        ("row // queries] > queries", "0] > queries", "gated: error"),
    ],
)
def test_a_wrong_kernel_is_found(tmp_path, old, new, text):
    module = module_of(tmp_path, "dcp_value_projected", old, new)
    wrong = wrong_of(module, "dcp_value_projected", 13, 1)
    assert any(text in line for line in wrong), wrong


def test_a_row_too_many_is_found(tmp_path):
    old, new = "present = cutlass.min(valid.shape[0] - first_row, TILE_M)", "present = TILE_M"
    module = module_of(tmp_path, "dcp_value_projected", old, new)
    with pytest.raises(OutOfMemory, match=r"ld.global.b32"):
        wrong_of(module, "dcp_value_projected", 1, 1)


def test_only_weights_are_requested_ahead_of_the_wait(modules):
    module = modules["dcp_value_projected"]
    kernel = module.DcpValueProjected()
    specs = operands_of(module, kernel)
    ptx = ptx_of(compile_kernel(kernel, specs, "sm_90a", keep_ptx=True))
    early = [access for access in global_accesses(ptx) if not access.waited]
    place = [spec.name for spec in specs if spec].index("w_uv_all")
    assert len(early) == module.TILES * module.SLICES
    assert all(access.parameters == {place} and access.is_load for access in early)


class Group:
    """The mailboxes of all ranks, and their operands for one exchange."""

    def __init__(self, module: ModuleType, rows: int) -> None:
        m = self.module = module
        self.mails = [self._armed(m.V_DIM, torch.bfloat16, 0x80000000) for _ in range(RANKS)]
        self.lse = [self._armed(None, torch.float32, 0xFFFFFFFF) for _ in range(RANKS)]
        self.record = torch.zeros(8, dtype=torch.int32)
        self.weights = small.noise(m.GATHERED, m.V_DIM, m.KV_LORA, scale=m.KV_LORA**-0.5)
        self.ranks = [self._operands(rank, rows) for rank in range(RANKS)]

    def _armed(self, width: int | None, dtype: torch.dtype, sentinel: int) -> Tensor:
        m = self.module
        shape = (RANKS, m.ROWS_CAP, m.HEADS, *([width] if width else []))
        return boxes.armed(shape, dtype, sentinel)

    def _operands(self, rank: int, rows: int) -> dict[str, Tensor]:
        m = self.module
        valid = torch.randint(0, 3, (rows,), dtype=torch.int32)
        partial = small.noise(rows, m.GATHERED, m.KV_LORA)
        partial[valid == 0] = small.NAN
        share = m.ROWS_CAP * m.HEADS * 4

        def table(mails: list[Tensor], share: int) -> Tensor:
            return torch.tensor([mail.data_ptr() + rank * share for mail in mails])

        return {
            "partial": partial,
            "partial_lse": torch.randn(rows, m.GATHERED) * 3,
            "valid": valid,
            "gate": small.packed_column(rows, m.PITCH, m.GATE_COLUMN, m.HEADS * m.V_DIM),
            "lengths": torch.full((rows,), 9, dtype=torch.int32),
            "w_uv_all": self.weights,
            "q_mail": torch.zeros(rows, m.GATHERED, m.LATENT, dtype=torch.uint8),
            "partial_mail": self.mails[rank][:, :rows],
            "partial_mail_peers": table(self.mails, share * m.V_DIM // 2),
            "lse_mail": self.lse[rank][:, :rows],
            "lse_mail_peers": table(self.lse, share),
            "gated": torch.full((rows, m.HEADS * m.V_DIM), small.NAN).bfloat16(),
            "fault": torch.tensor([self.record.data_ptr()]),
        }

    def expected(self, rank: int) -> Tensor:
        """The gated rows of a rank's heads, float64 but for what is sent."""
        heads = slice(rank * self.module.HEADS, (rank + 1) * self.module.HEADS)
        weights = self.weights[heads].double()
        sent, lse = [], []
        for one in self.ranks:
            filled = (one["valid"] > 0)[:, None]
            rows = torch.where(filled[..., None], one["partial"][:, heads].double(), 0.0)
            sent.append(torch.einsum("rhl,hvl->rhv", rows, weights).bfloat16().double())
            lse.append(torch.where(filled, one["partial_lse"][:, heads].double(), -torch.inf))
        share = torch.softmax(torch.stack(lse) * torch.log(torch.tensor(2.0)), 0).nan_to_num(0.0)
        merged = (share[..., None] * torch.stack(sent)).sum(0).flatten(1)
        return merged * torch.sigmoid(self.ranks[rank]["gate"].double())


def test_ranks_that_run_at_once_find_each_others_rows(modules):
    """Nothing has been sent when they start, so every poll waits."""
    name = "dcp_value_projected"
    group = Group(modules[name], 18)
    memory = [*group.mails, *group.lse, group.record]
    run([launch_of(group.module, name, live, memory) for live in group.ranks])
    for rank, live in enumerate(group.ranks):
        error = (live["gated"].double() - group.expected(rank)).norm()
        assert error < 2.0**-8 * group.expected(rank).norm()
    assert all(bool((mail.view(torch.int32) == -(2**31)).all()) for mail in group.mails)
    assert all(bool((mail.view(torch.int32) == -1).all()) for mail in group.lse)
    assert not group.record.any()


def test_a_rank_alone_waits_for_ever(modules):
    name = "dcp_value_projected"
    group = Group(modules[name], 1)
    memory = [*group.mails, *group.lse, group.record]
    with pytest.raises(AssertionError, match=r"\d+ CTAs wait for ever"):
        run([launch_of(group.module, name, group.ranks[0], memory)], most_turns=40)
