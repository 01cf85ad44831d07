"""inspect-ai: a task evaluated through its providers of OpenAI's API, by chat and responses, and of servers like it."""

from __future__ import annotations

import os
import sys
import tempfile

import checks

url, key = sys.argv[1:]
os.environ |= {"PACELINE_BASE_URL": f"{url}/v1", "PACELINE_API_KEY": key, "OPENAI_BASE_URL": f"{url}/v1"}
os.environ |= {"OPENAI_API_KEY": key, "INSPECT_LOG_DIR": tempfile.mkdtemp(), "INSPECT_DISPLAY": "none"}

from inspect_ai import Task  # noqa: E402  # it reads those variables
from inspect_ai import eval as evaluate  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.scorer import includes  # noqa: E402
from inspect_ai.solver import generate  # noqa: E402


def evaluated(model: str, **arguments: object) -> None:
    task = Task([Sample(checks.QUESTION, target=checks.ANSWER)], solver=generate(), scorer=includes())
    (log,) = evaluate(task, model=model, model_args=arguments, temperature=0)
    assert log.status == "success", log.error
    assert log.results is not None and log.results.scores[0].metrics["accuracy"].value == 1.0
    (usage,) = log.stats.model_usage.values()
    assert usage.input_tokens and usage.output_tokens


checks.run(
    "inspect-ai",
    {
        "openai-api": lambda: evaluated(f"openai-api/paceline/{checks.MODEL}"),
        "openai chat": lambda: evaluated(f"openai/{checks.MODEL}", responses_api=False),
        "openai responses": lambda: evaluated(f"openai/{checks.MODEL}", responses_api=True),
    },
)
