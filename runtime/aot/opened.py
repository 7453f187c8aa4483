"""A build as a layer uses it: every kernel checked against the sources, every object by its bytes.

Nothing is compiled and the compiler is not imported.  What does not fit is refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kpipe.runtime.aot.manifest import (
    BuildError,
    KernelEntry,
    Manifest,
    ObjectEntry,
    label,
    read_manifest,
    variant_id,
)
from kpipe.runtime.aot.sources import digest_now, shown_sources
from kpipe.runtime.aot.toolchain import dsl_version, load_runtime_library
from kpipe.runtime.host.compile import options_for
from kpipe.runtime.op import CLUSTER_FLAGS

FOLDER = "build"
AUTO = "auto"
PLACE_OPTIONS = {"rank": "--ranks", "resident": "--resident"}
"""Flags that a place in a group decides, and the options of `kpipe build` for them."""
_LOADED: dict[tuple[str, str], Callable[..., None]] = {}
_LOCK = threading.Lock()


def default_folder(generated: Path, arch: str) -> Path:
    """Where the build of a generated folder for an architecture is put, and looked for."""
    return generated / FOLDER / arch


def open_build(
    pipeline: str, generated: Path, arch: str, build: str | Path | None
) -> OpenBuild | None:
    """The build that a layer is to use: a path, "auto" for the one in its generated folder.

    None for None, and for "auto" where that folder has none: then kernels are compiled.  Raises
    BuildError for one that is there and is another pipeline's, architecture's or compiler's.
    """
    if build is None:
        return None
    default = default_folder(generated, arch)
    folder = default if build == AUTO else Path(build)
    manifest = read_manifest(folder)
    repair = f"kpipe build {generated} --arch {arch}"
    repair += "" if folder == default else f" --out {folder}"
    if manifest is None:
        if build == AUTO:
            return None
        raise BuildError(f"{pipeline}: no build in {folder}; make it: {repair}")
    opened = OpenBuild(pipeline, generated, folder, manifest, repair)
    opened.refuse_other(arch)
    return opened


@contextmanager
def gathered(problems: list[str]) -> Iterator[None]:
    """Findings about a build that are raised inside go into `problems`, so that all are told."""
    try:
        yield
    except BuildError as error:
        if error.problems is None:
            raise
        problems += [problem for problem in error.problems if problem not in problems]


class OpenBuild:
    """A build folder whose manifest has been read.

    `repair` is the command that makes it anew, `otherwise` what else would help.
    """

    def __init__(
        self, pipeline: str, generated: Path, folder: Path, manifest: Manifest, repair: str
    ) -> None:
        self.pipeline, self.generated, self.folder = pipeline, generated, folder
        self.manifest, self.repair = manifest, repair
        found_by_itself = generated / FOLDER in folder.parents
        self.otherwise = ", or delete it to compile in prepare()" if found_by_itself else ""

    def refuse_other(self, arch: str) -> None:
        """Raises BuildError for another pipeline, architecture, compiler or its options."""
        built, here = self.manifest, dsl_version()
        if (built.pipeline, built.arch) != (self.pipeline, arch):
            raise self.error(
                [f"it is the build of {built.pipeline} for {built.arch}, not of this for {arch}"]
            )
        if here and here != built.dsl:
            raise self.error([f"built by CuTe DSL {built.dsl}, this machine has {here}"])
        if built.options != options_for(arch):
            raise self.error([f"built with `{built.options}`, not `{options_for(arch)}`"])

    def kernel(self, kernel: str) -> BuiltKernel:
        """A generated kernel ("module:Class") of the build.

        Raises BuildError where the build has none of that name, and where its sources are not
        those that it was built from.
        """
        name = kernel.partition(":")[0]
        entry = self.manifest.kernels.get(name)
        if entry is None:
            raise self.error([f"kernels/{name}.py was never built"])
        path = self.generated / "kernels" / f"{name}.py"
        changed = [n for n, digest in entry.sources.items() if digest_now(path, n) != digest]
        if changed:
            raise self.error([f"{name} is stale: {shown_sources(name, changed)} changed"])
        return BuiltKernel(self, entry)

    def error(self, problems: list[str]) -> BuildError:
        """What is wrong with this build, and the repair; `problems` is kept in the error."""
        shown = "; ".join(problems[:4])
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        error = BuildError(
            f"{self.pipeline}: the build in {self.folder} cannot be used: {shown}{more}; build "
            f"again: {self.repair}{self.otherwise}"
        )
        error.problems = problems
        return error


class BuiltKernel:
    """The variants of a kernel that a build holds."""

    def __init__(self, build: OpenBuild, entry: KernelEntry) -> None:
        self.fields = frozenset(entry.fields)
        self._build, self._entry = build, entry

    def variant(self, values: Mapping[str, Any]) -> BuiltVariant:
        """The object of these flags, others as declared; BuildError where the build has none."""
        flags = {name: self._entry.defaults.get(name) for name in self._entry.fields}
        flags.update(values)
        known = self._build.manifest.objects.get(variant_id(self._entry.name, flags))
        if known is None:
            what = f"{label(self._entry.name, flags)} was never built{self._place(flags)}"
            raise self._build.error([what])
        return BuiltVariant(self._build, known)

    def _place(self, flags: Mapping[str, Any]) -> str:
        """Options that the repair needs where the build is for other places in a group."""
        objects = self._build.manifest.objects.values()
        mine = [entry.flags for entry in objects if entry.kernel == self._entry.name]
        options = [
            f" {option} {flags[name]}"
            for name, option in PLACE_OPTIONS.items()
            if name in flags and flags[name] not in {known.get(name) for known in mine}
        ]
        return f" (add{''.join(options)})" if options and mine else ""


@dataclass(frozen=True)
class BuiltVariant:
    """An object of a build."""

    build: OpenBuild
    entry: ObjectEntry

    @property
    def operands(self) -> tuple[str, ...]:
        """Names in the order of the call."""
        return self.entry.operands

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster as far as the tile says; one that is fixed in the file is not known."""
        return max(int(self.entry.flags.get(name, 1)) for name in CLUSTER_FLAGS)

    def resident_ctas(self, rows: int) -> int:
        """CTAs that have to run at the same time; BuildError for rows that it was not built for."""
        if str(rows) not in self.entry.resident:
            raise self.build.error([f"{self.entry.label} was not built for {rows} rows"])
        return self.entry.resident[str(rows)]

    def load(self) -> Callable[..., None]:
        """The function of the object, loaded once per process.

        Raises BuildError for a file that is missing or damaged, or that does not load.
        """
        path = (self.build.folder / self.entry.file).resolve()
        with _LOCK:
            known = _LOADED.get((str(path), self.entry.sha256))
            if known is None:
                known = self._loaded(path)
                _LOADED[str(path), self.entry.sha256] = known
            return known

    def _loaded(self, path: Path) -> Callable[..., None]:
        if why := self.entry.damage(path.parent):
            raise self.build.error([f"{self.entry.label} is damaged: {why}"])
        import tvm_ffi

        load_runtime_library()
        try:
            return tvm_ffi.load_module(str(path))[self.entry.symbol]
        except (OSError, RuntimeError, AttributeError) as error:
            first = str(error).strip().partition("\n")[0]
            raise self.build.error([f"{self.entry.label} does not load: {first}"]) from error
