"""lm-evaluation-harness: log-likelihoods and generations through its client of completions, without its data sets."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OPENAI_API_KEY", sys.argv[2])

import checks
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

url, key = sys.argv[1:]
completions = LocalCompletionsAPI(
    model=checks.MODEL,
    base_url=f"{url}/v1/completions",
    tokenizer_backend=None,
    tokenized_requests=False,
    max_length=2048,
)
chat = LocalChatCompletion(model=checks.MODEL, base_url=f"{url}/v1/chat/completions", max_length=2048)


def generated(model: object, prompt: object) -> str:
    asked = Instance("generate_until", {}, (prompt, {"until": ["\n\n"], "max_gen_toks": 32, "temperature": 0}), 0)
    return str(model.generate_until([asked], disable_tqdm=True)[0])  # type: ignore[attr-defined]


checks.run(
    "lm-eval",
    {
        "generate": lambda: generated(completions, "The harbour library opens"),
    },
)
