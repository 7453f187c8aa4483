"""Tables about words between ranks: the document has those of the plans, a file its own."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def table() -> ModuleType:
    path = ROOT / "bench" / "dcp_table.py"
    spec = importlib.util.spec_from_file_location("dcp_table", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_document_has_the_tables_of_the_plans(table: ModuleType) -> None:
    document = (ROOT / "docs" / "numbers.md").read_text()
    plans = [table.plan_of(name) for name in table.PIPELINES]
    assert table.bytes_table(plans) in document
    assert table.layer_table(plans) in document
    assert table.SECTION in document.split("\n")


def entry(what: str, us: float, floor_us: float = 0.0) -> dict:
    same = {"pipeline": "dsa_dcp_d2", "method": "_fork_sparse_decode", "rows": 8, "q": 1}
    return {**same, "what": what, "context": 32768, "us": us, "floor_us": floor_us}


def result(path: Path, entries: list[dict]) -> Path:
    data = {"gpu": "NVIDIA H200", "arch": "sm_90a", "ranks": 2, "note": "no NVLink"}
    path.write_text(json.dumps({**data, "kernels": {}, "timings": entries}))
    return path


def cells(section: str) -> dict[str, str]:
    lines = [line.strip("| ").split(" | ") for line in section.split("\n") if line[:1] == "|"]
    return {line[0]: line[1] for line in lines if len(line) == 2}


LAUNCHES = (
    *("packed_gemm", "query_norm", "index_gemm", "dsa_index", "index_scores", "topk_local"),
    *("topk_merge", "mla_query", "query_wait", "sparse_decode", "dcp_value", "o_proj", "o_reduce"),
)


def test_a_measured_section_has_times_shares_and_a_prediction(
    table: ModuleType, tmp_path: Path
) -> None:
    entries = [entry("layer", 50.0, 20.0), *(entry(name, 4.0, 1.0) for name in LAUNCHES)]
    path = result(tmp_path / "dcp.json", [*entries, entry("lockstep", 61.0, 20.0)])
    section = table.measured_section(path)
    assert section.startswith("### One of 2 ranks, on one GPU\n") and "No NVLink." in section
    found = cells(section)
    assert found["**layer of one rank, its words there**"] == "50.0 (40)"
    assert found["all ranks in lockstep, divided by the ranks: upper bound"] == "61.0"
    assert found["o_proj"] == "4.0 (25)"
    # On main eleven launches in a chain; query and wait are beside them.
    assert found["predicted from these launches, words always there"] == "44.0"
    journeys = [8 * size / 450e3 for size in (16384, 48 * 512 * 2 + 48 * 4, 14336)]
    over = 44.0 + sum(1.5 + journey for journey in journeys)
    assert found["**predicted over NVLink 4** (450 GB/s, 1.5 us, assumed)"] == f"{over:.1f}"


def test_nothing_is_predicted_where_a_launch_has_no_time(table: ModuleType, tmp_path: Path) -> None:
    entries = [entry(name, 4.0) for name in LAUNCHES[1:]]
    found = cells(table.measured_section(result(tmp_path / "dcp.json", entries)))
    assert found["predicted from these launches, words always there"] == "-"
    assert found["**layer of one rank, its words there**"] == "-"


def test_times_without_ranks_are_refused(table: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "tp.json"
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "timings": [entry("layer", 1.0)]}))
    with pytest.raises(ValueError, match="no times of ranks that exchange words"):
        table.measured_section(path)


def test_a_section_stands_at_the_end_of_its_own_and_replaces_itself(table: ModuleType) -> None:
    document = f"# Numbers\n\n{table.SECTION}\n\nwords\n\n## Next\n\nmore\n"
    once = table.with_section(document, "### One\n\nfirst\n")
    assert once == f"# Numbers\n\n{table.SECTION}\n\nwords\n\n### One\n\nfirst\n\n## Next\n\nmore\n"
    two = table.with_section(once, "### Two\n\nother\n")
    again = table.with_section(two, "### One\n\nsecond\n")
    assert again.index("### Two") < again.index("### One\n\nsecond") < again.index("## Next")
    assert again.count("### One") == 1 and "first" not in again
    with pytest.raises(ValueError, match="has no `## Words between ranks`"):
        table.with_section("# Numbers\n", "### One\n")
