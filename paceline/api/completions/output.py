"""The shapes of a text completion, whole and streamed. Pure. Source: openai-openapi 2.3.0, CreateCompletionResponse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.api.chat.message_builder import Json
from paceline.api.chat.output import report, summary, usage
from paceline.api.completions.logprobs import LegacyLogprobs, Offsets, entries, prompt_entries
from paceline.api.completions.request import CompletionCall
from paceline.api.http import sse
from paceline.api.http.errors import Failure
from paceline.api.http.strict_json import encode_json
from paceline.runtime.service import GenerateEvent, GenerationResult, Logprobs


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt, as it is repeated in front of its answers."""

    text: str
    spelled: tuple[bytes, ...]  # what each of its tokens stands for
    logprobs: tuple[Logprobs, ...] | None  # of all but the first; None: not asked for

    @staticmethod
    def of(prompt: str | None, spelled: tuple[bytes, ...], logprobs: tuple[Logprobs, ...] | None) -> Echo:
        """`prompt`: its text as it was sent; None where token ids were."""
        return Echo(_text(spelled) if prompt is None else prompt, spelled, logprobs)

    def entries(self, offsets: Offsets) -> LegacyLogprobs:
        """Tokens that stand in front of the text, as a model's own beginning does, begin where the text does."""
        assert self.logprobs is not None, "asked for by whoever wants entries"
        offsets.restart(len(self.text) - len(_text(self.spelled)))
        return prompt_entries(self.spelled, self.logprobs, offsets)


def _text(spelled: Sequence[bytes]) -> str:
    return b"".join(spelled).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class CompletionMeta:
    """What every part of one answer repeats."""

    id: str
    created: int  # Unix time, s
    fingerprint: str  # of the model
    call: CompletionCall
    prompt_tokens: tuple[int, ...]  # of each prompt
    echoes: tuple[Echo, ...]  # one a prompt, none where no echo is wanted

    @property
    def num_choices(self) -> int:
        return len(self.prompt_tokens) * self.call.n

    def echo(self, index: int) -> Echo | None:
        return self.echoes[index // self.call.n] if self.echoes else None

    def tail(self, dones: Mapping[int, GenerationResult]) -> Json:
        """Usage, with the tokens of each prompt once, and our summary. dones: by choice."""
        ordered = [dones[index] for index in sorted(dones)]
        prompt = sum(self.prompt_tokens)
        completions = sum(done.completion_tokens for done in ordered)
        said = usage(ordered) | {"prompt_tokens": prompt, "total_tokens": prompt + completions}
        note = summary(self.call, ordered)
        return {"usage": said} if note is None else {"usage": said, "paceline": note}

    def frame(self) -> Json:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.call.name,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(slots=True)
class Part:
    """A piece of one choice."""

    text: str
    said: LegacyLogprobs
    reason: str | None = None
    note: Json | None = None  # our report

    def json(self, index: int, top: int | None) -> Json:
        """top: how many alternatives were asked for; None: no log-probabilities at all."""
        logprobs = None if top is None else self.said.json(top)
        choice: Json = {"text": self.text, "index": index, "logprobs": logprobs, "finish_reason": self.reason}
        return choice if self.note is None else choice | {"paceline": self.note}


class ChoiceText:
    """One choice as it comes. The offsets of its tokens go on from part to part."""

    def __init__(self, envelope: CompletionMeta, index: int) -> None:
        self._call = envelope.call
        self._echo = envelope.echo(index)
        self._offsets = Offsets()

    def begin(self) -> Part | None:
        """The prompt, where it is to be repeated."""
        echo = self._echo
        if echo is None:
            return None
        said = LegacyLogprobs() if echo.logprobs is None else echo.entries(self._offsets)
        self._offsets.restart(len(echo.text))
        return Part(echo.text, said)

    def take(self, event: GenerateEvent) -> Part | None:
        """None where there is nothing to say."""
        if isinstance(event, GenerationResult):
            end = () if event.end is None else (event.end,)
            return Part("", entries(end, self._offsets), event.reason, report(self._call, event))
        if not event.text and not event.logprobs:
            return None
        return Part(event.text, entries(event.logprobs, self._offsets))


class CompletionChunks:
    """The chunks of a streamed completion."""

    def __init__(self, envelope: CompletionMeta) -> None:
        self._envelope = envelope
        self._choices = [ChoiceText(envelope, index) for index in range(envelope.num_choices)]
        self._dones: dict[int, GenerationResult] = {}

    def begin(self) -> bytes:
        return b"".join(self._chunk(index, choice.begin()) for index, choice in enumerate(self._choices))

    def take(self, index: int, event: GenerateEvent) -> bytes:
        if isinstance(event, GenerationResult):
            self._dones[index] = event
        return self._chunk(index, self._choices[index].take(event))

    def end(self) -> bytes:
        if not self._envelope.call.include_usage:
            return sse.DONE
        return sse.event(self._envelope.frame() | {"choices": []} | self._envelope.tail(self._dones)) + sse.DONE

    def fail(self, failure: Failure) -> bytes:
        return sse.event(failure.envelope()) + sse.DONE

    def _chunk(self, index: int, part: Part | None) -> bytes:
        if part is None:
            return b""
        call = self._envelope.call
        choice = part.json(index, call.logprobs if part.said.tokens else None)
        usage_of: Json = {"usage": None} if call.include_usage else {}
        return sse.event(self._envelope.frame() | {"choices": [choice]} | usage_of)


class CompletionBody:
    """The answer to a call that does not stream: the parts of a streamed one, put together."""

    def __init__(self, envelope: CompletionMeta) -> None:
        self._envelope = envelope
        self._choices = [ChoiceText(envelope, index) for index in range(envelope.num_choices)]
        self._parts = [[part] if (part := choice.begin()) is not None else [] for choice in self._choices]
        self._dones: dict[int, GenerationResult] = {}

    def take(self, index: int, event: GenerateEvent) -> None:
        if isinstance(event, GenerationResult):
            self._dones[index] = event
        part = self._choices[index].take(event)
        if part is not None:
            self._parts[index].append(part)

    def body(self) -> bytes:
        """Every choice must be done."""
        top = self._envelope.call.logprobs
        choices = [_joined(parts).json(index, top) for index, parts in enumerate(self._parts)]
        if len(choices) == 1:
            choices[0].pop("paceline", None)  # that of the whole says the same
        return encode_json(self._envelope.frame() | {"choices": choices} | self._envelope.tail(self._dones))


def _joined(parts: Sequence[Part]) -> Part:
    said = LegacyLogprobs()
    for part in parts:
        said.extend(part.said)
    return Part("".join(part.text for part in parts), said, parts[-1].reason, parts[-1].note)
