"""A generated folder: its layer class, and what the class says without being prepared."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.op import Op
from kpipe.runtime.oracle.geometry import Geometry
from kpipe.runtime.recording import recorded


def load_layer(folder: str | Path) -> type[Layer]:
    """The layer class of a generated folder.  Raises LayerError where there is none."""
    path = Path(folder)
    entry = path / "__init__.py"
    if not entry.is_file():
        raise LayerError(f"`{folder}` is not a generated folder: it has no __init__.py")
    name = f"kpipe_generated_{path.resolve().name}_{abs(hash(str(path.resolve())))}"
    module = sys.modules.get(name) or _import(name, entry)
    return getattr(module, module.__all__[0])


def layer_in(layer: type[Layer], module: str) -> type[Layer]:
    """The class of that name in another module of the layer's own package, which was loaded.

    Raises LayerError where there is none.
    """
    name = f"{layer.PACKAGE}.{module}"
    package = sys.modules[layer.PACKAGE]
    entry = Path(str(package.__file__)).parent / f"{module}.py"
    if not entry.is_file():
        raise LayerError(f"`{entry}` is missing from the generated folder")
    found = sys.modules.get(name) or _import(name, entry)
    return getattr(found, layer.__name__)


def _import(name: str, entry: Path) -> ModuleType:
    inside = [str(entry.parent)] if entry.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, entry, submodule_search_locations=inside)
    if spec is None or spec.loader is None:
        raise LayerError(f"cannot import `{entry}`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def geometry_of(layer: type[Layer]) -> Geometry:
    """The model's dimensions as the layer was generated for them."""
    known = {field.name for field in fields(Geometry)}
    values = {name: value for name, value in layer.MEMORY.geometry.items() if name in known}
    return Geometry(**values)  # type: ignore[arg-type]


def layer_of_step(
    layer_class: type[Layer], arch: str, rows: int, q: int, method: str = ""
) -> Layer:
    """A layer whose table has that step alone, so that prepare() makes ready what it launches.

    The method is the table's, or the one that is named.  Raises LayerError for rows or q that are
    not declared.
    """
    layer = layer_class()
    layer.arch = arch
    size = layer.declared_rows_of(rows, q)
    layer.TABLE = {(arch, q): {size: method or layer_class.TABLE[arch, q][size]}}  # type: ignore[misc]
    return layer


def launches(layer_class: type[Layer], method: str) -> tuple[Op, ...]:
    """The ops that a method launches, in host order; nothing is prepared or executed."""
    ops = {op.name: op for op in layer_class.OPS}
    return tuple(ops[call.op] for call in recorded(layer_class(), method))


def stages(layer_class: type[Layer], method: str, stop_after: str = "") -> tuple[str, ...]:
    """The stages that a method enters, in order, until the last op of `stop_after` has run.

    Raises LayerError that lists all of them where `stop_after` is none of them.
    """
    entered = [op.stage for op in launches(layer_class, method)]
    if stop_after and stop_after not in entered:
        known = ", ".join(dict.fromkeys(entered))
        raise LayerError(f"{layer_class.NAME}: no stage {stop_after!r}; stages: {known}")
    while stop_after and entered[-1] != stop_after:
        entered.pop()
    return tuple(dict.fromkeys(entered))
