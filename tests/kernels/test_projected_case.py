"""The judge of the kernel whose rows travel behind W_UV passes what the definition makes, only."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from test_exchange_cases import (
    HEADS,
    RANKS,
    VALUE,
    cleared,
    judged,
    on_the_cpu,  # noqa: F401 - a fixture of every test here
    rearm,
    sent_to_another,
)
from torch import Tensor

from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.launch_cases import exchange, projected

GENERATED = Path(__file__).resolve().parents[2] / "generated"

EMPTY = exchange.EMPTY_LSE


def projected_kernel(
    case, live: dict[str, Tensor], lse_base: str, clears: bool = True, selects: bool = True
) -> None:
    """dcp_value_projected, by its definition in FP32."""
    rows = live["gated"].shape[0]
    rearm(live["q_mail"], exchange.ALL_ONES)
    weights = live["w_uv_all"].float()
    sent = torch.einsum("rhl,hvl->rhv", live["partial"].float(), weights).bfloat16()
    filled = (live["valid"] > 0)[:, None] | (not selects)
    for owner in range(RANKS):
        heads = slice(owner * HEADS, (owner + 1) * HEADS)
        row = cleared(sent[:, heads]) if clears else sent[:, heads]
        row = torch.where(filled[..., None], row, 0.0)
        lse = torch.where(live["valid"][:, None] > 0, live["partial_lse"][:, heads], EMPTY)
        case.boxes.of(live["partial_mail_peers"])[owner][case.rank, :rows] = row
        case.boxes.of(live["lse_mail_peers"])[owner][case.rank, :rows] = lse
    lse = live["lse_mail"]
    base = 2.0 if lse_base == "2" else torch.e
    weight = torch.where(lse > EMPTY, base ** (lse - lse.amax(0)), 0.0)
    share = (weight / weight.sum(0)).nan_to_num(0.0)[..., None]
    merged = torch.where(share > 0, share * live["partial_mail"].float(), 0.0).sum(0).bfloat16()
    gated = (merged.float().flatten(1) * torch.sigmoid(live["gate"].float())).bfloat16()
    queries = rows // live["lengths"].shape[0]
    seen = case._visible(live["lengths"], queries) > 0
    live["gated"].copy_(torch.where(seen[:, None], gated, 0.0))
    rearm(live["partial_mail"], exchange.NEGATIVE_ZERO)
    rearm(live["lse_mail"], exchange.ALL_ONES)


@pytest.mark.parametrize("lse_base", ["2", "e"])
@pytest.mark.parametrize("q", [1, 4])
def test_a_right_projected_value_passes(lse_base, q):
    case = projected.DcpValueProjectedCase(VALUE)
    verdict = judged(case, projected_kernel, q=q, lse_base=lse_base)
    assert not verdict.wrong, verdict.wrong
    assert 0 < verdict.error < verdict.bound


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"clears": False}, "negative zeros"),
        ({"selects": False}, "rows sent: error inf"),
        ({"lse_base": "e"}, "gated: error"),
    ],
)
def test_a_wrong_projected_value_does_not_pass(how, text):
    def other(case, live: dict[str, Tensor], lse_base: str) -> None:
        projected_kernel(case, live, **{"lse_base": lse_base, **how})

    case = projected.DcpValueProjectedCase(VALUE)
    wrong = judged(case, other, lse_base="2").wrong
    assert any(text in line for line in wrong), wrong


def test_a_projected_value_of_another_head_does_not_pass():
    def other(case, live: dict[str, Tensor], lse_base: str) -> None:
        live = {**live, "w_uv_all": live["w_uv_all"].roll(1, 0)}
        projected_kernel(case, live, lse_base)

    case = projected.DcpValueProjectedCase(VALUE)
    assert any("rows sent: error" in text for text in judged(case, other, lse_base="2").wrong)
    for name, text in (("q_mail", "q_mail: "), ("partial_mail", "partial_"), ("lse_mail", "lse_")):

        def spoil(live: dict[str, Tensor], name: str = name) -> None:
            live[name][(0,) * live[name].dim()] = 3.0

        wrong = judged(case, projected_kernel, spoil, lse_base="2").wrong
        assert any(line.startswith(text) and "not re-armed" in line for line in wrong), wrong
    wrong = judged(case, projected_kernel, sent_to_another(case), lse_base="2").wrong
    assert any("1 words were sent to another's place" in line for line in wrong), wrong


@pytest.mark.parametrize(
    ("folder", "kernel", "case"),
    [
        ("dsa_dcp_d2", "dcp_value", exchange.DcpValueCase),
        ("dsa_dcp_d2_projected", "dcp_value_projected", projected.DcpValueProjectedCase),
    ],
)
def test_inputs_come_in_the_order_of_the_operands(folder, kernel, case):
    """A launch takes them by place."""
    package = load_layer(GENERATED / folder).PACKAGE
    module = importlib.import_module(f"{package}.kernels.{kernel}")
    names, specs = list(case(VALUE).inputs(8, 1)), module.operands()
    assert len(names) == len(specs)
    assert all(spec is None or spec.name == name for name, spec in zip(names, specs, strict=True))
