"""`paceline profile` and a server on one state directory, as processes: measured, believed, refined, kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openai import OpenAI

from paceline.commands.demo import Children, command, free_port

FLAGS = ("--model", "fake")


def test_what_is_measured_is_refined_by_workflows_and_known_after_the_server_has_ended(tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path / "state"))

    def profile(*arguments: str) -> str:
        with Children(tmp_path) as children:
            return children.run(command("profile", "--side", "cloud", *arguments, *state))

    measured = json.loads(profile(*FLAGS, "--seconds", "2", "--json"))
    rows = by_operation(measured)
    assert {"agent/prefill", "agent/decode", "chat/prefill", "chat/decode", "embed/encode"} == rows.keys()
    for row in rows.values():
        assert all(seconds > 0.0 for _, seconds, _ in row["points"])
        assert all(factor >= 1.0 for _, factor in row["slowdown"])
    assert measured["conditions"]["embedder"] == "hash" and measured["measured"]
    note = tmp_path / "broom.md"
    note.write_text("The broom is in the hall. The key is under the broom.")
    port = free_port(0)
    with Children(tmp_path) as children:
        store = ("--store", str(tmp_path / "state" / "docs"), "--embedder", "hash")
        children.run(command("docs", "add", str(note), "--side", "cloud", *store))
        server = children.start("cloud", command("serve", *FLAGS, "--port", str(port), *state), port=port)
        children.wait(lambda reports: all(reports))
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        for _ in range(2):
            answer: Any = client.chat.completions.create(
                model="fake:fast",
                messages=[{"role": "user", "content": "Where is the key?"}],
                max_tokens=20,
                extra_body={"paceline": {"report": True}},
            )
            assert "workflow fast" in answer.model_extra["paceline"]["why"]
        client.close()
    assert "anew" not in server.log.read_text()
    kept = json.loads(profile("--show", "--json"))
    assert (kept["measured"], kept["conditions"]) == (measured["measured"], measured["conditions"])
    learnt = by_operation(kept)
    assert {"rerank/score", "host/search"} <= learnt.keys(), "what was not measured was learnt"
    assert any(learnt[operation] != row for operation, row in rows.items()), "what was measured was refined"
    table = profile("--show")
    assert "rerank/score" in table and measured["measured"] in table and "estimates" in table


def by_operation(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["operation"]: row for row in content["learnt"]["profiles"]}
