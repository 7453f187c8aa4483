"""Collects findings, so that one run reports everything that is wrong."""

from __future__ import annotations

from collections.abc import Iterable

from kpipe.codegen.diagnostics import Diagnostic, Edit, Span, SpecError, did_you_mean
from kpipe.codegen.edits import replace_word
from kpipe.codegen.spec.load import Source


class Report:
    """The only mutable object of planning; it grows and is raised once at the end."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.found: list[Diagnostic] = []

    def error(
        self,
        code: str,
        message: str,
        span: Span | None,
        *,
        allowed: Iterable[str] = (),
        help: str = "",
        related: Iterable[tuple[str, Span]] = (),
        fix: tuple[Edit, ...] = (),
        once: bool = False,
    ) -> None:
        """Add one error.  With `once` the same sentence is not said again of another place:
        every mode that uses a missing buffer would repeat it."""
        if once and any((d.code, d.message) == (code, message) for d in self.found):
            return
        finding = Diagnostic(
            code, message, span, "error", tuple(allowed), help, tuple(related), fix=fix
        )
        if finding not in self.found:
            self.found.append(finding)

    def unknown(self, what: str, word: str, span: Span | None, allowed: Iterable[str]) -> None:
        """A name that nothing declares, with the nearest one that something does."""
        words = tuple(allowed)
        near = did_you_mean(word, words)
        hint = f"did you mean `{near}`?" if near else ""
        fix = self.replacement(span, word, near)
        self.error("KP103", f"unknown {what} `{word}`", span, allowed=words, help=hint, fix=fix)

    def replacement(self, span: Span | None, word: str, near: str) -> tuple[Edit, ...]:
        """The edit that puts `near` for `word` at a place; none without a `near`."""
        return replace_word(self.source.texts, span, word, near) if span and near else ()

    def extend(self, findings: Iterable[Diagnostic]) -> None:
        """Add findings made elsewhere."""
        self.found.extend(finding for finding in findings if finding not in self.found)

    def stop_on_errors(self) -> None:
        """Raise SpecError if anything was found so far."""
        if self.found:
            raise SpecError(tuple(self.found))
