"""What was found of generated kernels on a GPU, in the form that `kpipe check` reads.

A document is for one GPU.  It names the bytes that ran: every kernel file but for its first line,
which names its spec, and the device building blocks that the file imports, directly or through one
another, all by sha256.  Its records are one launch each: kernel, flags, rows, query rows a request,
how it was launched, error and bound.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DEVICE = Path(__file__).parent / "device"
PACKAGE = "kpipe.runtime.device"


def file_digest(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def kernel_digest(path: Path) -> str:
    """sha256 (hex) of a generated kernel without its first line, which names its spec."""
    lines = path.read_bytes().splitlines(keepends=True)
    return hashlib.sha256(b"".join(lines[1:])).hexdigest()


def device_files(kernel: Path) -> dict[str, str]:
    """Device building blocks that a kernel file is made of, in order: file name -> sha256."""
    found: set[str] = set()
    waiting = sorted(_imported(kernel.read_text()))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += sorted(_of_block(name))
    return {f"{name}.py": file_digest(DEVICE / f"{name}.py") for name in sorted(found)}


@cache
def _of_block(name: str) -> frozenset[str]:
    return frozenset(_imported((DEVICE / f"{name}.py").read_text()))


def _imported(text: str) -> set[str]:
    """Names of the device modules that a source imports, absolutely or from beside itself."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = PACKAGE if node.level == 1 else ""
            base = ".".join(filter(None, [base, node.module])) if node.level < 2 else ""
            dotted = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        parts = [name.removeprefix(f"{PACKAGE}.").split(".")[0] for name in dotted]
        found |= {
            part
            for part, name in zip(parts, dotted, strict=True)
            if name.startswith(f"{PACKAGE}.") and (DEVICE / f"{part}.py").is_file()
        }
    return found


def launch_record(
    kernel: str, flags: Mapping[str, Any], arch: str, rows: int, q: int, how: str, verdict: Any
) -> dict[str, Any]:
    """What was found of one launch; `verdict` is a Verdict of its case."""
    return {
        "kernel": kernel,
        "flags": dict(flags),
        "arch": arch,
        "rows": rows,
        "q": q,
        "how": how,
        "max_relative_error": verdict.error,
        "bound": verdict.bound,
        "ok": not verdict.wrong,
    }


def made_of(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What kernels of a folder are made of: name -> its digest and those of its device blocks."""
    paths = {name: folder / "kernels" / f"{name}.py" for name in sorted(set(names))}
    return {
        name: {"sha256": kernel_digest(path), "device": device_files(path)}
        for name, path in paths.items()
    }


def known_launches(folder: Path, gpu: str) -> frozenset[str]:
    """Launches that the folders beside this one have run as they stand here, as `launch_key`."""
    here = folder.resolve()
    beside = (
        path.parent.parent for path in sorted(here.parent.glob(f"*/evidence/{file_name(gpu)}"))
    )
    entries = (entry for other in beside if other != here for entry in _valid(other, gpu, folder))
    return frozenset(launch_key(**_identity(entry)) for entry in entries)


def kept_records(folder: Path, gpu: str, keys: Collection[str]) -> list[dict[str, Any]]:
    """What this folder's own evidence says of these launches, as far as it is still valid.

    A launch that is left out because a folder beside this one has run it keeps its record here:
    the other may leave it out at the same time.
    """
    return [e for e in _valid(folder, gpu, folder) if launch_key(**_identity(e)) in keys]


def _valid(of: Path, gpu: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Records of one folder's evidence that hold for the kernels of `folder`."""
    path = of / "evidence" / file_name(gpu)
    document = json.loads(path.read_text()) if path.is_file() else {}
    for name, made in document.get("kernels", {}).items():
        kernel = folder / "kernels" / f"{name}.py"
        if not kernel.is_file() or kernel_digest(kernel) != made["sha256"]:
            continue
        if device_files(kernel) == made["device"]:
            mine = [entry for entry in document["records"] if entry["kernel"] == name]
            yield from (entry for entry in mine if entry["ok"])


def _identity(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry[key] for key in ("kernel", "flags", "arch", "rows", "q", "how")}


def launch_key(
    kernel: str, flags: Mapping[str, Any], arch: str, rows: int, q: int, how: str
) -> str:
    """One word for a launch of a record."""
    return json.dumps([kernel, sorted(flags.items()), arch, rows, q, how])


def document(
    folder: Path,
    gpu: str,
    records: Iterable[Mapping[str, Any]],
    layers: Iterable[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The evidence of a generated folder: records of launches, and of whole layers."""
    records = list(records)
    return {
        "gpu": gpu,
        "versions": versions(),
        "kernels": made_of(folder, (entry["kernel"] for entry in records)),
        "layers": list(layers),
        "records": records,
    }


def text_of(evidence: Mapping[str, Any]) -> str:
    """A document as JSON with one record per line, so that a re-run reads well in a diff."""
    parts = [f' "{key}": {json.dumps(evidence[key])}' for key in ("gpu", "versions")]
    kernels = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(made)}" for name, made in evidence["kernels"].items()
    )
    parts.append(f' "kernels": {{\n{kernels}\n }}')
    for key in ("layers", "records"):
        lines = ",\n".join("  " + json.dumps(entry) for entry in evidence[key])
        parts.append(f' "{key}": [\n{lines}\n ]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def file_name(gpu: str) -> str:
    """Name of a GPU's evidence file: its name in lower case, words joined by underscores."""
    return "_".join(gpu.lower().replace("-", " ").split()) + ".json"


def versions() -> dict[str, str]:
    """The libraries that compiled and launched; `unknown` for one without a version."""
    import torch

    found = {"torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    for key, name in (("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")):
        try:
            found[key] = version(name)
        except PackageNotFoundError:
            found[key] = "unknown"
    return found
