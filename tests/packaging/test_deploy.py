"""The files to copy in `deploy/` are what the programs that read them accept. `make tools` installs those programs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from device_agent.setup import unit as of_user
from paceline.commands.main import build
from paceline.settings import SCHEMAS, AgentSettings, ServerSettings, variable
from paceline.settings_sources import paths, resolve
from tests.caddy import as_installed

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMMENTED = re.compile(r"^# (?=[a-z_]+ = )", re.MULTILINE)
CHART = DEPLOY / "helm" / "paceline"
COMMAND = re.compile(r"(?:command: |CMD |args: )\[([^\]]*)\]")


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    found = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    assert found is not None, "make tools"
    return subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("commented", [True, False], ids=["as it is", "every line in force"])
def test_the_settings_to_copy_are_settings(tmp_path: Path, commented: bool) -> None:
    text = (DEPLOY / "paceline.toml").read_text("utf-8")
    file = tmp_path / "paceline.toml"
    file.write_text(text if commented else COMMENTED.sub("", text))
    assert commented or len(tomllib.loads(file.read_text())["agent"]) >= 7, "nothing is left out"
    server, origins = resolve(ServerSettings, {}, {}, file)
    agent, of_agent = resolve(AgentSettings, {}, {}, file)
    assert (server.port, agent.port) == (8000, 8001) and origins["model"].startswith(f"file {file}")
    assert server.trusted_proxies == ("127.0.0.1",)
    tabled = {path for schema in SCHEMAS for path in paths(schema) if "." in path} - {"tuning.units"}
    default = {path for path in tabled if origins.get(path, "default") == of_agent.get(path, "default") == "default"}
    assert commented or not default, "what --help does not describe is described here"


def unit_text(unit: str) -> str:
    """A device's is written by `paceline setup`, a server's is copied."""
    if unit == "paceline-agent":
        return of_user("device", Path("/home/ann/100 %/paceline.toml"))
    return (DEPLOY / f"{unit}.service").read_text("utf-8")


@pytest.mark.parametrize(("unit", "scope"), [("paceline-server", "--system"), ("paceline-agent", "--user")])
def test_systemd_reads_the_units(tmp_path: Path, unit: str, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    text = unit_text(unit)
    (command,) = re.findall(r"^ExecStart=(\S+)", text, re.MULTILINE)
    file = tmp_path / f"{unit}.service"
    file.write_text(text.replace(command, sys.executable).replace("User=paceline", "User=root"))
    done = run("systemd-analyze", "verify", scope, "--man=no", file)
    own = [line for line in done.stderr.splitlines() if unit in line]
    assert done.returncode == 0 and own == [], done.stderr


def test_caddy_reads_its_example(tmp_path: Path) -> None:
    """That of a fleet runs in tests/e2e/test_behind_proxy.py, as nginx with its own does in test_proxy.py."""
    file = tmp_path / "Caddyfile"
    file.write_text(as_installed((DEPLOY / file.name).read_text("utf-8")))
    done = run("caddy", "validate", "--adapter", "caddyfile", "--config", file)
    assert done.returncode == 0, done.stderr
    assert "reverse_proxy" in run("caddy", "adapt", "--adapter", "caddyfile", "--config", file).stdout


IN_CONTAINERS = [DEPLOY / "compose.yaml", DEPLOY / "compose.fleet.yaml", CHART / "templates/servers.yaml"]


@pytest.mark.parametrize("file", [*IN_CONTAINERS, ROOT / "Dockerfile"], ids=lambda file: file.name)
def test_commands_of_containers_have_the_options_they_name(file: Path) -> None:
    known = typer.main.get_command(build()).commands  # type: ignore[attr-defined]  # a group: it has commands
    found = [[part.strip(' "') for part in line.split(",")] for line in COMMAND.findall(file.read_text("utf-8"))]
    found = [command for command in found if command[0] != "--model"]  # vLLM's
    assert len(found) == (1 if file.parent.name == "templates" else 2)
    for program, name, *rest in found:
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert program == "paceline" and {part for part in rest if part.startswith("--")} <= options


def test_variables_that_are_named_are_settings() -> None:
    files = [*(ROOT / "docs").glob("*.md"), *DEPLOY.rglob("*.*"), ROOT / "README.md", ROOT / "Dockerfile"]
    text = "".join(file.read_text("utf-8") for file in files)
    known = {variable(path) for schema in SCHEMAS for path in paths(schema)} | {"PACELINE_CONFIG"}
    assert set(re.findall(r"\bPACELINE_[A-Z_]+\b", text)) - known <= {"PACELINE_TEST_DEPTH"}


def test_the_agents_container_asks_its_own_program_whether_it_is_ready() -> None:
    agent = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]["agent"]
    assert agent["network_mode"] == "host", "where the server's port may answer as well"
    assert agent["healthcheck"]["test"][-2:] == ["--url", f"http://127.0.0.1:{AgentSettings(cloud='').port}"]


def test_variables_of_the_image_are_settings() -> None:
    text = "".join(file.read_text("utf-8") for file in (ROOT / "Dockerfile", *IN_CONTAINERS))
    names = set(re.findall(r"\bPACELINE_([A-Z_]+)", text))
    assert {"STATE_DIR", "API_KEY_FILE", "DATABASE", "ENGINE_URL"} <= names
    assert "PACELINE_HOST" not in text, "an agent then listens on loopback, and needs no key"


# ---- what is installed and what it may do ---------------------------------------------------------------------------
LOCKED = re.compile(r"^([\w.-]+)==([\w.+]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def test_the_image_is_built_from_a_digest_and_of_packages_with_hashes() -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8")
    assert re.search(r"^ARG PYTHON=python:3\.11-slim@sha256:[0-9a-f]{64}\nFROM \$\{PYTHON\}$", text, re.MULTILINE)
    installs = re.findall(r"pip install ([^\\\n]*)", text)
    assert all("--require-hashes" in each or each.split()[-1] == "." for each in installs), installs
    assert all("--no-deps" in each for each in installs)
    assert all(
        f"!deploy/{name}" in (ROOT / ".dockerignore").read_text() for name in re.findall(r"deploy/(\w+\.lock)", text)
    )


def test_the_lock_has_every_dependency_in_a_version_that_is_asked_for_and_no_address() -> None:
    locked: dict[str, dict[str, str]] = {}
    for kind in ("requirements", "cuda", "cpu"):
        text = (DEPLOY / f"{kind}.lock").read_text("utf-8")
        assert "://" not in text and LOCKED.sub("", text).strip() == "# Made by scripts/lock."
        locked[kind] = {name: version for name, version, _ in LOCKED.findall(text)}
    assert locked["cpu"] == {"torch": f"{locked['cuda']['torch']}+cpu"}
    asked = [
        Requirement(each) for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ]
    for kind in ("cuda", "cpu"):
        installed = locked["requirements"] | locked[kind]
        wrong = [each for each in asked if installed.get(canonicalize_name(each.name), "0") not in each.specifier]
        assert not wrong, "run scripts/lock"
    open_above = {each.name for each in asked if not {"<", "=="} & {part.operator for part in each.specifier}}
    assert open_above <= {"packaging", "pydantic-core"}, "one has years for versions, pydantic pins the other"


@pytest.mark.parametrize("name", ["compose.yaml", "compose.fleet.yaml"])
def test_containers_may_do_no_more_than_they_need(name: str) -> None:
    composed = yaml.safe_load((DEPLOY / name).read_text("utf-8"))
    own = [service for service in composed["services"].values() if service["image"] == "paceline"]
    assert len(own) == 2
    for service in own:
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
        assert (
            service["read_only"] is True and service["init"] is True and service["pids_limit"] and service["mem_limit"]
        )
        assert any(volume.endswith(":/var/lib/paceline") for volume in service["volumes"]), "where it writes"


PLACE = re.compile(r"\{\{ \.(Values|Release)\.(\w+)(?: \| (?:quote|toJson))? \}\}")


def test_the_chart_is_of_values_alone_and_rolls_without_a_gap() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    named = {"Values": values, "Release": {"Name": "paceline"}}
    used: set[str] = set()
    made: dict[str, Any] = {}
    for file in sorted((CHART / "templates").iterdir()):
        text = file.read_text("utf-8")
        used |= {value for where, value in PLACE.findall(text) if where == "Values"}
        text = PLACE.sub(lambda found: json.dumps(named[found[1]][found[2]]), text)
        assert "{{" not in text, "no logic that a reader of YAML does not see"
        made |= {each["kind"]: each for each in yaml.safe_load_all(text)}
    assert used == set(values) and set(made) == {"Deployment", "Service", "PodDisruptionBudget"}
    spec = made["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (server,) = pod["containers"]
    assert spec["replicas"] == 2 and spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert made["Service"]["spec"]["selector"] == spec["selector"]["matchLabels"]
    assert made["PodDisruptionBudget"]["spec"]["selector"] == spec["selector"]
    assert pod["terminationGracePeriodSeconds"] > 30, "answers have that long to end"
    assert [server[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")] == [
        "/readyz",
        "/healthz",
    ]
    assert "http://$(POD_IP):8000" in server["args"]
    assert server["securityContext"]["readOnlyRootFilesystem"] and server["securityContext"]["capabilities"]["drop"]
    assert {mount["name"] for mount in server["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("unit", ["paceline-server", "paceline-agent"])
def test_units_allow_the_calls_by_which_parsers_are_confined(unit: str) -> None:
    text = unit_text(unit)
    (allowed,) = re.findall(r"^SystemCallFilter=(.*)$", text, re.MULTILINE)
    calls = {"seccomp", "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"}
    assert {"@system-service", *calls} <= set(allowed.split())
