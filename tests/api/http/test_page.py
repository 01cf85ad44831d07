"""The files of the web page: revalidated, and under a policy that lets no text become code."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

import paceline.api.page
from paceline.api.page.endpoint import POLICY, load_assets

ASSETS = Path(paceline.api.page.__file__).parent / "assets"
WORD = re.compile(r"^  \"?([\w-]+)\"?: \"", re.MULTILINE)
LANGUAGES = (ASSETS / "en.js", ASSETS / "de.js")
PATHS = [asset.path for asset in load_assets()]
HOSTS = re.compile(r"(?:https?:)?//[a-z0-9-]+\.[a-z]")  # an address of another host
INLINE = re.compile(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=)", re.IGNORECASE)
MAKES_HTML = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser")


KINDS = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}


@pytest.mark.parametrize("path", PATHS[::6])
def test_a_file_has_its_type_a_tag_and_the_policy(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.headers["content-type"].split(";")[0] == KINDS.get(Path(path).suffix, "text/html")
    assert answer.headers["content-security-policy"] == POLICY and "unsafe" not in POLICY
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-cache"
    for held in (answer.headers["etag"], f"W/{answer.headers['etag']}", f'"other", {answer.headers["etag"]}'):
        again = http.get(path, headers={"if-none-match": held})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", answer.headers["etag"])
    assert http.get(path, headers={"if-none-match": '"other"'}).content == answer.content


def test_libraries_of_others_are_named_with_their_licences_and_every_language_has_known_words() -> None:
    licences = (ASSETS / "vendor" / "LICENSES.txt").read_text("utf-8")
    for file in (ASSETS / "vendor").iterdir():
        assert file.name == "LICENSES.txt" or f"{file.name} " in licences
    words = {file.stem: set(WORD.findall(file.read_text("utf-8"))) for file in LANGUAGES}
    assert len(words["en"]) > 100 and words["de"] - words["en"] == set()
    own = "".join(file.read_text("utf-8") for file in ASSETS.glob("*.[jh]*"))
    asked = re.findall(r"\bt\(\"(\w+)\"|data-(?:t|label|hint)=\"(\w+)\"", own)
    assert {first or second for first, second in asked} <= words["en"]


def test_no_file_names_another_host_or_holds_inline_code() -> None:
    for file in filter(Path.is_file, ASSETS.iterdir()):
        text = file.read_text("utf-8")
        assert len(text.splitlines()) <= 600, file
        assert not HOSTS.search(text.replace("http://www.w3.org/2000/svg", "")), file
        assert not MAKES_HTML.search(text), file
        assert file.suffix == ".js" or not INLINE.search(text), file
