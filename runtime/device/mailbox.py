"""Words of a mailbox: memory that peers write and this GPU polls, the data its own ready flag.

Every 4-byte word holds the sentinel until its writer has stored something else; writers sanitise,
so that nothing they store is the sentinel. All accesses are relaxed and of system scope.

Why no fence. A word says itself whether it has come, so a poll needs no order between words: it
looks at each. Who reads a word behind a poll that has seen it, in the same thread or in a later
kernel, sees it again (two reads of one place that are ordered by the kernels' order never go
back). The same holds for what a later kernel reads by plain loads: it has not read the place
before, so no cache of its SM holds what was there.

Why re-arming needs none. A re-armed place is written again by a peer only after the peer has
polled words that this rank has published in a later kernel. That kernel began to publish behind
its wait, thus after this one had ended and its stores had been performed; the peer's store is
issued only after its poll has returned. The two stores to the place meet in this GPU's memory in
that order. With one parity the next publish would not be separated from the re-arming in this way;
hence two.

A poll gives up after SPINS looks (about two seconds), leaves a record and traps.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int64, Uint32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from kpipe.runtime.comm.device_mailbox import STAGES

from . import scalar

WORD_BYTES = 4
FRAGMENT_BYTES = 16
"""What one access moves, at most."""
WORDS = 4
"""Words of a fragment."""
ALL_ONES = 0xFFFF_FFFF
"""Sentinel of E4M3 bytes, of FP32 and of integers: four E4M3 codes that no conversion makes."""
NEGATIVE_ZERO = 0x8000_0000
"""Sentinel of BF16 pairs: (+0, -0)."""
EMPTY_LSE = -3.0e38
"""LSE of a row without keys on its way: finite, so that it is no sentinel."""
SPINS = 6_000_000
"""Looks at a word before a poll gives up; each takes a trip to memory, 0.3 us or more."""
IN_FLIGHT = 8
"""Fragments that a thread requests before it looks at the first."""

_MAGNITUDES = 0x7FFF_7FFF

_VECTORS = {1: "b32", 2: "v2.b32", 4: "v4.b32"}

_SPIN = """{{
.reg .pred missing, expired;
.reg .b32 left;
mov.b32 left, {spins};
look:
{compare}
@!missing bra done;
sub.u32 left, left, 1;
setp.eq.u32 expired, left, 0;
@expired bra done;
ld.relaxed.sys.global.{vector} {names}, [${count}];
bra look;
done:
}}"""


def _spin_text(count: int, sentinel: int, spins: int) -> str:
    """PTX of a poll: $0 on are the words, behind them comes the address."""
    signed = sentinel - (sentinel >> 31 << 32)
    compare = [f"setp.eq.b32 missing, $0, {signed};"]
    compare += [f"setp.eq.or.b32 missing, ${n}, {signed}, missing;" for n in range(1, count)]
    return _SPIN.format(
        spins=spins,
        compare="\n".join(compare),
        vector=_VECTORS[count],
        names=_names(count, 0),
        count=count,
    )


def _names(count: int, first: int) -> str:
    names = ", ".join(f"${place + first}" for place in range(count))
    return names if count == 1 else f"{{{names}}}"


@dsl_user_op
def store(address: Int64, words: list[Uint32], *, loc=None, ip=None) -> None:
    """Stores one, two or four words (of this rank or of a peer) in one access.

    `address` is aligned to their size. The words must have been sanitised.
    """
    count = len(words)
    llvm.inline_asm(
        None,
        [
            Int64(address).ir_value(loc=loc, ip=ip),
            *(Uint32(word).ir_value(loc=loc, ip=ip) for word in words),
        ],
        f"st.relaxed.sys.global.{_VECTORS[count]} [$0], {_names(count, 1)};",
        "l" + ",r" * count + ",~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load(address: Int64, *, loc=None, ip=None) -> list[Uint32]:
    """The four words of a fragment, whatever they are."""
    result = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return _words(result, loc, ip)


@dsl_user_op
def load_word(address: Int64, *, loc=None, ip=None) -> list[Uint32]:
    """One word, whatever it is, as a list."""
    word = llvm.inline_asm(
        T.i32(),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "ld.relaxed.sys.global.b32 $0, [$1];",
        "=r,l,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [Uint32(word)]


@dsl_user_op
def _spin(
    words: list[Uint32], address: Int64, sentinel: int, spins: int, *, loc=None, ip=None
) -> list[Uint32]:
    """`words` at `address`, loaded anew until none is the sentinel or time is up."""
    count = len(words)
    fields = ", ".join(["i32"] * count)
    result = llvm.inline_asm(
        T.i32() if count == 1 else ir.Type.parse(f"!llvm.struct<({fields})>"),
        [
            Int64(address).ir_value(loc=loc, ip=ip),
            *(Uint32(word).ir_value(loc=loc, ip=ip) for word in words),
        ],
        _spin_text(count, sentinel, spins),
        ",".join(["=r"] * count + ["l"] + [str(place) for place in range(count)] + ["~{memory}"]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [Uint32(result)] if count == 1 else _words(result, loc, ip)


def _words(result, loc, ip) -> list[Uint32]:
    return [
        Uint32(llvm.extractvalue(T.i32(), result, [place], loc=loc, ip=ip))
        for place in range(WORDS)
    ]


@dsl_user_op
def _trap(*, loc=None, ip=None) -> None:
    """Makes what this thread has stored visible to the host and ends the launch with an error."""
    llvm.inline_asm(
        None,
        [],
        "fence.acq_rel.sys; trap;",
        "~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@cute.jit
def settle(
    words: list, address, sentinel: cutlass.Constexpr, stage: cutlass.Constexpr,
    fault: cute.Tensor, spins: cutlass.Constexpr = SPINS,
):  # fmt: skip
    """The words at `address` once they are there.

    `words` are what `load` or `load_word` has returned; the caller may request many before it
    settles the first. `fault`, i64 [1], is the address of the record that is left at a time-out,
    laid out as the host reads it. `stage` is one of STAGES.
    """
    settled = _spin(words, address, sentinel, spins)
    missing = settled[0] == Uint32(sentinel)
    for place in cutlass.range_constexpr(1, len(words)):
        missing = missing or settled[place] == Uint32(sentinel)
    if missing:
        record = fault[0]
        place = Int64(address)
        store(record + FRAGMENT_BYTES, settled * (WORDS // len(words)))
        about = [
            Uint32(STAGES.index(stage) + 1),
            Uint32(place & Int64(0xFFFF_FFFF)),
            Uint32(place >> 32),
            Uint32(0),
        ]
        store(record, about)
        _trap()
    return settled


@cute.jit
def wait(
    box, count, first, step, sentinel: cutlass.Constexpr,
    stage: cutlass.Constexpr, fault: cute.Tensor,
):  # fmt: skip
    """Returns once every `step`-th of `count` fragments from address `box` on, from the `first`,
    has come."""
    for base in cutlass.range(first, count, step * IN_FLIGHT, unroll=1):
        places = [cutlass.min(base + number * step, count - 1) for number in range(IN_FLIGHT)]
        addresses = [box + Int64(place) * FRAGMENT_BYTES for place in places]
        words = [load(address) for address in addresses]
        for number in cutlass.range_constexpr(IN_FLIGHT):
            settle(words[number], addresses[number], sentinel, stage, fault)


def rearm(address, sentinel: int, words: int = WORDS) -> None:
    """Stores the sentinel back into words that have been read."""
    store(address, [Uint32(sentinel)] * words)


def clear_negative_zero(pair: Uint32) -> Uint32:
    """A pair of BF16 in which every -0 is a +0; all other bits stay.

    The sum of a half's magnitude and of all ones but the highest has that bit set unless the
    magnitude is zero.
    """
    return pair & (((pair & Uint32(_MAGNITUDES)) + Uint32(_MAGNITUDES)) | Uint32(_MAGNITUDES))


def sendable_lse(lse: Float32) -> Float32:
    """An LSE as it travels: NaN, infinities and what lies beyond +-3e38 become EMPTY_LSE."""
    empty = Float32(EMPTY_LSE)
    usable = (lse > empty) & (lse < -empty)  # false for NaN
    return scalar.select(usable, lse, empty)
