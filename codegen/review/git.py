"""Files of a git commit, read without touching the work tree or the index."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

SIZE_LIMIT = 1 << 20  # bytes; nothing that kpipe reads or writes is larger
_OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")


class GitError(Exception):
    """git is missing, or said no; the text is one sentence for the user."""


def top_of(folder: Path) -> Path | None:
    """The top folder of the work tree that a folder belongs to, None where it is in none.

    Raises GitError where git is not installed.
    """
    done = _git(folder, "rev-parse", "--show-toplevel")
    text = done.stdout.decode("utf-8", errors="surrogateescape").rstrip("\n")
    return Path(text).resolve() if done.returncode == 0 and text else None


def commit_of(top: Path, ref: str) -> str | None:
    """The commit that a ref names, None where it names none.

    `REF...` is the commit at which REF and HEAD parted, as in `git diff REF...`.
    """
    parted = ref.endswith("...")
    done = _git(
        top, *("rev-parse", "--verify", "--quiet", "--end-of-options"), f"{_plain(ref)}^{{commit}}"
    )
    commit = done.stdout.decode("ascii", errors="replace").strip()
    if done.returncode != 0 or not commit:
        return None
    if parted:
        done = _git(top, "merge-base", commit, "HEAD")
        commit = done.stdout.decode("ascii", errors="replace").strip()
    return commit if done.returncode == 0 and commit else None


def files_of(top: Path, commit: str, folder: str) -> tuple[str, ...]:
    """Names of the plain files of a commit below a folder (`` for all), relative to the top.

    Links, submodules and files larger than 1 MiB are left out.
    """
    where = ["--", f"{folder}/"] if folder else []
    done = _git(top, "ls-tree", "-r", "-z", "-l", "--full-tree", commit, *where)
    if done.returncode != 0:
        raise GitError(_said(done))
    names = []
    for entry in done.stdout.decode("utf-8", errors="surrogateescape").split("\0"):
        facts, _, name = entry.partition("\t")
        mode, _, _, size = facts.split() if facts else ("", "", "", "-")
        if mode in ("100644", "100755") and int(size) <= SIZE_LIMIT:
            names.append(name)
    return tuple(names)


def extract(top: Path, commit: str, names: Iterable[str], target: Path) -> None:
    """Write files of a commit below `target`, under their own names."""
    wanted = list(names)
    if not wanted:
        return
    asked = "".join(f"{commit}:{name}\n" for name in wanted if "\n" not in name)
    done = _git(top, "cat-file", "--batch", given=asked.encode("utf-8", errors="surrogateescape"))
    if done.returncode != 0:
        raise GitError(_said(done))
    at = 0
    for name in (name for name in wanted if "\n" not in name):
        end = done.stdout.index(b"\n", at)
        words = done.stdout[at:end].split()
        if len(words) != 3 or words[1] != b"blob":
            raise GitError(f"git has no content for `{name}` at {commit[:10]}")
        size = int(words[2])
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(done.stdout[end + 1 : end + 1 + size])
        at = end + 1 + size + 1


def _plain(ref: str) -> str:
    return ref.removesuffix("...") or "HEAD"


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    text = done.stderr.decode("utf-8", errors="replace").strip()
    return text.partition("\n")[0] or "git failed without a word"


def _git(folder: Path, *words: str, given: bytes | None = None) -> subprocess.CompletedProcess:
    # In a hook git hands on where its own repository and index are; here the folder decides.
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_HOOK}
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *words],
            input=given,
            capture_output=True,
            check=False,
            env=environment,
        )
    except FileNotFoundError:
        raise GitError("git is not installed; name a folder or a file instead of a ref") from None
