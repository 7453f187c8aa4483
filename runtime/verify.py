"""`kpipe verify`: run a generated layer on seeded inputs and compare every stage with the oracle.

On a GPU that the layer is generated for, everything that has to hold is run, and the evidence is
written beside the generated code; options that describe one case run that case alone.  Without
such a GPU one case runs on the CPU, or with --suite all of them.  With --processes every rank is a
process, on a GPU of its own or on the CPU: see verify_processes.py.
Runs without the generator's libraries: `python -m kpipe.runtime.verify FOLDER`.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from kpipe.runtime import verify_processes
from kpipe.runtime.aot.opened import AUTO
from kpipe.runtime.case_report import Report, reported
from kpipe.runtime.case_text import as_json, as_text, raised_text
from kpipe.runtime.generated_folder import geometry_of, load_layer, stages
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.trial import Case
from kpipe.runtime.verify_all import as_json as suite_as_json
from kpipe.runtime.verify_all import as_text as suite_as_text
from kpipe.runtime.verify_all import verify_all, write_evidence
from kpipe.runtime.verify_suite import NamedCase, suite
from kpipe.runtime.watch import watched

FINE, FINDINGS, USAGE, ENVIRONMENT = 0, 1, 2, 4


class UsageError(ValueError):
    """What was asked for cannot be run."""


def main(argv: list[str]) -> int:
    """Run the command; returns 0, 1 (beyond a bound), 2 (usage) or 4 (no such backend here)."""
    try:
        options = _parser().parse_args(argv)
    except UsageError as error:
        print(f"error: {error}; see --help", file=sys.stderr)
        return USAGE
    except SystemExit:  # --help
        return FINE
    if options.concurrent:  # before CUDA starts: a queue that waits may not stand in a rank's way
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    try:
        layer_class = load_layer(options.folder)
        case = _case(layer_class, options)
        if options.processes:
            return _run_processes(layer_class, case, options, argv)
        if _wants_suite(layer_class, options, case):
            return _run_suite(layer_class, case, options)
        if options.backend == "cuda" and (reason := _cannot_run(layer_class, case)):
            print(f"error: {reason}", file=sys.stderr)
            return ENVIRONMENT
        with watched() if case.concurrent else nullcontext():
            report = verify(layer_class, case)
    except (UsageError, LayerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except (ValueError, RuntimeError, AssertionError) as error:  # out of the layer's own ops
        print(raised_text(error, options.format))
        return FINDINGS
    print(as_json(report) if options.format == "json" else as_text(report))
    return FINE if report.ok else FINDINGS


def verify(layer_class: type[Layer], case: Case) -> Report:
    """Run a case and compare all its layers.

    Raises LayerError for what the layer refuses, an unknown stage included.
    """
    size, q = _declared_rows(layer_class, case), case.q
    stages(layer_class, layer_class.TABLE[(case.arch, q)][size], case.stop_after)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, min(threads, 8)))
    try:
        return reported(layer_class, case)
    finally:
        torch.set_num_threads(threads)


def default_lengths(top_k: int, q: int) -> tuple[int, ...]:
    """Context lengths around the interesting places.

    More keys than top_k, one key, a page, a page and one, exactly top_k, none; q is their least.
    """
    wanted = (top_k + top_k // 4 + 7, 1, 64, 65, top_k, 0)
    return tuple(length if length == 0 else max(length, q) for length in wanted)


# -- from the command line to a case ------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kpipe verify", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="a generated folder, e.g. generated/dsa_tp")
    parser.add_argument(
        "--backend",
        choices=("auto", "reference", "cuda"),
        default="auto",
        help="auto: a GPU if fit",
    )
    parser.add_argument("--suite", action="store_true", help="all cases; the default on a GPU")
    parser.add_argument(
        "--launches", action="store_true", help="on a GPU: every launch, without whole layers"
    )
    parser.add_argument(
        "--again", action="store_true", help="also launches with a record in a folder beside"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="evidence [default: in FOLDER]")
    parser.add_argument(
        "--virtual-ranks", type=int, metavar="N", help="context-parallel: all; else how many"
    )
    parser.add_argument(
        "--processes", action="store_true", help="each rank a process, on a GPU of its own"
    )
    parser.add_argument(
        "--transport",
        choices=("auto", "symmetric", "ipc"),
        default="auto",
        help="of --processes: memory of other GPUs",
    )
    parser.add_argument("--stop-after", default="", metavar="STAGE")
    parser.add_argument("--arch", default="", metavar="A", help="default: the first one declared")
    parser.add_argument("--q", type=int, metavar="N", help="query rows per request [default: 1]")
    parser.add_argument("--lengths", metavar="L,L,...", help="context lengths, new rows included")
    parser.add_argument("--captured", action="store_true", help="all layers in one CUDA graph")
    parser.add_argument(
        "--concurrent", action="store_true", help="ranks of one device at once, not in lockstep"
    )
    parser.add_argument(
        "--late", type=int, metavar="SEED", help="further runs, a random rank late in each layer"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="chained layers [default: 1]")
    parser.add_argument("--replays", type=int, metavar="N", help="of --captured [default: 1]")
    parser.add_argument("--seed", type=int, metavar="N", help="of the inputs [default: 0]")
    parser.add_argument("--build", metavar="DIR", help="kernels [default: as prepare() has them]")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    return parser


def _case(layer_class: type[Layer], options: argparse.Namespace) -> Case:
    here = _arch_here(layer_class) if options.backend != "reference" else ""
    backend = options.backend
    if backend == "auto":
        backend = "cuda" if here and options.arch in ("", here) else "reference"
    arch = options.arch or here or next(iter(layer_class.TABLE))[0]
    if all(arch != known for known, _ in layer_class.TABLE):
        archs = ", ".join(dict.fromkeys(known for known, _ in layer_class.TABLE))
        raise UsageError(f"{layer_class.NAME}: no plan for {arch}; generated for {archs}")
    queries = [q for known, q in layer_class.TABLE if known == arch]
    q = options.q if options.q is not None else queries[0]
    layers = 1 if options.layers is None else options.layers
    if layers < 1:
        raise UsageError(f"--layers {layers}: at least one layer")
    _refuse(layer_class, options, backend)
    return Case(
        _lengths(layer_class, options.lengths, q),
        q=q,
        arch=arch,
        seed=options.seed or 0,
        layers=layers,
        only_ranks=_only_ranks(layer_class, options.virtual_ranks),
        stop_after=options.stop_after,
        backend=backend,
        captured=options.captured,
        concurrent=options.concurrent,
        replays=options.replays or 1,
        late=options.late,
        processes=options.processes,
        build=options.build or AUTO,
    )


def _refuse(layer_class: type[Layer], options: argparse.Namespace, backend: str) -> None:
    """Raises UsageError for options that do not go together."""
    if options.captured and backend != "cuda":
        raise UsageError("--captured needs --backend cuda")
    if options.concurrent and not (backend == "cuda" and layer_class.CONTEXT_PARALLEL):
        raise UsageError("--concurrent needs --backend cuda and a context-parallel layer")
    if options.late is not None and (refusal := _not_late(layer_class, options, backend)):
        raise UsageError(refusal)
    if options.build and backend != "cuda":
        raise UsageError("--build: the reference backend runs no kernels")
    if options.replays is not None and not (options.captured and options.replays > 0):
        raise UsageError(f"--replays {options.replays}: at least one, of --captured")
    if options.processes and (refusal := verify_processes.refusal(layer_class, options)):
        raise UsageError(refusal)
    whole = next((name for name in ("captured", "concurrent") if getattr(options, name)), "")
    whole = "late" if options.late is not None else whole
    whole = whole or ("processes" if options.processes and backend == "cuda" else "")
    if whole and options.stop_after:
        raise UsageError(f"--{whole} runs whole layers; leave out --stop-after")
    if options.stop_after and (options.layers or 1) > 1:
        raise UsageError("--stop-after cuts off the output that the next of --layers reads")


def _not_late(layer_class: type[Layer], options: argparse.Namespace, backend: str) -> str:
    """Why no rank can be late here; empty where one can."""
    if not layer_class.CONTEXT_PARALLEL:
        return f"--late: the ranks of {layer_class.NAME} exchange nothing"
    if options.captured or options.processes:
        word = "captured" if options.captured else "processes"
        return f"--late runs eagerly, the ranks in one process; leave out --{word}"
    if backend == "cuda" and not options.concurrent:
        return "--late needs --concurrent on a GPU: in lockstep nobody can be late"
    return ""


def _run_processes(
    layer_class: type[Layer], case: Case, options: argparse.Namespace, argv: list[str]
) -> int:
    """The case, or the suite, with a rank a process: started here, or one of them already."""
    if case.backend == "cuda" and (reason := _cannot_run(layer_class, case)):
        verify_processes.complain(reason)
        return ENVIRONMENT
    cases: tuple[NamedCase, ...] = (NamedCase("", case),)
    if _wants_suite(layer_class, options, case):
        cases = tuple(
            replace(named, case=replace(named.case, processes=True))
            for named in suite(layer_class, case.arch, case.backend)
        )
    return verify_processes.run(layer_class, cases, options, argv)


ONE_CASE = (
    "virtual_ranks",
    "stop_after",
    "q",
    "lengths",
    "captured",
    "concurrent",
    "late",
    "layers",
    "replays",
    "seed",
    "build",
)
"""Options that describe a case; with one of them that case runs, and not the suite."""


def _wants_suite(layer_class: type[Layer], options: argparse.Namespace, case: Case) -> bool:
    named = [name for name in ONE_CASE if _given(getattr(options, name))]
    if layer_class.CONTEXT_PARALLEL and "virtual_ranks" in named:
        named.remove("virtual_ranks")  # all of them run in any case
    whole = "suite" if options.suite else "launches" if options.launches else ""
    if whole and named:
        word = named[0].replace("_", "-")
        raise UsageError(f"--{whole} runs its own cases; leave out --{word}")
    return bool(whole) or (case.backend == "cuda" and not named)


def _given(value: object) -> bool:
    """Whether an option has been given; a seed of 0 has."""
    return value is not None and value is not False and value != ""


def _run_suite(layer_class: type[Layer], case: Case, options: argparse.Namespace) -> int:
    """Everything that has to hold; on a GPU the evidence is written where all of it does."""
    if options.launches and case.backend != "cuda":
        raise UsageError("--launches needs a GPU that the layer is generated for")
    cuda = case.backend == "cuda" and not options.launches
    if cuda and (reason := _cannot_run(layer_class, case)):
        print(f"error: {reason}", file=sys.stderr)
        return ENVIRONMENT
    folder = Path(options.folder)
    report = verify_all(
        layer_class,
        folder,
        case.arch,
        case.backend,
        lambda line: print(f"{line} ...", file=sys.stderr),
        again=options.again,
        layers=not options.launches,
        launched=lambda so_far: write_evidence(so_far, folder, options.out),
    )
    print(suite_as_json(report) if options.format == "json" else suite_as_text(report))
    if case.backend == "cuda":
        path = write_evidence(report, folder, options.out)
        print(f"evidence: {path}", file=sys.stderr)
    return FINE if report.ok else FINDINGS


def _arch_here(layer_class: type[Layer]) -> str:
    """The architecture of this machine's GPU, where the layer is generated for it; else empty."""
    if not torch.cuda.is_available():
        return ""
    from kpipe.runtime.host.launch import arch_of

    found = arch_of(torch.device("cuda"))
    return found if any(known == found for known, _ in layer_class.TABLE) else ""


def _lengths(layer_class: type[Layer], text: str | None, q: int) -> tuple[int, ...]:
    if text is None:
        return default_lengths(geometry_of(layer_class).top_k, q)
    words = [word.strip() for word in text.split(",")]
    wrong = next((word for word in words if not word.isascii() or not word.isdigit()), None)
    if wrong is not None:
        raise UsageError(f"--lengths: {wrong!r} is not a number of tokens")
    lengths = tuple(map(int, words))
    width = layer_class.MEMORY.buffers["scores"].shape[-1]
    if isinstance(width, int) and max(lengths) > width:
        raise UsageError(
            f"--lengths: {max(lengths)} tokens, {layer_class.NAME} is generated for {width}"
        )
    return lengths


def _only_ranks(layer_class: type[Layer], wanted: int | None) -> tuple[int, ...]:
    ranks = layer_class.RANKS
    if layer_class.CONTEXT_PARALLEL:
        if wanted not in (None, ranks):
            raise UsageError(
                f"--virtual-ranks {wanted}: {layer_class.NAME} is generated for {ranks} ranks "
                "that exchange data; all of them have to run"
            )
        return ()
    if wanted is not None and not 1 <= wanted <= ranks:
        raise UsageError(
            f"--virtual-ranks {wanted}: {layer_class.NAME} is generated for {ranks} ranks"
        )
    return tuple(range(wanted or 1))


def _declared_rows(layer_class: type[Layer], case: Case) -> int:
    layer = layer_class()
    layer.arch = case.arch
    return layer.declared_rows_of(len(case.lengths) * case.q, case.q)


def _cannot_run(layer_class: type[Layer], case: Case) -> str:
    """Why the layer does not run on a device of this machine; empty where it does."""
    layer = layer_class()
    layer.arch = case.arch
    try:
        layer.refuse_missing_kernels()
    except LayerError as error:
        return str(error)
    if not torch.cuda.is_available():
        return f"{layer_class.NAME}: this machine has no CUDA device"
    from kpipe.runtime.host.launch import arch_of

    found = arch_of(torch.device("cuda"))
    return "" if found == case.arch else f"{layer_class.NAME}: the device is {found}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
