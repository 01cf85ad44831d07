"""nginx with its example in front of a server: the page, a stream, an upload, and a device's link, over TLS."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from paceline.commands.demo import Children, command, free_port
from tests.e2e.pair import joined, started
from tests.reliability.streams import until

EXAMPLE = Path(__file__).parents[2] / "deploy" / "nginx.conf"
NAME = socket.gethostname()  # no loopback name: the environment's certificates count
ADDRESS = socket.gethostbyname(NAME)
FLAGS = ("--embedder", "hash")
MIB = 1 << 20


@contextmanager
def nginx(directory: Path, server: str, port: int) -> Iterator[Path]:
    """nginx in front of a server. Yields its certificate, which nobody signed."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    assert program is not None, "make tools"
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    names = ("-subj", "/CN=paceline", "-addext", f"subjectAltName=DNS:{NAME}", "-days", "2", "-nodes")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", key, "-out", certificate)
    subprocess.run(["openssl", "req", "-x509", *names, *curve], check=True, capture_output=True)
    text = EXAMPLE.read_text("utf-8")
    for pattern, here in (
        (r"/etc/letsencrypt/\S+/fullchain.pem", str(certificate)),
        (r"/etc/letsencrypt/\S+/privkey.pem", str(key)),
        (r"listen 443 ", f"listen {ADDRESS}:{port} "),
        (r"http://127.0.0.1:8000", server),
    ):
        assert re.search(pattern, text)
        text = re.sub(pattern, here, text)
    paths = "".join(
        f"{kind}_temp_path {directory}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    file = directory / "nginx.conf"
    file.write_text(
        f"daemon off;\npid {directory}/pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{paths}{text}}}\n"
    )
    with (directory / "nginx.log").open("wb") as log:
        process = subprocess.Popen([program, "-p", directory, "-c", file], stderr=log)

    def listens() -> bool:
        assert process.poll() is None, (directory / "nginx.log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex((ADDRESS, port)) == 0

    try:
        until(listens)
        yield certificate
    finally:
        process.terminate()
        process.wait()
    said = (directory / "nginx.log").read_text()
    assert "nginx: [warn]" not in said, said


def test_what_passes_a_proxy_with_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = ("--state-dir", str(tmp_path / "cloud"))
    with Children(tmp_path) as children:
        key = json.loads(children.run(command("keys", "create", "k", "--json", *state)))["key"]
        tls = free_port(0)
        (tmp_path / "harbour.md").write_text("The harbour library of Tarnwick opens at eight.\n")
        children.run(command("docs", "add", "harbour.md", "--side", "cloud", "--embedder", "hash", *state))
        server = started(children, "cloud", "serve", *FLAGS, "--trusted-proxies", "127.0.0.1")
        with nginx(tmp_path, server.url, tls) as certificate:
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            url = f"https://{NAME}:{tls}"
            verify = ssl.create_default_context(cafile=str(certificate))
            bearer = {"authorization": f"Bearer {key}"}
            with httpx.Client(base_url=url, headers=bearer, verify=verify, trust_env=False, timeout=60) as http:
                assert http.get("/").status_code == http.get("/page/app.js").status_code == 200
                body = {
                    "model": "fake",
                    "stream": True,
                    "max_tokens": 20,
                    "messages": [{"role": "user", "content": "?"}],
                }
                with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"
                asked = body | {"stream": False, "paceline": {"report": True}}
                asked["messages"] = [{"role": "user", "content": "When does the harbour library of Tarnwick open?"}]
                (cited,) = http.post("/v1/chat/completions", json=asked).json()["paceline"]["citations"]
                assert cited["url"].startswith(f"{url}/passage?id=") and http.get(cited["url"]).is_success
                sent = {"data": {"purpose": "assistants"}, "files": {"file": ("big.txt", bytes(30 * MIB))}}
                assert http.post("/v1/files", **sent).status_code == 200  # type: ignore[arg-type]  # as httpx has them
            device = joined(children, "d", url, *FLAGS, of=state)
            told = json.loads(children.run(command("status", "--url", server.url, "--key", key, "--json")))
            assert [link["peer"] for link in told[0]["links"]] == ["d"]
            answer_at_device = children.run(command("chat", "--url", device.url, "--max-tokens", "5", "Hello?"))
            assert answer_at_device.strip()
