"""From plan to text: every file of one pipeline's generated folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemBytecodeCache, FileSystemLoader, StrictUndefined

from kpipe.codegen.cache import cache_folder
from kpipe.codegen.proof.proved import ProvedPlan
from kpipe.codegen.render.context import (
    common_context,
    layer_context,
    memory_context,
    ops_context,
)
from kpipe.codegen.render.schedule import picture, picture_path, schedule_context

SHIPPED = Path(__file__).resolve().parents[2] / "templates"


def environment(folders: tuple[Path, ...]) -> Environment:
    """Jinja without surprises: undefined names are errors, the user's folders come first."""
    return Environment(
        loader=FileSystemLoader([*map(str, folders), str(SHIPPED)]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        auto_reload=False,
        bytecode_cache=_compiled_templates(),
    )


def _compiled_templates() -> FileSystemBytecodeCache | None:
    """Compiled templates between runs, checked against their source: a tenth of a cold run."""
    folder = cache_folder("templates")
    return FileSystemBytecodeCache(folder) if folder else None


def render_pipeline(proved: ProvedPlan, template_folders: tuple[Path, ...]) -> dict[str, str]:
    """Relative path -> text of every generated file.  Pure: no file is written."""
    plan = proved.pipeline
    jinja = environment(template_folders)
    common = common_context(plan)

    def render(template: str, context: dict[str, Any]) -> str:
        return _tidy(jinja.get_template(template).render(**common, **context))

    files = {
        "__init__.py": render("layer/init.py.jinja", {}),
        "layer.py": render("layer/layer.py.jinja", layer_context(plan)),
        "memory.py": render("layer/memory.py.jinja", memory_context(plan)),
        "ops.py": render("layer/ops.py.jinja", ops_context(plan)),
        "SCHEDULE.md": render("layer/schedule.md.jinja", schedule_context(plan)),
        "kernels/__init__.py": render("layer/kernels_init.py.jinja", {}),
    }
    for method in plan.methods:
        files[picture_path(method)] = picture(plan, method)
    for kernel in sorted({plan.kernel(op) for op in plan.ops} - {""}):
        files[f"kernels/{kernel}.py"] = render(f"kernels/{kernel}.py.jinja", {})
    return files


def render_layer(proved: ProvedPlan, template_folders: tuple[Path, ...]) -> str:
    """The text of `layer.py` alone.  Pure."""
    plan = proved.pipeline
    template = environment(template_folders).get_template("layer/layer.py.jinja")
    return _tidy(template.render(**common_context(plan), **layer_context(plan)))


def _tidy(text: str) -> str:
    """Without more than two empty lines in a row."""
    return re.sub(r"\n{4,}", "\n\n\n", text)
