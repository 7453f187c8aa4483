"""A picture as one HTML page: nothing is loaded, a small script shows titles at once."""

from __future__ import annotations

from html import escape

_STYLE = """\
:root{color-scheme:light dark}
body{margin:1.5rem auto;max-width:1000px;font:14px/1.45 ui-sans-serif,system-ui,sans-serif;
background:#f6f7f9;color:#1f2733}
svg{width:100%;height:auto}
g:hover>rect{stroke-width:2.5}
pre{overflow-x:auto;font:12px/1.4 ui-monospace,Menlo,Consolas,monospace}
#tip{position:fixed;display:none;max-width:34rem;padding:.5rem .7rem;border-radius:6px;
white-space:pre-line;pointer-events:none;background:#1f2733;color:#fff;font-size:13px}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6e9ee}
#tip{background:#e6e9ee;color:#14181d}}
"""
_SCRIPT = """\
const tip = document.getElementById("tip");
for (const title of document.querySelectorAll("svg g > title")) {
  const group = title.parentNode, words = title.textContent;
  title.remove();
  group.setAttribute("aria-label", words);
  group.addEventListener("mousemove", event => {
    tip.textContent = words;
    tip.style.display = "block";
    const right = event.clientX + 14 + tip.offsetWidth > innerWidth;
    const low = event.clientY + 14 + tip.offsetHeight > innerHeight;
    tip.style.left = (right ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14) + "px";
    tip.style.top = (low ? event.clientY - 14 - tip.offsetHeight : event.clientY + 14) + "px";
  });
  group.addEventListener("mouseleave", () => { tip.style.display = "none"; });
}
"""


def html_page(title: str, picture: str, text: str) -> str:
    """A page with an SVG picture, and the same as text folded away below it."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n"
        f"{picture}<details><summary>As text</summary><pre>{escape(text)}</pre></details>\n"
        f'<div id="tip" role="status"></div>\n<script>\n{_SCRIPT}</script>\n</body>\n</html>\n'
    )
