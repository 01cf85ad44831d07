"""Backup and restore as docs/deployment.md has them: each side's state directory as an archive, unpacked elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from openai import OpenAI

from paceline.commands.demo import Children, command
from tests.e2e.pair import joined, started
from tests.postgres import move

FLAGS = ("--embedder", "hash")
FACT = "The landlord is called Velda.\n"


def moved(side: Path, to: Path) -> Path:
    """Back up with tar, and a database with pg_dump, as the page does, lose the original, and restore elsewhere."""
    move(side, to / side.name)
    archive = side.parent / f"{side.name}.tar.gz"
    subprocess.run(["tar", "-C", str(side.parent), "-czpf", str(archive), side.name], check=True)
    shutil.rmtree(side)
    to.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-C", str(to), "-xzpf", str(archive)], check=True)
    return to / side.name


def documents(children: Children, side: str, state: Path) -> list[str]:
    listed = command("docs", "list", "--side", side, "--state-dir", str(state), "--embedder", "hash", "--json")
    return [row["name"] for row in json.loads(children.run(listed))]


def test_both_sides_come_back_from_their_archives(tmp_path: Path) -> None:
    cloud, device = tmp_path / "cloud", tmp_path / "device"
    for side in ("cloud", "device"):
        (tmp_path / f"{side}.md").write_text(FACT)
    with Children(tmp_path) as children:
        for side, state in (("cloud", cloud), ("device", device)):
            where = ("--side", side, "--state-dir", str(state), "--embedder", "hash")
            children.run(command("docs", "add", str(tmp_path / f"{side}.md"), *where))
        key = json.loads(children.run(command("keys", "create", "k", "--json", "--state-dir", str(cloud))))["key"]
        server = started(children, "server", "serve", *FLAGS, state=cloud).url
        joined(children, "d", server, *FLAGS, state=device, of=("--state-dir", str(cloud)))
        with OpenAI(base_url=f"{server}/v1", api_key=key, max_retries=0) as client:
            response = client.responses.create(model="fake", input="Who?", max_output_tokens=8)
            file = client.files.create(file=("a.md", FACT.encode()), purpose="assistants")

    cloud, device = (moved(state, tmp_path / "restored") for state in (cloud, device))
    port = int(server.rsplit(":", 1)[1])  # a device knows its server by its address
    with Children(tmp_path) as children:
        started(children, "server", "serve", *FLAGS, state=cloud, port=port)
        started(children, "d", "agent", *FLAGS, "--cloud", server, "--device", "d", state=device)  # without a code
        children.wait(lambda said: all(each is not None and each["linked"] for each in said))
        assert documents(children, "cloud", cloud) == ["cloud.md"]
        assert documents(children, "device", device) == ["device.md"], "encrypted, with its key in the archive"
        with OpenAI(base_url=f"{server}/v1", api_key=key, max_retries=0) as client:
            assert client.responses.retrieve(response.id).output_text == response.output_text
            assert client.files.content(file.id).text == FACT
