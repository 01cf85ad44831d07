"""Streamed answers with the times of their pieces, for the scenarios that disturb one in mid-stream."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise

import httpx

WAIT_S = 120.0


class Stream:
    """One chat completion, read in a thread. Its connection closes with the context."""

    def __init__(self, url: str, body: Mapping[str, object], key: str = "") -> None:
        """url: base URL of a side."""
        self.pieces: list[tuple[float, str]] = []  # time, text
        self.status = 0
        self.reason: str | None = None
        self.degraded: str | None = None
        self.error: str | None = None  # in the stream
        self.tokens = 0  # of the whole answer
        self.alone = 0  # of them written without the peer
        self.began = time.monotonic()
        self._more = threading.Condition()
        self.ended = self._done = False
        self._url = f"{url}/v1/chat/completions"
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._body = {"model": "fake", "stream": True, "stream_options": {"include_usage": True}, **body}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)

    @property
    def whole(self) -> bool:
        """Ended in order."""
        return self.status == 200 and self.error is None and self._done and self.reason in ("stop", "length")

    def wait_for(self, pieces: int) -> None:
        """Until so many have come, or the stream has ended."""
        with self._more:
            assert self._more.wait_for(lambda: self.ended or len(self.pieces) >= pieces, WAIT_S), "no more text"

    def join(self) -> Stream:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the answer does not end"
        return self

    def gap_after(self, time: float) -> float:
        """Longest wait for a piece, s, of those that came later than that."""
        times = [began for began, _ in self.pieces]
        return max((after - max(before, time) for before, after in pairwise(times) if after > time), default=0.0)

    def _read(self) -> None:
        try:
            with (
                httpx.Client(timeout=WAIT_S, trust_env=False) as http,
                http.stream("POST", self._url, json=self._body, headers=self._headers) as answer,
            ):
                self.status = answer.status_code
                if self.status != httpx.codes.OK:
                    self.error = answer.read().decode()
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        self._done = True
                    elif line.startswith("data: "):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError as error:
            self.error = repr(error)
        finally:
            with self._more:
                self.ended = True
                self._more.notify_all()

    def _take(self, event: dict[str, object]) -> None:
        if event.get("error"):
            self.error = json.dumps(event["error"])
        extra = event.get("paceline")
        if isinstance(extra, dict):
            self.degraded = extra.get("degraded", self.degraded)
            self.alone = int((extra.get("stats") or {}).get("alone", 0))
        if isinstance(usage := event.get("usage"), dict):
            self.tokens = int(usage["completion_tokens"])
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            self.reason = choice.get("finish_reason") or self.reason
            text = choice["delta"].get("content")
            if text:
                with self._more:
                    self.pieces.append((time.monotonic(), text))
                    self._more.notify_all()


def until(condition: Callable[[], bool]) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + WAIT_S, "it does not come true"
        time.sleep(0.01)  # between two looks
    return time.monotonic() - began
