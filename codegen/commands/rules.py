"""`kpipe explain` and `kpipe rules`."""

from __future__ import annotations

import json

import click

from kpipe.codegen.commands.common import WIDTH, aligned, use_color
from kpipe.codegen.diagnostics import did_you_mean
from kpipe.codegen.rules import RULES


def run_explain(code: str, color: str) -> int:
    """Print one rule; raises UsageError for a code that no rule has."""
    rule = RULES.get(code.upper())
    if rule is None:
        near = did_you_mean(code.upper(), RULES)
        hint = f"did you mean {near}? " if near else ""
        raise click.UsageError(f"no rule `{code}`; {hint}kpipe rules lists them all")
    title = f"{rule.code}  {rule.name}"
    bright = use_color(color)
    click.echo(click.style(title, bold=True) if bright else title, color=bright)
    example = [f"  {line}" for line in rule.bad.expandtabs(4).split("\n")]
    sections = (_plain(rule.why), ["for example", *example], ["repair", *_plain(rule.repair)])
    for lines in sections:
        click.echo("\n" + "\n".join(lines))
    return 0


def _plain(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, WIDTH - 2, initial_indent="  ", subsequent_indent="  ")


def run_rules(form: str) -> int:
    """List every rule."""
    rules = [RULES[code] for code in sorted(RULES)]
    if form == "json":
        keys = ("code", "name", "why", "bad", "repair")
        payload = {
            "schema": "kpipe.rules/1",
            "rules": [{key: getattr(rule, key) for key in keys} for rule in rules],
        }
        click.echo(json.dumps(payload, indent=2))
        return 0
    if form == "markdown":
        click.echo(rules_page(), nl=False)
        return 0
    for line in aligned((rule.code, rule.name) for rule in rules):
        click.echo(line)
    return 0


def rules_page() -> str:
    """Every rule as a Markdown page."""
    parts = [
        "# Rules\n\nEvery finding of kpipe names its rule. Written by "
        "`kpipe rules --format markdown`; `kpipe explain CODE` prints one of them.\n"
    ]
    for code in sorted(RULES):
        rule = RULES[code]
        example = f"```text\n{rule.bad.expandtabs(4)}\n```"
        parts.append(
            f"## {rule.code} {rule.name}\n\n{rule.why}\n\n{example}\n\nRepair: {rule.repair}\n"
        )
    return "\n".join(parts)
