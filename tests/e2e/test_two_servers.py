"""Two servers over one PostgreSQL and an agent, real processes: any server asks the device, and one of them may die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx

from paceline.commands.demo import Child, Children
from tests.e2e.pair import joined, started
from tests.e2e.test_identity import eventually
from tests.postgres import RealPostgres
from tests.reliability.streams import Stream

COMMON = ("--embedder", "hash", "--host", "127.0.0.1", "--debug-options")
LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}


def test_a_device_of_a_lost_server_is_linked_to_the_other_and_its_answer_goes_on(
    postgres: RealPostgres, tmp_path: Path
) -> None:
    with Children(tmp_path) as children:
        pace = 'tuning.emulate = "forward=15ms"'  # of everybody's engine: the answer lasts longer than the loss
        settings = f'{pace}\n[server]\ndatabase = "{postgres.new_database()}"\n'
        (tmp_path / "paceline.toml").write_text(settings)  # where the programs run
        servers = [started(children, name, "serve", *COMMON) for name in ("a", "b")]
        urls = ",".join(server.url for server in servers)
        phone = joined(children, "phone", urls, *COMMON, "--cloud-may-ask", "on")
        home, other = sorted(servers, key=is_linked, reverse=True)
        told = ask(other)
        assert told["degraded"] is None and told["strategy"] != "autoregressive", "by way of its server"

        answer = Stream(phone.url, asked(**LONG))
        answer.wait_for(20)
        os.kill(home.process.pid, signal.SIGKILL)
        eventually(lambda: is_linked(other), "linked again")
        answer.join()
        assert answer.degraded == "cloud_lost" and answer.alone < 600, "it was taken in again"
        home.process.wait()
        children.members.remove(home)
        assert answer.reason == "length"
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
