"""The demonstration's questions: how one is asked through OpenAI's own client, shown as it comes, and judged.

Shows whose documents decided each token by colour, from the `paceline` object of each chunk. Knows nothing of
processes or ports: a base URL is all it gets.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from openai import OpenAI

MAX_TOKENS = 96
COLOURS = {"cloud": "cyan", "device": "magenta"}  # of a lane; neither: the terminal's own


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answers: tuple[str, ...]  # each must occur in the answer
    sides: tuple[str, ...]  # whose documents it takes


@dataclass(slots=True)
class Answer:
    """What came, gathered."""

    pieces: list[tuple[str, str | None]] = field(default_factory=list)  # (text, lane)
    citations: list[tuple[str, str]] = field(default_factory=list)  # (side, document)
    strategy: str = ""
    degraded: str | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    def lanes(self) -> Counter[str]:
        """Pieces by the side whose documents decided them."""
        return Counter(lane for _, lane in self.pieces if lane)

    def lanes_of(self, part: str) -> frozenset[str]:
        """Who decided the pieces that hold the last occurrence of `part`."""
        start = self.text.casefold().rfind(part.casefold())
        end, position, found = start + len(part), 0, set()
        for text, lane in self.pieces:
            if lane and start >= 0 and position < end and position + len(text) > start:
                found.add(lane)
            position += len(text)
        return frozenset(found)


def load_questions(file: Path) -> tuple[Question, ...]:
    """Raises ConfigError when the samples are not there or not as they should be."""
    try:
        entries = json.loads(file.read_text("utf-8"))
        return tuple(Question(each["question"], _several(each["answer"]), tuple(each["sides"])) for each in entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the sample questions {file} cannot be read ({error}): install paceline again") from error


def ask(client: OpenAI, question: str, show: Callable[[str, str | None], None]) -> Answer:
    """One streamed request at temperature 0. `show` gets each piece of text with its lane as it comes.

    Raises PacelineError when the request fails, before or after its first token.
    """
    from openai import OpenAIError

    try:
        return _asked(client, question, show)
    except OpenAIError as error:
        raise PacelineError(f"the request to {client.base_url} failed: {error}") from error


def _asked(client: OpenAI, question: str, show: Callable[[str, str | None], None]) -> Answer:
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        extra_body={"paceline": {"report": True}},
    )
    answer = Answer()
    for chunk in stream:
        said = (chunk.model_extra or {}).get("paceline") or {}
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            answer.pieces.append((text, said.get("lane")))
            show(text, said.get("lane"))
        if "citations" in said:
            answer.citations = [(each["side"], each["document"]) for each in said["citations"]]
            answer.strategy, answer.degraded = said["strategy"], said["degraded"]
    return answer


def faults(question: Question, answer: Answer) -> Iterator[str]:
    """What is wrong with an answer, in words; nothing if it is right."""
    for expected in question.answers:
        if expected.casefold() not in answer.text.casefold():
            yield f"{expected!r} is not in the answer"
        elif strange := answer.lanes_of(expected) - set(question.sides):
            yield f"{expected!r} was decided by documents of the {' and '.join(sorted(strange))}"
    cited = {side for side, _ in answer.citations}
    for side in question.sides:
        if side not in cited:
            yield f"no document of the {side} is cited"
        if side not in answer.lanes():
            yield f"no token was decided by documents of the {side}"
    if answer.degraded:
        yield f"the answer was degraded: {answer.degraded}"


def _several(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def footer(answer: Answer) -> str:
    """Strategy, pieces by lane and citations, in one line. What a device does not name is private."""
    lanes = ", ".join(f"{number} by the {side}" for side, number in sorted(answer.lanes().items()))
    cited = "; ".join(f"{side}: {document or 'a private document'}" for side, document in answer.citations)
    return f"{answer.strategy or 'no report'}; decided: {lanes or 'nothing'}; cited: {cited or 'nothing'}"


def curl_line(url: str, model: str, question: str) -> str:
    body: Mapping[str, object] = {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": question}],
    }
    quoted = json.dumps(body).replace("'", "'\\''")
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{quoted}'"
