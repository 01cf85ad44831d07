"""lm-evaluation-harness: a generation through its client of completions. Its log-likelihoods want data sets;
`tests/api/completions/test_logprobs.py` has what it reads."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OPENAI_API_KEY", sys.argv[2])

import checks
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, key = sys.argv[1:]
model = LocalCompletionsAPI(
    model=checks.MODEL,
    base_url=f"{url}/v1/completions",
    tokenizer_backend=None,
    tokenized_requests=False,
    max_length=2048,
)


def generated() -> None:
    until = {"until": ["\n\n"], "max_gen_toks": 32, "temperature": 0}
    asked = Instance("generate_until", {}, ("The harbour library opens", until), 0)
    assert isinstance(model.generate_until([asked], disable_tqdm=True)[0], str)


checks.run("lm-eval", {"generate": generated})
