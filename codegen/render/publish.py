"""Publishing: compare what is on disk with what should be there, then write the difference.

`compare` is pure.  `publish` writes all or nothing, as far as a file system allows: new bytes go
to temporary files beside their targets first, replaced files are kept until everything is in
place, and a failure puts them back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kpipe.codegen.config import display
from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError
from kpipe.codegen.render.manifest import FILE_NAME, Manifest, digest, is_inner

Kind = Literal["new", "changed", "missing", "unchanged", "orphan", "hand_edited"]
# What a run reports, in this order; `unchanged` is only counted.
DRIFT: tuple[Kind, ...] = ("new", "changed", "missing", "orphan", "hand_edited")


@dataclass(frozen=True)
class FolderState:
    """What is on disk: the bytes of every file that the old manifest or the new text names."""

    root: Path  # nothing outside it is ever written
    folder: Path
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Change:
    """One file: how it differs, its bytes on disk and the bytes that it should have.

    new: written for the first time.  changed: generated before, other text now.  missing:
    generated before and gone from disk.  orphan: generated before, no longer part of the output.
    hand_edited: on disk with bytes that kpipe did not write, and in the way.
    """

    path: str
    kind: Kind
    old: bytes | None
    new: bytes | None


@dataclass(frozen=True)
class Changes:
    """The difference between a folder and its new text, sorted by path."""

    root: Path
    folder: Path
    entries: tuple[Change, ...]

    def of(self, kind: Kind) -> tuple[Change, ...]:
        """The files of one class."""
        return tuple(entry for entry in self.entries if entry.kind == kind)

    @property
    def drift(self) -> tuple[Change, ...]:
        """Every file that is not as it should be."""
        return tuple(entry for entry in self.entries if entry.kind != "unchanged")


def read_state(root: Path, folder: Path, names: Iterable[str]) -> FolderState:
    """The bytes of the named files that exist.

    Raises SpecError KP806 for a name that leads out of `root`, links resolved.
    """
    files = {}
    for name in sorted(set(names)):
        path = _checked(root, folder, name)
        if path.is_file():
            files[name] = path.read_bytes()
    return FolderState(root, folder, files)


def compare(state: FolderState, new: Mapping[str, str], old: Manifest | None) -> Changes:
    """Classify every file of the new text and of the old manifest; touches nothing.

    A file whose bytes are as they should be is unchanged, whoever wrote them.  The manifest is
    kpipe's own and is never hand-edited.
    """
    recorded = dict(old.files) if old else {}
    entries = []
    for path in sorted({*new, *recorded}):
        on_disk = state.files.get(path)
        wanted = new[path].encode("utf-8") if path in new else None
        if wanted is None and on_disk is None:
            continue
        kind = _kind(path, on_disk, wanted, recorded)
        entries.append(Change(path, kind, on_disk, wanted))
    return Changes(state.root, state.folder, tuple(entries))


def _kind(
    path: str, on_disk: bytes | None, wanted: bytes | None, recorded: Mapping[str, str]
) -> Kind:
    if on_disk is None:
        return "missing" if path in recorded else "new"
    if on_disk == wanted:
        return "unchanged"
    if path != FILE_NAME and digest(on_disk) != recorded.get(path):
        return "hand_edited"
    return "orphan" if wanted is None else "changed"


def hand_edit_findings(changes: Changes) -> tuple[Diagnostic, ...]:
    """One finding KP803 per file that kpipe would overwrite or delete, and did not write."""
    found = []
    for entry in changes.of("hand_edited"):
        shown = display(changes.folder / entry.path)
        verb = "overwrites" if entry.new is not None else "deletes"
        found.append(
            Diagnostic(
                "KP803",
                f"`{shown}` was edited by hand; kpipe has not written these bytes",
                Span(shown, 1, 1, 1, 1),
                help="move the edit into the spec or a template, or delete the file and generate "
                f"again; `--force` {verb} it",
            )
        )
    return tuple(found)


def publish(plans: Sequence[Changes], *, force: bool = False) -> None:
    """Bring all folders to their new text, all of them or none.

    Writes only files that differ and deletes orphans; other files are left alone.  Raises
    SpecError KP803 for hand-edited files unless `force`, KP806 for a path outside the output
    root, KP805 where the file system fails (everything is as before then).
    """
    edited = tuple(d for changes in plans for d in hand_edit_findings(changes))
    if edited and not force:
        raise SpecError(edited)
    targets = [
        (changes, entry, _checked(changes.root, changes.folder, entry.path))
        for changes in plans
        for entry in changes.drift
    ]
    transaction = _Transaction()
    try:
        for _, entry, path in targets:
            transaction.stage(path, entry)
        for _, entry, path in targets:
            transaction.apply(path, entry)
    except OSError as error:
        transaction.roll_back()
        reason = error.strerror or str(error)
        place = display(Path(error.filename)) if error.filename else "the output"
        message = f"cannot write `{place}`: {reason}; every file is as it was"
        raise SpecError((Diagnostic("KP805", message, None),)) from error
    except BaseException:
        transaction.roll_back()
        raise
    transaction.finish()
    for changes, entry, path in targets:
        if entry.new is None:
            _drop_empty(path.parent, changes.folder)


class _Transaction:
    """Temporary files, kept copies and made folders of one publish."""

    def __init__(self) -> None:
        self.staged: dict[Path, Path] = {}
        self.kept: dict[Path, Path] = {}
        self.applied: list[Path] = []
        self.made: list[Path] = []

    def stage(self, path: Path, entry: Change) -> None:
        """Write the new bytes beside the target and copy the old ones."""
        on_disk = path.read_bytes() if path.is_file() else None
        if on_disk != entry.old:
            shown = display(path)
            message = f"`{shown}` changed while kpipe was running"
            raise SpecError((Diagnostic("KP803", message, Span(shown, 1, 1, 1, 1)),))
        self._make_folder(path.parent)
        if entry.old is not None:
            copy = _beside(path, "old")
            self.kept[path] = copy
            shutil.copy2(path, copy)
        if entry.new is not None:
            temporary = _beside(path, "new")
            self.staged[path] = temporary
            with open(temporary, "xb") as file:
                file.write(entry.new)
            if entry.old is not None:
                shutil.copymode(path, temporary)

    def apply(self, path: Path, entry: Change) -> None:
        """Put the staged bytes in place, or delete the file."""
        self.applied.append(path)
        if entry.new is None:
            path.unlink()
        else:
            os.replace(self.staged[path], path)

    def roll_back(self) -> None:
        """Everything as before; goes on past further failures, so that most is saved."""
        for path in self.applied:
            with contextlib.suppress(OSError):
                if path in self.kept:
                    os.replace(self.kept[path], path)
                else:
                    path.unlink(missing_ok=True)
        for copy in self.kept.values():
            with contextlib.suppress(OSError):
                copy.unlink(missing_ok=True)
        for temporary in self.staged.values():
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        for folder in reversed(self.made):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def finish(self) -> None:
        """Drop the kept copies."""
        for copy in self.kept.values():
            with contextlib.suppress(OSError):
                copy.unlink()

    def _make_folder(self, folder: Path) -> None:
        absent = []
        while not folder.exists():
            absent.append(folder)
            folder = folder.parent
        for path in reversed(absent):
            path.mkdir()
            self.made.append(path)


def _beside(path: Path, tag: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{tag}")


def _drop_empty(folder: Path, top: Path) -> None:
    while folder != top and folder.is_relative_to(top):
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def _checked(root: Path, folder: Path, name: str) -> Path:
    """The path of a generated file, which must stay inside the output root, links resolved."""
    path = folder / name
    resolved = path.resolve()
    if not is_inner(name) or not resolved.is_relative_to(root.resolve()) or path.is_symlink():
        shown = display(path)
        what = "is a link" if path.is_symlink() else "lies outside the output root"
        message = f"`{shown}` {what}; kpipe writes plain files below `{display(root)}` only"
        raise SpecError((Diagnostic("KP806", message, None, help="remove the link"),))
    return path
