"""What a mask may leave out: ownership of a key is no reason to skip its query."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from type_edits import changed, findings_with

from kpipe.codegen.ops.contract import Contract, Kind
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.ops.types import Mask, Placement, resolve_type
from kpipe.codegen.plan.masks import refused_gates


def gating(op: str, mask: str, *outputs: str) -> dict[str, Contract]:
    """The contract of `op` with a mask that gates these outputs."""
    contract = CONTRACTS[op]
    assert contract.operand(mask) is not None
    operands = tuple(replace(o, gates=outputs) if o.name == mask else o for o in contract.operands)
    return {op: replace(contract, operands=operands)}


def test_an_ownership_mask_that_skips_the_query(tmp_path: Path) -> None:
    """The reported bug: a negative slot was taken to mean that the row has no query either."""
    contracts = gating("mla_query", "slots", "latent_kv", "q_mail")
    found = findings_with(tmp_path / "dcp", "dsa_dcp", contracts)
    assert {f.code for f in found} == {"KP212"}
    finding = next(f for f in found if f.message.startswith("mode `wait`"))
    assert finding.message == (
        "mode `wait`: `mla_query` leaves rows out of `q_mail` (the same values on every rank) by "
        "`slots`, which tells apart the rows whose new key this rank stores"
    )
    assert finding.help == (
        "`slots` may go on to gate `latent_kv`; compute `q_mail` of `mla_query` for every row in "
        "use, which `lengths` tells (0: padding)"
    )
    ((role, reader),) = finding.related
    assert role == "reader" and reader != finding.span and finding.span is not None
    # Where every rank stores every key, a negative slot is a padded row, and may skip all.
    both = gating("mla_query", "slots", "latent_kv", "query")
    assert findings_with(tmp_path / "tp", "dsa_tp", both) == ()


def test_what_is_not_written_here_is_not_gated(tmp_path: Path) -> None:
    """`query` exists without context parallelism only."""
    contracts = gating("mla_query", "slots", "latent_kv", "query")
    assert findings_with(tmp_path, "dsa_dcp", contracts) == ()


@pytest.mark.parametrize(
    ("name", "contracts", "message"),
    [
        (
            "dsa_dcp",
            gating("index_front", "index_slots", "index_kv", "index_q8"),
            "`index_front` leaves rows out of `index_q8` (the same values on every rank) by "
            "`index_slots`, which tells apart the rows whose new key this rank stores",
        ),
        (
            "dsa_dcp",
            gating("dcp_value", "valid", "partial_mail", "lse_mail", "gated"),
            "`dcp_value` leaves rows out of `gated` (this rank's heads) by `valid`, which tells "
            "apart the rows that have keys on this rank",
        ),
    ],
)
def test_other_outputs(
    name: str, contracts: dict[str, Contract], message: str, tmp_path: Path
) -> None:
    found = findings_with(tmp_path, name, contracts)
    assert {f.code for f in found} == {"KP212"}
    assert message in {f.message.partition(": ")[2] for f in found}


def test_a_mask_of_another_domain_is_no_mask_of_this_one(tmp_path: Path) -> None:
    """Counts of this rank's keys, bound where rows in use are told."""
    found = findings_with(tmp_path, "dsa_dcp", changed("dcp_value", "valid", mask=Mask.ACTIVE))
    said = {(f.code, f.message, f.help) for f in found if "mode `wait`" in f.message}
    assert (
        "KP212",
        "mode `wait`: `topk_merge` writes `valid` as the rows that have keys on this rank, "
        "`dcp_value` takes it as the rows that are in use",
        "bind `dcp_value` to a tensor that tells apart the rows that are in use",
    ) in said


def test_the_table_of_masks_and_placements() -> None:
    merged = {None, Placement.CONTEXT_SHARDED, Placement.GATHERED, Placement.PARTIAL}
    for mask, placement in product(Mask, (None, *Placement)):
        allowed = {Mask.OWNED: placement is None, Mask.KEYED: placement in merged}
        assert mask.may_gate(placement) is allowed.get(mask, True)


def test_a_single_rank_owns_every_row() -> None:
    slots = CONTRACTS["mla_query"].operand("slots").type
    assert resolve_type(slots, "slots", True, 8).mask is Mask.OWNED
    assert resolve_type(slots, "slots", False, 8).mask is Mask.ACTIVE
    assert resolve_type(slots, "slots", True, 1).mask is Mask.ACTIVE


@pytest.mark.parametrize("parallel", [(False, 8), (True, 8), (True, 1)])
def test_every_shipped_contract_gates_what_its_masks_may(parallel: tuple[bool, int]) -> None:
    """No spec can bind another mask to these operands (nothing of their shape and type has another
    domain), so the contracts themselves are held to the rule, under every flag."""
    checked = 0
    for contract in CONTRACTS.values():
        for on in (False, True):
            flags = {flag.name: on for flag in contract.flags} | {"dcp": parallel[0]}
            assert refused_gates(contract, flags, {}, parallel) == (), contract.name
        checked += sum(len(o.gates) for o in contract.operands)
    assert checked >= 20


def test_every_insert_is_gated_by_slots_and_by_slots_alone() -> None:
    for contract in CONTRACTS.values():
        inserted = {o.name for o in contract.operands if o.access.name == "INSERT"}
        gates = {o.name: set(o.gates) for o in contract.operands if o.name.endswith("slots")}
        assert set().union(*gates.values()) == inserted if gates else not inserted
        for operand in contract.operands:
            if operand.gates:
                assert operand.type is not None and operand.kind is not Kind.CACHE


def test_a_gate_names_an_operand() -> None:
    with pytest.raises(ValueError, match=r"mla_query: `slots` gates querry, no operand of it"):
        gating("mla_query", "slots", "querry")
