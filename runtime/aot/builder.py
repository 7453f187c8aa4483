"""Builds a generated folder for one architecture: what is missing or stale, in parallel processes.

One build at a time writes into a folder; a second one waits, and then finds everything done.
Objects and the manifest replace what is there in one step each, so that a build that is stopped
leaves a folder in which everything that the manifest names is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

from kpipe.runtime.aot.maker import Made, Order, make, warm_up
from kpipe.runtime.aot.manifest import (
    BuildError,
    Manifest,
    ObjectEntry,
    manifest_of,
    read_manifest,
    write_manifest,
)
from kpipe.runtime.aot.state import CURRENT, states_of
from kpipe.runtime.aot.toolchain import linker
from kpipe.runtime.aot.wanted import FolderKernels, Wanted

LOCK = ".lock"
MAKING = ".making-"


@dataclass
class Outcome:
    """What a build has done: objects made and reused, what failed, and the bytes of all objects."""

    made: list[Made] = field(default_factory=list)
    reused: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)  # variant, error
    bytes: int = 0


def build(
    kernels: FolderKernels,
    wanted: Sequence[Wanted],
    out: Path,
    jobs: int,
    said: Callable[[str, int, int, float], None] = lambda what, number, total, seconds: None,
    waiting: Callable[[], None] = lambda: None,
) -> Outcome:
    """Makes every wanted object that is not in `out` as it should be, with up to `jobs` processes.

    `said` is told of each object: its variant, its number, of how many, seconds.  `waiting` is
    called where another build holds the folder.  Objects of `out` whose kernels have not changed
    stay; those of others are deleted.  Raises BuildError where `out` holds another pipeline or
    architecture, and for what this machine lacks.
    """
    program = linker()
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out, waiting):
        for left in out.glob(f"{MAKING}*"):  # of a build that was stopped
            shutil.rmtree(left)
        manifest = _manifest_before(out)
        refuse_other(kernels, manifest, out)
        states = states_of(wanted, manifest, out)
        shelf = _Shelf(kernels, out, manifest, [s.entry for s in states if s.entry])
        outcome = Outcome(reused=sum(state.kind == CURRENT for state in states))
        todo = [state.wanted for state in states if state.kind != CURRENT]
        with tempfile.TemporaryDirectory(prefix=MAKING, dir=out) as folder:
            orders = {one.id: _order(one, kernels.arch, program, Path(folder)) for one in todo}
            by_target = {orders[one.id].target: one for one in todo}
            for number, made in enumerate(_all_made(list(orders.values()), jobs), 1):
                one = by_target[made.order.target]
                changed = not kernels.is_current(kernels.entries[one.kernel])
                error = "its sources changed meanwhile" if changed else made.error
                if error:
                    outcome.failed.append((one.label, error))
                else:
                    shelf.put(one, made.order.target)
                    outcome.made.append(made)
                said(one.label, number, len(todo), made.seconds)
        shelf.close()
        outcome.bytes = sum(entry.bytes for entry in shelf.objects.values())
    return outcome


def refuse_other(kernels: FolderKernels, manifest: Manifest | None, out: Path) -> None:
    """Raises BuildError where `out` holds the build of another pipeline or architecture."""
    here = (kernels.layer_class.NAME, kernels.arch)
    if manifest is not None and (manifest.pipeline, manifest.arch) != here:
        raise BuildError(
            f"{out} holds the build of {manifest.pipeline} for {manifest.arch}, not of {here[0]} "
            f"for {here[1]}: name another folder with --out"
        )


def _manifest_before(out: Path) -> Manifest | None:
    """One that cannot be read is as good as none to a build that replaces it."""
    try:
        return read_manifest(out)
    except BuildError:
        return None


class _Shelf:
    """The objects of a build folder while it is written: what stays, and what is put there."""

    def __init__(
        self,
        kernels: FolderKernels,
        out: Path,
        manifest: Manifest | None,
        current: Sequence[ObjectEntry],
    ) -> None:
        self.out = out
        self.plain = {
            "pipeline": kernels.layer_class.NAME,
            "arch": kernels.arch,
            "dsl": kernels.dsl,
            "options": kernels.options,
        }
        self.kernels = dict(kernels.entries)
        kept = list(current)
        if manifest and (manifest.dsl, manifest.options) == (kernels.dsl, kernels.options):
            for name, entry in manifest.kernels.items():
                if name not in self.kernels and kernels.is_current(entry):
                    self.kernels[name] = entry
            unchanged = {n for n, e in self.kernels.items() if manifest.kernels.get(n) == e}
            kept += [e for e in manifest.objects.values() if e.kernel in unchanged]
        self.objects = manifest_of(self.plain, (), kept).objects

    def put(self, wanted: Wanted, made: Path) -> None:
        """Moves a new object into the folder and names it in the manifest."""
        data = made.read_bytes()
        os.replace(made, self.out / wanted.file)
        self.objects[wanted.id] = ObjectEntry(
            kernel=wanted.kernel,
            flags=wanted.flags,
            key=wanted.key,
            symbol=wanted.symbol,
            file=wanted.file,
            sha256=hashlib.sha256(data).hexdigest(),
            bytes=len(data),
            operands=wanted.operands,
            resident=wanted.resident,
        )
        self._write()

    def close(self) -> None:
        """Writes the manifest and deletes objects that it does not name."""
        self._write()
        named = {entry.file for entry in self.objects.values()}
        for path in self.out.glob("*.so"):
            if path.name not in named:
                path.unlink()

    def _write(self) -> None:
        manifest = manifest_of(self.plain, self.kernels.values(), self.objects.values())
        write_manifest(self.out, manifest)


def _order(one: Wanted, arch: str, program: str, folder: Path) -> Order:
    target = folder / one.file
    return Order(one.path, one.class_name, one.flags, arch, one.symbol, program, target)


def _all_made(orders: Sequence[Order], jobs: int) -> Iterator[Made]:
    """What comes of each order, as it is done."""
    if min(jobs, len(orders)) <= 1:
        yield from map(make, orders)
        return
    # Forked from a process that has the compiler but has not used it, nor any thread.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kpipe.runtime.aot.preload"])
    with ProcessPoolExecutor(min(jobs, len(orders)), context, warm_up) as pool:
        waiting = {pool.submit(make, order): order for order in orders}
        try:
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    order = waiting.pop(future)
                    yield future.result()
        except BrokenProcessPool:
            raise BuildError(
                f"a process that compiled kernels died, perhaps at {order.path.name}; what was "
                "made is kept: build again, with --jobs 1 to see which kernel it is"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _locked(out: Path, waiting: Callable[[], None]) -> Iterator[None]:
    with open(out / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
