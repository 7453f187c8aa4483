"""The kernels of small and real dimensions as files, their PTX, and what holds for all of them."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from ptx_flow import global_accesses

from kpipe.codegen.render.api import environment
from kpipe.runtime.formats import cache_format as cache_layout
from kpipe.runtime.host.compile import TensorSpec, compile_kernel, ptx_of

ARCHS = ("sm_90a", "sm_100a")
KERNELS = {
    "rms_norm": "RmsNorm",
    "dsa_index": "DsaIndex",
    "mla_value": "MlaValue",
    "mla_gate": "MlaGate",
    "packed_gemm": "PackedGemm",
    "gate_gemm": "GateGemm",
    "index_gemm": "IndexGemm",
    "o_proj": "OProj",
    "index_scores": "IndexScores",
    "topk_select": "TopkSelect",
    "sparse_decode": "SparseDecode",
    "mla_query": "MlaQuery",
    "mla_query_split": "MlaQuerySplit",
    "index_front": "IndexFront",
}
_QUERY_WEIGHTS = {"kv_norm", "q_b", "w_uk", "q_scale_inv", "k_scale_inv"}
WEIGHTS = {
    "rms_norm": {"q_norm"},
    "dsa_index": {"index_k_norm", "index_k_bias"},
    "mla_value": {"w_uv"},
    "mla_gate": set(),
    "packed_gemm": {"packed"},
    "gate_gemm": {"packed"},
    "index_gemm": {"index_q_b"},
    "o_proj": {"o_proj"},
    "index_scores": set(),
    "topk_select": set(),
    "sparse_decode": {"q_scale", "k_scale"},
    "mla_query": {"q_norm", *_QUERY_WEIGHTS},
    "mla_query_split": _QUERY_WEIGHTS,
    "index_front": {"q_norm", "index_q_b", "index_k_norm", "index_k_bias"},
}
STEP_READS = {
    "index_scores": {"index_table", "lengths"},
    "topk_select": {"lengths", "block_table"},
}
"""What the engine writes ahead of the layer: read ahead of the wait, maybe behind it too."""
LAYOUT_ONLY = {"topk_select": {"latent_kv"}}
"""Operands of which a kernel takes a stride and no byte."""
KIMI = {
    "hidden": 7168,
    "heads": 12,
    "q_lora": 1536,
    "kv_lora": 512,
    "pe": 64,
    "nope": 128,
    "v_dim": 128,
    "index_heads": 32,
    "index_dim": 128,
    "top_k": 2048,
    "context": 131072,
}
SMALL = {
    "hidden": 256,
    "heads": 2,
    "q_lora": 128,
    "kv_lora": 128,
    "pe": 16,
    "nope": 32,
    "v_dim": 32,
    "index_heads": 4,
    "index_dim": 32,
    "top_k": 16,
    "context": 1152,
}
GEOMETRIES = {"kimi": KIMI, "small": SMALL}
_SERIAL = itertools.count()


def context(dims: dict[str, int], cache_format: str = "fp8_tensor", ranks: int = 0) -> dict:
    """What a template is rendered with, derived from the model dimensions; with `ranks` contexts
    are sharded over so many."""
    caches = {
        "latent_kv": cache_layout(cache_format, kv_lora=dims["kv_lora"], pe=dims["pe"]),
        "index_kv": cache_layout("index_fp8", index_dim=dims["index_dim"]),
    }
    widths = {
        "q_a": dims["q_lora"],
        "kv_a": dims["kv_lora"] + dims["pe"],
        "gate": dims["heads"] * dims["v_dim"],
        "wk": dims["index_dim"],
        "wv": dims["index_heads"],
    }
    starts = [0, *itertools.accumulate(widths.values())]
    scalars = {"rms_eps": 1e-6, "index_eps": 1e-6, "softmax_scale": 192**-0.5}
    return {
        "spec": "pipelines/example.yaml",
        "dims": {**dims, "latent": widths["kv_a"], "pitch": starts[-1], "tp": ranks or 8},
        "columns": dict(zip(widths, starts, strict=False)),
        "pages": dict.fromkeys(caches, 64),
        "formats": {name: layout.name for name, layout in caches.items()},
        "row_bytes": {name: layout.row_bytes for name, layout in caches.items()},
        "parallel": {"tp": ranks or 8, "dcp": ranks or None, "interleave": 1},
        "scalars": scalars,
        "rows_cap": 64,
    }


def render(folder: Path, geometry: str, cache_format: str = "fp8_tensor") -> None:
    """Writes the kernels of a geometry as real files."""
    templates = environment(())
    for name in KERNELS:
        template = templates.get_template(f"kernels/{name}.py.jinja")
        text = template.render(context(GEOMETRIES[geometry], cache_format))
        (folder / f"{name}.py").write_text(text)


def load(path: Path) -> ModuleType:
    """A fresh module from a file, under a name of its own."""
    name = f"generated_{path.stem}_{next(_SERIAL)}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def build(module: ModuleType, name: str, arch: str, **flags) -> str:
    """PTX of a kernel of `module`."""
    kernel = getattr(module, KERNELS[name])(**flags)
    specs = operands_of(module, flags)
    return ptx_of(compile_kernel(kernel, specs, arch, keep_ptx=True))


def operands_of(module: ModuleType, flags: dict) -> tuple[TensorSpec | None, ...]:
    """The operands under these flags; those that no flag moves take none."""
    known = inspect.signature(module.operands).parameters
    return module.operands(**{name: flags[name] for name in known if name in flags})


def names_of(specs: tuple[TensorSpec | None, ...]) -> list[str]:
    """The operands that the compiled kernel has, in its own order."""
    return [spec.name for spec in specs if spec is not None]


def parameters(module: ModuleType) -> list[str]:
    """The operand behind each parameter of the kernel."""
    return names_of(module.operands())


def assert_waits(
    ptx: str, names: list[str], weights: set[str], step_reads: Collection[str] = ()
) -> None:
    """Weights are read ahead of the wait; everything else, and every store, lies behind it.

    What a bulk copy brings later has waited for room in the ring, not for the predecessor. Of
    `step_reads` each is read ahead of the wait at least once.
    """
    accesses = global_accesses(ptx)
    ahead = any(not access.waited for access in accesses)
    assert ahead or not weights, "no weight is requested ahead of the wait"
    ahead = {names[n] for access in accesses if not access.waited for n in access.parameters}
    assert ahead >= set(step_reads), "an early read lies behind the wait"
    for access in accesses:
        operands = {names[parameter] for parameter in access.parameters}
        assert operands, f"address of unknown origin: {access.text}"
        if access.is_load and operands <= set(step_reads):
            continue
        early = access.is_load and operands <= weights
        place = f"{sorted(operands)} touched before the wait: {access.text}"
        assert access.waited or early, place
        streamed = "cp.async.bulk" in access.text
        late = access.waited and early and not streamed
        assert not late, f"{sorted(operands)} read late: {access.text}"
