"""The same spec gives the same bytes: whatever the hash seed, folder, locale or home."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from spec_project import PIPELINES, make_project, plan_of, render

SCRIPT = """
import hashlib, sys
from spec_project import PIPELINES, plan_of, render
from pathlib import Path
root = Path(sys.argv[1])
for name in PIPELINES:
    for path, text in sorted(render(plan_of(root, name)).items()):
        print(hashlib.sha256(text.encode()).hexdigest(), name, path)
"""


def digests(root: Path, cwd: Path, **variables: str) -> str:
    """Output of a fresh process that renders every shipped pipeline of `root`."""
    places = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), **variables}
    command = [sys.executable, "-c", SCRIPT, str(root)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = make_project(tmp_path_factory.mktemp("project"))
    return {
        f"{name}/{path}": text
        for name in PIPELINES
        for path, text in render(plan_of(root, name)).items()
    }


def test_other_processes_render_the_same_bytes(files: dict[str, str], tmp_path: Path) -> None:
    """Specs by an absolute path and by a relative one, elsewhere; each process proves anew."""
    root = make_project(tmp_path / "two" / "deeper")
    home = tmp_path / "home"
    home.mkdir()
    mine = [
        f"{hashlib.sha256(text.encode()).hexdigest()} {' '.join(name.split('/', 1))}"
        for name, text in sorted(files.items(), key=in_order)
    ]
    cold, other = str(tmp_path / "cold"), str(tmp_path / "other")
    runs = [
        digests(root, tmp_path, PYTHONHASHSEED="0", LC_ALL="C", KPIPE_CACHE_DIR=cold),
        digests(
            Path("two/deeper"),
            tmp_path,
            PYTHONHASHSEED="random",
            LC_ALL="C.UTF-8",
            TZ="Asia/Tokyo",
            HOME=str(home),
            KPIPE_CACHE_DIR=other,
        ),
    ]
    for output in runs:
        assert output.splitlines() == mine


def in_order(item: tuple[str, str]) -> tuple[int, str]:
    """As `SCRIPT` prints them: by pipeline, then by path."""
    name, _, path = item[0].partition("/")
    return list(PIPELINES).index(name), path


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?<![\w.:])/(tmp|home|root|usr|work|Users)\b",  # absolute paths
        r"\b20\d\d-\d\d-\d\d\b|\b\d\d:\d\d:\d\d\b",  # dates and times
        r"0x(?=[0-9a-f]*[a-f])[0-9a-f]{6,}|0x[0-9A-Fa-f]{9,}",  # addresses, not sentinels
        r"\bat 0x|object at",
    ],
)
def test_nothing_of_the_machine_is_written_down(pattern: str, files: dict[str, str]) -> None:
    for path, text in files.items():
        assert not re.search(pattern, text), path


def test_no_user_or_host_name_is_written_down(files: dict[str, str]) -> None:
    names = {os.environ.get("USER", ""), os.uname().nodename} - {"", "root", "main"}
    for path, text in files.items():
        assert not [name for name in names if re.search(rf"\b{re.escape(name)}\b", text)], path


def test_files_are_plain_text(files: dict[str, str]) -> None:
    for path, text in files.items():
        assert text.isascii(), path
        assert text.endswith("\n") and not text.endswith("\n\n") or path.endswith(".md"), path
        assert "\r" not in text and "\t" not in text, path


UNORDERED = {  # lines of dsa_dcp.yaml in another order: order has no meaning there
    "parallel": ("{tp: 8, dcp: 8, interleave: 1,", "{interleave: 1, dcp: 8, tp: 8,"),
    "rounds": ("kv_norm: bf16, query_b: bf16", "query_b: bf16, kv_norm: bf16"),
    "tactics": (
        'packed_gemm: {"1-8": {tile_n: 32, tokens: 8, ring: 104}',
        'packed_gemm: {"1-8": {ring: 104, tokens: 8, tile_n: 32}',
    ),
    "table": ('{"1-32": one_shot, "33-64": two_shot}', '{"33-64": two_shot, "1-32": one_shot}'),
}


@pytest.mark.parametrize("section", UNORDERED)
def test_keys_without_an_order_may_stand_in_any(section: str, tmp_path: Path) -> None:
    before = render(plan_of(make_project(tmp_path / "a"), "dsa_dcp"))
    edit = ("dsa_dcp.yaml", *UNORDERED[section])
    after = render(plan_of(make_project(tmp_path / "b", [edit]), "dsa_dcp"))
    assert after == before


def shuffled(text: str, section: str) -> str:
    """The lines of a section of one-line entries, last one first."""
    head, start, rest = text.partition(f"{section}:")
    first, _, body = rest.partition("\n")
    lines = body.split("\n")
    count = next(i for i, line in enumerate(lines) if not line.startswith("  "))
    entries = [line for line in lines[:count] if not line.startswith("    ")]
    assert len(entries) == count, f"{section} has entries of several lines"
    return "\n".join([head + start + first, *entries[::-1], *lines[count:]])


@pytest.mark.parametrize("section", ["mailboxes", "caches"])
def test_order_of_memory_shows_in_memory_and_nowhere_else(section: str, tmp_path: Path) -> None:
    """The declarations keep the order of the file, openly; the class, the ops and the kernels do
    not depend on it."""
    root = make_project(tmp_path)
    before = render(plan_of(root, "dsa_dcp"))
    path = root / "pipelines" / "dsa_dcp.yaml"
    path.write_text(shuffled(path.read_text(), section))
    after = render(plan_of(root, "dsa_dcp"))
    assert [name for name in before if before[name] != after[name]] == ["memory.py"]
    assert sorted(before["memory.py"].split("\n")) == sorted(after["memory.py"].split("\n"))


def test_order_of_buffers_shows_in_memory_and_nowhere_else(tmp_path: Path) -> None:
    root = make_project(tmp_path)
    before = render(plan_of(root, "dsa_tp"))
    path = root / "pipelines" / "dsa_tp.yaml"
    lines = path.read_text().split("\n")
    at = [i for i, line in enumerate(lines) if line.startswith(("  q_c: ", "  query: "))][:2]
    lines[at[0]], lines[at[1]] = lines[at[1]], lines[at[0]]
    path.write_text("\n".join(lines))
    after = render(plan_of(root, "dsa_tp"))
    assert [name for name in before if before[name] != after[name]] == ["memory.py"]


def test_order_of_columns_is_the_layout_and_changes_kernels(tmp_path: Path) -> None:
    """Here order has a meaning: it says where a column begins in the packed row."""
    before = render(plan_of(make_project(tmp_path / "a")))
    edit = ("dsa_tp.yaml", "{q_a: q_lora, kv_a: latent,", "{kv_a: latent, q_a: q_lora,")
    after = render(plan_of(make_project(tmp_path / "b", [edit])))
    changed = [name for name in before if before[name] != after[name]]
    assert "memory.py" in changed and "kernels/rms_norm.py" in changed
    assert "ops.py" not in changed
