"""Two servers over one PostgreSQL and an agent, real processes: any server asks the device, and one of them may die."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx

from paceline.commands.demo import Child, Children, command, free_port
from tests.e2e.test_identity import eventually
from tests.postgres import real_postgres

COMMON = ("--model", "fake", "--embedder", "hash", "--host", "127.0.0.1", "--debug-options")
LONG = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0, "stream": True}


def test_a_device_of_a_lost_server_is_linked_to_the_other_and_its_answer_goes_on(tmp_path: Path) -> None:
    with real_postgres() as postgres, Children(tmp_path) as children:
        settings = f'[server]\ndatabase = "{postgres.new_database()}"\n'
        (tmp_path / "paceline.toml").write_text(settings)  # where the programs run
        servers = []
        for name in ("a", "b"):
            port = free_port(0)
            flags = ("--state-dir", str(tmp_path / name), "--port", str(port))
            servers.append(children.start(name, command("serve", *COMMON, *flags), port=port))
            children.wait(all)
        code = tmp_path / "code"
        code.touch(mode=0o600)
        devices = command("devices", "add", "phone", "--json")
        code.write_text(json.loads(children.run(devices))["code"])
        port, urls = free_port(0), ",".join(server.url for server in servers)
        flags = ("--state-dir", str(tmp_path / "phone"), "--port", str(port), "--cloud-may-ask", "on")
        agent = command("agent", *COMMON, *flags, "--cloud", urls, "--device", "phone", "--code-file", str(code))
        phone = children.start("phone", agent, port=port)
        children.wait(all)
        eventually(lambda: is_linked(phone), "linked")
        home, other = sorted(servers, key=is_linked, reverse=True)
        told = ask(other)
        assert told["degraded"] is None and told["strategy"] != "autoregressive", "by way of its server"

        with httpx.stream("POST", f"{phone.url}/v1/chat/completions", json=asked(**LONG), timeout=60.0) as answer:
            lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
            assert sum(1 for _, _ in zip(range(20), lines, strict=False)) == 20
            os.kill(home.process.pid, signal.SIGKILL)
            eventually(lambda: is_linked(other), "linked again")
            *_, last = (chunk for chunk in lines if chunk.get("choices"))
        assert last["paceline"]["degraded"] == "cloud_lost"
        assert last["paceline"]["stats"]["alone"] < 2000, "it was taken in again"
        home.process.wait()
        children.members.remove(home)
        assert last["choices"][0]["finish_reason"] == "length"
        assert ask(other)["degraded"] is None


def asked(**fields: object) -> dict[str, object]:
    given = {
        "model": "fake",
        "messages": [{"role": "user", "content": "Hello"}],
        "paceline": {"report": True, "strategy": "aggregate"},
    }
    return given | fields


def ask(server: Child) -> dict[str, object]:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked(max_tokens=20), timeout=60.0)
    told: dict[str, object] = answer.raise_for_status().json()["paceline"]
    return told


def is_linked(child: Child) -> bool:
    found: dict[str, bool] = httpx.get(f"{child.url}/readyz", timeout=10.0).json()
    return found["linked"]
