"""Questions of honest clients beside hostile ones, and a strict schema that their answers keep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import httpx

SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"enum": ["Bari", "Oslo"]}, "rooms": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "rooms"],
    "additionalProperties": False,
}
STRICT: Final = {"type": "json_schema", "json_schema": {"name": "stay", "strict": True, "schema": SCHEMA}}
ALONE: Final[dict[str, object]] = {"strategy": "autoregressive", "privacy": "local-only"}


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=120, verify=False, trust_env=False)


async def ask_strictly(http: httpx.AsyncClient, paceline: Mapping[str, object], **fields: object) -> dict[str, Any]:
    """An answer under a strict schema, which has been checked. The body of the response."""
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "Where do I stay?"}],
        "max_tokens": 64,
        "seed": 3,
        "response_format": STRICT,
        "paceline": {"strategy": "aggregate", "report": True, **paceline},
        **fields,
    }
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    stay = json.loads(choice["message"]["content"])
    assert set(stay) == {"city", "rooms"} and stay["city"] in ("Bari", "Oslo") and stay["rooms"] in range(10), stay
    return dict(answer.json())
