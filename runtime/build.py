"""`kpipe build`: compiles every kernel that a generated folder can launch, without a GPU.

The objects go to FOLDER/build/ARCH beside a manifest; `prepare()` of the layer loads them and
compiles nothing.  What is there already and made from the same sources is kept.
Runs without the generator's libraries: `python -m kpipe.runtime.build FOLDER --arch ARCH`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kpipe.runtime.aot.builder import Outcome
    from kpipe.runtime.aot.wanted import FolderKernels, Place, Wanted
    from kpipe.runtime.layer import Layer

FINE, FINDINGS, USAGE, DRIFT, ENVIRONMENT, INTERRUPTED = 0, 1, 2, 3, 4, 130


class Said:
    """What the command says while it works: plain lines, or one JSON object a line for a bar."""

    def __init__(self, events: bool) -> None:
        self.events = events

    def item(self, what: str, number: int, total: int, seconds: float) -> None:
        """An object is done."""
        if self.events:
            self._event(what=what, number=number, total=total, seconds=round(seconds, 3))
        else:
            print(f"{number}/{total}  {what}  {seconds:.1f} s", file=sys.stderr)

    def line(self, text: str) -> None:
        """Something else that a person should know."""
        if self.events:
            self._event(line=text)
        else:
            print(text, file=sys.stderr)

    def result(self, text: str) -> None:
        """What the command is about."""
        if self.events:
            self._event(result=text)
        else:
            print(text)

    def _event(self, **values: Any) -> None:
        print(json.dumps(values), flush=True)


def main(argv: list[str]) -> int:
    """Run the command.

    Returns 0; 1 where a kernel does not compile; 2 (usage); 3 (--check: something is missing,
    stale or damaged) or 4 (no compiler or linker on this machine).
    """
    options = _options(argv)
    if isinstance(options, int):
        return options
    said = Said(options.events)
    if lacking := [name for name in ("torch", "tvm_ffi", "cutlass") if find_spec(name) is None]:
        said.line(f"error: {', '.join(lacking)} not installed: pip install 'kpipe-dsl[gpu]'")
        return ENVIRONMENT
    from kpipe.runtime.aot.opened import default_folder
    from kpipe.runtime.aot.toolchain import ToolMissing, dsl_version
    from kpipe.runtime.metadata import LayerError

    try:
        kernels, wanted = _wanted(options, dsl_version())
        out = options.out or default_folder(Path(options.folder), options.arch)
        if not options.check:
            return _build(kernels, wanted, out, options, said)
        return _check(kernels, wanted, out, options, said)
    except ToolMissing as error:
        said.line(f"error: {error}")
        return ENVIRONMENT
    except (LayerError, ValueError) as error:
        said.line(f"error: {error}")
        return USAGE
    except OSError as error:
        said.line(f"error: {error.filename}: {error.strerror or error}")
        return USAGE
    except KeyboardInterrupt:
        said.line("interrupted; what was made is kept")
        return INTERRUPTED


def _wanted(options: argparse.Namespace, dsl: str) -> tuple[FolderKernels, list[Wanted]]:
    from kpipe.runtime.aot.wanted import FolderKernels
    from kpipe.runtime.generated_folder import load_layer

    layer_class = load_layer(options.folder)
    kernels = FolderKernels(layer_class, Path(options.folder), options.arch, dsl)
    places = _places(layer_class, options) if layer_class.CONTEXT_PARALLEL else []
    only = tuple(filter(None, options.only.split(",")))
    return kernels, kernels.wanted(only, places)


def _places(layer_class: type[Layer], options: argparse.Namespace) -> list[Place]:
    """The ranks that are built for; BuildError for one that the group does not have."""
    from kpipe.runtime.aot.manifest import BuildError
    from kpipe.runtime.aot.wanted import MULTIPROCESSORS, Place

    known = [str(rank) for rank in range(layer_class.RANKS)]
    ranks = options.ranks.split(",") if options.ranks else known
    if wrong := [rank for rank in ranks if rank not in known]:
        raise BuildError(
            f"--ranks: {layer_class.NAME} has the ranks 0 to {known[-1]}, no `{wrong[0]}`"
        )
    resident = options.resident or MULTIPROCESSORS.get(options.arch)
    if resident is None:
        raise BuildError(f"say --resident N: how many multiprocessors a GPU of {options.arch} has")
    return [Place(int(rank), resident) for rank in ranks]


def _build(
    kernels: FolderKernels,
    wanted: list[Wanted],
    out: Path,
    options: argparse.Namespace,
    said: Said,
) -> int:
    from kpipe.runtime.aot.builder import build

    started = time.monotonic()

    def waiting() -> None:
        said.line(f"another build is writing {out}; waiting for it")

    outcome = build(kernels, wanted, out, options.jobs, said.item, waiting)
    for what, error in outcome.failed:
        said.line(f"error: {what} does not compile: {error}")
    said.result(_summary(kernels, outcome, out, time.monotonic() - started))
    return FINDINGS if outcome.failed else FINE


def _summary(kernels: FolderKernels, outcome: Outcome, out: Path, seconds: float) -> str:
    failed = f", {len(outcome.failed)} failed" if outcome.failed else ""
    return (
        f"{out}: {len(outcome.made)} compiled, {outcome.reused} reused{failed}, "
        f"{outcome.bytes / 1e6:.1f} MB, {seconds:.1f} s; {kernels.arch}, CuTe DSL {kernels.dsl}"
    )


def _check(
    kernels: FolderKernels,
    wanted: list[Wanted],
    out: Path,
    options: argparse.Namespace,
    said: Said,
) -> int:
    """Says which objects are not as they should be, and why."""
    from kpipe.runtime.aot.builder import refuse_other
    from kpipe.runtime.aot.manifest import BuildError, read_manifest
    from kpipe.runtime.aot.state import states_of

    try:
        manifest = read_manifest(out)
    except BuildError as error:
        said.line(f"error: {error}")
        return DRIFT
    refuse_other(kernels, manifest, out)
    states = states_of(wanted, manifest, out)
    wrong = [state for state in states if state.kind != "current"]
    width = max((len(state.kind) for state in wrong), default=0)
    for state in wrong:
        said.result(f"{state.kind:<{width}}  {state.wanted.label}: {state.why}")
    if not wrong:
        said.result(f"{out}: all {len(states)} objects are current")
        return FINE
    again = f"kpipe build {options.folder} --arch {options.arch}"
    again += f" --out {options.out}" if options.out else ""
    said.line(f"{len(wrong)} of {len(states)} objects are not current; to build them: {again}")
    return DRIFT


def _options(argv: list[str]) -> argparse.Namespace | int:
    """The options, or the exit code of --help and of a wrong one."""
    parser = argparse.ArgumentParser(prog="kpipe build", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="a generated folder, e.g. generated/dsa_tp")
    parser.add_argument("--arch", required=True, metavar="A", help="target, e.g. sm_90a")
    parser.add_argument("--out", type=Path, metavar="DIR", help="[default: FOLDER/build/ARCH]")
    parser.add_argument("--only", default="", metavar="KERNEL,...", help="these kernels alone")
    parser.add_argument("--check", action="store_true", help="list what is not current, exit 3")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, metavar="N", help="[default: cores]")
    parser.add_argument("--ranks", default="", metavar="N,...", help="of a group [default: all]")
    parser.add_argument(
        "--resident",
        type=int,
        default=0,
        metavar="N",
        help="CTAs that a rank of a group can "
        "count on [default: the multiprocessors of the usual GPU of ARCH]",
    )
    parser.add_argument("--events", action="store_true", help=argparse.SUPPRESS)
    try:
        return parser.parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
