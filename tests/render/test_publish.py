"""Publishing: the classes of files, all or nothing, and nothing outside the output root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.render.manifest import Manifest, digest
from kpipe.codegen.render.publish import Changes, FolderState, compare, publish, read_state


def manifest(files: dict[str, str]) -> Manifest:
    digests = {path: digest(text) for path, text in files.items()}
    return Manifest("x", "x.yaml", "0", "g.yaml", {}, {}, "0", digests)


def changes(root: Path, new: dict[str, str], old: dict[str, str] | None) -> Changes:
    recorded = manifest(old) if old is not None else None
    state = read_state(root, root / "x", {*new, *(old or {})})
    return compare(state, new, recorded)


def kinds(found: Changes) -> dict[str, str]:
    return {entry.path: entry.kind for entry in found.entries}


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_classes() -> None:
    disk = {"same.py": b"1", "changed.py": b"old", "edited.py": b"mine", "orphan.py": b"o"}
    disk |= {"edited_orphan.py": b"mine", "stray.py": b"mine", "as_wanted.py": b"w"}
    old = manifest(
        {"same.py": "1", "changed.py": "old", "edited.py": "e", "orphan.py": "o"}
        | {"edited_orphan.py": "eo", "gone.py": "g", "gone_orphan.py": "go", "as_wanted.py": "z"}
    )
    new = {"same.py": "1", "changed.py": "new", "edited.py": "new", "gone.py": "g", "new.py": "n"}
    new |= {"stray.py": "kpipe's", "as_wanted.py": "w"}
    found = compare(FolderState(Path("r"), Path("r/x"), disk), new, old)
    assert kinds(found) == {
        "as_wanted.py": "unchanged",
        "changed.py": "changed",
        "edited.py": "hand_edited",
        "edited_orphan.py": "hand_edited",
        "gone.py": "missing",
        "new.py": "new",
        "orphan.py": "orphan",
        "same.py": "unchanged",
        "stray.py": "hand_edited",
    }
    assert [entry.path for entry in found.drift] == [
        path for path, kind in kinds(found).items() if kind != "unchanged"
    ]


def test_the_manifest_is_never_hand_edited() -> None:
    state = FolderState(Path("r"), Path("r/x"), {"manifest.json": b"{}"})
    assert kinds(compare(state, {"manifest.json": "{ }"}, None)) == {"manifest.json": "changed"}


def test_writes_only_what_differs_and_leaves_strangers_alone(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    first = {"a.py": "a\n", "kernels/b.py": "b\n"}
    publish([changes(tmp_path, first, None)])
    (folder / "evidence").mkdir()
    (folder / "evidence/h200.json").write_text("{}")
    before = (folder / "a.py").stat()
    second = {"a.py": "a\n", "c/d.py": "d\n"}
    publish([changes(tmp_path, second, first)])
    after = (folder / "a.py").stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    assert snapshot(folder) == {"a.py": b"a\n", "c/d.py": b"d\n", "evidence/h200.json": b"{}"}
    assert not (folder / "kernels").exists()


def test_keeps_the_mode_of_a_file(tmp_path: Path) -> None:
    publish([changes(tmp_path, {"a.py": "1"}, None)])
    (tmp_path / "x/a.py").chmod(0o640)
    publish([changes(tmp_path, {"a.py": "2"}, {"a.py": "1"})])
    assert (tmp_path / "x/a.py").stat().st_mode & 0o777 == 0o640


def test_refuses_hand_edited_files_and_writes_nothing(tmp_path: Path) -> None:
    old = {"a.py": "1", "b.py": "1", "gone.py": "1"}
    publish([changes(tmp_path, old, None)])
    (tmp_path / "x/a.py").write_text("mine")
    (tmp_path / "x/gone.py").write_text("mine")
    before = snapshot(tmp_path)
    wanted = changes(tmp_path, {"a.py": "2", "b.py": "2"}, old)
    with pytest.raises(SpecError) as raised:
        publish([wanted])
    assert snapshot(tmp_path) == before
    found = raised.value.diagnostics
    assert [d.code for d in found] == ["KP803", "KP803"]
    assert "a.py` was edited by hand; kpipe has not written these bytes" in found[0].message
    assert found[0].help.endswith("`--force` overwrites it")
    assert found[1].help.endswith("`--force` deletes it")
    publish([wanted], force=True)
    assert snapshot(tmp_path / "x") == {"a.py": b"2", "b.py": b"2"}


@pytest.mark.parametrize("fail_at", range(1, 5))
def test_a_failure_restores_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    old = {"a.py": "1", "b.py": "1", "orphan.py": "1"}
    publish([changes(tmp_path, old, None)])
    stamp = (tmp_path / "x/a.py").stat().st_mtime_ns
    before = snapshot(tmp_path)
    calls = 0
    real = os.replace

    def failing(source, target):  # noqa: ANN001, ANN202
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    new = {"a.py": "2", "b.py": "2", "new/c.py": "3", "z.py": "4"}
    with pytest.raises(SpecError, match="No space left on device; every file is as it was"):
        publish([changes(tmp_path, new, old)])
    assert calls >= fail_at
    assert snapshot(tmp_path) == before
    assert (tmp_path / "x/a.py").stat().st_mtime_ns == stamp
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == ["a.py", "b.py", "orphan.py"]


def test_a_failure_while_staging_replaces_nothing(tmp_path: Path) -> None:
    publish([changes(tmp_path, {"a.py": "1"}, None)])
    (tmp_path / "x/sub").write_text("a file where a folder is needed")
    before = snapshot(tmp_path)
    with pytest.raises(SpecError) as raised:
        publish([changes(tmp_path, {"a.py": "2", "sub/b.py": "2"}, {"a.py": "1"})])
    assert raised.value.diagnostics[0].code == "KP805"
    assert snapshot(tmp_path) == before


def test_two_folders_are_one_transaction(tmp_path: Path) -> None:
    good = changes(tmp_path / "one", {"a.py": "1"}, None)
    (tmp_path / "two").mkdir()
    (tmp_path / "two/x").write_text("no folder")
    bad = changes(tmp_path / "two", {"a.py": "1"}, None)
    with pytest.raises(SpecError):
        publish([good, bad])
    assert not (tmp_path / "one").exists()


def test_a_file_that_changed_meanwhile_is_not_lost(tmp_path: Path) -> None:
    publish([changes(tmp_path, {"a.py": "1"}, None)])
    wanted = changes(tmp_path, {"a.py": "2"}, {"a.py": "1"})
    (tmp_path / "x/a.py").write_text("just now")
    with pytest.raises(SpecError, match="changed while kpipe was running"):
        publish([wanted])
    assert snapshot(tmp_path) == {"x/a.py": b"just now"}


@pytest.mark.parametrize("name", ["../outside.py", "/outside.py", "a/../../b.py", "./a.py", ""])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError) as raised:
        read_state(tmp_path, tmp_path / "x", [name])
    assert raised.value.diagnostics[0].code == "KP806"


def test_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "root"
    (root / "x").mkdir(parents=True)
    (root / "x/kernels").symlink_to(outside)
    with pytest.raises(SpecError, match="lies outside the output root"):
        read_state(root, root / "x", ["kernels/a.py"])
    (root / "x/a.py").symlink_to(root / "x/b.py")
    with pytest.raises(SpecError, match="is a link"):
        read_state(root, root / "x", ["a.py"])


def test_a_link_made_after_the_comparison_is_refused(tmp_path: Path) -> None:
    wanted = changes(tmp_path / "root", {"kernels/a.py": "1"}, None)
    (tmp_path / "outside").mkdir()
    (tmp_path / "root/x").mkdir(parents=True)
    (tmp_path / "root/x/kernels").symlink_to(tmp_path / "outside")
    with pytest.raises(SpecError):
        publish([wanted])
    assert not list((tmp_path / "outside").iterdir())
