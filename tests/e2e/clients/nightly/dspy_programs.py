"""DSPy: its language model by chat, responses and text, with a schema, and its embedder.

Its JSONAdapter asks models that it does not know for JSON in words, which the demonstration's do not write.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it would fetch a list of prices when imported

import checks
import dspy

url, key = sys.argv[1:]
SCHEMA = {"type": "object", "properties": {"place": {"enum": checks.PLACES}}, "required": ["place"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
WHERE = {"api_base": f"{url}/v1", "api_key": key, "cache": False, "num_retries": 0}


def asked(kind: str) -> None:
    model = dspy.LM(f"openai/{checks.MODEL}", model_type=kind, temperature=0, **WHERE)
    found = model(messages=[{"role": "user", "content": checks.QUESTION}])[0]
    checks.opens(found["text"] if isinstance(found, dict) else found)


def continued() -> None:
    model = dspy.LM(f"text-completion-openai/{checks.MODEL}", model_type="text", max_tokens=8, temperature=0, **WHERE)
    assert isinstance(model("The harbour library opens")[0], str)


def formatted() -> None:
    model = dspy.LM(f"openai/{checks.MODEL}", temperature=0, **WHERE)
    found = model(messages=[{"role": "user", "content": checks.QUESTION}], response_format=FORMAT)[0]
    assert json.loads(found)["place"] in checks.PLACES


def embedded() -> None:
    embed = dspy.Embedder(f"openai/{checks.EMBEDDER}", api_base=f"{url}/v1", api_key=key, caching=False)
    assert len(embed(["a"])[0]) == 384


checks.run(
    "dspy",
    {
        "chat": lambda: asked("chat"),
        "responses": lambda: asked("responses"),
        "text": continued,
        "schema": formatted,
        "embedder": embedded,
    },
)
