"""The cases that a generated layer has to pass on a GPU, or on the CPU's reference backend.

Each case runs whole layers against the oracle, stage by stage.  On a GPU chains of layers are
captured into one CUDA graph, with poisoned scratch between them, and replayed on other inputs.
Modes are run on the same inputs and compared with one another: those that launch the same ops
bit by bit, others within the bounds of the layer's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kpipe.runtime.generated_folder import geometry_of, launches
from kpipe.runtime.layer import Layer
from kpipe.runtime.oracle.compare import declared_bounds, relative_error
from kpipe.runtime.trial import Case, Trial, run_case

LARGE_CACHE = 2**32 + 2**28
"""Bytes of a cache whose offsets do not fit in 32 bits."""
OTHER_LAYERS = 3
"""Blocks of one layer are this many times as far apart as a page is long."""


@dataclass(frozen=True)
class NamedCase:
    """A case and what it is there for."""

    name: str
    case: Case


def suite(layer_class: type[Layer], arch: str, backend: str) -> tuple[NamedCase, ...]:
    """The cases of a layer, sized by its geometry and by what it declares for `arch`."""
    top_k, context = geometry_of(layer_class).top_k, _context(layer_class)
    page = layer_class.MEMORY.caches["latent_kv"].page
    on_gpu, exchanging = backend == "cuda", layer_class.CONTEXT_PARALLEL
    # Even and odd: mailboxes take turns by layer, so the last layer of a step meets the first of
    # the next in the same parity or in the other.
    chained = (4 if on_gpu else 1) if exchanging else 3
    least = min(q for known, q in layer_class.TABLE if known == arch)

    def case(lengths: tuple[int, ...], q: int = least, layers: int = 1, **more: object) -> Case:
        fitting = tuple(
            length if length == 0 else min(max(length, q), context) for length in lengths
        )
        captured = on_gpu
        return Case(fitting, q, arch, layers=layers, backend=backend, captured=captured, **more)  # type: ignore[arg-type]

    edges = (0, 1, 63, 64, 65, top_k - 1, top_k, top_k + 1)
    replays = (200 if exchanging else 100) if on_gpu else 1
    found = [
        NamedCase("edges of pages and top-k", case(edges, layers=chained, replays=replays)),
        NamedCase("eager", replace(case(edges, seed=1), captured=False)),
        NamedCase("padded rows", case((70, top_k + 1, 0), seed=2)),
        NamedCase(
            "block strides beyond the page",
            case((*edges[1:], 2 * top_k + 9), seed=3, block_rows=OTHER_LAYERS * page),
        ),
        NamedCase(
            "tied scores",
            case((top_k + 300, 2 * top_k, 65, 3 * top_k), seed=4, distinct_keys=top_k // 2),
        ),
        NamedCase("the longest context", case((context,), seed=5)),
        NamedCase(
            "many rows", case(_many(_largest(layer_class, arch, least) // least, top_k), seed=6)
        ),
    ]
    if least < 4 and (arch, 4) in layer_class.TABLE:
        four = _largest(layer_class, arch, 4) // 4
        found += [
            NamedCase("q 4, chained", case((4, top_k + 2, 0, 3000), 4, min(chained, 3), seed=7)),
            NamedCase("q 4, the longest context", case((context, 2), 4, seed=8)),
            NamedCase("q 4, many rows", case(_many(four, top_k), 4, seed=9)),
        ]
    if backend == "cuda":
        large = case((300, top_k + 70, 1), seed=10, cache_bytes=LARGE_CACHE)
        found.append(NamedCase("caches beyond 4 GiB", large))
    return tuple(found)


def _context(layer_class: type[Layer]) -> int:
    """Keys a request may have."""
    width = layer_class.MEMORY.buffers["scores"].shape[-1]
    return int(width) * (layer_class.RANKS if layer_class.CONTEXT_PARALLEL else 1)


def _largest(layer_class: type[Layer], arch: str, q: int) -> int:
    return max(layer_class.TABLE[(arch, q)])


def _many(requests: int, top_k: int) -> tuple[int, ...]:
    """Lengths of every size up to twice top_k, short and long in turn."""
    return tuple((request * 977 + 3) % (2 * top_k) for request in range(requests))


@dataclass(frozen=True)
class Agreement:
    """What two methods made of the same inputs: the error of the output, 0 where bits agree."""

    first: str
    second: str
    same_ops: bool
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        """False for NaN as well."""
        return self.error <= self.bound


def methods(layer_class: type[Layer], arch: str) -> tuple[str, ...]:
    """Every method of the table for that architecture, once."""
    sizes = (by_rows for (known, _), by_rows in layer_class.TABLE.items() if known == arch)
    return tuple(dict.fromkeys(method for by_rows in sizes for method in by_rows.values()))


def run_methods(layer_class: type[Layer], arch: str, backend: str) -> dict[str, Trial]:
    """The same step by every method of the table; under context parallelism on a device only."""
    if layer_class.CONTEXT_PARALLEL and backend != "cuda":
        return {}
    top_k = geometry_of(layer_class).top_k
    lengths = (top_k + 200, 1, 64, 2 * top_k, 0, 65, top_k, 2)
    # A build has what the table launches; here methods run at rows that it may not give them.
    where = {"backend": backend, "captured": backend == "cuda", "build": None}
    case = Case(lengths, 1, arch, seed=11, model=11, **where)
    return {
        method: run_case(layer_class, replace(case, method=method))[0]
        for method in methods(layer_class, arch)
    }


def agreements(layer_class: type[Layer], trials: Mapping[str, Trial]) -> tuple[Agreement, ...]:
    """Each method against the first one with the same ops, or else against the first one.

    Ops are the same where the same ones are launched with the same flags that choose what they
    compute; launch attributes and order make no difference.
    """
    first_with: dict[tuple[str, ...], str] = {}
    found = []
    for method in trials:
        ops = tuple(sorted(op.name for op in launches(layer_class, method)))
        other = first_with.setdefault(ops, method)
        same = other != method
        if not same and len(first_with) > 1:
            other = next(iter(first_with.values()))
        if other != method:
            found.append(_agreement(other, trials[other], method, trials[method], same_ops=same))
    return tuple(found)


def _agreement(first: str, one: Trial, second: str, other: Trial, *, same_ops: bool) -> Agreement:
    outs = one.ranks[0].out, other.ranks[0].out
    if same_ops:
        different = int((outs[0].view(torch.int16) != outs[1].view(torch.int16)).sum())
        return Agreement(first, second, True, float(different), 0.0)
    bound = float(declared_bounds()["out"])
    return Agreement(first, second, False, relative_error(outs[1], outs[0]), bound)
