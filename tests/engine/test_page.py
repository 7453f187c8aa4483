"""docs/engines.md: its example runs, and its tables name what the adapters read."""

from __future__ import annotations

import re
from pathlib import Path

import engine_recorded as recorded
import pytest
import torch
from layer_factory import LayerFactory
from layer_inputs import engine_inputs

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "engines.md").read_text()


def test_the_example_decodes_two_layers(layers: LayerFactory) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, type] = {}
    exec(example, names)
    layer_class = layers.tp(4)
    inputs = [engine_inputs(layer_class, (70, 131, 5)) for _ in range(2)]
    caches = [(one.caches.latent_kv, one.caches.index_kv) for one in inputs]
    weights = [one.weights for one in inputs]
    decode = names["DecodeLayers"](layer_class, weights, caches, "cpu", arch="sm_90a")
    alone = engine_inputs(layer_class, (70, 131, 5))
    alone.prepared(layer_class, arch="sm_90a").run(alone.step)
    for number, one in enumerate(inputs):
        step = one.step
        index = recorded.indexer(step)
        decode.decode(number, step.hidden, step.out, recorded.vllm(step), index)
        assert step.out.equal(alone.step.out) and bool(torch.isfinite(step.out).all())


def attributes(section: str, columns: slice) -> set[str]:
    """Names in columns of a section's table, without what they belong to."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|")]
    words = re.findall(r"`([\w.]+)`", " ".join(cell for row in rows for cell in row[columns]))
    return {word.split(".")[-1] for word in words}


def read_by(module: str) -> set[str]:
    """Attribute names that an adapter asks for."""
    text = (ROOT / "runtime" / "engine" / f"{module}.py").read_text()
    asked = re.findall(r"\.(?:optional|bound|count|tensor)\(\s*([^)]*)\)", text)
    words = {word for call in asked for word in re.findall(r'"([a-z][\w.]*)"', call)}
    return {word.split(".")[-1] for word in words}


@pytest.mark.parametrize(
    ("section", "module", "apart"),
    [("vLLM", "vllm", {"index_metadata"}), ("SGLang", "sglang", {"name"})],
)
def test_the_tables_name_what_is_read(section: str, module: str, apart: set[str]) -> None:
    """`apart` are an argument and the name of an enumerated mode."""
    asked = read_by(module) - apart
    assert attributes(section, slice(1)) - apart <= asked
    assert asked <= attributes(section, slice(3))
