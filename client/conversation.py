"""Requests to a server over OpenAI's API, and their streamed answers.

httpx only. Reads the `paceline` object of Paceline's servers and works without it at others. Errors are sentences that
say what to do next.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx

from paceline.errors import ConfigError, PacelineError
from paceline.system import by_proxy, tls_fault, unusable_proxy

REASONING = "reasoning"  # in place of a lane: text that the model thinks before its answer, or steps of a workflow
SILENCE_S = 60.0  # after which an answer is given up; a running server sends at least a comment every 15

Json = Mapping[str, object]


class Silent(PacelineError):
    """Nothing came for longer than the client waits, no sign that the program is at work either."""


@dataclass(slots=True)
class Answer:
    """The part of an answer received so far."""

    model: str
    text: str = ""
    reasoning: str = ""  # before it
    finish_reason: str | None = None
    usage: Json | None = None
    report: Json = field(default_factory=dict)  # strategy, why, degraded, citations, stats

    def as_json(self) -> Json:
        return {
            "model": self.model,
            "content": self.text,
            "reasoning": self.reasoning,
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            "paceline": dict(self.report),
        }


class Conversation:
    """Questions to one server, each sent with the messages before it."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        model: str | None = None,
        options: Json | None = None,
        extension: Json | None = None,
        silence: float = SILENCE_S,
    ) -> None:
        """`url`: with or without `/v1`. `options` are added to each request, `extension` to its `paceline` object.
        silence: s without a byte, after which the server is given up."""
        self._url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        self._silence = silence
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if key and not (key.isascii() and key.isprintable()):
            raise ConfigError("The key has characters that no key has: is it the right file?")
        try:
            if not httpx.URL(self._url).host or httpx.URL(self._url).scheme not in ("http", "https"):
                raise ValueError(self._url)
            loopback = urlsplit(self._url).hostname in ("localhost", "127.0.0.1", "::1")
        except (ValueError, httpx.InvalidURL):
            raise ConfigError(f"{url} is no address: give one such as http://127.0.0.1:8000 with --url.") from None
        timeout = httpx.Timeout(silence, connect=min(silence, 5.0))
        is_https = self._url.startswith("https")  # then what the system trusts counts, as for the link
        verify = ssl.create_default_context() if is_https else True
        try:
            self._http = httpx.Client(
                base_url=self._url, headers=headers, timeout=timeout, trust_env=not loopback, verify=verify
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise ConfigError(f"{url} cannot be asked: {unusable_proxy() or error}.") from None
        self._model = model
        self._options = dict(options or {})
        self._extension = dict(extension or {})
        self.messages: list[dict[str, str]] = []
        self.answer = Answer(model or "")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    @property
    def url(self) -> str:
        return self._url

    @property
    def model(self) -> str:
        """The model named at construction or by `choose`, else the first that the server lists."""
        if self._model is None:
            models = self.models()
            self._model = str(models[0].get("id", "")) if models else ""
        return self._model

    def models(self) -> list[Json]:
        """The models that the server lists. Raises PacelineError."""
        data = self.get("/models").get("data")
        return [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []

    def get(self, path: str) -> Json:
        """The JSON object at a path below `/v1`. Raises PacelineError."""
        with self._readable_errors():
            return json_object(self._checked(self._http.get(path)).content)

    def post(self, path: str, body: Json) -> Json:
        """The JSON object that a body is answered with at a path below `/v1`. Raises PacelineError."""
        with self._readable_errors():
            return json_object(self._checked(self._http.post(path, json=body)).content)

    def readiness(self) -> Json:
        """The body of `/readyz`. Raises PacelineError also while it cannot be asked."""
        with self._readable_errors():
            return json_object(self._checked(self._http.get(f"{self._url.removesuffix('/v1')}/readyz")).content)

    def relay(self, message: bytes, headers: Mapping[str, str]) -> bytes:
        """The answer to a message of the Model Context Protocol; empty for one that gets none. Raises PacelineError."""
        headers = {"content-type": "application/json", "accept": "application/json, text/event-stream", **headers}
        with self._readable_errors():
            response = self._http.post(f"{self._url.removesuffix('/v1')}/mcp", content=message, headers=headers)
            answered = response.status_code == 202 or "jsonrpc" in json_object(response.content)
            return response.content if answered else self._checked(response).content

    def choose(self, name: str, value: str | None) -> None:
        """From the next question on: the model, or a field of the `paceline` object; None: the server's default."""
        if name == "model":
            self._model = value
        elif value is None:
            self._extension.pop(name, None)
        else:
            self._extension[name] = value

    def chosen(self, name: str) -> str | None:
        value = self._model if name == "model" else self._extension.get(name)
        return None if value is None else str(value)

    def forget(self) -> None:
        self.messages.clear()
        self.answer = Answer(self._model or "")

    def ask(self, question: str) -> Iterator[tuple[str, str | None]]:
        """Stream pieces of text with their lanes, or REASONING; `answer` has the rest.

        Question and answer join the conversation once the answer is complete. Raises PacelineError, also after the
        first piece; the question is then dropped.
        """
        asked = {"role": "user", "content": question}
        self.answer = answer = Answer(self.model)
        body = {
            "model": answer.model,
            "messages": [*self.messages, asked],
            "stream": True,
            "stream_options": {"include_usage": True},
            "paceline": {"report": True, **self._extension},
            **self._options,
        }
        with self._readable_errors(), self._http.stream("POST", "/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                self._checked(response)
            yield from _pieces(response.iter_lines(), answer)
        self.messages += [asked, {"role": "assistant", "content": answer.text}]

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if fault := tls_fault(self._url, error):
                raise PacelineError(f"{fault}.") from None
            raise PacelineError(
                f"Nothing answers at {self._url}{by_proxy(self._url)} ({error}). Start `paceline serve` or `paceline "
                "agent` there, or give the address of one with --url."
            ) from None
        except httpx.TimeoutException:
            raise Silent(f"{self._url} has said nothing for {self._silence:g} s; is it overloaded?") from None
        except UnicodeEncodeError:
            raise PacelineError("That has bytes that are no UTF-8: write it in that encoding.") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PacelineError(f"The connection to {self._url} broke: {error}. Ask again.") from None

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.status_code == 200:
            return response
        error = _error_of(json_object(response.content))
        if response.status_code == 401:
            raise PacelineError(f"{self._url} wants a key: give one with --key - or --key-file. It says: {error}")
        raise PacelineError(f"{self._url} answered {response.status_code}: {error}")


def _pieces(lines: Iterator[str], answer: Answer) -> Iterator[tuple[str, str | None]]:
    """Read server-sent events into `answer`, yielding each text with its lane. Raises PacelineError."""
    for line in lines:
        if not line.startswith("data:"):
            continue  # a comment, or the end of an event
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json_object(data.encode())
        if chunk.get("error"):
            raise PacelineError(f"The answer could not be finished: {_error_of(chunk)}")
        yield from _take(chunk, answer)
    raise PacelineError("The connection was cut in mid-answer. Ask again.")


def _take(chunk: Json, answer: Answer) -> Iterator[tuple[str, str | None]]:
    report, usage, choices = chunk.get("paceline"), chunk.get("usage"), chunk.get("choices")
    lane = None
    if isinstance(report, dict):
        lane = report.pop("lane", None)
        answer.report = {**answer.report, **report}
    if isinstance(usage, dict):
        answer.usage = usage
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return
    if choice.get("finish_reason"):
        answer.finish_reason = str(choice["finish_reason"])
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return
    thought, text = delta.get("reasoning_content"), delta.get("content")
    if isinstance(thought, str) and thought:
        answer.reasoning += thought
        yield thought, REASONING
    if isinstance(text, str) and text:
        answer.text += text
        yield text, lane if isinstance(lane, str) else None


def json_object(content: bytes) -> dict[str, object]:
    try:
        value: object = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}


def _error_of(body: Json) -> str:
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return str(message) if message else "it gave no reason; is it a Paceline server?"
