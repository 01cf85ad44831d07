"""A stand-in for the Hugging Face hub: the part of its interface that fetches a model, on a port of this machine.

It can be told to close connections early, to refuse, to change content and to ignore ranges.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests import stand_ins

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class StandInHub:
    """Repositories by name, and how it misbehaves."""

    repositories: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut_after: int | None = None  # bytes of a weights' response, before the connection is closed
    cuts: int = 1 << 30  # so often
    withheld_from: int | None = None  # byte of weights, from which on none is sent
    withheld: threading.Event = field(default_factory=threading.Event)  # set once the bytes before that are sent
    changed: bool = False  # weights come with a byte that is not theirs
    ignores_ranges: bool = False
    down: bool = False  # 503 to all
    storage: StandInHub | None = None  # another host, which large files are fetched from; None: from here
    wrong_token: str = ""  # which it does not know
    lie: Callable[[dict[str, Any]], object] = lambda _: None  # changes its description of a repository
    headers: Mapping[str, str] = field(default_factory=dict)  # of its answers for files, in place of the true ones
    endless: bool = False  # weights go on after their end
    tokens: set[str] = field(default_factory=set)  # that were sent to it
    sent: int = 0  # bytes of files
    ranges: list[str] = field(default_factory=list)  # that were asked for
    url: str = ""


@contextmanager
def serving(hub: StandInHub) -> Iterator[StandInHub]:
    with stand_ins.serving(type("Handler", (_Handler,), {"hub": hub})) as hub.url:
        yield hub


@contextmanager
def asked(hub: StandInHub, cache: Path) -> Iterator[StandInHub]:
    """Serve it as the hub that this process asks, with a cache of its own."""
    with serving(hub), pytest.MonkeyPatch.context() as patched:
        patched.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patched.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patched.setattr(constants, "HF_HUB_CACHE", str(cache))
        patched.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


class _Handler(stand_ins.Handler):
    hub: StandInHub

    def get(self) -> None:
        path = self.path.partition("?")[0]
        if token := self.headers.get("Authorization"):
            self.hub.tokens.add(token)
        if self.hub.wrong_token and token == f"Bearer {self.hub.wrong_token}":
            self._refuse(401, "", "Invalid credentials in Authorization header")
            return
        if self.hub.down:
            self._refuse(503, "")
            return
        if found := re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/(.+))?", path):
            self._describe(found[1], found[2], found[3])
        elif found := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            self._file(found[1], found[3], body=self.command == "GET")
        else:
            self._refuse(404, "")

    def _describe(self, name: str, what: str | None, revision: str | None) -> None:
        files = self.hub.repositories.get(name)
        if files is None:
            self._refuse(401, "RepoNotFound")
            return
        if revision not in (None, "main", COMMIT):
            self._refuse(404, "RevisionNotFound")
            return
        if what == "tree":
            self._json([_entry(file, content) for file, content in files.items()])
            return
        siblings = [_sibling(file, content) for file, content in files.items()]
        described = {"id": name, "sha": COMMIT, "siblings": siblings, "gated": name in self.hub.gated}
        self.hub.lie(described)
        self._json(described)

    def _file(self, name: str, file: str, *, body: bool) -> None:
        content = self.hub.repositories.get(name, {}).get(file)
        if name in self.hub.gated:
            self._refuse(403, "GatedRepo")
            return
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        etag, size = _name(file, content), len(content)
        if self.hub.changed and _is_large(file):
            content = content[:-1] + bytes([content[-1] ^ 1])
        asked = self.headers.get("Range")
        start = 0
        if asked and body:
            self.hub.ranges.append(asked)
        if asked and not self.hub.ignores_ranges:
            start = int(asked.removeprefix("bytes=").partition("-")[0])
        if self.hub.storage is not None and _is_large(file):
            self._redirect(f"{self.hub.storage.url}{self.path}?X-Amz-Signature=1", etag, size)
            return
        self.send_response(206 if start else 200)
        described = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if _is_large(file):
            described |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(size)}
        for header, value in (described | dict(self.hub.headers)).items():
            self.send_header(header, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        if not self.hub.endless:
            self.send_header("Content-Length", str(size - start))
        self.end_headers()
        if not body:
            return
        while self.hub.endless:
            try:
                self.wfile.write(bytes(1 << 16))
            except OSError:
                return
            self.hub.sent += 1 << 16
        rest = content[start:]
        if _is_large(file) and self.hub.cut_after is not None and self.hub.cuts > 0:
            self.hub.cuts -= 1
            rest = rest[: self.hub.cut_after]
            self.close_connection = True
        if _is_large(file) and self.hub.withheld_from is not None:
            rest = rest[: max(0, self.hub.withheld_from - start)]
            self.close_connection = True
        self.hub.sent += len(rest)
        self.wfile.write(rest)
        if _is_large(file) and self.hub.withheld_from is not None:
            self.hub.withheld.set()

    def _json(self, value: object) -> None:
        self.answer(json.dumps(value).encode(), "application/json")

    def _redirect(self, url: str, etag: str, size: int) -> None:
        """To where large files lie: a host that is not the hub's, with a signature in place of a token."""
        self.send_response(302)
        self.send_header("Location", url)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Etag", f'"{etag}"')
        self.send_header("X-Linked-Size", str(size))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        self.send_response(status)
        if code or message:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", message or code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _is_large(file: str) -> bool:
    return file.endswith((".safetensors", ".gguf", ".bin"))


def _name(file: str, content: bytes) -> str:
    """As the hub names content: large files by their sha256, others as git does."""
    return hashlib.sha256(content).hexdigest() if _is_large(file) else _git_name(content)


def _git_name(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _sibling(file: str, content: bytes) -> dict[str, object]:
    found: dict[str, object] = {"rfilename": file, "size": len(content), "blobId": _git_name(content)}
    if _is_large(file):
        found["lfs"] = {"sha256": _name(file, content), "size": len(content), "pointerSize": 134}
    return found


def _entry(file: str, content: bytes) -> dict[str, object]:
    found: dict[str, object] = {"type": "file", "path": file, "size": len(content), "oid": _git_name(content)}
    if _is_large(file):
        found["lfs"] = {"oid": _name(file, content), "size": len(content), "pointerSize": 134}
    return found
