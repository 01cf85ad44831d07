"""Official clients against a real server process: each performs the same tasks and must get the same answers.

The Node client is in `tests/e2e/clients/node_modules`, LangChain and LiteLLM are in `.venv-clients`: `make clients`
installs both. The reference for all of them is curl's output.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from paceline.commands.demo import Children, clean_environment, command
from tests.e2e.pair import started

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "tests" / "e2e" / "clients"
TASKS = json.loads((CLIENTS / "tasks.json").read_text())
TIMEOUT = 240.0  # s for all tasks of one client
Said = dict[str, Any]
BASE = {"model": TASKS["model"], "messages": [{"role": "user", "content": TASKS["question"]}], **TASKS["sampling"]}
LONG = BASE | {"max_tokens": TASKS["schema_tokens"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": TASKS["schema"]}}
RESPONSE = {"model": TASKS["model"], "input": TASKS["question"], **TASKS["response"]}
PROMPT = {"model": TASKS["model"], "prompt": TASKS["question"], **TASKS["sampling"]}
TOOLS = {
    "tools": [{"type": "function", "function": TASKS["tool"]}],
    "tool_choice": {"type": "function", "function": {"name": TASKS["tool"]["name"]}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(URL, key) of `paceline serve`, with a key made by command."""
    directory = tmp_path_factory.mktemp("server")
    with Children(directory) as children:
        state = ("--state-dir", str(directory / "state"))
        key = json.loads(children.run(command("keys", "create", "clients", "--json", *state)))["key"]
        yield started(children, "cloud", "serve", "--embedder", "hash", state=directory / "state").url, key


# ---- curl, the reference --------------------------------------------------------------------------------------------
def curled(server: tuple[str, str], path: str, body: Mapping[str, object]) -> str:
    url, key = server
    headers = ("-H", f"authorization: Bearer {key}", "-H", "content-type: application/json")
    sent = ["curl", "-sN", f"{url}/v1/{path}", *headers, "-d", json.dumps(body)]
    return subprocess.run(sent, capture_output=True, text=True, timeout=TIMEOUT, check=True).stdout


@pytest.fixture(scope="module")
def measure(server: tuple[str, str]) -> Said:
    def choice(**more: object) -> Any:
        answer = json.loads(curled(server, "chat/completions", LONG | more))
        return answer["choices"][0]

    whole = json.loads(curled(server, "chat/completions", BASE))
    call = choice(**TOOLS)["message"]["tool_calls"][0]["function"]
    vectors = json.loads(curled(server, "embeddings", {"model": TASKS["embedder"], "input": TASKS["texts"]}))
    response = json.loads(curled(server, "responses", RESPONSE))
    return {
        "embeddings": [each["embedding"] for each in vectors["data"]],
        "completions": json.loads(curled(server, "completions", PROMPT))["choices"][0]["text"],
        "responses": response["output"][0]["content"][0]["text"],
        "whole": {
            "text": whole["choices"][0]["message"]["content"],
            "reason": whole["choices"][0]["finish_reason"],
            "usage": whole["usage"]["completion_tokens"],
        },
        "schema": choice(response_format=FORMAT)["message"]["content"],
        "tool": {"name": call["name"], "arguments": call["arguments"]},
    }


def test_curl_reads_the_same_streamed(server: tuple[str, str], measure: Said) -> None:
    lines = curled(server, "chat/completions", BASE | {"stream": True}).splitlines()
    chunks = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert chunks.pop() == "[DONE]"
    text = "".join(json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == measure["whole"]["text"] and len(text) > 0


# ---- the clients ----------------------------------------------------------------------------------------------------
def answer(whole: Any) -> Said:
    choice = whole.choices[0]
    usage = whole.usage.completion_tokens
    return {"text": choice.message.content, "reason": choice.finish_reason, "usage": usage}


def call(whole: Any) -> Said:
    (made,) = whole.choices[0].message.tool_calls
    return {"name": made.function.name, "arguments": made.function.arguments}


def logprobs(whole: Any) -> list[Any]:
    content = whole.choices[0].logprobs.content
    return [[each.logprob, each.bytes, len(each.top_logprobs)] for each in content]


def vectors(embedded: Any) -> list[list[float]]:
    return [each.embedding for each in embedded.data]


def gathered(chunks: list[Any]) -> Said:
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return {
        "text": "".join(choice.delta.content or "" for choice in choices),
        "reason": choices[-1].finish_reason,
        "usage": chunks[-1].usage.completion_tokens,
    }


STREAMED: Said = {"stream": True, "stream_options": {"include_usage": True}}


def openai_client(url: str, key: str) -> Said:
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60.0) as client:
        create: Callable[..., Any] = client.chat.completions.create
        respond: Callable[..., Any] = client.responses.create
        said: Said = {
            "models": [model.id for model in client.models.list()],
            "whole": answer(create(**BASE)),
            "streamed": gathered(list(create(**BASE, **STREAMED))),
            "schema": create(**LONG, response_format=FORMAT).choices[0].message.content,
            "tool": call(create(**LONG, **TOOLS)),
            "logprobs": logprobs(create(**BASE, logprobs=True, top_logprobs=3)),
            "completions": client.completions.create(**PROMPT).choices[0].text,
            "embeddings": vectors(client.embeddings.create(model=TASKS["embedder"], input=TASKS["texts"])),
        }
        with client.chat.completions.stream(**LONG, **TOOLS) as stream:
            said["tool_streamed"] = call(stream.get_final_completion())
        whole, events = respond(**RESPONSE), list(respond(**RESPONSE, stream=True))
        identity = events[0].response.id
        said["responses"] = {
            "text": whole.output_text,
            "again": client.responses.retrieve(whole.id).output_text,
            "streamed": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
            "kept": client.responses.retrieve(identity).output_text,
            "numbers": [event.sequence_number for event in events],
            "resumed": [
                event.sequence_number for event in client.responses.retrieve(identity, stream=True, starting_after=2)
            ],
        }
        client.responses.delete(identity)
        try:
            client.responses.retrieve(identity)
        except openai.NotFoundError:
            said["responses"]["gone"] = True
        file = client.files.create(file=("omber.md", TASKS["file"].encode()), purpose="assistants")
        store = client.vector_stores.create(name="lights")
        added = client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=50)
        found = list(client.vector_stores.search(store.id, query=TASKS["search"]))
        said["files"] = {
            "status": added.status,
            "text": found[0].content[0].text,
            "name": found[0].filename,
            "content": client.files.content(file.id).text,
            "listed": file.id in [each.id for each in client.files.list()],
        }
        client.vector_stores.delete(store.id)
        client.files.delete(file.id)
        try:
            create(**BASE | {"model": "nobody"})
        except openai.NotFoundError as error:
            said["refusal"] = {"status": error.status_code, "code": error.code, "named": bool(error.request_id)}
        return said


def script(*program: str) -> Callable[[str, str], Said]:
    """A client in another process, which prints its results as its last line."""

    def ask(url: str, key: str) -> Said:
        assert Path(program[0]).exists() or program[0] == "node", "make clients"
        done = subprocess.run(
            [*program, url, key],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env=clean_environment({}),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said: Said = json.loads(done.stdout.splitlines()[-1])
        return said

    return ask


OTHER_PYTHON = str(ROOT / ".venv-clients" / "bin" / "python")
ASK: dict[str, Callable[[str, str], Said]] = {
    "openai": openai_client,
    "openai for Node": script("node", str(CLIENTS / "node.mjs")),
    "LangChain": script(OTHER_PYTHON, str(CLIENTS / "langchain_chat.py")),
    "LiteLLM": script(OTHER_PYTHON, str(CLIENTS / "litellm_chat.py")),
}


@pytest.mark.parametrize("client", ASK)
def test_every_client_gets_what_curl_gets(server: tuple[str, str], measure: Said, client: str) -> None:
    said = ASK[client](*server)
    assert said["whole"] == said["streamed"] == measure["whole"]
    # Some clients parse JSON answers, so only the value must be the same, not the text.
    value = json.loads(said["schema"])
    assert value == json.loads(measure["schema"])
    jsonschema.validate(value, TASKS["schema"])
    for way in ("tool", "tool_streamed"):
        assert said[way]["name"] == TASKS["tool"]["name"]
        arguments = json.loads(said[way]["arguments"])
        assert arguments == json.loads(measure["tool"]["arguments"])
        jsonschema.validate(arguments, TASKS["tool"]["parameters"])
    assert len(said["logprobs"]) == measure["whole"]["usage"]
    assert all(logprob <= 0 and 1 <= top <= 3 for logprob, _, top in said["logprobs"])
    assert bytes(byte for _, each, _ in said["logprobs"] for byte in each).decode() == measure["whole"]["text"]
    assert said["refusal"]["status"] == 404
    assert said["refusal"].get("code", "model_not_found") == "model_not_found" and said["refusal"].get("named", True)
    assert TASKS["model"] in said.get("models", [TASKS["model"]])
    if "completions" in said:
        assert said["completions"] == measure["completions"]
    for vector, wanted in zip(said["embeddings"], measure["embeddings"], strict=True):
        assert vector == pytest.approx(wanted, abs=1e-6)  # base64 is float32, JSON the same in decimal
    check_responses(said["responses"], measure["responses"])
    if "files" in said:
        kept = {
            "status": "completed",
            "text": TASKS["file"],
            "name": "omber.md",
            "content": TASKS["file"],
            "listed": True,
        }
        assert said["files"] == {name: kept[name] for name in said["files"]}


def check_responses(said: Said, text: str) -> None:
    """Check a client's results of the Responses API, as far as it reports them."""
    for way in ("text", "again", "streamed", "kept"):
        assert said.get(way, text) == text, way
    numbers = said.get("numbers", [])
    assert numbers == list(range(len(numbers)))
    assert said.get("resumed", numbers[3:]) == numbers[3:]
    assert said.get("gone", True)


# ---- clients of other APIs ------------------------------------------------------------------------------------------
def test_anthropics_client_gets_what_curl_gets(server: tuple[str, str], measure: Said) -> None:
    said = script(OTHER_PYTHON, str(CLIENTS / "anthropic_chat.py"))(*server)
    tokens = TASKS["response"]["max_output_tokens"]
    assert said["whole"] == {"text": measure["responses"], "reason": "max_tokens", "usage": tokens} == said["streamed"]
    for way in ("tool", "tool_streamed"):
        assert said[way]["name"] == TASKS["tool"]["name"]
        jsonschema.validate(json.loads(said[way]["arguments"]), TASKS["tool"]["parameters"])
    assert said["tool"] == said["tool_streamed"]
    assert said["after_tool"] in ("end_turn", "max_tokens", "tool_use")
    assert said["counted"] == said["asked"]
    assert TASKS["model"] in said["models"]
    assert said["refusal"] == {"status": 404, "named": True, "kind": "not_found_error"}


def test_ollamas_client_gets_what_curl_gets(server: tuple[str, str], measure: Said) -> None:
    said = script(OTHER_PYTHON, str(CLIENTS / "ollama_chat.py"))(*server)
    assert said["whole"] == said["streamed"] == measure["whole"]
    assert said["generated"] == said["generated_streamed"] == measure["whole"]["text"]
    assert said["completions"] == measure["completions"]
    assert said["calls"] == said["calls_streamed"]
    jsonschema.validate(json.loads(said["schema"]), TASKS["schema"])
    for vector, wanted in zip(said["embeddings"], measure["embeddings"], strict=True):
        assert vector == pytest.approx(wanted, abs=1e-6)
    assert TASKS["model"] in said["models"] and said["context"] > 0
    assert said["refusal"]["status"] == 404 and "nobody" in said["refusal"]["text"]
