"""Two servers over one PostgreSQL behind a real Caddy with `deploy/Caddyfile.fleet`: what official clients and a device
see when one is killed, and when one is replaced."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI, Stream

from paceline.commands.demo import Child, Children, command, free_port
from tests.caddy import as_installed
from tests.e2e.pair import joined, started
from tests.e2e.test_identity import eventually
from tests.postgres import RealPostgres

EXAMPLE = Path(__file__).parents[2] / "deploy" / "Caddyfile.fleet"
NODE = Path(__file__).parent / "clients" / "fleet.mjs"
COMMON = ("--embedder", "hash", "--host", "127.0.0.1", "--debug-options")
SAID: dict[str, Any] = {"model": "fake", "input": "Tell me of the harbour.", "max_output_tokens": 60, "temperature": 0}
PLAIN = {"ignore_eos": True, "paceline": {"strategy": "autoregressive"}}  # nothing drafted: a step for each token


@dataclass(slots=True)
class Fleet:
    children: Children
    url: str  # the proxy's
    key: str
    one: Child
    two: Child

    def start(self, name: str, port: int) -> Child:
        return started(self.children, name, "serve", *COMMON, "--trusted-proxies", "127.0.0.1", port=port)

    def end(self, server: Child) -> int:
        server.process.wait()
        self.children.members.remove(server)
        return server.process.returncode

    def client(self, url: str, **headers: str) -> OpenAI:
        return OpenAI(base_url=f"{url}/v1", api_key=self.key, max_retries=0, timeout=60.0, default_headers=headers)


@pytest.fixture(scope="module")
def fleet(postgres: RealPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("fleet")
    settings = f'[server]\ndatabase = "{postgres.new_database()}"\n[server.tuning]\nemulate = "forward=20ms"\n'
    (directory / "paceline.toml").write_text(settings)
    with Children(directory) as children:
        ports = [free_port(0), free_port(0)]
        key = json.loads(children.run(command("keys", "create", "clients", "--json")))["key"]
        with caddy(directory, ports) as url:
            made = Fleet(children, url, key, *(Child("", None, Path(), "") for _ in ports))  # type: ignore[arg-type]
            made.one, made.two = made.start("one", ports[0]), made.start("two", ports[1])
            yield made
            for child in children.members:
                child.process.kill()  # neither is to wait for the other


@contextmanager
def caddy(directory: Path, ports: list[int]) -> Iterator[str]:
    program = shutil.which("caddy")
    assert program is not None, "make tools"
    port = free_port(0)
    text = EXAMPLE.read_text("utf-8").replace("auto_https off", "admin off\n\tauto_https off")
    for name, here in (("one:8000", ports[0]), ("two:8000", ports[1])):
        assert name in text
        text = text.replace(name, f"127.0.0.1:{here}")
    text, found = re.subn(r"(?m)^:8000 ", f"http://127.0.0.1:{port} ", text)
    assert found == 1
    (directory / "Caddyfile").write_text(as_installed(text))
    with (directory / "caddy.log").open("wb") as log:
        run = [program, "run", "--config", directory / "Caddyfile", "--adapter", "caddyfile"]
        process = subprocess.Popen(run, stderr=log, env={"HOME": str(directory)})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def place(url: str) -> str:
    return url.removeprefix("http://")


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_official_clients_go_on_where_a_killed_server_left_them(fleet: Fleet) -> None:
    """A header leads to the one that is killed, behind the proxy; the rest comes from the other."""
    led = fleet.client(fleet.url, **{"paceline-affinity": place(fleet.one.url)})
    other = fleet.client(fleet.two.url)
    whole = other.responses.create(**SAID, extra_body=PLAIN)
    stream: Stream[Any] = led.responses.create(**SAID, stream=True, extra_body=PLAIN)
    begun = [event for event, _ in zip(stream, range(20), strict=False)]
    late = led.responses.create(**SAID, background=True, extra_body=PLAIN)
    chat = led.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "Hello"}], stream=True, extra_body=PLAIN
    )
    next(iter(chat))
    fleet.one.process.kill()
    fleet.end(fleet.one)
    identity, seen = begun[0].response.id, begun[-1].sequence_number
    assert len(begun) == seen + 1 == 20, "as they come"
    rest = list(led.responses.retrieve(identity, stream=True, starting_after=seen))
    assert [event.sequence_number for event in begun + rest] == list(range(seen + 1 + len(rest)))
    assert text_of(begun + rest) == whole.output_text == rest[-1].response.output_text
    assert text_of(list(led.responses.retrieve(late.id, stream=True))) == whole.output_text

    fleet.one = fleet.start("one", int(fleet.one.url.rpartition(":")[2]))
    node = ["node", str(NODE), fleet.one.url, fleet.two.url, fleet.key, identity, str(seen)]
    said = json.loads(subprocess.run(node, capture_output=True, check=True, timeout=60.0).stdout)
    assert said["rest"]["text"] == text_of(rest) and said["rest"]["last"] == rest[-1].type
    assert said["rest"]["numbers"] == [event.sequence_number for event in rest]
    assert said["before"] == ["omber.md"] and said["gone"] == []
    one = fleet.client(fleet.one.url)
    talk = one.conversations.create(items=[{"type": "message", "role": "user", "content": "I live at the coast."}])
    other.responses.create(**SAID | {"max_output_tokens": 3}, conversation=talk.id)
    assert len(list(one.conversations.items.list(talk.id))) == 3


def test_a_server_is_replaced_and_no_request_fails(fleet: Fleet) -> None:
    """Under load by clients that keep their connections, with a device linked through the proxy."""
    joined(fleet.children, "phone", fleet.url, *COMMON, "--cloud-may-ask", "on")
    done, seen, asking = threading.Event(), Counter[object](), []
    for number in range(4):
        asking.append(threading.Thread(target=ask, args=(fleet, number, done, seen), daemon=True))
        asking[-1].start()
    try:
        eventually(lambda: seen["whole"] >= 8, "asked")
        fleet.one.process.terminate()
        assert fleet.end(fleet.one) == 0
        before = seen["whole"]
        fleet.one = fleet.start("one", int(fleet.one.url.rpartition(":")[2]))
        eventually(lambda: seen["whole"] >= before + 8, "asked again")
    finally:
        done.set()
        for each in asking:
            each.join()
    assert set(seen) == {"whole"}, seen
    asked: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    asked["paceline"] = {"strategy": "aggregate", "device": "phone", "report": True}
    bearer = {"authorization": f"Bearer {fleet.key}"}
    for server in (fleet.one, fleet.two):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, headers=bearer, timeout=60.0).json()
        assert answer["paceline"]["degraded"] is None, answer


def ask(fleet: Fleet, number: int, done: threading.Event, seen: Counter[object]) -> None:
    """Streams and whole answers over one client's connections, which forgets where it was led to."""
    bearer = {"authorization": f"Bearer {fleet.key}"}
    with httpx.Client(base_url=f"{fleet.url}/v1", headers=bearer, timeout=60.0) as http:
        while not done.is_set():
            http.cookies.clear()
            body = SAID | {"seed": number, "max_output_tokens": 12, "stream": True}
            try:
                with http.stream("POST", "/responses", json=body) as answer:
                    events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
                numbers = [event["sequence_number"] for event in events]
                whole = numbers == list(range(len(numbers))) and "output_tokens" in str(events[-1:])
                seen["whole" if answer.is_success and whole else (answer.status_code, str(events[-1:]))] += 1
                asked = {"model": "fake", "prompt": "Hello", "max_tokens": 3}
                told = http.post("/completions", json=asked)
                seen["whole" if told.is_success else (told.status_code, told.text)] += 1
            except httpx.HTTPError as error:
                seen[repr(error)] += 1
