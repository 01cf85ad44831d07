"""Document and question of a prompt, from its token ids: the conversation as the demonstration's template writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.engine.reader.question import asked
from paceline.engine.tokenizer import PREAMBLE, Tokenizer

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


class Asked(NamedTuple):
    """What is to be read and what is asked of it. document: "" if there is none."""

    document: str
    message: str


class PromptReader:
    """Takes prompts apart at the marks of roles, which no text of a message can hold."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = {tokenizer.token_name(token): token for token in range(min(tokenizer.vocab_size, 64))}
        self._system, self._user, self.assistant, self.end = (names[role] for role in ROLES)

    def read(self, prompt: Sequence[int]) -> Asked:
        """The document is the text behind the preamble; without one, what the system and the user have said before the
        question."""
        document, instructions, message = "", "", ""
        for role, ids in self._messages(prompt):
            text = self._tokenizer.decode(ids)
            if role == self._system and text.startswith(PREAMBLE):
                document = text.removeprefix(PREAMBLE)
            elif role == self._system:
                instructions = text
            elif role == self._user:
                message = text
        before, question = asked(message)
        given = "\n".join(text for text in (instructions, before) if text)
        return Asked(document or given, question if given and not document else message)

    def _messages(self, prompt: Sequence[int]) -> list[tuple[int, list[int]]]:
        roles = (self._system, self._user, self.assistant)
        found: list[tuple[int, list[int]]] = []
        for token in prompt:
            if token in roles:
                found.append((token, []))
            elif found and token != self.end:
                found[-1][1].append(token)
        return found
