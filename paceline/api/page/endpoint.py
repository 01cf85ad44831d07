"""Routes of the page's files: one for each, so that exactly these need no key. They are read once, at the start.

The page holds nothing of a user: it asks the API as any client does, with a key where one is needed. The policy in its
headers forbids scripts and styles in the HTML, connections to other hosts, frames, and assignments of HTML by scripts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.http.routing import OpenRoute

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
VENDOR = "vendor/"  # libraries of others, as they are published
PAGES = {
    "index.html": "/",
    "docs.html": "/docs",
    "passage.html": "/passage",
    "dashboard.html": "/dashboard",
}  # every other file is below /page/
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; manifest-src 'self'; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",  # kept by browsers, and asked for again with its tag: a new release shows at once
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page, with the path that serves it."""

    path: str
    content: bytes
    media_type: str

    @property
    def tag(self) -> str:
        """Strong entity tag of the content (RFC 9110, 8.8.3)."""
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    async def show(self, request: Request) -> Response:
        """The file, or 304 when the browser holds it already."""
        headers = HEADERS | {"etag": self.tag}
        held = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if self.tag in held:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers | {"content-type": self.media_type})


def load_assets() -> list[Asset]:
    """Every file of the page, in the order of their names."""
    top = files(__package__) / "assets"
    found = {f"{folder}{file.name}": file for folder in ("", VENDOR) for file in (top / folder).iterdir()}
    return [
        Asset(PAGES.get(name, f"/page/{name}"), found[name].read_bytes(), TYPES[PurePosixPath(name).suffix])
        for name in sorted(found)
        if found[name].is_file()
    ]


router = APIRouter(route_class=OpenRoute, include_in_schema=False)
for _asset in load_assets():
    router.add_api_route(_asset.path, _asset.show)
