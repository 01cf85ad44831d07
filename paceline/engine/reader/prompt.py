"""Document and question of a prompt, from its token ids: the conversation as the demonstration's template writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from paceline.engine.reader.question import asked
from paceline.engine.tokenizer import PREAMBLE, Tokenizer

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


# What the API adds to a system message: the functions that may be called, and the schema of the answer.
_TOOLS = re.compile(r"# Tools\n.*?<tools>\n(.*?)\n</tools>.*?</tool_call>", re.DOTALL)
_SCHEMA = re.compile(r"Answer with JSON of this schema[^\n]*:\n[^\n]*")
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


class Asked(NamedTuple):
    """What is to be read and what is asked of it."""

    document: str  # "" if there is none
    message: str
    whole: str = ""  # the message and what is before the question in it
    earlier: str = ""  # what the user has said before
    tools: tuple[tuple[str, str], ...] = ()  # name and description of each function that may be called
    is_answered: bool = False  # a function has been called for this message


class PromptReader:
    """Takes prompts apart at the marks of roles, which no text of a message can hold."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = {tokenizer.token_name(token): token for token in range(min(tokenizer.vocab_size, 64))}
        self._system, self._user, self.assistant, self.end = (names[role] for role in ROLES)

    def read(self, prompt: Sequence[int]) -> Asked:
        """The document is the text behind the preamble; without one, what the system and the user have said before the
        question, or what a function has returned."""
        document, instructions, message, earlier, results = "", "", "", "", ""
        tools: tuple[tuple[str, str], ...] = ()
        for role, ids in self._messages(prompt):
            text = self._tokenizer.decode(ids)
            if role == self._system and text.startswith(PREAMBLE):
                document = text.removeprefix(PREAMBLE)
            elif role == self._system:
                if found := _TOOLS.search(text):
                    tools = _functions(found[1])
                instructions = _SCHEMA.sub("", _TOOLS.sub("", text)).strip()
            elif role == self._user and (returned := _RESULT.findall(text)):
                results = "\n".join(returned)
            elif role == self._user:
                earlier, message, results = message, text, ""
        before, question = asked(message)
        given = "\n".join(text for text in (instructions, before, results) if text)
        question = question if given and not document else message
        return Asked(document or given, question, message, earlier, tools, bool(results))

    def _messages(self, prompt: Sequence[int]) -> list[tuple[int, list[int]]]:
        roles = (self._system, self._user, self.assistant)
        found: list[tuple[int, list[int]]] = []
        for token in prompt:
            if token in roles:
                found.append((token, []))
            elif found and token != self.end:
                found[-1][1].append(token)
        return found


def _functions(lines: str) -> tuple[tuple[str, str], ...]:
    try:
        found = [json.loads(line)["function"] for line in lines.splitlines()]
        return tuple((str(each["name"]), str(each.get("description", ""))) for each in found)
    except (ValueError, KeyError, TypeError):  # of somebody who writes as the API does
        return ()
