"""`kpipe bench`: times a generated layer on the GPU of this machine, whole and launch by launch.

Everything is timed inside CUDA graphs over several layers whose weights and caches together are
larger than the L2 cache.  A launch is timed alone, chained with itself over the layers, so that
the launches' times need not add up to the layer's: there they overlap.  How ranks that exchange
words are timed on one GPU: see bench_ranks.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kpipe.runtime import bench_against
from kpipe.runtime.bench_against import asks_for_comparison
from kpipe.runtime.bench_floor import BANDWIDTH, floor_us, launch_bytes
from kpipe.runtime.bench_inputs import TimedLayer, build
from kpipe.runtime.bench_peers import NOTE
from kpipe.runtime.bench_ranks import LOCKSTEP, AloneBench, RankBench
from kpipe.runtime.comm.mailbox import MailboxTimeout
from kpipe.runtime.evidence import made_of, versions
from kpipe.runtime.generated_folder import launches, load_layer
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError

REPLAYS = 50
ROUNDS = 5  # medians of that many replays each; how far they lie apart is the spread of a run
LAYERS = 4
REPEAT = 4
"""How often a launch is chained with itself on each layer."""


@dataclass(frozen=True)
class Timing:
    """Median microseconds of a layer, or of one of its launches, and what bounds it from below.

    `medians` are those of the rounds, in their order; `us` is the one in the middle.
    """

    pipeline: str
    what: str  # "layer", "lockstep" (all ranks of one GPU, divided by them), or the op
    method: str
    rows: int
    q: int
    context: int
    us: float
    floor_us: float
    medians: tuple[float, ...] = ()

    @property
    def share(self) -> float:
        """How much of the time the floor explains."""
        return self.floor_us / self.us


def graph_us(
    runs: Sequence[Callable[[], object]],
    replays: int = REPLAYS,
    before: Callable[[], object] | None = None,
    mode: str = "global",
) -> float:
    """Median microseconds of one of `runs`, all of them captured into one graph.

    `before` comes ahead of every replay and of the first run, and is not timed: a replay of a
    graph, so that the device does not wait for the host behind it.  `mode` is that of the capture's
    errors: "relaxed" where the runs launch from several threads.
    """
    return replay_us(captured(runs, before, mode), len(runs), replays, before)


def captured(
    runs: Sequence[Callable[[], object]],
    before: Callable[[], object] | None = None,
    mode: str = "global",
) -> torch.cuda.CUDAGraph:
    """One graph of all runs, which have run once before and have been replayed once.

    `before` and `mode` as in `graph_us`.
    """
    ahead: Callable[[], object] = before or _nothing
    ahead()
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = _captured(runs, mode)
    ahead()
    graph.replay()
    return graph


def graphed(run: Callable[[], object]) -> Callable[[], object]:
    """A replay of a run, which has run, so that the device does not wait for the host behind it.

    What the run reads has to stay where it is for as long as it is replayed.
    """
    return captured([run]).replay


def _captured(runs: Sequence[Callable[[], object]], mode: str) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        for run in runs:
            run()
    return graph


def replay_us(
    graph: torch.cuda.CUDAGraph,
    runs: int,
    replays: int = REPLAYS,
    before: Callable[[], object] | None = None,
) -> float:
    """Median microseconds of one of the `runs` of a graph, over that many replays."""
    ahead: Callable[[], object] = before or _nothing
    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(replays)]
    for start, end in pairs:
        ahead()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return middle([start.elapsed_time(end) * 1e3 for start, end in pairs]) / runs


def middle(times: Sequence[float]) -> float:
    """The median; of an even number the upper one of the two in the middle."""
    return sorted(times)[len(times) // 2]


def _medians(
    runs: Sequence[Callable[[], object]],
    before: Callable[[], object] | None = None,
    mode: str = "global",
) -> tuple[float, ...]:
    graph = captured(runs, before, mode)
    return tuple(replay_us(graph, len(runs), before=before) for _ in range(ROUNDS))


def time_layers(
    timed: Sequence[TimedLayer], context: int, before: Callable[[], object] | None = None
) -> Timing:
    """The whole layer, one behind the other; `before` as in `graph_us`."""
    medians = _medians([layer.run for layer in timed], before)
    return _of_layer(timed[0], "layer", context, medians)


def _of_layer(one: TimedLayer, what: str, context: int, medians: tuple[float, ...]) -> Timing:
    layer, q, rows = one.layer, one.step.q, one.step.rows
    method = layer.TABLE[layer.arch, q][layer.declared_rows(one.step)]
    names = [op.name for op in launches(type(layer), method)]
    needed = floor_us(type(layer), names, rows, q, context)
    where = (layer.NAME, what, method, rows, q, context)
    return Timing(*where, middle(medians), needed, medians)


def time_launches(
    timed: Sequence[TimedLayer],
    context: int,
    repeat: int = REPEAT,
    before: Callable[[], object] | None = None,
) -> list[Timing]:
    """Every launch of the method alone, chained with itself; the others are left out.

    `before` as in `graph_us`.
    """
    layer_class = type(timed[0].layer)
    if before is not None:
        before()
    method = [layer.run() for layer in timed][0]
    rows, q = timed[0].step.rows, timed[0].step.q
    found = []
    by_name = {op.name: op for op in launches(layer_class, method)}
    for op in by_name.values():
        saved = [(one.layer, leave_out_others(one.layer, op.name)) for one in timed]
        try:
            medians = _medians([one.run for _ in range(repeat) for one in timed], before)
        finally:
            for layer, others in saved:
                for name, ready in others.items():
                    setattr(layer, name, ready)
        needed = launch_bytes(layer_class, op.name, rows, q, context) / BANDWIDTH * 1e6
        where = (layer_class.NAME, op.name, method, rows, q, context)
        found.append(Timing(*where, middle(medians), needed, medians))
    return found


def leave_out_others(layer: Layer, kept: str) -> dict[str, Callable[..., object]]:
    """Every op of the layer but `kept` does nothing from here on; returns what they did."""
    others = {op.name: getattr(layer, op.name) for op in layer.OPS if op.name != kept}
    for name in others:
        setattr(layer, name, _nothing)
    return others


def _nothing(*operands: object, **named: object) -> None:
    """Stands in for the launches that are not timed."""


def table(timings: Sequence[Timing]) -> str:
    """Rows: what is timed; columns: token rows; cells: microseconds and percent of the floor."""
    columns = sorted({(t.context, t.q, t.rows) for t in timings})
    whats = list(dict.fromkeys(t.what for t in timings))
    cells = [["us / % of floor", *(f"{r} x q{q}, {c // 1024}K" for c, q, r in columns)]]
    for what in whats:
        line = [what]
        for context, q, rows in columns:
            hit = [
                t for t in timings if (t.what, t.context, t.q, t.rows) == (what, context, q, rows)
            ]
            line.append(f"{hit[0].us:.1f} / {100 * hit[0].share:.0f}" if hit else "")
        cells.append(line)
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def document(
    timings: Sequence[Timing], arch: str, folder: Path, layer_class: type[Layer] | None = None
) -> dict[str, object]:
    """What is written down: the machine, the versions, the kernels of `folder`, the times; of a
    class whose ranks exchange words, how many they are and what is not in the times."""
    layer = layer_class or load_layer(folder)
    exchanging = layer.CONTEXT_PARALLEL
    kernels = (path.stem for path in folder.glob("kernels/*.py") if path.stem != "__init__")
    return {
        "gpu": torch.cuda.get_device_name(),
        "arch": arch,
        "geometry": {**layer.MEMORY.geometry, "ranks": layer.RANKS},
        "kernels": made_of(folder, kernels),
        "versions": versions(),
        "replays": REPLAYS,
        "rounds": ROUNDS,
        "layers": LAYERS,
        **({"ranks": layer.RANKS, "note": NOTE} if exchanging else {}),
        "timings": [asdict(t) for t in timings],
    }


def main(argv: list[str]) -> int:
    """Run the command; returns 0, 1 (a poll gave up), 2 (usage) or 4 (no device here, or an op
    without a kernel).  With `--against` it is `bench_against` that runs."""
    if asks_for_comparison(argv):
        return bench_against.main(argv)
    parser = argparse.ArgumentParser(prog="kpipe bench", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="a generated folder, e.g. generated/dsa_tp")
    parser.add_argument("--rows", default="1,4,16,64", metavar="N,N,...", help="token rows")
    parser.add_argument("--q", type=int, default=1, metavar="N", help="query rows per request")
    parser.add_argument("--context", type=int, default=32768, metavar="N", help="keys per request")
    parser.add_argument("--layers-only", action="store_true", help="leave out single launches")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the times as JSON")
    parser.add_argument(
        "--against",
        metavar="OLD",
        help="compare with a file of --out: by what is measured now, or in place of FOLDER by a "
        "second file, for which no GPU is needed (--format json: for tools); exit 1 where "
        "something is slower",
    )
    options = parser.parse_args(argv)
    try:
        layer_class = load_layer(options.folder)
        counts = [int(word) for word in options.rows.split(",")]
    except (LayerError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(f"error: {layer_class.NAME}: this machine has no CUDA device", file=sys.stderr)
        return 4
    from kpipe.runtime.host.launch import arch_of

    timings: list[Timing] = []
    try:
        arch = arch_of(torch.device("cuda"))
        for found in _measure(layer_class, arch, counts, options):
            timings += found
            if options.out:  # what comes later may fail
                written = document(timings, arch, Path(options.folder), layer_class)
                options.out.write_text(json.dumps(written, indent=1) + "\n")
    except LayerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    except MailboxTimeout as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(timings))
    if layer_class.CONTEXT_PARALLEL:
        print(NOTE)
    return 0


def _measure(
    layer_class: type[Layer], arch: str, counts: list[int], options: argparse.Namespace
) -> Iterator[list[Timing]]:
    """The times at one number of rows after the other."""
    if layer_class.CONTEXT_PARALLEL:
        yield from _measure_ranks(layer_class, arch, counts, options)
        return
    for rows in counts:
        timed = build(
            layer_class, arch=arch, rows=rows, q=options.q, context=options.context, count=LAYERS
        )
        timings = [time_layers(timed, options.context)]
        if not options.layers_only:
            timings += time_launches(timed, options.context)
        yield timings


def _measure_ranks(
    layer_class: type[Layer], arch: str, counts: list[int], options: argparse.Namespace
) -> Iterator[list[Timing]]:
    """Rank 0 alone at every number of rows, and then, as every rank is compiled for it, all of
    them in lockstep."""
    alone = AloneBench(layer_class, arch, LAYERS, 1 if options.layers_only else REPEAT)
    for rows in counts:
        yield time_alone(alone, rows, options.q, options.context)
    del alone
    gc.collect()  # its layers and mailboxes, which know each other
    together = RankBench(layer_class, arch, LAYERS)
    for rows in counts:
        yield [time_lockstep(together, rows, options.q, options.context)]


def time_alone(alone: AloneBench, rows: int, q: int, context: int) -> list[Timing]:
    """A rank that finds its words at once: its layer, and its launches where layers are repeated.

    A launch alone finds those too that other launches of its rank would have stored.  Raises
    MailboxTimeout, which says what was missing, where a poll has given up all the same.
    """
    with _naming(alone.peers.timeouts):
        timed = alone.ready(rows, q, context)
        whole = timed[: alone.count]
        found = [time_layers(whole, context, graphed(alone.peers.words(whole)))]
        if alone.repeat > 1:
            words = graphed(alone.peers.words(timed, own=True))
            found += time_launches(timed, context, 1, words)
    return found


def time_lockstep(together: RankBench, rows: int, q: int, context: int) -> Timing:
    """All ranks in lockstep, divided by the ranks; raises MailboxTimeout as `time_alone` does."""
    with _naming(together.timeouts):
        ready = together.ready(rows, q, context)
        found = _medians([together.in_lockstep(ready)], mode="relaxed")
        medians = tuple(us / (together.count * together.ranks) for us in found)
    return _of_layer(ready[0][0], LOCKSTEP, context, medians)


@contextmanager
def _naming(timeouts: Callable[[], Iterable[Exception]]) -> Iterator[None]:
    """What a poll that has given up has noted is raised in place of the device's error."""
    try:
        yield
    except RuntimeError as error:
        for timeout in timeouts():
            raise timeout from error
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
