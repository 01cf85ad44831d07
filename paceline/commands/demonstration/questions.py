"""The demonstration's questions: sent with OpenAI's own client, shown as the answer arrives, and judged.

Colours show which side's documents decided each token, from the `paceline` object of each chunk. Knows nothing of
processes or ports: it gets a base URL.
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
COLOURS = {"cloud": "cyan", "device": "magenta"}  # by lane; text without a lane has the terminal's colour


class Silent(PacelineError):
    """Nothing came for longer than the client waits, no sign that the program is at work either."""


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answers: tuple[str, ...]  # each must occur in the answer
    sides: tuple[str, ...]  # sides whose documents are needed


@dataclass(slots=True)
class Answer:
    """A streamed answer, collected."""

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
        """The sides that decided the pieces which overlap the last occurrence of `part`."""
        start = self.text.casefold().rfind(part.casefold())
        end, position, found = start + len(part), 0, set()
        for text, lane in self.pieces:
            if lane and start >= 0 and position < end and position + len(text) > start:
                found.add(lane)
            position += len(text)
        return frozenset(found)


def load_questions(file: Path) -> tuple[Question, ...]:
    """Read the sample questions. Raises ConfigError when the file is missing or malformed."""
    try:
        entries = json.loads(file.read_text("utf-8"))
        return tuple(Question(each["question"], _several(each["answer"]), tuple(each["sides"])) for each in entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the sample questions {file} cannot be read ({error}): install paceline again") from error


def ask(client: OpenAI, question: str, show: Callable[[str, str | None], None]) -> Answer:
    """Send one streamed request at temperature 0. `show` gets each piece of text with its lane as it arrives.

    Raises PacelineError when the request fails, before or after its first token; Silent where that is the client's
    timeout, which every sign of life begins anew.
    """
    from openai import APITimeoutError, OpenAIError

    try:
        return _asked(client, question, show)
    except APITimeoutError as error:
        raise Silent(f"nothing came from {client.base_url} for {client.timeout} s") from error
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
        report = (chunk.model_extra or {}).get("paceline") or {}
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            answer.pieces.append((text, report.get("lane")))
            show(text, report.get("lane"))
        if "citations" in report:
            answer.citations = [(each["side"], each["document"]) for each in report["citations"]]
            answer.strategy, answer.degraded = report["strategy"], report["degraded"]
    return answer


def faults(question: Question, answer: Answer) -> Iterator[str]:
    """Describe each fault of an answer; nothing if it is right."""
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
    """Strategy, pieces by lane and citations in one line. A document without a name is private to a device."""
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
