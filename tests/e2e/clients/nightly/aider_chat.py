"""aider: a question about a file, whole and streamed, through its command. The demonstration's model edits no code."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import checks

url, key = sys.argv[1:]
FOLDER = Path(tempfile.mkdtemp())
ENVIRONMENT = {
    "PATH": os.defpath,
    "HOME": str(FOLDER),
    "OPENAI_API_BASE": f"{url}/v1",
    "OPENAI_API_KEY": key,
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "AIDER_ANALYTICS": "false",
    "AIDER_CHECK_UPDATE": "false",
}
PLAIN = (
    "--no-git",
    "--yes-always",
    "--no-pretty",
    "--no-show-model-warnings",
    "--no-show-release-notes",
    "--map-tokens",
    "0",
)


def asked(*more: str) -> None:
    command = [str(Path(sys.executable).with_name("aider")), "--model", f"openai/{checks.MODEL}", *PLAIN, *more]
    done = subprocess.run(
        [*command, "--chat-mode", "ask", "--message", checks.QUESTION],
        capture_output=True,
        text=True,
        timeout=300,
        env=ENVIRONMENT,
        cwd=FOLDER,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-300:]
    checks.opens(done.stdout)
    assert "Tokens:" in done.stdout, done.stdout[-300:]


checks.run("aider-chat", {"stream": lambda: asked("--stream"), "whole": lambda: asked("--no-stream")})
