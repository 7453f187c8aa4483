"""What a value means beyond shape and dtype: the types that flow between ops.

Two int32 tensors of one shape can hold token positions or cache rows; two BF16 rows can be whole
or one rank's share of a sum.  A reader that takes the one for the other runs and is wrong, so
contracts say which it is and the planner compares writers with readers.

The positions follow from interleaved sharding over D ranks in runs of I tokens: token t lies on
rank (t // I) % D, there at t // (D * I) * I + t % I.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple


class IndexSpace(Enum):
    """What integers count; for scores and page tables, what their last axis counts."""

    NONE = "no index"
    GLOBAL = "token positions of the request"
    LOCAL = "positions within this rank's share"
    PHYSICAL = "physical cache rows"


class Placement(Enum):
    """How a tensor lies over the ranks."""

    REPLICATED = "the same values on every rank"
    HEAD_SHARDED = "this rank's heads"
    CONTEXT_SHARDED = "this rank's share of the context"
    PARTIAL = "one rank's part of a result"  # to be summed, or merged by LSE weight
    GATHERED = "all heads over this rank's share of the context"


class LseBase(Enum):
    """The base of a log sum of exponentials."""

    NONE = "no LSE"
    TWO = "an LSE to base 2"
    E = "an LSE to base e"


class EmptyRow(Enum):
    """What stands in a row that has no keys; a reader of UNDEFINED selects such rows itself."""

    NONE = "no such rows"
    ZERO_NEG_INF = "0 and LSE -inf in rows without keys"
    UNDEFINED = "anything in rows without keys"


class IndexFormat(Enum):
    """How a list of fewer entries than its width is filled."""

    NONE = "no list"
    COMPACT_PREFIX = "a compact prefix and its length"
    HOLES = "a list with -1 anywhere"


class Mask(Enum):
    """Which rows a tensor tells apart, where ops leave out the others by it (`Operand.gates`)."""

    NONE = "no mask"
    ACTIVE = "the rows that are in use"
    KEYED = "the rows that have keys on this rank"
    OWNED = "the rows whose new key this rank stores"

    def may_gate(self, placement: Placement | None) -> bool:
        """Whether rows that it leaves out may be missing from such an output; None is a cache.

        A row in use has a query on every rank, whoever stores its key: only what is stored by key
        may follow ownership, and only what is merged over the ranks may follow their keys.
        """
        if self is Mask.KEYED:
            return placement in (
                None,
                Placement.CONTEXT_SHARDED,
                Placement.GATHERED,
                Placement.PARTIAL,
            )
        return placement is None or self is not Mask.OWNED


@dataclass(frozen=True)
class ValueType:
    """The meaning of one tensor.  NONE in a field: does not apply, or does not matter here."""

    space: IndexSpace = IndexSpace.NONE
    placement: Placement = Placement.REPLICATED
    lse: LseBase = LseBase.NONE
    empty: EmptyRow = EmptyRow.NONE
    format: IndexFormat = IndexFormat.NONE
    mask: Mask = Mask.NONE

    def refuses(self, written: ValueType) -> tuple[str, ...]:
        """Fields in which what was written does not serve a reader of this type.

        A stronger promise serves a weaker need: zeroed rows where any would do, a compact prefix
        where -1 could stand anywhere.
        """
        if written is self:  # most edges: contracts share their types
            return ()
        return tuple(
            field
            for field in ("space", "placement", "lse", "empty", "format", "mask")
            if not _serves(getattr(written, field), getattr(self, field))
        )


class TypePair(NamedTuple):
    """A type that depends on whether contexts are sharded."""

    tp: ValueType
    dcp: ValueType


class ColumnTypes(NamedTuple):
    """The types of a buffer's columns, where the buffer as a whole has none."""

    columns: tuple[tuple[str, ValueType], ...]


OperandType = ValueType | TypePair | ColumnTypes


def resolve_type(
    declared: OperandType | None, target: str, context_parallel: bool, ranks: int
) -> ValueType | None:
    """The type of an operand bound to `target`; None where nothing is known.

    A single rank holds all heads, the whole context and the whole sum: with `ranks` 1 placements
    are one, and so are local and global positions, and every row in use is its own.
    """
    if type(declared) is ColumnTypes:
        declared = dict(declared.columns).get(target)
    elif type(declared) is TypePair:
        declared = declared.dcp if context_parallel else declared.tp
    if declared is None or ranks > 1:
        return declared
    space = IndexSpace.GLOBAL if declared.space is IndexSpace.LOCAL else declared.space
    mask = declared.mask if declared.mask is Mask.NONE else Mask.ACTIVE
    return replace(declared, space=space, placement=Placement.REPLICATED, mask=mask)


_STRONGER = {
    EmptyRow.UNDEFINED: EmptyRow.ZERO_NEG_INF,
    IndexFormat.HOLES: IndexFormat.COMPACT_PREFIX,
}


_UNCHECKED = (IndexSpace.NONE, LseBase.NONE, EmptyRow.NONE, IndexFormat.NONE, Mask.NONE)


def _serves(written: Enum, wanted: Enum) -> bool:
    if written is wanted or written in _UNCHECKED or wanted in _UNCHECKED:
        return True
    return _STRONGER.get(wanted) is written


def _with_keys(
    space: IndexSpace, format: IndexFormat = IndexFormat.NONE, mask: Mask = Mask.NONE
) -> TypePair:
    """Follows the keys: whole on every rank, or this rank's share where contexts are sharded.

    A rank that holds every key tells no other rows apart than those in use.
    """
    whole = mask if mask is Mask.NONE else Mask.ACTIVE
    return TypePair(
        ValueType(space, format=format, mask=whole),
        ValueType(space, Placement.CONTEXT_SHARDED, format=format, mask=mask),
    )


REPLICATED = ValueType()
HEADS = ValueType(placement=Placement.HEAD_SHARDED)
PARTIAL = ValueType(placement=Placement.PARTIAL)
GLOBAL_IDS = ValueType(IndexSpace.GLOBAL)
# Every rank is told the whole request's length; requests that are padding have length 0.
LENGTHS = ValueType(IndexSpace.GLOBAL, mask=Mask.ACTIVE)
# Columns of scores and places of a page table: the keys that this rank holds, in its own order.
BY_POSITION = TypePair(
    ValueType(IndexSpace.GLOBAL), ValueType(IndexSpace.LOCAL, Placement.CONTEXT_SHARDED)
)
SLOTS = _with_keys(IndexSpace.PHYSICAL, mask=Mask.OWNED)  # negative: not stored here
COUNTS = _with_keys(IndexSpace.NONE, mask=Mask.KEYED)  # of keys on this rank
ROW_LIST = _with_keys(IndexSpace.PHYSICAL, IndexFormat.COMPACT_PREFIX)
ROW_LIST_WITH_HOLES = _with_keys(IndexSpace.PHYSICAL, IndexFormat.HOLES)
