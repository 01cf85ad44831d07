"""Encoders of text completions, in one piece and streamed. Pure.

Source: openai-openapi 2.3.0, CreateCompletionResponse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.api.chat.message_builder import Json
from paceline.api.chat.output import report, running_usage, summary, usage
from paceline.api.completions.logprobs import LegacyLogprobs, Offsets, entries, prompt_entries
from paceline.api.completions.request import CompletionCall
from paceline.api.http import sse
from paceline.api.http.errors import Failure
from paceline.api.http.strict_json import encode_json
from paceline.runtime.service import GenerateEvent, GenerationResult, Logprobs


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that is repeated in front of its answers."""

    text: str
    token_bytes: tuple[bytes, ...]  # of each token
    logprobs: tuple[Logprobs, ...] | None  # of all tokens but the first; None: not requested

    @staticmethod
    def of(prompt: str | None, token_bytes: tuple[bytes, ...], logprobs: tuple[Logprobs, ...] | None) -> EchoedPrompt:
        """`prompt`: the text that was sent; None where token ids were sent."""
        return EchoedPrompt(_text(token_bytes) if prompt is None else prompt, token_bytes, logprobs)

    def entries(self, offsets: Offsets) -> LegacyLogprobs:
        """The entries of the prompt's tokens. Tokens before the text, such as a BOS token, have its offset."""
        assert self.logprobs is not None, "entries need log-probabilities"
        offsets.restart(len(self.text) - len(_text(self.token_bytes)))
        return prompt_entries(self.token_bytes, self.logprobs, offsets)


def _text(token_bytes: Sequence[bytes]) -> str:
    return b"".join(token_bytes).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class CompletionMeta:
    """Fields that all parts of one answer repeat."""

    id: str
    created: int  # Unix time, s
    fingerprint: str  # of the model
    call: CompletionCall
    echoes: tuple[EchoedPrompt, ...]  # one per prompt; none without `echo`
    prompt_tokens: int = 0  # of all prompts, as known before the answer; 0: unknown

    @property
    def num_choices(self) -> int:
        return len(self.call.prompts) * self.call.n

    def echo(self, index: int) -> EchoedPrompt | None:
        return self.echoes[index // self.call.n] if self.echoes else None

    def tail(self, dones: Mapping[int, GenerationResult]) -> Json:
        """Usage, which counts each prompt once, and the field `paceline`. `dones`: by index of the choice."""
        ordered = [dones[index] for index in sorted(dones)]
        prompt = sum(done.prompt_tokens for done in ordered[:: self.call.n])
        completions = sum(done.completion_tokens for done in ordered)
        tokens = usage(ordered) | {"prompt_tokens": prompt, "total_tokens": prompt + completions}
        extension = summary(self.call, ordered)
        return {"usage": tokens} if extension is None else {"usage": tokens, "paceline": extension}

    def frame(self) -> Json:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.call.name,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(slots=True)
class ChoiceDelta:
    """A part of one choice."""

    text: str
    logprobs: LegacyLogprobs
    reason: str | None = None
    report: Json | None = None  # the field `paceline`

    def json(self, index: int, top: int | None) -> Json:
        """`top`: number of alternatives requested; None: no log-probabilities."""
        logprobs = None if top is None else self.logprobs.json(top)
        choice: Json = {"text": self.text, "index": index, "logprobs": logprobs, "finish_reason": self.reason}
        return choice if self.report is None else choice | {"paceline": self.report}


class ChoiceEncoder:
    """Converts the events of one choice to its parts. Token offsets count over all parts."""

    def __init__(self, meta: CompletionMeta, index: int) -> None:
        self._call = meta.call
        self._echo = meta.echo(index)
        self._offsets = Offsets()

    def begin(self) -> ChoiceDelta | None:
        """The prompt, if it is to be echoed."""
        echo = self._echo
        if echo is None:
            return None
        logprobs = LegacyLogprobs() if echo.logprobs is None else echo.entries(self._offsets)
        self._offsets.restart(len(echo.text))
        return ChoiceDelta(echo.text, logprobs)

    def take(self, event: GenerateEvent) -> ChoiceDelta | None:
        """The part for an event; None if it has neither text nor log-probabilities."""
        if isinstance(event, GenerationResult):
            end = () if event.end is None else (event.end,)
            return ChoiceDelta("", entries(end, self._offsets), event.reason, report(self._call, event))
        if not event.text and not event.logprobs:
            return None
        return ChoiceDelta(event.text, entries(event.logprobs, self._offsets))


class CompletionChunks:
    """Encoder of a streamed completion (`AnswerChunks`)."""

    headers = sse.HEADERS

    def __init__(self, meta: CompletionMeta) -> None:
        self._meta = meta
        self._encoders = [ChoiceEncoder(meta, index) for index in range(meta.num_choices)]
        self._dones: dict[int, GenerationResult] = {}
        self._tokens = [0] * meta.num_choices  # of each choice so far

    def ping(self) -> bytes:
        return sse.PING

    def begin(self) -> bytes:
        return b"".join(self._chunk(index, encoder.begin()) for index, encoder in enumerate(self._encoders))

    def take(self, index: int, event: GenerateEvent) -> bytes:
        if isinstance(event, GenerationResult):
            self._dones[index] = event
            self._tokens[index] = event.completion_tokens
        else:
            self._tokens[index] += event.tokens
        return self._chunk(index, self._encoders[index].take(event))

    def end(self) -> bytes:
        if not self._meta.call.include_usage:
            return sse.DONE
        return sse.event(self._meta.frame() | {"choices": []} | self._meta.tail(self._dones)) + sse.DONE

    def fail(self, failure: Failure) -> bytes:
        return sse.event(failure.envelope()) + sse.DONE

    def _chunk(self, index: int, delta: ChoiceDelta | None) -> bytes:
        if delta is None:
            return b""
        call = self._meta.call
        choice = delta.json(index, call.logprobs if delta.logprobs.tokens else None)
        usage_of: Json = {"usage": None} if call.include_usage else {}
        if call.running_usage:
            usage_of = running_usage(self._meta.prompt_tokens, sum(self._tokens))
        return sse.event(self._meta.frame() | {"choices": [choice]} | usage_of)


class CompletionBody:
    """Encoder of a completion in one piece (`AnswerBody`): joins the parts of each choice."""

    def __init__(self, meta: CompletionMeta) -> None:
        self._meta = meta
        self._encoders = [ChoiceEncoder(meta, index) for index in range(meta.num_choices)]
        self._deltas = [[delta] if (delta := encoder.begin()) is not None else [] for encoder in self._encoders]
        self._dones: dict[int, GenerationResult] = {}

    def take(self, index: int, event: GenerateEvent) -> None:
        if isinstance(event, GenerationResult):
            self._dones[index] = event
        delta = self._encoders[index].take(event)
        if delta is not None:
            self._deltas[index].append(delta)

    def body(self) -> bytes:
        """Every choice must be done."""
        top = self._meta.call.logprobs
        choices = [_joined(deltas).json(index, top) for index, deltas in enumerate(self._deltas)]
        if len(choices) == 1:
            choices[0].pop("paceline", None)  # equal to that of the whole answer
        return encode_json(self._meta.frame() | {"choices": choices} | self._meta.tail(self._dones))


def _joined(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    logprobs = LegacyLogprobs()
    for delta in deltas:
        logprobs.extend(delta.logprobs)
    return ChoiceDelta("".join(delta.text for delta in deltas), logprobs, deltas[-1].reason, deltas[-1].report)
