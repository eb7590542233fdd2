"""The status page: one document for everybody, without an asset from elsewhere and without a word of any cluster.

What it shows it asks ``/cluster/events`` for, with the key that whoever looks at it has typed. It is kept in three
files, each with the name of the language that it is in; the document holds the other two.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from router.front.exchange import Header

HTML = b"text/html; charset=utf-8"
_STYLE = '<link rel="stylesheet" href="status.css">'
_SCRIPT = '<script src="status.js"></script>'


@dataclass(frozen=True)
class StatusPage:
    """The document and what is sent with it.

    Attributes:
        body: the document.
        headers: among them a policy under which a browser runs the page's own script, asks nobody but this router, and
            lets no other page show it.
    """

    body: bytes
    headers: tuple[Header, ...]


def status_page() -> StatusPage:
    """Put it together."""
    sources = Path(__file__).with_name("status.html")
    style, script = (sources.with_suffix(suffix).read_text() for suffix in (".css", ".js"))
    body = sources.read_text()
    for place, tag, text in ((_STYLE, "style", style), (_SCRIPT, "script", script)):
        assert body.count(place) == 1, f"{sources.name} has no place for its {tag}"
        body = body.replace(place, f"<{tag}>{text}</{tag}>")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src '{_hash(style)}'",
            f"script-src '{_hash(script)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers = (
        (b"content-security-policy", policy.encode()),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-cache"),
    )
    return StatusPage(body.encode(), headers)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
