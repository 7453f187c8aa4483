"""The manifest of a build: which objects there are, and everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kpipe.runtime.metadata import LayerError

SCHEMA = "kpipe.build/1"
FILE_NAME = "manifest.json"
Flags = Mapping[str, bool | int | float | str]


class BuildError(LayerError):
    """A build that cannot be used as it stands; the text names what is wrong and the repair.

    `problems` are the single findings of a text that joins several.
    """

    problems: list[str] | None = None


@dataclass(frozen=True)
class KernelEntry:
    """A generated kernel file: its class, digests of its sources, and its flags as declared."""

    name: str
    class_name: str
    sources: Mapping[str, str]
    defaults: Flags
    fields: tuple[str, ...]


@dataclass(frozen=True)
class ObjectEntry:
    """One object: a kernel with its flags fixed, and what a launch has to know about it.

    `operands` are names in the order of the call, empty for one that the flags leave out;
    `resident` are CTAs that have to run at the same time, by rows, of a kernel that publishes and
    polls; `sha256` and `bytes` are those of the file; `key` is the digest of all that it was
    made from.
    """

    kernel: str
    flags: Flags
    key: str
    symbol: str
    file: str
    sha256: str
    bytes: int
    operands: tuple[str, ...]
    resident: Mapping[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The variant in words."""
        return label(self.kernel, self.flags)

    def damage(self, folder: Path) -> str:
        """What is wrong with the file in that build folder; empty for nothing."""
        try:
            data = (folder / self.file).read_bytes()
        except OSError as error:
            return f"{self.file}: {error.strerror or error}"
        if hashlib.sha256(data).hexdigest() != self.sha256:
            return f"{self.file}: {len(data)} bytes that are not those of the build"
        return ""


@dataclass(frozen=True)
class Manifest:
    """The objects of a generated folder for one architecture, by one version of the compiler."""

    pipeline: str
    arch: str
    dsl: str
    options: str
    kernels: Mapping[str, KernelEntry]
    objects: Mapping[str, ObjectEntry]  # by `variant_id`


def label(kernel: str, flags: Flags) -> str:
    """A variant in words: the kernel's name and its flags."""
    shown = (f"{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in flags.items())
    return " ".join([kernel, *shown])


def variant_id(kernel: str, flags: Flags) -> str:
    """One word for a kernel with these flags, whatever their order."""
    return json.dumps([kernel, sorted(flags.items())])


def digest_of(parts: Any) -> str:
    """sha256 (hex) of a value in JSON, independent of the order of keys."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a build, None where there is none.  Raises BuildError for one that is
    damaged or of another version of kpipe."""
    path = folder / FILE_NAME
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BuildError(f"the manifest {path} cannot be read: {error}") from None
    try:
        if data["schema"] != SCHEMA:
            raise BuildError(f"the manifest {path} is {data['schema']!r}, not {SCHEMA!r}")
        kernels = [
            KernelEntry(**{**entry, "fields": tuple(entry["fields"])}) for entry in data["kernels"]
        ]
        objects = [
            ObjectEntry(**{**entry, "operands": tuple(entry["operands"])})
            for entry in data["objects"]
        ]
        plain = {name: str(data[name]) for name in ("pipeline", "arch", "dsl", "options")}
        return manifest_of(plain, kernels, objects)
    except (KeyError, TypeError, AttributeError) as error:
        raise BuildError(f"the manifest {path} is not one of a build: {error!r}") from None


def manifest_of(
    plain: Mapping[str, str], kernels: Iterable[KernelEntry], objects: Iterable[ObjectEntry]
) -> Manifest:
    """A manifest with its entries by name, in order."""
    ordered = sorted(objects, key=lambda entry: variant_id(entry.kernel, entry.flags))
    return Manifest(
        **plain,
        kernels={entry.name: entry for entry in sorted(kernels, key=lambda entry: entry.name)},
        objects={variant_id(entry.kernel, entry.flags): entry for entry in ordered},
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the manifest of a build in one step."""
    head = {"schema": SCHEMA}
    head |= {name: getattr(manifest, name) for name in ("pipeline", "arch", "dsl", "options")}
    parts = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    for name in ("kernels", "objects"):
        entries = getattr(manifest, name).values()
        lines = ",\n".join(f"  {json.dumps(asdict(entry))}" for entry in entries)
        parts.append(f' "{name}": [\n{lines}\n ]')
    replace_file(folder / FILE_NAME, ("{\n" + ",\n".join(parts) + "\n}\n").encode())


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file so that nobody sees part of it; what was there stays until then."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
