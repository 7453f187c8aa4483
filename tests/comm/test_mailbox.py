"""Words, indices and error texts of one mailbox."""

from __future__ import annotations

import re

import pytest
import torch

from kpipe.runtime.comm.gate import Gate
from kpipe.runtime.comm.mailbox import Mailbox, MailboxError, MailboxSpec, MailboxTimeout
from kpipe.runtime.comm.sanitise import clear_negative_zero
from kpipe.runtime.comm.virtual_ranks import SingleRank, VirtualRanks

ALL = slice(None)
ONES, PAIR = 0xFFFFFFFF, 0x80000000
LSE = MailboxSpec("lse_mail", (4, 3, 2), torch.float32, ONES, source_axis=0)
QUERY = MailboxSpec("q_mail", (3, 8, 4), torch.float8_e4m3fn, ONES, source_axis=1, source_stride=2)
GATHER = MailboxSpec("o_gather", (3, 16), torch.bfloat16, PAIR, source_axis=1, source_stride=4)
PLAIN = MailboxSpec("plain", (3, 8), torch.bfloat16, PAIR)


def boxes(spec: MailboxSpec, ranks: int = 4, **keywords) -> list[Mailbox]:
    group = VirtualRanks(ranks, timeout_s=0.05, **keywords)
    return [group.rank(rank).mailbox(spec, 0) for rank in range(ranks)]


def refused(text: str):
    return pytest.raises(MailboxError, match=f"^{re.escape(text)}$")


def test_buffers_start_armed_in_shape_and_dtype() -> None:
    for spec in (LSE, QUERY, GATHER, PLAIN):
        box = boxes(spec)[2]
        assert tuple(box.local.shape) == spec.shape == box.shape
        assert box.local.dtype == spec.dtype == box.dtype
        assert (box.local.view(torch.int32) == spec.signed_sentinel).all()
        assert (box.rank, box.ranks, box.name, box.sentinel) == (2, 4, spec.name, spec.sentinel)


def test_stored_words_arrive_and_rearm_clears_only_the_region() -> None:
    receiver = boxes(GATHER)[1]
    value = torch.arange(8, dtype=torch.bfloat16).reshape(2, 4)
    receiver.store(1, (slice(0, 2), slice(4, 8)), value)
    assert torch.equal(receiver.poll((slice(0, 2), slice(4, 8))), value)
    receiver.rearm((slice(0, 1), slice(4, 8)))
    assert torch.equal(receiver.poll((1, slice(4, 8))), value[1])
    with pytest.raises(MailboxTimeout):
        receiver.poll((0, slice(4, 8)))


def test_a_store_reaches_the_peer_and_nobody_else() -> None:
    group = boxes(LSE)
    group[1].store(3, (1, slice(0, 2)), torch.ones(2, 2))
    assert torch.equal(group[3].poll((1, slice(0, 2))), torch.ones(2, 2))
    for rank in (0, 1, 2):
        assert (group[rank].local.view(torch.int32) == -1).all()


def test_poll_returns_a_view_of_local() -> None:
    box = boxes(PLAIN, ranks=1)[0]
    box.store(0, (ALL, ALL), torch.ones(3, 8, dtype=torch.bfloat16))
    assert box.poll((slice(0, 2),)).data_ptr() == box.local.data_ptr()


def test_values_at_odd_offsets_and_strides_are_stored() -> None:
    box = boxes(PLAIN, ranks=1)[0]
    packed = torch.arange(1, 100, dtype=torch.bfloat16)[:96].reshape(3, 32)
    box.store(0, (ALL, ALL), packed[:, 3:11])
    assert torch.equal(box.poll((ALL,)), packed[:, 3:11])
    box.rearm((0,))
    box.store(0, (0,), packed.flatten()[1:9])  # contiguous, but off the words of its memory
    assert torch.equal(box.poll((0,)), packed[0, 1:9])


def test_patterns_close_to_the_sentinel_arrive_bit_for_bit() -> None:
    rows = [
        [0x8001] * 8,  # a subnormal that compares equal to zero when flushed
        [0x7FC1, 0xFFC1, 0x7F81, 0xFFFF] * 2,  # NaNs with payloads
        [0x8000, 0x3F80] * 4,  # -0 in the low half is no sentinel, but is cleared as well
    ]
    value = torch.tensor(rows).to(torch.int16).view(torch.bfloat16)
    sent = clear_negative_zero(value)
    box = boxes(PLAIN, ranks=1)[0]
    box.store(0, (ALL,), sent)
    got = box.poll((ALL,)).view(torch.int16)
    assert torch.equal(got[:2], value[:2].view(torch.int16))
    assert got[2].tolist() == [0, 0x3F80] * 4


def test_fp32_next_to_negative_zero_arrives() -> None:
    spec = MailboxSpec("fp32", (1, 2), torch.float32, PAIR)
    box = boxes(spec, ranks=1)[0]
    value = torch.tensor([[-(1 << 31) + 1, 0x7FC00001]], dtype=torch.int32).view(torch.float32)
    box.store(0, (ALL,), value)
    assert torch.equal(box.poll((ALL,)).view(torch.int32), value.view(torch.int32))


def test_the_sentinel_is_refused_and_nothing_is_written() -> None:
    box = boxes(PLAIN, ranks=1)[0]
    value = torch.ones(8, dtype=torch.bfloat16)
    value[4:6] = torch.tensor([0.0, -0.0])
    text = (
        "mailbox plain, parity 0, stage unknown, rank 0: 1 of 4 words stored into rank 0 "
        "equal the sentinel 0x80000000; sanitise the value first"
    )
    with refused(text):
        box.store(0, (0,), value)
    assert (box.local.view(torch.int32) == -(1 << 31)).all()
    box.store(0, (0,), clear_negative_zero(value))
    assert torch.equal(box.poll((0,)), value)


def test_an_unread_word_is_not_overwritten() -> None:
    group = boxes(LSE)
    group[1].store(0, (1, slice(0, 2)), torch.ones(2, 2))
    text = (
        "mailbox lse_mail, parity 0, stage unknown, rank 1: 2 of 4 words in rank 0 are "
        "overwritten before rank 0 has re-armed them"
    )
    with refused(text):
        group[1].store(0, (1, slice(1, 3)), torch.zeros(2, 2))
    assert torch.equal(group[0].poll((1, slice(0, 2))), torch.ones(2, 2))
    group[0].rearm((1, slice(0, 2)))
    group[1].store(0, (1, slice(1, 3)), torch.zeros(2, 2))
    lenient = boxes(LSE, refuse_overwrite=False)
    lenient[1].store(0, (1, 0), torch.ones(2))
    lenient[1].store(0, (1, 0), torch.zeros(2))
    assert torch.equal(lenient[0].poll((1, 0)), torch.zeros(2))


@pytest.mark.parametrize(
    ("spec", "peer", "index", "value", "text"),
    [
        (LSE, 4, (1, 0), torch.ones(2), "no rank 4 among 4"),
        (LSE, -1, (1, 0), torch.ones(2), "no rank -1 among 4"),
        (LSE, 0, (2, 0), torch.ones(2), "stores into rank 0 at the place of rank 2"),
        (
            QUERY,
            2,
            (ALL, slice(0, 4)),
            torch.ones(3, 4, 4).to(torch.float8_e4m3fn),
            "stores into rank 2 at the place of rank 0",
        ),
        (
            LSE,
            0,
            (1, 0),
            torch.ones(2, dtype=torch.bfloat16),
            "stored torch.bfloat16 [2], the indexed region is torch.float32 [2]",
        ),
        (
            LSE,
            0,
            (1, slice(0, 2)),
            torch.ones(2),
            "stored torch.float32 [2], the indexed region is torch.float32 [2, 2]",
        ),
    ],
)
def test_stores_against_the_protocol(spec, peer, index, value, text) -> None:
    with refused(f"mailbox {spec.name}, parity 0, stage unknown, rank 1: {text}"):
        boxes(spec)[1].store(peer, index, value)


@pytest.mark.parametrize(
    ("spec", "index", "text"),
    [
        (LSE, (ALL, slice(0, 4)), "the index reaches 4 rows, rows_cap is 3"),
        (LSE, (ALL, slice(9, 12)), "the index reaches 12 rows, rows_cap is 3"),
        (LSE, (ALL, slice(9, 2)), "the index reaches 9 rows, rows_cap is 3"),
        (QUERY, (3,), "the index reaches 4 rows, rows_cap is 3"),
        (LSE, (4,), "the index reaches 5 places of axis 0, which has 4"),
        (LSE, (-1,), "axis 0 is indexed by -1; negative places are not allowed"),
        (
            LSE,
            (slice(0, -1),),
            "axis 0 is indexed by slice(0, -1, None); negative places are not allowed",
        ),
        (
            LSE,
            (torch.tensor([0, 1]),),
            "axis 0 is indexed by Tensor; only integers, slices and Ellipsis give a view",
        ),
        (LSE, (0, 0, 0, 0), "the index has 4 entries, the mailbox 3 axes"),
        (LSE, (..., 0, ...), "the index has more than one Ellipsis"),
        (GATHER, (0, slice(1, 3)), "bytes 2:6 of the last axis are not whole words of 4 bytes"),
        (GATHER, (0, slice(1, 4)), "bytes 2:8 of the last axis are not whole words of 4 bytes"),
        (GATHER, (0, 2), "bytes 4:6 of the last axis are not whole words of 4 bytes"),
        (QUERY, (..., slice(0, 3)), "bytes 0:3 of the last axis are not whole words of 4 bytes"),
        (
            GATHER,
            (0, slice(0, 8, 2)),
            "the last axis is indexed with step 2; words have step 1",
        ),
    ],
)
def test_bad_indices(spec: MailboxSpec, index: tuple, text: str) -> None:
    box = boxes(spec)[1]
    for use in (box.poll, box.rearm):
        with refused(f"mailbox {spec.name}, parity 0, stage unknown, rank 1: {text}"):
            use(index)


def test_no_rows_are_nothing_to_wait_for() -> None:
    box = boxes(LSE)[1]
    assert box.poll((ALL, slice(0, 0))).shape == (4, 0, 2)
    box.store(0, (1, slice(0, 0)), torch.ones(0, 2))


def test_steps_and_ellipsis_select_what_a_tensor_would() -> None:
    box = boxes(LSE, ranks=4)[1]
    box.store(1, (1, slice(0, 3, 2)), torch.ones(2, 2))
    assert torch.equal(box.poll((1, slice(0, 3, 2), ...)), torch.ones(2, 2))
    assert (box.local[1, 1].view(torch.int32) == -1).all()
    assert box.poll((1, 0, 1)).item() == 1.0


def test_the_time_out_names_everything() -> None:
    group = VirtualRanks(4, timeout_s=0.05)
    ends = [group.rank(rank).mailbox(LSE, 1) for rank in range(4)]
    for rank in (0, 1, 2):
        ends[rank].store(0, (rank, slice(0, 2)), torch.ones(2, 2))
    ends[3].store(0, (3, 0), torch.ones(2))
    text = (
        "mailbox lse_mail, parity 1, stage value, rank 0: rank 3 has not written "
        "(after 0.05 s); first missing word (3, 1, 0), 2 of 16 missing; "
        "expected anything but 0xFFFFFFFF, saw 0xFFFFFFFF 0xFFFFFFFF"
    )
    with (
        group.rank(0).in_stage("value"),
        pytest.raises(MailboxTimeout, match=f"^{re.escape(text)}$") as caught,
    ):
        ends[0].poll((ALL, slice(0, 2)))
    error = caught.value
    assert (error.mailbox, error.stage, error.rank) == ("lse_mail", "value", 0)
    assert (error.peers, error.word) == ((3,), (3, 1, 0))


@pytest.mark.parametrize(
    ("spec", "index", "text"),
    [
        (QUERY, (0, ALL), "ranks 0, 2, 3 have not written"),
        (GATHER, (0, ALL), "ranks 0, 2, 3 have not written"),
        (GATHER, (0, slice(4, 12)), "rank 2 has not written"),
        (PLAIN, (1, ALL), "a peer has not written"),
    ],
)
def test_the_time_out_names_the_writers_that_are_missing(spec, index, text) -> None:
    box = boxes(spec)[1]
    own = {"q_mail": (0, slice(2, 4)), "o_gather": (0, slice(4, 8)), "plain": (0,)}[spec.name]
    box.store(1, own, torch.ones_like(box.local[own].float()).to(spec.dtype))
    with pytest.raises(MailboxTimeout, match=re.escape(f"rank 1: {text} (after 0.05 s)")):
        box.poll(index)


def test_the_words_seen_are_one_fragment() -> None:
    box = boxes(GATHER)[1]
    box.store(1, (0, slice(4, 8)), torch.tensor([1, 2, 3, 4], dtype=torch.bfloat16))
    with pytest.raises(MailboxTimeout) as caught:
        box.poll((0, slice(4, 16)))
    assert str(caught.value).endswith(
        "first missing word (0, 4), 4 of 6 missing; expected anything but 0x80000000, "
        "saw 0x80000000 0x80000000 0x80000000 0x80000000"
    )
    with pytest.raises(MailboxTimeout, match="saw 0x80000000 0x80000000 0x40003F80 0x40804040$"):
        box.poll((0, slice(0, 8)))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"shape": ()}, "shape () is empty"),
        ({"shape": (2, 0)}, "shape (2, 0) is empty"),
        ({"shape": (2, 3)}, "the last axis has 6 bytes, not whole words of 4"),
        ({"sentinel": 1 << 32}, "sentinel 4294967296 is not 32-bit"),
        ({"sentinel": -1}, "sentinel -1 is not 32-bit"),
        ({"parities": 0}, "0 parities, at least 1"),
        ({"source_axis": 2}, "no axis 2 in shape (2, 4)"),
        (
            {"source_axis": 1, "source_stride": 3},
            "axis 1 has 4 places, not a multiple of source_stride 3",
        ),
    ],
)
def test_declarations_that_cannot_work(fields: dict, text: str) -> None:
    good = {"name": "m", "shape": (2, 4), "dtype": torch.bfloat16, "sentinel": PAIR}
    MailboxSpec(**good)
    with refused(f"mailbox m: {text}"):
        MailboxSpec(**{**good, **fields})


def test_single_rank_reads_what_it_publishes() -> None:
    comm = SingleRank()
    spec = MailboxSpec("o_mail", (1, 2, 4), torch.bfloat16, PAIR, source_axis=0)
    box = comm.mailbox(spec, 1)
    value = torch.ones(2, 4, dtype=torch.bfloat16)
    box.store(0, (0,), value)
    assert (comm.rank, comm.ranks) == (0, 1)
    assert torch.equal(comm.mailbox(spec, 1).poll((0,)), value)
    with pytest.raises(MailboxTimeout, match=r"rank 0 has not written \(every rank waits"):
        comm.mailbox(spec, 0).poll((0,))


def test_a_mailbox_stands_without_a_group() -> None:
    words = [PLAIN.armed_words()]
    box = Mailbox(PLAIN, 0, 0, words, Gate(1, 0.05))
    box.store(0, (0,), torch.ones(8, dtype=torch.bfloat16))
    assert (words[0][0] == 0x3F803F80).all()
