"""DSPy: its language model by chat, responses and text, a program with typed fields, and its embedder."""

from __future__ import annotations

import sys
from typing import Literal

import checks
import dspy

url, key = sys.argv[1:]
WHERE = {"api_base": f"{url}/v1", "api_key": key, "cache": False, "num_retries": 0}


class Opening(dspy.Signature):
    """Name the place that the question is about."""

    question: str = dspy.InputField()
    place: Literal["harbour", "library"] = dspy.OutputField()


def asked(kind: str) -> None:
    model = dspy.LM(f"openai/{checks.MODEL}", model_type=kind, temperature=0, **WHERE)
    found = model(messages=[{"role": "user", "content": checks.QUESTION}])[0]
    checks.opens(found["text"] if isinstance(found, dict) else found)


def continued() -> None:
    model = dspy.LM(f"text-completion-openai/{checks.MODEL}", model_type="text", max_tokens=8, temperature=0, **WHERE)
    assert isinstance(model("The harbour library opens")[0], str)


def program() -> None:
    schema = dspy.JSONAdapter(use_native_function_calling=False)
    model = dspy.LM(f"openai/{checks.MODEL}", temperature=0, max_tokens=256, **WHERE)
    with dspy.context(lm=model, adapter=schema):
        assert dspy.Predict(Opening)(question=checks.QUESTION).place in checks.PLACES


def embedded() -> None:
    embed = dspy.Embedder(f"openai/{checks.EMBEDDER}", api_base=f"{url}/v1", api_key=key, caching=False)
    assert len(embed(["a"])[0]) == 384


checks.run(
    "dspy",
    {
        "chat": lambda: asked("chat"),
        "responses": lambda: asked("responses"),
        "text": continued,
        "typed program": program,
        "embedder": embedded,
    },
)
