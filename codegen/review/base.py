"""The old side of a comparison: a git commit, a folder or a file, always as files on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from kpipe.codegen.config import display, load_config, project_root
from kpipe.codegen.diagnostics import printable
from kpipe.codegen.review.git import GitError, commit_of, extract, files_of, top_of

ALIKE = 0.6  # of two texts, from which on one file is taken for the other renamed


@dataclass(frozen=True)
class Pair:
    """One pipeline on both sides, as files.

    `old` is where the old text lies, `old_as` the path that it had in the tree of `new`; both are
    None for a new pipeline, `new` for one that was deleted.
    """

    new: str | None
    old: Path | None
    old_as: str | None


@dataclass
class Base:
    """Where the old side comes from.

    `label` says so in a few words.  `root` holds the files; for a commit they are a copy of what
    is needed, which `bring` extends.
    """

    label: str
    root: Path
    top: Path | None = None  # of the work tree, for a commit
    commit: str = ""
    file: Path | None = None
    known: tuple[str, ...] = field(default=(), repr=False)  # specs of the commit

    def counterpart(self, path: Path) -> Path | None:
        """Where a file or folder of the working tree would lie on the old side."""
        if self.file is not None:
            return self.file
        if self.top is not None:
            inner = _inner(path, self.top)
            return self.root / inner if inner is not None else None
        inner = _inner(path, project_root(path))
        return self.root / inner if inner is not None else None

    def spec(self, path: Path) -> Path | None:
        """The old text of a spec; a folder may be a copy of the tree or of the pipelines alone."""
        whole = self.counterpart(path)
        places = [whole] if whole is not None else []
        if self.top is None and self.file is None:
            inner = _inner(path, Path.cwd().resolve())
            places += [self.root / inner] if inner is not None else []
            places += [self.root / path.parent.name / path.name, self.root / path.name]
        return next((place for place in places if place.is_file()), None)

    def bring(self, folder: Path) -> Path | None:
        """A folder of the working tree as it was on the old side, None where it was not there."""
        if self.file is not None:
            return None
        place = self.counterpart(folder)
        if self.top is not None and self.commit and place is not None and not place.exists():
            inner = place.relative_to(self.root).as_posix()
            extract(self.top, self.commit, files_of(self.top, self.commit, inner), self.root)
        return place if place is not None and place.is_dir() else None


@contextmanager
def opened(against: str, specs: Sequence[str]) -> Iterator[Base]:
    """The old side that the user named: REF, DIR or FILE.

    Raises UsageError with one sentence where it is none of them.
    """
    path = Path(against)
    try:
        if path.exists():
            _only_one(against, specs)
        if path.is_dir():
            base = Base(f"folder {display(path)}", path.resolve())
            if not any(base.spec(Path(spec)) for spec in specs):
                message = f"folder `{against}` holds none of the specs that are compared"
                raise click.UsageError(f"{message}; name a copy of the project or of its pipelines")
            yield base
        elif path.is_file():
            if len(specs) != 1:
                message = f"`{against}` is one file; compare one SPEC with it"
                raise click.UsageError(message)
            yield Base(f"file {display(path)}", path.resolve().parent, file=path.resolve())
        else:
            with TemporaryDirectory(prefix="kpipe-") as folder:
                yield _commit(against, specs, Path(folder).resolve())
    except GitError as error:
        raise click.UsageError(printable(str(error))) from None


def _only_one(against: str, specs: Sequence[str]) -> None:
    """Refuse a word that is a path and a ref alike."""
    if against.startswith(("/", ".")) or not specs:
        return
    try:
        top = top_of(_folder(specs))
    except GitError:
        return
    if top is not None and commit_of(top, against) is not None:
        message = (
            f"`{against}` is a path and a git ref; write `./{against}` or `refs/heads/{against}`"
        )
        raise click.UsageError(message)


def _folder(specs: Sequence[str]) -> Path:
    """The nearest folder that exists at or above the first spec; without specs, this one."""
    folder = Path(specs[0]).resolve().parent if specs else Path.cwd()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def _commit(ref: str, specs: Sequence[str], target: Path) -> Base:
    here = _folder(specs)
    top = top_of(here)
    shown = printable(ref)
    if top is None:
        raise click.UsageError(
            f"`{shown}` is no folder and no file, and `{display(here)}` is not in a git "
            "repository; name a folder or a file, or run kpipe in a clone"
        )
    commit = commit_of(top, ref)
    if commit is None:
        message = f"`{shown}` is no folder, no file and no commit that this clone has"
        if ref.startswith("origin/"):
            message += f"; get it with `git fetch origin {shown.removeprefix('origin/')}`"
        raise click.UsageError(message)
    project = project_root(here / "_")
    inner = _inner(project, top)
    folder = "" if inner is None or inner == Path(".") else inner.as_posix()
    names = files_of(top, commit, folder)
    output = _inner(load_config(here / "_").output, top)
    skipped = f"{output.as_posix()}/" if output is not None else "\0"
    settings = ("kpipe.toml", "pyproject.toml")
    kept = [
        name
        for name in names
        if (name.endswith((".yaml", ".yml")) and not name.startswith(skipped))
        or name.removeprefix(f"{folder}/") in settings
    ]
    extract(top, commit, kept, target)
    (target / folder / ".git").mkdir(parents=True, exist_ok=True)  # the mark of a project
    specs_there = tuple(name for name in kept if name.endswith((".yaml", ".yml")))
    label = commit[:10] if ref == commit else f"{shown} ({commit[:10]})"
    return Base(label, target, top, commit, known=specs_there)


def pairs_of(base: Base, specs: Sequence[str], *, all_of_project: bool) -> list[Pair]:
    """The specs of the working tree with their old texts, then those that are gone.

    With `all_of_project` the old specs that the project's settings name count too; otherwise a
    spec counts as gone where the user named it.
    """
    pairs: list[Pair] = []
    for spec in specs:
        path = Path(spec)
        old = base.spec(path)
        if path.exists() or old is None:
            pairs.append(Pair(spec, old, spec if old is not None else None))
        else:
            pairs.append(Pair(None, old, spec))
    gone = {pair.old: pair.old_as for pair in pairs if pair.new is None}
    if all_of_project:
        named = {pair.old for pair in pairs}
        gone |= {old: shown for old, shown in _gone(base) if old not in named}
    found = []
    for pair in pairs:
        if pair.new is None:
            continue
        if pair.old is None and Path(pair.new).is_file():
            old = _renamed(base, Path(pair.new), gone)
            if old is not None:
                shown = gone.pop(old, None) or _shown(base, old)
                pair = Pair(pair.new, old, shown)
        found.append(pair)
    return [*found, *(Pair(None, old, shown) for old, shown in gone.items())]


def _gone(base: Base) -> Iterator[tuple[Path, str]]:
    """Old specs that the project's settings name and that the working tree has no more."""
    config = load_config(Path("pyproject.toml"))
    root = base.counterpart(config.root) if base.file is None else None
    if root is None or (base.top is None and not root.is_dir()):
        return
    for pattern in config.pipelines:
        for old in sorted(root.glob(pattern)):
            now = config.root / old.relative_to(root)
            if old.is_file() and not now.exists():
                yield old, display(now)


def _renamed(base: Base, new: Path, gone: dict[Path | None, str | None]) -> Path | None:
    """The old file that a new one was made of by renaming: gone now, and mostly the same text."""
    from difflib import SequenceMatcher

    beside = base.counterpart(new)
    if base.file is not None or beside is None:
        return None
    candidates = [place for place in gone if place is not None]
    for place in sorted(beside.parent.glob("*.yaml")):
        now = new.parent / place.name
        if not now.exists() and place not in candidates:
            candidates.append(place)
    text = new.read_text("utf-8", errors="replace").splitlines()
    best, best_ratio = None, ALIKE
    for place in candidates:
        old = place.read_text("utf-8", errors="replace").splitlines()
        ratio = SequenceMatcher(None, old, text, autojunk=False).ratio()
        if ratio >= best_ratio and (best is None or ratio > best_ratio):
            best, best_ratio = place, ratio
    return best


def _shown(base: Base, old: Path) -> str:
    """The path that an old file had in the working tree."""
    top = base.top if base.top is not None else project_root(Path("_"))
    return display(top / old.relative_to(base.root))


def _inner(path: Path, folder: Path) -> Path | None:
    resolved = Path(os.path.realpath(path))
    return resolved.relative_to(folder) if resolved.is_relative_to(folder) else None
