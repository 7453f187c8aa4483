"""Who may import whom, read from the sources.

The runtime serves without the generator and its libraries; the generator runs without torch and
without a GPU library; generated code needs the runtime only; the oracle and the reference do not
know each other, since each checks the other.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from spec_project import PIPELINES, make_project, plan_of, render

ROOT = Path(__file__).parents[1]
GENERATOR_LIBRARIES = {"pydantic", "pydantic_core", "jinja2", "ruamel", "click", "rich"}
GPU_LIBRARIES = {"torch", "cutlass", "flashinfer", "tvm_ffi", "cuda", "triton"}
GENERATED_MAY = {"kpipe", "torch", "cutlass", "flashinfer"}


def imports_of(text: str, module: str) -> set[str]:
    """Absolute names that a module imports, wherever it does so; `module` is its own name."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, *filter(None, [node.module])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and dynamic(node):
            if module == "kpipe.runtime.host.kernel_file":
                continue  # a layer's own kernels, from the generated package that it belongs to
            assert isinstance(node.args[0], ast.Constant), f"{module} imports a computed name"
            found.add(str(node.args[0].value))
    return found


def dynamic(call: ast.Call) -> bool:
    name = getattr(call.func, "id", "") or getattr(call.func, "attr", "")
    return name in ("import_module", "__import__") and bool(call.args)


def imports_below(folder: str) -> dict[str, set[str]]:
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        relative = path.relative_to(ROOT).with_suffix("")
        module = ".".join(("kpipe", *relative.parts))
        found[str(relative)] = imports_of(path.read_text(), module)
    assert found
    return found


def inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def top(name: str) -> str:
    return name.partition(".")[0]


def breaches(found: dict[str, set[str]], *forbidden: str) -> list[str]:
    return [
        f"{m} imports {n}" for m, names in found.items() for n in names if inside(n, *forbidden)
    ]


def test_the_runtime_does_not_know_the_generator() -> None:
    assert breaches(imports_below("runtime"), "kpipe.codegen", *GENERATOR_LIBRARIES) == []


def test_the_generator_does_not_know_torch_nor_the_runtime() -> None:
    assert breaches(imports_below("codegen"), "kpipe.runtime", *GPU_LIBRARIES) == []


def test_the_generator_needs_its_libraries_and_nothing_else() -> None:
    for module, names in imports_below("codegen").items():
        foreign = {top(n) for n in names} - set(sys.stdlib_module_names) - GENERATOR_LIBRARIES
        assert foreign <= {"kpipe"}, module


def test_oracle_and_reference_do_not_know_each_other() -> None:
    assert breaches(imports_below("runtime/oracle"), "kpipe.runtime.reference") == []
    assert breaches(imports_below("runtime/reference"), "kpipe.runtime.oracle") == []


@pytest.mark.parametrize("name", PIPELINES)
def test_generated_code_needs_the_runtime_only(name: str, tmp_path: Path) -> None:
    for path, text in render(plan_of(make_project(tmp_path), name)).items():
        if not path.endswith(".py"):
            continue
        package = f"kpipe.generated.{name}"
        module = ".".join((package, *Path(path).with_suffix("").parts))
        for found in imports_of(text, module):
            if inside(found, "kpipe"):
                assert inside(found, "kpipe.runtime", package), f"{path} imports {found}"
                assert not inside(found, "kpipe.runtime.oracle"), f"{path} imports {found}"
            else:
                assert top(found) in {*GENERATED_MAY, *sys.stdlib_module_names}, f"{path}: {found}"


def test_the_walk_sees_every_form_of_import() -> None:
    text = (
        "import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\n"
        "def h():\n    from i import j\n    importlib.import_module('k')\n    __import__('l')\n"
    )
    seen = imports_of(text, "kpipe.runtime.comm.gate")
    assert seen == {
        *("a.b", "c.d", "kpipe.runtime.comm.e", "kpipe.runtime.f.g", "i.j", "k", "l"),
    }


def test_reserved_words_cover_the_base_class_of_generated_layers() -> None:
    """A mode, a cache or a stream of such a name would replace what the layer itself uses."""
    from kpipe.codegen.plan.names import LAYER_WORDS

    tree = ast.parse((ROOT / "runtime" / "layer.py").read_text())
    layer = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Layer")
    own = {n.name for n in ast.walk(layer) if isinstance(n, ast.FunctionDef)}
    nested = {
        n.name
        for f in layer.body
        if isinstance(f, ast.FunctionDef)
        for n in ast.walk(f)
        if isinstance(n, ast.FunctionDef) and n is not f
    }
    stored = {
        n.attr
        for n in ast.walk(layer)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and getattr(n.value, "id", "") == "self"
    }
    words = {name.lstrip("_") for name in (own - nested) | stored}
    assert {w for w in words if w.islower() and not w.endswith("__")} <= LAYER_WORDS
