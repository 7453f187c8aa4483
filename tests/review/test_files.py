"""Which generated files change and why, how the work tree stands to it, what evidence is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from review_project import LATE, TABLE, commit, inside, make_repository, reviewed
from spec_project import edit, plan_of

from kpipe.codegen.config import load_config
from kpipe.codegen.evidence import evidence_of, kernel_digest
from kpipe.codegen.render.generate import prepare
from kpipe.codegen.render.manifest import digest
from kpipe.codegen.render.publish import publish
from kpipe.codegen.review.model import Difference, EvidenceChange, FileChange
from kpipe.codegen.review.verdict import verdict_line

SPEC = "pipelines/dsa_tp.yaml"
FOLDER = Path("generated/dsa_tp")


def generate(root: Path) -> None:
    with inside(root):
        config = load_config(Path(SPEC))
        publish([prepare(SPEC, config, config.output, {}).changes], force=True)


def record(root: Path) -> None:
    """Evidence of every launch on sm_90a, as the files are now."""
    folder = root / FOLDER
    records = [
        {
            "kernel": one.kernel,
            "arch": one.arch,
            "rows": one.rows,
            "ok": True,
        }
        for one in evidence_of(plan_of(root), folder)
        if one.arch == "sm_90a"
    ]
    (folder / "evidence").mkdir(exist_ok=True)
    files = {path.stem: path.read_bytes() for path in (folder / "kernels").glob("*.py")}
    kernels = {n: {"sha256": kernel_digest(text), "device": {}} for n, text in files.items()}
    text = json.dumps({"gpu": "a GPU", "kernels": kernels, "records": records})
    (folder / "evidence" / "gpu.json").write_text(text)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_repository(tmp_path_factory.mktemp("pristine"))
    generate(root)
    record(root)
    commit(root)
    return root


@pytest.fixture
def repository(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "repository"))


def only(root: Path) -> Difference:
    (found,) = reviewed(root).pipelines
    assert found.files is not None
    return found


def files(root: Path) -> dict[str, tuple[str, tuple[str, ...], str]]:
    return {one.path: (one.effect, one.causes, one.disk) for one in only(root).files.changes}


def manifest(root: Path, **changed: object) -> None:
    """Rewrite the manifest of the folder, with the digests of its files as they are now."""
    path = root / FOLDER / "manifest.json"
    data = json.loads(path.read_text())
    data["files"] = {name: digest((root / FOLDER / name).read_bytes()) for name in data["files"]}
    path.write_text(json.dumps({**data, **changed}, indent=2, sort_keys=True) + "\n")


def test_nothing_changes(repository: Path) -> None:
    assert files(repository) == {}
    assert only(repository).evidence == ()


def test_a_table_edit_changes_no_kernel(repository: Path) -> None:
    edit(repository, "dsa_tp.yaml", TABLE, LATE)
    stale = ("changed", ("spec",), "stale")
    found = files(repository)
    text = {path: change for path, change in found.items() if not path.startswith("schedule/")}
    assert text == {"SCHEDULE.md": stale, "layer.py": stale}
    # The pictures of the lists that this touches; one is named anew, since it has two lists now.
    assert {path: change[0] for path, change in found.items() if path not in text} == {
        "schedule/front.svg": "changed",
        "schedule/late_front.svg": "removed",
        "schedule/late_front_prims_ts.svg": "new",
        "schedule/late_front_sparse_decode.svg": "new",
    }
    line = verdict_line(reviewed(repository))
    assert "; no kernel file changes; " in line
    assert line.endswith("; 6 generated files not up to date")
    generate(repository)
    assert {disk for _, _, disk in files(repository).values()} == {"current"}
    assert "up to date" not in verdict_line(reviewed(repository))


def test_a_remark_in_the_spec_changes_comments(repository: Path) -> None:
    edit(repository, "dsa_tp.yaml", "kpipe: 1\n", "kpipe: 1\n# a remark\n")
    found = files(repository)
    assert found["layer.py"][:2] == ("comments", ("spec",))
    assert not [path for path in found if path.startswith("kernels/")]
    assert only(repository).state == "same"


def test_a_number_of_the_model_changes_kernels(repository: Path) -> None:
    path = repository / "pipelines" / "geometry" / "kimi_k31.yaml"
    path.write_text(path.read_text().replace("rms_eps: 1.0e-6", "rms_eps: 1.0e-5"))
    found = only(repository)
    kernels = {one.path: one.causes for one in found.files.kernels}
    assert kernels["kernels/rms_norm.py"] == ("spec",)
    assert "kernels/topk_select.py" not in kernels
    assert found.numerics == ("scalar rms_eps: 1e-06 -> 1e-05",)
    lost = {one.op for one in found.evidence if (one.before, one.after) == ("valid", "stale")}
    assert "query_norm" in lost and "topk_select" not in lost
    assert " lose evidence" in verdict_line(reviewed(repository))


def test_another_template(repository: Path) -> None:
    """The old side was written by another template of one kernel."""
    kernel = repository / FOLDER / "kernels" / "o_proj.py"
    good = kernel.read_bytes()
    kernel.write_bytes(good + b"\nOLD = 1\n")
    templates = json.loads((repository / FOLDER / "manifest.json").read_text())["templates"]
    templates["kernels/o_proj.py.jinja"] = "0" * 64
    manifest(repository, templates=templates)
    commit(repository)
    kernel.write_bytes(good)
    (found,) = reviewed(repository, against="HEAD").pipelines
    assert found.files.kernels == (
        FileChange("kernels/o_proj.py", "changed", ("template",), found.files.kernels[0].disk),
    )
    assert {(one.op, one.before, one.after) for one in found.evidence} == {
        ("o_proj", "stale", "valid")
    }


def test_another_kpipe(repository: Path) -> None:
    layer = repository / FOLDER / "layer.py"
    good = layer.read_bytes()
    layer.write_bytes(good + b"\nOLD = 1\n")
    manifest(repository, tool="0" * 64)
    commit(repository)
    layer.write_bytes(good)
    (found,) = reviewed(repository, against="HEAD").pipelines
    assert {one.path: one.causes for one in found.files.changes} == {"layer.py": ("tool",)}


def test_the_old_side_was_not_generated_or_edited_by_hand(repository: Path) -> None:
    layer = repository / FOLDER / "layer.py"
    good = layer.read_bytes()
    layer.write_bytes(good + b"\nOLD = 1\n")
    commit(repository)
    layer.write_bytes(good)
    (found,) = reviewed(repository, against="HEAD").pipelines
    assert {one.path: one.causes for one in found.files.changes} == {
        "layer.py": ("hand edit on the old side",)
    }
    edit(repository, "dsa_tp.yaml", TABLE, LATE)
    commit(repository)  # a schedule that its folder does not follow
    edit(repository, "dsa_tp.yaml", LATE, TABLE)
    (found,) = reviewed(repository, against="HEAD").pipelines
    assert found.changed_ranges and found.files.changes == ()


def test_how_the_work_tree_stands(repository: Path) -> None:
    folder = repository / FOLDER
    (folder / "layer.py").write_bytes((folder / "layer.py").read_bytes() + b"# mine\n")
    (folder / "kernels" / "o_proj.py").unlink()
    (folder / "kernels" / "gone.py").write_text("GONE = 1\n")
    data = json.loads((folder / "manifest.json").read_text())
    data["files"]["kernels/gone.py"] = digest("GONE = 1\n")
    (folder / "manifest.json").write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
    assert files(repository) == {
        "kernels/gone.py": ("", (), "orphan"),
        "kernels/o_proj.py": ("", (), "missing"),
        "layer.py": ("", (), "hand edit"),
    }
    line = verdict_line(reviewed(repository))
    assert "2 generated files not up to date" in line and "1 file edited by hand" in line


def test_a_launch_that_is_activated_without_evidence(repository: Path) -> None:
    wider = TABLE.replace('"1-4": front, "5-32"', '"1-5": front, "6-32"', 1)
    edit(repository, "dsa_tp.yaml", TABLE, wider)
    found = only(repository)
    assert EvidenceChange("sm_90a", "index_front", (5,), "", "missing") in found.evidence
    assert EvidenceChange("sm_90a", "query_norm", (5,), "valid", "") in found.evidence
    assert "1 newly activated without evidence" in verdict_line(reviewed(repository))


def test_records_of_a_folder_beside_count_on_both_sides(repository: Path) -> None:
    """The same kernels stand in another folder, and only there are they recorded."""
    beside = repository / "generated" / "beside"
    beside.mkdir()
    shutil.move(repository / FOLDER / "evidence", beside / "evidence")
    (repository / FOLDER / "evidence").mkdir()
    (repository / FOLDER / "evidence" / "empty.json").write_text("{}")
    commit(repository)
    edit(repository, "dsa_tp.yaml", TABLE, LATE)
    assert only(repository).evidence == ()
