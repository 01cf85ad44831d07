"""R25: whatever name a client gives an upload, its bytes lie under the server's own id, and nothing else is written."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from urllib.parse import quote

import httpx

from tests.e2e.pair import Server
from tests.postgres import home, rows
from tests.rag.parsing.made import CONTAINER, archive
from tests.reliability.conftest import Figure, Size

CANARY = "the canary"
SEEDS = (
    "../canary.txt", "../../canary.txt", "/etc/passwd", "//etc//passwd", "..\\..\\canary.txt", "C:\\canary.txt",
    "%2e%2e%2fcanary.txt", "..%2f..%2fcanary.txt", "%252e%252e%252fcanary.txt", "....//....//canary.txt", ".", "..",
    "...", " ", "", "~", "~/canary.txt", "-rf", "--help", "CON", "NUL.txt", "com1", "aux.md", "a:b", "a\0.txt",
    "a\r\nSet-Cookie: b", "a\tb", "\u202etxt.exe", "\ufeffa.txt", "\u2025/canary.txt", "\uff0e\uff0e\uff0fcanary.txt",
    "\u2215etc\u2215passwd", "a" * 4096, "é" * 300, "e\u0301.txt", "\U0001f600.md", "a\x7f.txt", "a\x1b[31m.txt",
    "file-0", "documents.sqlite", "../documents.sqlite", "x.part", "file-0.aes", "../../keys.sqlite",
    ".ssh/authorized_keys", "a'b\"c", "a;b|c&d", "$(touch canary)", "`touch canary`", "{}", "a/", "a/.", "a/..", "\\",
    "a\\..", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
)  # fmt: skip


def names(count: int, rng: random.Random) -> list[str]:
    """The names above, then mixtures of their parts."""
    parts = [*SEEDS, "../", "..\\", "%2e%2e/", "\0", "/", "a", ".md", "\n", "\u202e"]
    return [*SEEDS, *("".join(rng.choices(parts, k=rng.randrange(2, 6))) for _ in range(count - len(SEEDS)))][:count]


def form(name: str) -> tuple[bytes, dict[str, str]]:
    """A form whose file has exactly this name, which no well-behaved client would send."""
    field = name.encode("utf-8", "surrogatepass").replace(b'"', b"%22").replace(b"\r", b"%0D").replace(b"\n", b"%0A")
    body = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nassistants\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\n\r\nA text.\r\n--x--\r\n' % field
    )
    return body, {"content-type": "multipart/form-data; boundary=x"}


def tree(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not path.name.endswith((".log", "-wal", "-shm"))}


def test_no_name_no_archive_member_and_no_link_leads_outside(
    server: Server, tmp_path: Path, figure: Figure, size: Size, rng: random.Random
) -> None:
    canary = tmp_path / "canary.txt"
    canary.write_text(CANARY)
    files = server.state / "docs" / "files"
    before = tree(tmp_path)
    refused, stored = 0, set()
    tried = names(size(75, 500), rng)
    with httpx.Client(base_url=server.child.url, trust_env=False, timeout=60.0) as client:
        for name in tried:
            body, headers = form(name)
            answer = client.post("/v1/files", content=body, headers=headers)
            assert answer.status_code < 500, (name, answer.text)
            if answer.status_code != 200:
                refused += 1
                continue
            made = answer.json()
            stored.add(made["id"])
            shown = made["filename"]
            assert shown and shown.isprintable() and "/" not in shown and "\\" not in shown, (name, shown)
            assert shown.strip(". ") and len(shown) <= 255
            content = client.get(f"/v1/files/{made['id']}/content")
            assert content.text == "A text." and "set-cookie" not in content.headers
        for name in tried[:60]:  # as ids, too
            for verb in ("GET", "DELETE"):
                answer = client.request(verb, f"/v1/files/{quote(name, safe='')}")
                assert answer.status_code in {400, 404, 405, 414} or not name.strip("/.\\ "), (name, answer.status_code)
    new = tree(tmp_path) - before
    outside = {path for path in new if path.parent != files}
    figure("names", len(tried))
    figure("of them refused", refused)
    figure("files outside the folder of uploads", len(outside), at_most=0)
    assert not outside
    assert {path.name for path in new} == (set() if home(server.state) else stored), "a database has them as rows"
    assert {row[0] for row in rows(files.parent / "documents.sqlite", "SELECT id FROM files")} == stored
    assert all(re.fullmatch(r"file-[0-9a-f]{32}", name) for name in stored)
    assert canary.read_text() == CANARY

    before = tree(tmp_path)
    members = {"META-INF/container.xml": CONTAINER, **{f"{'../' * i}evil{i}.txt": b"evil" for i in range(8)}}
    members["/absolute.txt"] = b"evil"
    ids = []
    for name in ("a.epub", "a.docx"):
        upload = {"file": (name, archive(members))}
        ids.append(server.call("POST", "/v1/files", files=upload, data={"purpose": "assistants"}).json()["id"])
    store = server.call("POST", "/v1/vector_stores", json={"file_ids": ids}).json()["id"]
    while server.call("GET", f"/v1/vector_stores/{store}").json()["file_counts"]["in_progress"]:
        time.sleep(0.05)
    folder = tmp_path / "notes"
    folder.mkdir()
    secret = tmp_path / "secret.md"
    secret.write_text("The quixotic secret.")
    (folder / "plain.md").write_text("A plain note.")
    (folder / "loop").symlink_to(folder)
    server.docs("add", str(folder))
    outside = {
        path for path in tree(tmp_path) - before if server.state not in path.parents and folder not in path.parents
    }
    assert outside == {folder, secret}
    figure("members and links written outside", len(outside - {folder, secret}), at_most=0)
