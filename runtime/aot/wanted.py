"""The objects that a generated folder needs on an architecture: all that its tables can launch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kpipe.runtime.aot.manifest import BuildError, KernelEntry, digest_of, label, variant_id
from kpipe.runtime.aot.sources import sources_of
from kpipe.runtime.comm.device_comm import SMS_PER_GPC
from kpipe.runtime.host.compile import flags_of, options_for
from kpipe.runtime.host.kernel_file import FileVariant, polls, publishes
from kpipe.runtime.host.launch import unbound_op

if TYPE_CHECKING:
    from kpipe.runtime.layer import Layer
    from kpipe.runtime.op import Call

MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}
"""Of an H200 and of a B200: CTAs that run at the same time for sure."""


@dataclass(frozen=True)
class Place:
    """A rank of a group, as far as it decides flags: its number, and the CTAs it can count on.

    Its device is its own: of ranks that share one, clusters may have to be narrower than built.
    """

    rank: int
    resident: int
    widest_cluster: int = SMS_PER_GPC


@dataclass(frozen=True)
class Wanted:
    """One object to be: a kernel of the folder with its flags fixed, and what it depends on."""

    kernel: str
    class_name: str
    path: Path
    flags: Mapping[str, Any]
    operands: tuple[str, ...]
    resident: Mapping[str, int]
    parts: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Digest of everything that the object is made from."""
        return digest_of(self.parts)

    @property
    def symbol(self) -> str:
        """The name that it exports, its own."""
        return f"kpipe_{self.kernel}_{self.key[:32]}"

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.kernel}-{self.key[:32]}.so"

    @property
    def id(self) -> str:
        """The name of the variant in a manifest."""
        return variant_id(self.kernel, self.flags)

    @property
    def label(self) -> str:
        """The variant in words."""
        return label(self.kernel, self.flags)


class FolderKernels:
    """The kernels of a generated layer and their variants for one architecture and compiler.

    Raises BuildError for an architecture that the layer was not generated for.
    """

    def __init__(self, layer_class: type[Layer], folder: Path, arch: str, dsl: str) -> None:
        known = list(dict.fromkeys(target for target, _ in layer_class.TABLE))
        if arch not in known:
            raise BuildError(
                f"{layer_class.NAME}: no plan for {arch}; generated for {', '.join(known)}"
            )
        self.layer_class, self.folder, self.arch, self.dsl = layer_class, folder, arch, dsl
        self.options = options_for(arch)
        self.entries: dict[str, KernelEntry] = {}

    def wanted(
        self,
        only: Sequence[str] = (),
        places: Iterable[Place] = (),
        calls: Sequence[Call] | None = None,
    ) -> list[Wanted]:
        """Every distinct object, in the order of kernels and rows; with `only` of these kernels.

        `places` are the ranks of a layer that exchanges words; it is not asked for by others.
        `calls` are launches of the layer, all that its tables can launch without them.
        Raises BuildError that lists the kernels where `only` names none of them.
        """
        calls = self.layer_class().calls(self.arch) if calls is None else calls
        launched = {call.op for call in calls}
        ops = [op for op in self.layer_class.OPS if op.kernel and op.name in launched]
        names = sorted({op.kernel.partition(":")[0] for op in ops})
        if unknown := [name for name in only if name not in names]:
            raise BuildError(
                f"{self.layer_class.NAME} launches no kernel `{unknown[0]}` on {self.arch}; it "
                f"launches {', '.join(names)}"
            )
        found: dict[str, tuple[str, FileVariant, dict[str, int]]] = {}
        for op in sorted(ops, key=lambda op: op.kernel):
            if only and op.kernel.partition(":")[0] not in only:
                continue
            for place in places if self.layer_class.CONTEXT_PARALLEL else (None,):
                ready = unbound_op(self.layer_class, op, self.arch, place)
                for call in calls:
                    for variant in ready.variants(call) if call.op == op.name else ():
                        self._note(found, op.kernel, variant, call.rows)
        return [self._wanted(*one) for one in found.values()]

    def is_current(self, entry: KernelEntry) -> bool:
        """Whether a kernel of a manifest still stands in the folder as it was built."""
        path = self._path(entry.name)
        return path.is_file() and sources_of(path) == entry.sources

    def _note(
        self,
        found: dict[str, tuple[str, FileVariant, dict[str, int]]],
        kernel: str,
        variant: FileVariant,
        rows: int,
    ) -> None:
        name, _, class_name = kernel.partition(":")
        if name not in self.entries:
            self.entries[name] = self._entry(name, class_name, type(variant.kernel))
        one = found.setdefault(
            variant_id(name, dict(flags_of(variant.kernel))), (kernel, variant, {})
        )
        if polls(variant.operands) and publishes(variant.operands):
            one[2][str(rows)] = variant.resident_ctas(rows)

    def _entry(self, name: str, class_name: str, kernel_class: type) -> KernelEntry:
        declared = fields(kernel_class)
        names = tuple(f.name for f in declared)
        defaults = {f.name: f.default for f in declared if f.default is not MISSING}
        return KernelEntry(name, class_name, sources_of(self._path(name)), defaults, names)

    def _path(self, name: str) -> Path:
        return self.folder / "kernels" / f"{name}.py"

    def _wanted(self, kernel: str, variant: FileVariant, resident: dict[str, int]) -> Wanted:
        name, _, class_name = kernel.partition(":")
        flags = dict(flags_of(variant.kernel))
        parts = {
            "kernel": f"{name}:{class_name}",
            "sources": dict(self.entries[name].sources),
            "flags": flags,
            "operands": repr(variant.specs),
            "arch": self.arch,
            "dsl": self.dsl,
            "options": self.options,
        }
        path = self._path(name)
        return Wanted(name, class_name, path, flags, variant.operands, resident, parts)
