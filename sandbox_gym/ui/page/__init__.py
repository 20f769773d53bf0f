"""The page itself: one text out of the files beside this one, with no outside resources. What sandboxes have written
goes into it as text, never as HTML.
"""

from __future__ import annotations

from pathlib import Path

_SCRIPTS = ("tree.js", "sandbox.js", "page.js")


def page(nonce: str) -> str:
    """`nonce`: what allows its own script and style, and no other."""
    folder = Path(__file__).parent
    text = (folder / "page.html").read_text("utf-8")
    for name, source in (
        ("STYLE", (folder / "page.css").read_text("utf-8")),
        ("SCRIPT", "\n".join((folder / script).read_text("utf-8") for script in _SCRIPTS)),
        ("NONCE", nonce),
    ):
        text = text.replace(f"@{name}@", source)
    return text
