"""Identity between real processes: enrolment by file and standard input, restarts, renewal, revocation, another key."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from device_agent.cloud import Credentials
from paceline.commands.demo import Child, Children, command, configured, free_port
from tests.e2e.pair import started
from tests.postgres import forget_key
from tests.reliability.streams import Stream

TIMEOUT_S = 60.0  # for a change to take effect, on a busy machine
COMMON = ("--embedder", "hash", "--host", "127.0.0.1")


class Site:
    """A server and its agents, each a process."""

    def __init__(self, children: Children, directory: Path) -> None:
        self.children = children
        self.directory = directory
        self._ports: dict[str, int] = {}
        self._programs: dict[str, Child] = {}

    def serve(self, *flags: str) -> str:
        return self._start("cloud", "serve", *flags)

    def agent(self, name: str, *flags: str) -> str:
        flags = ("--cloud-may-ask", "on", *flags)
        return self._start(name, "agent", "--cloud", self.url("cloud"), "--device", name, *flags)

    def kill(self, name: str) -> None:
        child = self._programs.pop(name)
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
        self.children.members.remove(child)

    def url(self, name: str) -> str:
        return self._programs[name].url

    def log(self, name: str) -> str:
        return self._programs[name].log.read_text()

    def renewals(self) -> int:
        return self.log("cloud").count("the key of laptop was renewed")

    def state(self, name: str) -> Path:
        return self.directory / name

    def devices(self, *arguments: str) -> str:
        return self.children.run(command("devices", *arguments, "--state-dir", str(self.state("cloud"))))

    def code_file(self, name: str) -> Path:
        """A file with a code for this device."""
        file = self.directory / f"{name}.code"
        file.touch(mode=0o600)
        file.write_text(self.devices("add", name))
        return file

    def linked(self, name: str) -> bool:
        try:
            return bool(httpx.get(f"{self.url(name)}/readyz", trust_env=False, timeout=10.0).json().get("linked"))
        except httpx.TransportError:
            return False

    def key(self, name: str) -> bytes:
        """The public key that an agent holds for the server."""
        held = Credentials(self.state(name)).get(self.url("cloud"))
        assert held is not None
        return held.keys[-1].public_key

    def _start(self, name: str, *arguments: str) -> str:
        port = self._ports.setdefault(name, free_port(0))
        child = started(self.children, name, *arguments, *COMMON, state=self.state(name), port=port)
        self._programs[name] = child
        return child.url


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Children(tmp_path) as children:
        yield Site(children, tmp_path)


def eventually(held: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not held():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


JOINT = {
    "messages": [{"role": "user", "content": "Who keeps the key?"}],
    "max_tokens": 256,
    "seed": 11,
    "paceline": {"strategy": "aggregate", "device": "laptop", "report": True},
}
LIFE_S = 6.0  # of a key, where it is renewed in mid-stream: every three seconds


def test_an_agent_that_is_enrolled_outlives_restarts_renewals_and_another_key_of_its_server(site: Site) -> None:
    """Its answer over several renewals is that without any; a server with another key is refused with a sentence, and
    one that is revoked is told so."""
    site.serve()
    secret = (code := site.code_file("laptop")).read_text().strip()
    site.agent("laptop", "--code-file", str(code))
    eventually(lambda: site.linked("cloud"), "it is not linked")
    enrolled = site.key("laptop")
    first = Stream(site.url("cloud"), JOINT).join()
    assert first.whole and first.degraded is None and len(first.text) > 20
    assert site.renewals() == 0
    site.kill("laptop")
    site.agent("laptop")
    eventually(lambda: site.linked("laptop"), "it is not linked after its restart")
    assert site.key("laptop") == enrolled
    site.kill("cloud")
    eventually(lambda: not site.linked("laptop"), "the link is still there")
    short = (f"credential_hours = {LIFE_S / 3600}", "emulate = 'forward=100ms'")
    site.serve(*configured(site.directory, "[tuning]", *short))
    eventually(lambda: site.linked("cloud"), "it is not linked after the server's restart")
    before = site.renewals()
    again = Stream(site.url("cloud"), JOINT).join()
    assert (again.text, again.whole, again.degraded) == (first.text, True, None)
    assert site.renewals() > before and site.key("laptop") != enrolled
    for name in ("cloud", "laptop"):
        assert secret not in site.log(name)
        assert not [
            file for file in site.state(name).rglob("*") if file.is_file() and secret in file.read_text("latin-1")
        ]

    site.kill("cloud")
    forget_key(site.state("cloud"))
    site.serve()
    eventually(lambda: "has been set up anew, or somebody is in between" in site.log("laptop"), "it was not told")
    assert not site.linked("cloud")
    site.kill("laptop")
    site.agent("laptop", "--code-file", str(site.code_file("laptop")))
    eventually(lambda: site.linked("laptop"), "it cannot be enrolled again")
    site.devices("revoke", "laptop")
    eventually(lambda: not site.linked("cloud"), "the link is still there")
    eventually(lambda: "The server's owner has revoked this device" in site.log("laptop"), "it was not told")


def test_a_code_and_a_key_are_read_from_standard_input(site: Site) -> None:
    site.serve()
    key = "sk-of-the-agent"
    (keys := site.directory / "keys").touch(mode=0o600)
    keys.write_text(f"# of the agent\n{key}\n")
    port = free_port(0)
    arguments = command(
        "agent", "--model", "fake", *COMMON, "--cloud", site.url("cloud"), "--code", "-", "--api-key-file", str(keys)
    )
    with (site.directory / "laptop.log").open("wb") as log:
        process = subprocess.Popen(
            [*arguments, "--port", str(port), "--state-dir", str(site.state("laptop"))],
            cwd=site.directory,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        assert process.stdin is not None
        process.stdin.write(site.devices("add", "laptop").encode())
        process.stdin.close()
        agent = Child("laptop", process, site.directory / "laptop.log", f"http://127.0.0.1:{port}")
        site._programs["laptop"] = agent
        site.children.members.append(agent)
        site.children.wait(all)
        eventually(lambda: site.linked("laptop"), "it is not linked")
        models = f"{agent.url}/v1/models"
        assert httpx.get(models, trust_env=False).status_code == 401
        assert httpx.get(models, trust_env=False, headers={"authorization": f"Bearer {key}"}).status_code == 200
        asked = command("chat", "--url", agent.url, "--max-tokens", "4", "--json", "Who?")

        def said(*flags: str, given: str = f"{key}\n") -> subprocess.CompletedProcess[str]:
            return subprocess.run([*asked, *flags], input=given, cwd=site.directory, capture_output=True, text=True)

        for flags in (("--key", "-"), ("--key-file", "-"), ("--key-file", str(keys))):
            done = said(*flags)
            assert done.returncode == 0 and json.loads(done.stdout)["finish_reason"], done.stderr
        refused = said("--key", "-", given="\n")
        assert refused.returncode != 0 and "standard input has no key" in refused.stderr
    finally:
        process.kill()
        process.wait()
        site.children.members[:] = [child for child in site.children.members if child.process is not process]
