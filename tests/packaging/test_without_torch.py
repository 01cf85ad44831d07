"""What runs where torch and transformers are not installed: every module but those that compute on them, and an agent
with the demonstration's model and the embedder.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
REFUSE = """
import sys

REFUSED = "torch"

class Refusal:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        is_refused = name.partition(".")[0] in (REFUSED, "transformers", "sentence_transformers", "xllamacpp")
        return None if is_refused else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Refusal, sys.meta_path)
"""
IMPORT_ALL = """
import importlib, json, pkgutil, paceline, paceline.server, paceline.device_agent, paceline.client

lost = {}
packages = (paceline, paceline.server, paceline.device_agent, paceline.client)
for info in [info for each in packages for info in pkgutil.walk_packages(each.__path__, each.__name__ + ".")]:
    if not info.name.endswith("__main__") and not info.name.startswith("paceline.bench"):
        try:
            importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            lost[info.name] = error.name
print(json.dumps(lost))
"""
AGENT = """
import paceline.commands.main
sys.argv[0] = "paceline"
paceline.commands.main.main()
"""
ON_TORCH = r"paceline\.engine\.(hf|layer_kernel|paged\..*|stage|tensors|weights|sampling\.(?!row_kernel).*)"
IN_A_STAGE = r"paceline\.runtime\.stages\.stage_(server|worker)"


def test_nothing_that_is_required_requires_torch() -> None:
    """By what the installed packages ask for in turn, extras left out."""
    open_names, seen = ["paceline"], set[str]()
    while open_names:
        name = canonicalize_name(open_names.pop())
        if name not in seen:
            seen.add(name)
            lines = project()["dependencies"] if name == "paceline" else required(name)
            wanted = map(Requirement, lines)
            open_names += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    assert {"numpy", "fastapi"} <= seen
    assert not seen & {"torch", "transformers", "sentence-transformers"}


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def required(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:  # of another system
        return []


def test_every_module_but_those_that_compute_on_it_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", REFUSE + IMPORT_ALL], capture_output=True, text=True, check=True)
    lost = json.loads(done.stdout)
    assert lost, "the refusal works"
    assert {name for name in lost if not re.fullmatch(f"{ON_TORCH}|{IN_A_STAGE}", name)} == set(), lost


def test_a_start_imports_nothing_large_that_only_some_requests_need() -> None:
    """Each takes as long as ten modules of ours, or as much memory."""
    programs = "commands.main", "device_agent.program", "server.program", "engine.tokenizer", "engine.llama_cpp.engine"
    imports = "; ".join(f"import paceline.{program}" for program in programs)
    code = f"import sys; {imports}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"numpy", "fastapi", "tokenizers"} <= loaded
    large = {"openai", "torch", "transformers", "huggingface_hub", "gguf", "bm25s", "requests", "lxml", "pypdfium2"}
    assert not loaded & {*large, "scipy", "prompt_toolkit", "jsonschema", "yaml", "xllamacpp"}


EACH = """
import paceline.commands.main
commands, state = sys.argv[1:-1], sys.argv[-1]
for command in commands:
    sys.argv = ["paceline", *command.split(), "--state-dir", f"{state}/{command.split()[0]}"]
    try:
        paceline.commands.main.main()
    except SystemExit as ended:
        assert ended.code == 2, (command, ended)
"""


@pytest.mark.parametrize("has_torch", [False, True], ids=["neither", "torch alone"])
def test_what_needs_it_says_what_to_install(tmp_path: Path, has_torch: bool) -> None:
    refuse = REFUSE.replace('REFUSED = "torch"', "REFUSED = None") if has_torch else REFUSE
    given = "serve --port 0 --model demo-causal", "stage --model demo-causal", "agent --port 0 --model some/model"
    command = [sys.executable, "-c", refuse + EACH, *given, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr.count("pip install 'paceline[torch]'") == len(given), done.stderr


@pytest.mark.slow
def test_an_agent_answers_and_embeds(tmp_path: Path) -> None:
    arguments = ["agent", "--model", "demo", "--port", "0", "--state-dir", str(tmp_path), "--log-level", "warning"]
    command = [sys.executable, "-c", REFUSE + AGENT, *arguments]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None
            said = next((line for line in agent.stdout if "serving" in line), "")
            (url,) = re.findall(r"http://\S+", said)
            with httpx.Client(base_url=url, timeout=60) as client:
                note = {"role": "system", "content": "The spare key hangs behind the bird feeder."}
                question = {"role": "user", "content": "Where does the spare key hang?"}
                asked = {"model": "demo", "messages": [note, question]}
                answer = client.post("/v1/chat/completions", json=asked).json()
                embedded = client.post("/v1/embeddings", json={"model": "all-MiniLM-L6-v2", "input": "a key"}).json()
            assert "bird feeder" in answer["choices"][0]["message"]["content"], answer
            assert len(embedded["data"][0]["embedding"]) == 384, embedded
        finally:
            agent.terminate()
