"""The language: Pydantic models of a pipeline file and of a geometry file.

The models say which keys exist and which plain types they take.  What needs more than one
field at once (tables over rows, names of ops and buffers, shapes) is checked by the planner,
which knows the contracts.
"""

from __future__ import annotations

import keyword
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def _usable(name: str) -> str:
    """Names become Python names in the generated files."""
    if keyword.iskeyword(name):
        raise PydanticCustomError("reserved", "`{name}` is a word of Python", {"name": name})
    return name


def _one_line(text: str) -> str:
    """Documentation is copied into docstrings, so it must not be able to end one."""
    if re.search(r'["\\\n]', text):
        message = "documentation is one line without double quotes and backslashes"
        raise PydanticCustomError("doc", message)
    return text


def _as_written(value: object) -> object:
    """Targets may look like numbers (`9.0`); the text counts, not the float."""
    return getattr(value, "raw", value)


Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=64), AfterValidator(_usable)]
Doc = Annotated[str, AfterValidator(_one_line)]
Expression = Annotated[str | int, Field(description="shape expression, for example heads * v_dim")]
Dtype = Literal["bf16", "fp8", "fp32", "i32", "i64", "u8"]
Rounding = Literal["bf16", "fp32"]
Table = Annotated[
    Any,
    Field(
        description="a value, or a mapping of row ranges to values; it may be keyed by arch "
        "(sm_90a) and by query length (q1) above the row ranges"
    ),
]


class Model(BaseModel):
    """Base of every model: immutable, unknown keys are errors.

    Defaults that are models are `model_construct()`ed: validating them would compile a validator
    for each of their classes while this file is imported.  `dict(model)` compiles none either,
    `model_dump()` does.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        protected_namespaces=(),
        defer_build=True,  # only the outermost model is asked to validate
    )


class Parallel(Model):
    """How one layer is spread over ranks."""

    tp: int = Field(1, ge=1, le=256, description="tensor-parallel ranks; heads are split over them")
    dcp: int | None = Field(
        None, ge=1, le=256, description="context-parallel ranks; leave out for whole contexts"
    )
    interleave: int = Field(
        1, ge=1, description="consecutive tokens of a context that stay on one rank"
    )
    transport: Literal["peer_store", "multicast"] = Field(
        "peer_store", description="how mailbox words travel to peers"
    )


class Rows(Model):
    """The steps that the layer is sized for."""

    batches: str = Field(description="token rows of a step, e.g. 1-8, 16, 32, 64")
    queries: tuple[int, ...] = Field(
        (1,),
        min_length=1,
        description="query rows per request; 1 is plain decode, more is verification",
    )
    wide: str = Field("", description="further row counts of wide steps, beyond the batches")


class Environment(Model):
    """What kpipe may assume about code that it does not generate."""

    between_layers: Literal["waits", "full", "silent"] = Field(
        "silent",
        description="what runs between two layers: kernels that wait under PDL, a full "
        "dependency, or something unknown",
    )
    spin_overlap: Literal["forbid", "allow"] = Field(
        "forbid", description="whether a kernel that polls a peer may overlap its neighbours"
    )


class Round(Model):
    """Intermediates that are rounded to BF16, or kept in FP32."""

    kv_norm: Rounding = Field("bf16", description="normed latent ahead of its FP8 cast")
    query_b: Rounding = Field("bf16", description="output of Q_B, nope and pe rows")
    absorb: Rounding = Field("bf16", description="absorbed query ahead of its FP8 cast")
    merged: Rounding = Field("bf16", description="what the rows of the ranks are merged to")
    value: Rounding = Field("bf16", description="output of W_UV")
    mix: Rounding = Field("fp32", description="AttnRes' mixture of blocks ahead of its output norm")


class Numerics(Model):
    """Rounding points and quantisers: part of the result, so part of the spec."""

    round: Round = Round.model_construct()
    sigmoid: Literal["exact", "refined", "fast"] = Field(
        "refined", description="exact: div.rn; refined: reciprocal plus one Newton step; fast"
    )
    index_quant: Literal["ue8m0", "ue8m0_bf16"] = Field(
        "ue8m0",
        description="ue8m0: scale max(amax, 1e-4)/448 rounded up; ue8m0_bf16: of BF16 "
        "values, floor 1e-10",
    )


class Buffer(Model):
    """Scratch memory."""

    shape: tuple[Expression, ...] = Field(min_length=1, description="one shape expression per axis")
    dtype: Dtype
    scope: Literal["layer", "kind", "model", "device", "step"] = Field(
        "kind",
        description="who shares it: layer, nobody; kind, the layers of this pipeline; model, the "
        "pipelines of one geometry; device, all pipelines; step, the engine's, written once a step",
    )
    columns: dict[Name, Expression] = Field(
        default={},
        description="named column blocks of the last axis, in order; offsets are derived",
    )
    pad_to: int = Field(1, ge=1, description="the last axis is padded up to a multiple of this")
    init: Literal["empty", "zeros"] = Field(
        "empty", description="zeros: cleared once, padding stays zero for ever"
    )


class Mailbox(Model):
    """Memory that peers write and this rank polls."""

    shape: tuple[Expression, ...] = Field(min_length=1, description="shape of one parity")
    dtype: Dtype
    sentinel: int = Field(ge=0, le=0xFFFFFFFF, description="32-bit word that no payload holds")
    parities: int = Field(
        2, ge=1, le=8, description="copies used in turn by the layers of the kind"
    )
    rearmed_by: Name = Field(
        description="the op that stores the sentinel back, or the word of the modes for it"
    )


class Cache(Model):
    """A paged cache, or recurrent state, that outlives the step."""

    format: Literal[
        "fp8_tensor", "fp8_ds_mla", "nvfp4_ds_mla", "index_fp8", "kda_state", "kda_conv"
    ]
    page: int = Field(64, ge=1, description="tokens per kernel page")
    manager_page: int | None = Field(
        None, ge=1, description="tokens per page of the engine's block pool, where it differs"
    )
    max_blocks: int | None = Field(None, ge=1, description="largest number of blocks addressed")


class Stage(Model):
    """A step that the reader of a paper would recognise."""

    ops: tuple[str, ...] = Field(min_length=1, description="ops and slots that modes may name")
    variants: dict[Name, Table] = Field(
        default={}, description="slot -> op (or list of ops), by rows"
    )
    options: dict[Name, Table] = Field(default={}, description="words that the ops understand")
    tactics: dict[str, Table] = Field(default={}, description="op -> tile parameters, by rows")
    bind: dict[str, str] = Field(
        default={}, alias="with", description="operand (or op.operand) -> buffer or column"
    )
    pdl: dict[str, Literal["off", "hold"]] = Field(
        default={}, description="weaken one launch: off = no attribute, hold = no early release"
    )


class Stream(Model):
    """Attributes of a stream beside main."""

    priority: int = Field(0, ge=-5, le=5, description="lower runs first, 0 is the default")


class External(Model):
    """An opaque op of the engine: kpipe orders it and calls it, and knows nothing else."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    doc: Doc = ""


class Prefetch(Model):
    """Weights of later ops requested into L2 beside an op."""

    after: str = Field(description="op behind which the request is made")
    weights: tuple[str, ...] = Field(description="op.weight, or next.op.weight for the next layer")
    rows: str = Field(description="row counts at which it pays")
    cap_mib: int = Field(96, ge=1, le=1024)
    grid: int = Field(32, ge=1, le=132)


class Features(Model):
    """What the deployment has; modes may require it and prepare() checks it again."""

    fused_indexer: bool = Field(True, description="scores and select are one fused decode indexer")


class Requires(Model):
    """When a mode is legal."""

    dcp: bool | None = Field(None, description="needs, or excludes, context parallelism")
    fused_indexer: bool | None = None


class Overlap(Model):
    """Which op runs on which stream in which order, by rows."""

    modes: dict[Name, dict[str, Any]] = Field(
        description="mode -> stream -> list of ops, `fork STREAM`, `join STREAM`, `issue STREAM`"
    )
    table: Table = Field(description="rows of the step -> mode")
    table_unfused: Table = Field(None, description="used where features.fused_indexer is false")
    fallback: dict[Name, Name] = Field(
        default={}, description="what replaces a mode that is not legal here"
    )


class Draft(Model):
    """Marks a spec that cannot be generated yet."""

    missing: tuple[str, ...] = Field(description="ops that have no contract yet")


class Pipeline(Model):
    """One layer's decode path."""

    kpipe: Literal[1] = Field(description="version of the language")
    name: Name
    doc: Doc = ""
    geometry: Name = Field(description="file below geometry/ that holds the model's dimensions")
    parallel: Parallel = Parallel.model_construct()
    targets: tuple[Annotated[str, BeforeValidator(_as_written)], ...] = Field(
        min_length=1, description="GPU architectures, e.g. sm_90a"
    )
    rows: Rows
    features: Features = Features.model_construct()
    environment: Environment = Environment.model_construct()
    numerics: Numerics = Numerics.model_construct()
    buffers: dict[Name, Buffer] = Field(default={})
    mailboxes: dict[Name, Mailbox] = Field(default={})
    caches: dict[Name, Cache] = Field(default={})
    streams: dict[Name, Stream] = Field(default={})
    external: dict[Name, External] = Field(default={})
    step: dict[Name, Stage] = Field(
        default={}, description="stages that run once per step, ahead of its layers"
    )
    stages: dict[Name, Stage] = Field(min_length=1)
    overlap: Overlap
    prefetch: tuple[Prefetch, ...] = ()
    draft: Draft | None = None


class Rope(Model):
    """Which tensors are rotated, and how."""

    query_pe: Literal["none", "interleaved", "neox"] = "none"
    key_pe: Literal["none", "interleaved", "neox"] = "none"
    index_q: Literal["none", "interleaved", "neox"] = "none"
    index_k: Literal["none", "interleaved", "neox"] = "none"


class Scalars(Model):
    """Real numbers of the model."""

    rms_eps: float = Field(gt=0, lt=1)
    index_eps: float = Field(1e-6, gt=0, lt=1)
    softmax_dim: Expression = Field(description="the softmax scale is this to the power -1/2")
    softmax_mscale: float = Field(
        1.0, gt=0, description="yarn: the scale is multiplied by its square"
    )


class Geometry(Model):
    """Dimensions of one model; every number has its home here."""

    kpipe: Literal[1]
    geometry: Name
    doc: Doc = ""
    dims: dict[Name, Expression] = Field(min_length=1, max_length=256)
    scalars: Scalars
    rope: Rope = Rope.model_construct()
