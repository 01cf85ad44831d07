"""shell-gpt: a question, a command for the shell, and a chat, through its command."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import checks

url, key = sys.argv[1:]
HOME = tempfile.mkdtemp()
ENVIRONMENT = {
    "PATH": os.defpath,
    "HOME": HOME,
    "OPENAI_API_KEY": key,
    "API_BASE_URL": f"{url}/v1",
    "DEFAULT_MODEL": checks.MODEL,
    "CHAT_CACHE_PATH": f"{HOME}/chats",
    "CACHE_PATH": f"{HOME}/cache",
    "OPENAI_USE_FUNCTIONS": "false",
    "PRETTIFY_MARKDOWN": "false",
    "USE_LITELLM": "false",
}


def sgpt(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("sgpt")), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stderr[-300:]
    return done.stdout


def chat() -> None:
    for _ in range(2):
        checks.opens(sgpt("--no-cache", "--chat", "library", checks.QUESTION))
    assert checks.QUESTION in sgpt("--show-chat", "library")


checks.run("shell-gpt", {"question": lambda: checks.opens(sgpt("--no-cache", checks.QUESTION)), "chat": chat})
