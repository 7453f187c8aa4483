"""The machine that runs PTX: what nobody waited for is not there yet, and mistakes are named."""

from __future__ import annotations

import pytest
import torch
from ptx_machine import Launch, packed, parse, run

OLD = 0x7F7F7F7F  # what shared memory holds at first
WAIT_BEGIN = "{\nW:\n"
WAIT_END = "@P1 bra DONE;\nbra W;\nDONE:\n}\n"


def execute(body: str, warps: int = 1, cluster: int = 1, turns: int = 200) -> list[int]:
    """What the lanes of all CTAs of one cluster leave at their place of the output."""
    given = torch.arange(128, dtype=torch.int32)
    out = torch.full((32 * cluster,), -1, dtype=torch.int32)
    text = (
        f".reqntid {32 * warps}\n{{\nmov.b32 %s, __dynamic_shmem__0;\nadd.u32 %b, %s, 4096;\n"
        "mov.u32 %l, %tid.x;\nmov.u32 %rank, %ctaid.x;\nld.param.b64 %g, [k_param_0];\n"
        "ld.param.b64 %o, [k_param_1];\nmad.lo.u32 %n, %rank, 32, %l;\n"
        "mul.wide.u32 %no, %n, 4;\nadd.s64 %o, %o, %no;\n"
        f"mad.lo.u32 %mine, %l, 16, %s;\nsetp.eq.u32 %first, %l, 0;\n{body}\nret;\n}}"
    )
    arguments = packed([(given, ()), (out, ())])
    run([Launch(parse(text), (cluster, 1, 1), arguments, [given, out], cluster)], turns)
    return out.tolist()


def wait(parity: int = 0) -> str:
    """Until the phase is over."""
    poll = f"mbarrier.try_wait.parity.shared.b64 P1, [%b], {parity};\n"
    return WAIT_BEGIN + poll + WAIT_END


MEET = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
SHOW = "ld.shared.b32 %v, [%mine];\nst.global.b32 [%o], %v;\n"
ANNOUNCE = "@%announces mbarrier.arrive.expect_tx.shared.b64 _, [%b], 128;\n"
# CTA 0 sends a word a lane to CTA 1, whose barrier counts 128 bytes behind one arrival.
SEND = (
    "@%first mbarrier.init.shared.b64 [%b], 1;\nbar.warp.sync 0xffffffff;\n"
    "setp.eq.u32 %to, %rank, 1;\nand.pred %announces, %to, %first;\n"
    f"{ANNOUNCE}{MEET}setp.eq.u32 %from, %rank, 0;\n"
    "mapa.shared::cluster.u32 %pb, %b, 1;\nmapa.shared::cluster.u32 %pm, %mine, 1;\n"
    "add.u32 %word, %l, 100;\n"
)
ASYNC = (
    "@%from st.async.weak.shared::cluster.mbarrier.complete_tx::bytes.b32 [%pm], %word, [%pb];\n"
)


def test_what_a_peer_sends_is_there_once_waited_for():
    waits = "@%from bra $end;\n" + wait() + SHOW + "$end:\n"
    assert execute(SEND + ASYNC + waits, cluster=2)[32:] == [100 + lane for lane in range(32)]


def test_what_a_peer_sends_is_late():
    """Behind the meeting of the cluster the store has been made, and has not landed."""
    waits = "@%from bra $end;\n" + SHOW + wait() + "$end:\n"
    seen = execute(SEND + ASYNC + MEET + waits, cluster=2)[32:]
    assert OLD in seen


def test_a_cta_waits_for_its_mail():
    with pytest.raises(AssertionError, match="ends before what peers have stored arrives"):
        execute(SEND + ASYNC + MEET, cluster=2)


IDLE = (  # for more than two turns
    "mov.u32 %turns, 0;\n$loop:\nadd.u32 %turns, %turns, 1;\n"
    "setp.lt.u32 %more, %turns, 300;\n@%more bra $loop;\n"
)


def test_nobody_writes_to_a_cta_that_has_ended():
    with pytest.raises(AssertionError, match="a CTA that has ended"):
        execute(f"{SEND}@!%from bra $end;\n{IDLE}{ASYNC}$end:\n", cluster=2)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_cluster_meets_again(slow):
    """Both see what CTA 0 stores ahead of the second meeting, and not what it stores behind the
    third, whoever of them is slow."""
    idle = f"setp.ne.u32 %fast, %rank, {slow};\n@%fast bra $on;\n{IDLE}$on:\n"
    stores = [f"@%from st.shared.b32 [%mine], {number};\n" for number in (1, 2)]
    body = (
        SEND.replace(ANNOUNCE, "")
        + (idle if slow == 0 else "")
        + f"{stores[0]}{MEET}"
        + (idle if slow == 1 else "")
        + "mapa.shared::cluster.u32 %zero, %mine, 0;\nld.shared::cluster.b32 %v, [%zero];\n"
        + f"st.global.b32 [%o], %v;\n{MEET}{stores[1]}"
    )
    assert execute(body, cluster=2) == [1] * 64


COPY = (
    "@%first mbarrier.init.shared.b64 [%b], 32;\nbar.warp.sync 0xffffffff;\n"
    "mul.wide.u32 %from64, %l, 4;\nand.b64 %from64, %from64, 112;\nadd.s64 %from64, %from64, %g;\n"
    "cp.async.cg.shared.global [%mine], [%from64], 16;\n"
)
BEHIND = "cp.async.mbarrier.arrive.noinc.shared.b64 [%b];\n"


def test_copies_are_there_once_waited_for():
    assert execute(COPY + BEHIND + wait() + SHOW) == [lane // 4 * 4 for lane in range(32)]


def test_copies_are_late():
    seen = execute(COPY + BEHIND + SHOW + wait())
    assert OLD in seen and set(seen) - {OLD}, "some are over at once"


def test_a_cta_waits_for_its_copies():
    with pytest.raises(AssertionError, match="or what it copies"):
        execute(COPY)


BULK = (
    "@%first mbarrier.init.shared.b64 [%b], 1;\nbar.warp.sync 0xffffffff;\n"
    "@%first mbarrier.arrive.expect_tx.shared.b64 _, [%b], 512;\n"
    "@%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[%s], [%g], 512, [%b];\n"
)


def test_a_run_is_there_once_its_bytes_are_counted():
    assert execute(BULK + wait() + SHOW) == [4 * lane for lane in range(32)]


def test_a_run_is_late():
    assert set(execute(BULK + SHOW + wait())) == {OLD}


def test_a_cta_waits_for_its_runs():
    with pytest.raises(AssertionError, match="or what it copies"):
        execute(BULK)


@pytest.mark.parametrize(
    ("threads", "message"),
    [
        ("64", ""),
        ("96", "1 CTAs wait for ever"),
        ("32", "64 threads at barrier 3 for 32"),
        ("%count", "barrier 3 for \\[32, 64\\]"),
    ],
)
def test_named_barriers_count(threads, message):
    count = "setp.lt.u32 %low, %l, 32;\nselp.u32 %count, 32, 64, %low;\n"
    body = f"{count}bar.sync 3, {threads};\n"
    if message:
        with pytest.raises(AssertionError, match=message):
            execute(body, warps=2)
    else:
        execute(body, warps=2)


def test_arrivals_are_counted():
    init = "@%first mbarrier.init.shared.b64 [%b], 40;\nbar.warp.sync 0xffffffff;\n"
    arrive = "mbarrier.arrive.shared.b64 _, [%b];\n"
    with pytest.raises(AssertionError, match="1 CTAs wait for ever"):
        execute(init + arrive + wait())
    tail = "setp.lt.u32 %some, %l, 8;\n@%some " + arrive
    execute(init + arrive + tail + wait())
    with pytest.raises(AssertionError, match="more arrivals than a phase has"):
        execute(init + "mbarrier.arrive.expect_tx.shared.b64 _, [%b], 16;\n" + arrive)
