"""The old side: refs, folders, files; specs that are new, gone, moved or broken there."""

from __future__ import annotations

import shutil
from pathlib import Path

import click
import pytest
from review_project import LATE, TABLE, commit, git, inside, make_repository, reviewed
from spec_project import edit

from kpipe.codegen.review.base import opened
from kpipe.codegen.review.git import files_of
from kpipe.codegen.review.model import Rename
from kpipe.codegen.review.verdict import verdict_line


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def repository(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "repository"))


def only(root: Path, *specs: str, against: str = "main"):
    (found,) = reviewed(root, *specs, against=against).pipelines
    return found


def refused(root: Path, against: str, *specs: str) -> str:
    with pytest.raises(click.UsageError) as caught:
        reviewed(root, *specs, against=against)
    return caught.value.message


def test_the_work_tree_and_the_index_are_left_alone(repository: Path) -> None:
    edit(repository, "dsa_tp.yaml", TABLE, LATE)
    git(repository, "add", "-A")
    before = git(repository, "status", "--porcelain")
    reviewed(repository)
    assert git(repository, "status", "--porcelain") == before


def test_everything_is_read_from_the_ref(repository: Path) -> None:
    """Parent spec and geometry too: here both differ, the spec itself does not."""
    table = 'sm_90a:  {q1: {"1-4": wait, "5-64": fork}'
    edit(repository, "dsa_dcp.yaml", table, table.replace('"1-4": wait, "5-64"', '"1-64"'))
    geometry = repository / "pipelines" / "geometry" / "kimi_k31.yaml"
    geometry.write_text(geometry.read_text().replace("top_k: 2048", "top_k: 1024"))
    found = only(repository, "pipelines/dsa_dcp_d2.yaml")
    assert [(one.mode_before, one.mode_after) for one in found.changed_ranges if one.rows[0] == 1]
    assert ("dimension", "top_k", "2048", "1024") in {
        (one.section, one.name, one.before, one.after) for one in found.settings
    }


def test_a_geometry_that_the_ref_lacks_is_not_taken_from_the_work_tree(repository: Path) -> None:
    folder = repository / "pipelines" / "geometry"
    (folder / "other.yaml").write_text(
        (folder / "small.yaml").read_text().replace("geometry: small", "geometry: other")
    )
    edit(repository, "dsa_tp.yaml", "geometry: kimi_k31", "geometry: other")
    commit(repository)
    git(repository, "rm", "-q", "--cached", "pipelines/geometry/other.yaml")
    git(repository, "commit", "-q", "-m", "without the geometry")
    found = only(repository, against="HEAD")
    assert found.state == "no base"
    assert [d.code for d in found.old_found] == ["KP103"]
    label = f"HEAD ({git(repository, 'rev-parse', 'HEAD')[:10]})"
    assert found.old_found[0].span.path == f"{label}: pipelines/dsa_tp.yaml"


def test_from_a_folder_below_and_with_an_absolute_path(repository: Path) -> None:
    edit(repository, "dsa_tp.yaml", TABLE, LATE)
    with inside(repository):
        (here,) = reviewed(repository).pipelines
    (below,) = reviewed(repository / "pipelines", "dsa_tp.yaml").pipelines
    (absolute,) = reviewed(repository, str(repository / "pipelines" / "dsa_tp.yaml")).pipelines
    assert here.ranges == below.ranges == absolute.ranges
    assert here.lists == below.lists == absolute.lists


def test_where_two_branches_parted(repository: Path) -> None:
    git(repository, "checkout", "-q", "-b", "work")
    edit(repository, "dsa_tp.yaml", TABLE, LATE)
    commit(repository)
    git(repository, "checkout", "-q", "main")
    edit(repository, "dsa_tp.yaml", "sigmoid: refined", "sigmoid: fast")
    commit(repository)
    git(repository, "checkout", "-q", "work")
    assert only(repository, against="main").numerics == ("sigmoid: fast -> refined",)
    assert only(repository, against="main...").numerics == ()


def test_a_copy_of_the_tree_and_a_copy_of_the_folder(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "pipelines", tmp_path / "whole" / "pipelines")
    shutil.copytree(repository / "pipelines", tmp_path / "flat")
    edit(repository, "dsa_tp.yaml", TABLE, LATE)
    whole = only(repository, against=str(tmp_path / "whole"))
    flat = only(repository, against=str(tmp_path / "flat"))
    file = only(repository, against=str(tmp_path / "flat" / "dsa_tp.yaml"))
    assert whole.lists == flat.lists == file.lists != ()
    assert whole.settings == flat.settings == file.settings == ()


def test_new_deleted_and_moved_specs(repository: Path) -> None:
    pipelines = repository / "pipelines"
    (pipelines / "dsa_dcp_d2.yaml").rename(pipelines / "dsa_dcp_two.yaml")
    (pipelines / "dsa_tp.yaml").unlink()
    (pipelines / "dsa_dcp4.yaml").write_text(
        "extends: dsa_dcp.yaml\nname: dsa_dcp4\nparallel: {tp: 4, dcp: 4}\n"
    )
    names = sorted(f"pipelines/{path.name}" for path in pipelines.glob("*.yaml"))
    found = {one.path: one for one in reviewed(repository, *names, everything=True).pipelines}
    assert {path: one.state for path, one in found.items()} == {
        "pipelines/dsa_dcp.yaml": "same",
        "pipelines/dsa_dcp4.yaml": "new",
        "pipelines/dsa_dcp_two.yaml": "changed",
        "pipelines/dsa_tp.yaml": "deleted",
    }
    assert found["pipelines/dsa_dcp_two.yaml"].renames == (
        Rename("spec", "pipelines/dsa_dcp_d2.yaml", "pipelines/dsa_dcp_two.yaml"),
    )
    assert {one.state for one in found["pipelines/dsa_tp.yaml"].ranges} == {"gone"}


def test_a_deleted_spec_that_is_named(repository: Path) -> None:
    (repository / "pipelines" / "dsa_tp.yaml").unlink()
    assert only(repository).state == "deleted"


def test_a_spec_that_cannot_be_read_there(repository: Path) -> None:
    path = repository / "pipelines" / "dsa_tp.yaml"
    good = path.read_text()
    path.write_text("kpipe: [1\n")
    commit(repository)
    path.write_text(good)
    found = only(repository, against="HEAD")
    assert (found.state, [d.code for d in found.old_found]) == ("no base", ["KP105"])
    assert found.found == ()


def test_a_spec_that_is_racy_there_is_still_compared(repository: Path) -> None:
    edit(repository, "dsa_dcp.yaml", "between_layers: waits", "between_layers: silent")
    commit(repository)
    edit(repository, "dsa_dcp.yaml", "between_layers: silent", "between_layers: waits")
    found = only(repository, "pipelines/dsa_dcp.yaml", against="HEAD")
    assert found.before.kind == "assumed" and found.before.basis[0] == "m1 or m3"
    assert found.after.kind == "proved" and found.found == ()
    assert found.lists and all(change.launches for change in found.lists)


def test_a_spec_that_became_racy(repository: Path) -> None:
    edit(repository, "dsa_dcp.yaml", "between_layers: waits", "between_layers: silent")
    found = only(repository, "pipelines/dsa_dcp.yaml")
    assert found.after.kind == "assumed" and set(found.after.codes) == {"KP301", "KP303"}
    assert found.lists and found.files is None and found.found


def test_a_draft_is_no_finding(repository: Path) -> None:
    (repository / "pipelines" / "draft.yaml").write_text(
        "extends: dsa_tp.yaml\nname: draft\ndraft: {missing: [nobody]}\n"
    )
    commit(repository)
    found = only(repository, "pipelines/draft.yaml", against="HEAD")
    assert (found.state, found.found) == ("draft", ())
    line = verdict_line(reviewed(repository, "pipelines/draft.yaml", "pipelines/dsa_tp.yaml"))
    assert line.startswith("kpipe: no schedule change in 2 pipelines against main (")
    assert "draft" not in line


def test_a_project_below_the_top_and_a_hook(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "mono" / "serving" / "layers"
    shutil.copytree(repository, inner, ignore=shutil.ignore_patterns(".git"))
    git(tmp_path / "mono", "init", "-q", "-b", "main")
    commit(tmp_path / "mono")
    edit(inner, "dsa_tp.yaml", TABLE, LATE)
    monkeypatch.setenv("GIT_DIR", "elsewhere")
    (found,) = reviewed(tmp_path / "mono", "serving/layers/pipelines/dsa_tp.yaml").pipelines
    assert [one.rows for one in found.changed_ranges] == [(1, 2, 3, 4)]


def test_words_that_name_nothing(repository: Path, tmp_path: Path) -> None:
    says = "`nowhere` is no folder, no file and no commit that this clone has"
    assert refused(repository, "nowhere") == says
    assert refused(repository, "origin/main").endswith("; get it with `git fetch origin main`")
    assert "no commit" in refused(repository, "-x")
    assert "no commit" in refused(repository, "--upload-pack=touch hacked")
    assert refused(repository, "\x1b[31mred").startswith("`\\x1b[31mred`")
    outside = tmp_path / "outside"
    shutil.copytree(repository / "pipelines", outside / "pipelines")
    assert refused(outside, "HEAD") == (
        "`HEAD` is no folder and no file, and `pipelines` is not in a git repository; name a "
        "folder or a file, or run kpipe in a clone"
    )
    (repository / "empty").mkdir()
    assert refused(repository, "empty").startswith("folder `empty` holds none of the specs")


def test_a_word_that_is_a_path_and_a_ref(repository: Path) -> None:
    shutil.copytree(repository / "pipelines", repository / "main" / "pipelines")
    assert refused(repository, "main") == (
        "`main` is a path and a git ref; write `./main` or `refs/heads/main`"
    )
    assert only(repository, against="./main").state == "same"
    assert only(repository, against="refs/heads/main").state == "same"


def test_one_file_is_compared_with_one_spec(repository: Path) -> None:
    text = refused(
        repository, "pipelines/dsa_tp.yaml", "pipelines/dsa_tp.yaml", "pipelines/dsa_dcp.yaml"
    )
    assert text == "`pipelines/dsa_tp.yaml` is one file; compare one SPEC with it"


def test_git_that_is_not_installed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repository))
    text = refused(repository, "main")
    assert text == "git is not installed; name a folder or a file instead of a ref"


def test_links_and_large_files_are_not_taken(repository: Path) -> None:
    (repository / "pipelines" / "link.yaml").symlink_to("/etc/passwd")
    (repository / "pipelines" / "large.yaml").write_text("#" * (1 << 20) + "#")
    made = commit(repository)
    names = files_of(repository, made, "pipelines")
    assert "pipelines/dsa_tp.yaml" in names
    assert not {"pipelines/link.yaml", "pipelines/large.yaml"} & {*names}
    with inside(repository), opened("HEAD", ["pipelines/dsa_tp.yaml"]) as base:
        assert not (base.root / "pipelines" / "link.yaml").exists()
        assert (base.root / "pipelines" / "dsa_tp.yaml").is_file()
