"""A hostile file uploaded to a real server: other requests are served while it is parsed, and it is read or refused."""

from __future__ import annotations

from pathlib import Path

import httpx

from paceline.commands.processes import Children, command, free_port


def test_a_markdown_file_made_to_backtrack_stops_nobody(tmp_path: Path) -> None:
    port = free_port(0)
    with Children(tmp_path) as children:
        flags = ("--model", "fake", "--threads", "1", "--port", str(port), "--state-dir", str(tmp_path / "state"))
        server = children.start("cloud", command("serve", *flags), port=port)
        children.wait(lambda said: all(said))
        with httpx.Client(base_url=server.url, timeout=20.0, trust_env=False) as client:
            heading = b"# x" + b" " * (64 * 1024) + b"x\n\nThe mill is red.\n"
            upload = client.post("/v1/files", files={"file": ("a.md", heading)}, data={"purpose": "assistants"})
            file = upload.json()["id"]
            store = client.post("/v1/vector_stores", json={"name": "notes", "file_ids": [file]}).json()["id"]
            status = "in_progress"
            while status == "in_progress":
                assert client.get("/healthz").status_code == 200
                status = client.get(f"/v1/vector_stores/{store}/files/{file}").json()["status"]
            assert status == "completed"
