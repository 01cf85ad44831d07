"""llm: prompts whole and streamed, a conversation, a schema and a tool, through its model of OpenAI's API."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import checks

url, key = sys.argv[1:]
os.environ["LLM_USER_PATH"] = tempfile.mkdtemp()
MODELS = f"""
- model_id: {checks.MODEL}
  model_name: {checks.MODEL}
  api_base: {url}/v1
  api_key_name: paceline
  supports_schema: true
  supports_tools: true
"""
(Path(os.environ["LLM_USER_PATH"]) / "extra-openai-models.yaml").write_text(MODELS)

import llm  # noqa: E402  # it reads that folder when imported

model = llm.get_model(checks.MODEL)
SCHEMA = {"type": "object", "properties": {"place": {"enum": checks.PLACES}}, "required": ["place"]}


def prompted(**options: object) -> llm.Response:
    return model.prompt(checks.QUESTION, key=key, **options)


def streamed() -> None:
    pieces = list(prompted())
    assert len(pieces) > 1
    checks.opens("".join(pieces))


def conversation() -> None:
    talk = model.conversation()
    for _ in range(2):
        checks.opens(talk.prompt(checks.QUESTION, key=key).text())
    assert len(talk.responses) == 2


def schema() -> None:
    assert json.loads(prompted(schema=SCHEMA).text())["place"] in checks.PLACES


def tool() -> None:
    def opening_hours(place: str) -> str:
        """When a place opens."""
        return f"The {place} opens at 8:30."

    response = prompted(tools=[opening_hours])
    assert response.text() or response.tool_calls()


def counted() -> None:
    usage = prompted(stream=False).usage()
    assert usage.input and usage.output


checks.run(
    "llm",
    {
        "whole": lambda: checks.opens(prompted(stream=False).text()),
        "stream": streamed,
        "conversation": conversation,
        "schema": schema,
        "tool offered": tool,
        "usage": counted,
    },
)
