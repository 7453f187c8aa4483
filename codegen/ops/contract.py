"""What an op promises: the vocabulary in which contracts are written.

A contract is a table.  It names the operands an op touches, how and in which phase it touches
them, where it waits and releases under programmatic dependent launch (PDL), what it cannot do,
and the reference function that defines its result.  The planner binds operands to buffers by
name; the order of operands is the order of arguments of the reference function and of the
kernel alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from .types import OperandType


class Kind(Enum):
    """Where the memory behind an operand comes from."""

    BUFFER = "buffer"  # a buffer, a column of one, or a mailbox, declared in the spec
    WEIGHT = "weight"  # bound once in prepare(), never written
    CACHE = "cache"  # paged bytes that outlive the step
    STEP = "step"  # handed in for every step (lengths, slots, tables, hidden, out)


class Access(Enum):
    """How an op touches an operand."""

    READ = "read"
    WRITE = "write"
    INSERT = "insert"  # writes some cache rows, leaves the others as they are
    UPDATE = "update"  # reads and rewrites (recurrent state)
    PUBLISH = "publish"  # writes mailbox words of peers (and of this rank)
    POLL = "poll"  # reads mailbox words until none of them is the sentinel
    CONSUME = "consume"  # polls, then stores the sentinel back (re-arms)
    EXCHANGE = "exchange"  # publishes its share, then consumes everybody's
    REARM = "rearm"  # stores the sentinel back without reading
    LAYOUT = "layout"  # needs shape and strides only, no bytes

    @property
    def reads(self) -> bool:
        """Loads bytes, polling included."""
        return self in (Access.READ, Access.UPDATE) or self.polls

    @property
    def polls(self) -> bool:
        """Spins until a peer has written."""
        return self in (Access.POLL, Access.CONSUME, Access.EXCHANGE)

    @property
    def writes(self) -> bool:
        """Stores payload, publishing included."""
        return self in (Access.WRITE, Access.INSERT, Access.UPDATE) or self.publishes

    @property
    def publishes(self) -> bool:
        """Stores into peers' mailboxes."""
        return self in (Access.PUBLISH, Access.EXCHANGE)

    @property
    def rearms(self) -> bool:
        """Stores the sentinel back."""
        return self in (Access.CONSUME, Access.EXCHANGE, Access.REARM)


class Phase(Enum):
    """When an access may begin: before or after the op's PDL wait."""

    PROLOGUE = "prologue"
    BODY = "body"


class Path(Enum):
    """How an op reaches the memory of an operand."""

    GENERIC = "generic"  # plain loads and stores
    ASYNC = "async"  # bulk copies of the async proxy (TMA)


class Release(Enum):
    """Where an op calls `griddepcontrol.launch_dependents` when it is not held."""

    NEVER = "never"
    SOME_BLOCKS = "some_blocks"  # not every thread block calls it: the last exit releases
    AFTER_WEIGHTS = "after_weights"  # once its weights are requested, maybe ahead of its wait
    AFTER_WAIT = "after_wait"
    AFTER_LOADS = "after_loads"  # behind the wait, once everything that it reads is requested
    LIBRARY = "library"  # inside a library kernel, cannot be moved

    @property
    def fixed(self) -> bool:
        """Not a switch of the launch: holding it means nothing, or is not ours to do."""
        return self in (Release.NEVER, Release.SOME_BLOCKS, Release.LIBRARY)


class Derive(Enum):
    """How the planner decides a flag from the mode that an op stands in."""

    CONTEXT_PARALLEL = "context_parallel"  # the spec shards contexts (`parallel.dcp` is given)
    ONLY_WRITER = "only_writer"  # the operand has a reader and no other writer in this mode
    IS_WRITTEN = "is_written"  # another op writes the operand ahead of this one
    WRITTEN_APART = "written_apart"  # another op of this mode writes the operand, early or late
    ONLY_POLLER = "only_poller"  # no other op polls the operand in this mode
    OPTION = "option"  # read from the stage's `options`


@dataclass(frozen=True)
class Operand:
    """One argument of an op.

    `shape` is a tuple of shape expressions over geometry dimensions, `rows`, `requests` and
    `rows_cap`.  An operand with `when` exists only where that flag is set (`!flag`: unset) and
    is passed by keyword.  Without `type` nothing is known of its meaning, and nothing checked.
    """

    name: str
    kind: Kind
    access: Access
    shape: tuple[str, ...]
    dtype: str
    phase: Phase = Phase.BODY
    when: str = ""
    type: OperandType | None = None
    path: Path = Path.GENERIC
    gates: tuple[str, ...] = ()  # a mask: operands whose rows are left out where it says so
    scattered: str = ""  # flag under which a peer is sent only the columns that it owns

    @property
    def passed(self) -> bool:
        """True where the orchestration passes it; weights are bound in prepare()."""
        return self.kind is not Kind.WEIGHT


@dataclass(frozen=True)
class Flag:
    """A kernel flag that the planner derives; `operand` is what it is derived from."""

    name: str
    derive: Derive
    operand: str = ""
    doc: str = ""


@dataclass(frozen=True)
class Option:
    """A word that a stage may set under `options:`; the first choice is the default.

    With `table` the value may vary by rows.  An empty `choices` means a positive integer.
    """

    name: str
    choices: tuple[str, ...] = ()
    table: bool = False
    doc: str = ""


@dataclass(frozen=True)
class Limits:
    """What an op cannot do.  Empty tuples mean no limit."""

    archs: tuple[str, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()  # inclusive ranges of head rows of one launch
    head_pad: tuple[int, ...] = ()  # head counts that it is padded up to
    cache_formats: tuple[str, ...] = ()
    pages: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()
    max_rows: int = 0
    dcp: bool = True  # may stand in a context-parallel spec
    tp: bool = True  # may stand in a spec without context parallelism
    interleaves: tuple[int, ...] = ()
    divides: tuple[tuple[str, int], ...] = ()  # expression over dimensions must be a multiple
    sent: tuple[str, ...] = ()  # rounding points whose values travel, so as BF16


@dataclass(frozen=True)
class Scratch:
    """Private workspace of an op; `bytes` is a shape expression evaluated per plan."""

    name: str
    bytes: str
    zero_once: bool = False


@dataclass(frozen=True)
class Role:
    """Warps of a kernel that do one part of its work.

    A role that does not wait touches its operands early, unless a barrier inside the kernel
    holds it behind the role `after`, which waits itself or stands behind one that does.
    """

    name: str
    waits: bool
    operands: tuple[str, ...]
    after: str = ""


def early_roles(roles: tuple[Role, ...]) -> frozenset[str]:
    """Names of the roles that touch memory before any wait of theirs has returned.

    Raises ValueError for a name used twice, an unknown `after`, and roles that stand behind one
    another in a circle.
    """
    by_name = {role.name: role for role in roles}
    if len(by_name) < len(roles):
        raise ValueError("two roles have one name")
    early = set()
    for role in roles:
        seen, at = {role.name}, role
        while not at.waits and at.after:
            if at.after not in by_name:
                raise ValueError(f"role {at.name!r} stands behind {at.after!r}, which is no role")
            if at.after in seen:
                raise ValueError(f"role {role.name!r} stands behind itself")
            seen.add(at.after)
            at = by_name[at.after]
        if not at.waits:
            early.add(role.name)
    return frozenset(early)


Tactic = tuple[tuple[str, int], ...]  # field of the kernel's tile, value


def tactics(*entries: tuple[int, dict[str, int]]) -> tuple[tuple[int, Tactic], ...]:
    """Tile parameters by rows, `(most rows, {field: value})` in order of rows, as measured."""
    return tuple((most, tuple(fields.items())) for most, fields in entries)


def _part(whole: int, most: int) -> int:
    """`whole` by the least power of two that makes it no larger than `most`."""
    while whole > most:
        whole //= 2
    return whole


@dataclass(frozen=True)
class Contract:
    """The promise of one op.

    `waits`: every thread block executes the wait in at least one warp role.  Without `roles` all
    its threads do.  `proxy_fence`: operands behind whose plain stores a fence between the generic
    and the async proxy stands, in every thread that stores, and then a barrier of these threads,
    ahead of the release.  Raises ValueError where roles contradict the rest.
    """

    name: str
    doc: str
    operands: tuple[Operand, ...]
    reference: str  # "module:function" below kpipe.runtime.reference
    source: str = "kpipe"
    kernel: str = ""  # template below templates/kernels; empty: no kernel of ours yet
    kernel_when: str = ""  # flag under which that kernel serves (`!flag`: unset); empty: always
    flags: tuple[Flag, ...] = ()
    options: tuple[Option, ...] = ()
    constants: tuple[str, ...] = ()  # geometry names that the op is specialised on
    constants_when: str = ""  # flag under which it takes them; empty: always
    waits: bool = True
    release: Release = Release.AFTER_WAIT
    limits: Limits = Limits()
    scratch: tuple[Scratch, ...] = ()
    fixes: tuple[tuple[str, str], ...] = ()  # numerics that the kernel is written for
    lse_base: str = ""  # "2" or "e" where it writes an LSE
    empty_row: str = ""  # what it writes for a row without keys
    tile: tuple[str, ...] = ()  # names of tactic fields
    tactics: tuple[tuple[int, Tactic], ...] = ()  # up to so many rows; what a spec says goes first
    parts: tuple[tuple[str, str, str], ...] = ()  # operand, flag or "", shape: all that it touches
    tile_parts: tuple[tuple[str, str], ...] = ()  # fields that part a dimension by a power of two
    # By field what is worth timing; the first value is what the kernel takes by itself.
    tile_values: tuple[tuple[str, tuple[int, ...]], ...] = ()
    takes_rows: bool = False  # no operand tells it how many rows the step has
    roles: tuple[Role, ...] = ()
    proxy_fence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := {name for name, _ in self.tile_values} - set(self.tile):
            raise ValueError(f"{self.name}: values for {', '.join(sorted(unknown))}, no tile field")
        known = {operand.name for operand in self.operands}
        stored = {operand.name for operand in self.operands if operand.access.writes}
        if unknown := set(self.proxy_fence) - stored:
            names = ", ".join(sorted(unknown))
            raise ValueError(f"{self.name}: fences stores of {names}, which it does not store")
        for operand in self.operands:
            if unknown := set(operand.gates) - known:
                names = ", ".join(sorted(unknown))
                raise ValueError(f"{self.name}: `{operand.name}` gates {names}, no operand of it")
        if not self.roles:
            return
        early_roles(self.roles)
        given = {name for role in self.roles for name in role.operands}
        if given != known:
            named = ", ".join(sorted(given ^ known))
            raise ValueError(f"{self.name}: roles and operands differ in {named}")
        if self.waits != any(role.waits for role in self.roles):
            word = "waits" if self.waits else "does not wait"
            raise ValueError(f"{self.name} {word}, its roles say otherwise")

    def phase(self, operand: Operand) -> Phase:
        """When the op may first touch an operand, roles that do not wait considered."""
        return Phase.PROLOGUE if operand.name in self._unawaited else operand.phase

    @cached_property
    def _unawaited(self) -> frozenset[str]:
        early = early_roles(self.roles)
        return frozenset(n for role in self.roles if role.name in early for n in role.operands)

    def operand(self, name: str) -> Operand | None:
        """The operand of that name, or None."""
        return next((operand for operand in self.operands if operand.name == name), None)

    def tactic(self, rows: int, dims: Mapping[str, int]) -> Tactic:
        """The tile parameters for that many rows where the spec names none; maybe none at all.

        A field that parts a dimension is its largest part that is no larger than measured.
        """
        found = next((tactic for most, tactic in self.tactics if rows <= most), ())
        parted = {name: dims[dimension] for name, dimension in self.tile_parts}
        return tuple((name, _part(parted.get(name, most), most)) for name, most in found)

    @property
    def early_reads(self) -> tuple[str, ...]:
        """Non-weight operands that the op touches before its wait."""
        return tuple(
            operand.name
            for operand in self.operands
            if operand.kind is not Kind.WEIGHT
            and operand.access is not Access.LAYOUT
            and (self.phase(operand) is Phase.PROLOGUE or not self.waits)
        )

    @cached_property
    def typed_reads(self) -> tuple[Operand, ...]:
        """Operands that it loads and whose meaning it states."""
        return tuple(o for o in self.operands if o.type is not None and o.access.reads)

    @cached_property
    def typed_writes(self) -> tuple[Operand, ...]:
        """Operands that it stores and whose meaning it states."""
        return tuple(o for o in self.operands if o.type is not None and o.access.writes)

    @property
    def polls(self) -> tuple[Operand, ...]:
        """Operands on which it spins until a peer has written."""
        return tuple(operand for operand in self.operands if operand.access.polls)


def reads(
    name: str,
    shape: str,
    dtype: str,
    *,
    early: bool = False,
    when: str = "",
    type: OperandType | None = None,
    path: Path = Path.GENERIC,
    gates: tuple[str, ...] = (),
) -> Operand:
    """A buffer or column that the op reads."""
    phase = Phase.PROLOGUE if early else Phase.BODY
    return Operand(
        name, Kind.BUFFER, Access.READ, _split(shape), dtype, phase, when, type, path, gates
    )


def writes(
    name: str, shape: str, dtype: str, *, when: str = "", type: OperandType | None = None
) -> Operand:
    """A buffer that the op writes completely (all rows, all elements)."""
    return Operand(name, Kind.BUFFER, Access.WRITE, _split(shape), dtype, when=when, type=type)


def weight(name: str, shape: str, dtype: str = "bf16", *, when: str = "") -> Operand:
    """A static tensor; it may be loaded before the wait."""
    return Operand(name, Kind.WEIGHT, Access.READ, _split(shape), dtype, Phase.PROLOGUE, when)


def step(
    name: str,
    shape: str,
    dtype: str,
    *,
    write: bool = False,
    early: bool = False,
    when: str = "",
    type: OperandType | None = None,
    path: Path = Path.GENERIC,
    gates: tuple[str, ...] = (),
) -> Operand:
    """A tensor that the engine hands in for every step; `early`: it is read before the wait."""
    access = Access.WRITE if write else Access.READ
    phase = Phase.PROLOGUE if early else Phase.BODY
    return Operand(name, Kind.STEP, access, _split(shape), dtype, phase, when, type, path, gates)


def cache(name: str, access: Access, *, early: bool = False, path: Path = Path.GENERIC) -> Operand:
    """A paged cache; its bytes are described by the buffer's cache format."""
    phase = Phase.PROLOGUE if early else Phase.BODY
    return Operand(name, Kind.CACHE, access, (), "u8", phase, path=path)


def mailbox(
    name: str,
    access: Access,
    shape: str,
    dtype: str,
    *,
    when: str = "",
    type: OperandType | None = None,
    scattered: str = "",
) -> Operand:
    """Memory that peers write and this rank polls; the shape is that of one parity."""
    axes = _split(shape)
    return Operand(
        name, Kind.BUFFER, access, axes, dtype, when=when, type=type, scattered=scattered
    )


def _split(shape: str) -> tuple[str, ...]:
    """Shape expressions, comma separated; commas inside parentheses belong to a call."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(shape):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(shape[start:position].strip())
            start = position + 1
    return (*parts, shape[start:].strip())
