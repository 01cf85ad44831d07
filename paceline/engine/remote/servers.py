"""The servers of one model, over HTTP: calls to them, and which is asked when one is lost.

Token ids go in and come out, by `/v1/completions` with `return_token_ids`. A server that returns text alone is taken
for plain answers, whose text is encoded here. A server that is lost is asked last until it answers again; a call that
it did not answer goes to another. Knows no sequences.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import httpx

from paceline.core.sampling.dist import GAMMA
from paceline.core.sampling.sampler import RowSampling, logit_shifts
from paceline.engine.base import ModelInfo, TextModel
from paceline.engine.remote.rows import ToldRow
from paceline.errors import EngineError, EngineRefusal

log = logging.getLogger("paceline.engine")

COMPLETIONS: Final = "/v1/completions"
CONNECT_S: Final = 5.0
READ_S: Final = 300.0  # without a byte: a busy server makes a request wait
AWAY_S: Final = 5.0  # a lost server is asked last for so long
MAX_LISTED: Final = 128  # ids of one call whose log-probabilities are asked for, vLLM's limit
MOST_BANNED: Final = 64  # ids that a constraint excludes, for a bias to exclude them in a stream
BANNED: Final = -100.0
LEAST_HEAD: Final = 3  # likeliest ids that are asked for: an answer that was spoilt (`_Turns`) has two, which shows
SPOILT_TRIES: Final = 20  # of calls that others spoil
MOST_LOGPROB: Final = 0.01  # rounding may leave a little above 0
REFUSED: Final = (400, 413, 422)  # statuses of what every server of a model would refuse
_TOO_LONG: Final = re.compile(r"(context|model).{0,20}(length|size|window)", re.IGNORECASE)
_SECONDS: Final = re.compile(r"[0-9]{1,5}")


class Drawn(NamedTuple):
    """A token of a stream, and its row's likeliest ids where they were asked for."""

    token: int
    likeliest: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Abilities:
    """Abilities that every server of a model has, by trial."""

    returns_ids: bool = False  # token ids come back
    head: int = 0  # likeliest ids that are told of a token; 0: none
    whole: bool = False  # or all of them
    lists: bool = False  # log-probabilities of ids that are named
    allows: bool = False  # allowed_token_ids is honoured
    same_cached: bool = False  # scores do not depend on the prefix cache
    decode_s: float | None = None  # of a call for one token

    @property
    def scores(self) -> bool:
        """Rows can be scored, so that more than plain answers are written with them."""
        return self.returns_ids and self.head > 0

    def and_those_of(self, other: Abilities) -> Abilities:
        return Abilities(
            self.returns_ids and other.returns_ids,
            min(self.head, other.head),
            self.whole and other.whole,
            self.lists and other.lists,
            self.allows and other.allows,
            self.same_cached and other.same_cached,
            max((each for each in (self.decode_s, other.decode_s) if each is not None), default=None),
        )

    def missing(self) -> list[str]:
        """Abilities that these servers lack, as sentences' ends."""
        lacks = {
            "token ids come back as text alone: only plain answers are written": self.returns_ids,
            "no log-probabilities are told: only plain answers are written": self.head > 0,
            "ids cannot be named (logprob_token_ids): sampled tokens of joint answers are approximate": self.lists,
            "allowed_token_ids is ignored: constraints are approximate": self.allows,
            "scores differ by the prefix cache: verified and joint answers are approximate": self.same_cached,
        }
        return [what for what, is_there in lacks.items() if not is_there]


@dataclass(slots=True)
class _Server:
    url: str
    model: str
    away_until: float = 0.0  # monotonic s


class _Turns:
    """Turns of calls that name ids and of calls that do not, so that never both are under way. They are no owners, and
    exclude each other: another rule than `core.fair`'s.

    In vLLM 0.32's first model runner a call that names ids has those beside it in a step told of their own token
    alone, whatever they asked for. Calls of other programs and streams are not held up by this: see `_score`.
    """

    def __init__(self) -> None:
        self._names = False  # of those under way
        self._under_way = 0
        self._waiting: dict[bool, list[asyncio.Future[None]]] = {False: [], True: []}

    @asynccontextmanager
    async def taken(self, *, names: bool) -> AsyncIterator[None]:
        if self._under_way and (names != self._names or self._waiting[not names]):
            turn = asyncio.get_running_loop().create_future()
            self._waiting[names].append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._leave()
                raise
        else:
            self._names, self._under_way = names, self._under_way + 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            waiting = {names: [turn for turn in turns if not turn.done()] for names, turns in self._waiting.items()}
            self._names = not self._names if waiting[not self._names] else self._names
            turns, waiting[self._names] = waiting[self._names], []
            self._waiting, self._under_way = waiting, len(turns)
            for turn in turns:
                turn.set_result(None)


class RemoteModel:
    """One model, on servers that are all alike. Calls are made on one event loop; `close` them there."""

    def __init__(
        self,
        servers: Sequence[tuple[str, str]],
        info: ModelInfo,
        abilities: Abilities,
        text: TextModel,
        key: str | None,
    ) -> None:
        """servers: URL and the model's name there."""
        self.info, self.abilities, self.block_size = info, abilities, 1
        self.eos_ids = sorted(text.eos_ids)
        self._text = text
        self._servers = [_Server(url, model) for url, model in servers]
        self._headers, self._key = headers(key), key
        self._client: httpx.AsyncClient | None = None
        self._turns = _Turns()

    # ---- calls ------------------------------------------------------------------------------------------------------
    async def rows(self, prompts: Sequence[Sequence[int]], head: int, salt: str) -> list[ToldRow]:
        """The row behind each prompt, by its `head` likeliest ids; -1: all of them. Raises EngineError."""
        found = await self._score(prompts, salt, {"logprobs": head})
        return [ToldRow.of(each, self.info.vocab_size) for each in found]

    async def told(self, prompt: Sequence[int], ids: Sequence[int], salt: str) -> dict[int, float]:
        """Log-probabilities of these ids behind a prompt, in calls of `MAX_LISTED`. Raises EngineError."""
        found: dict[int, float] = {}
        for first in range(0, len(ids), MAX_LISTED):
            part = [*ids[first : first + MAX_LISTED]]
            (told,) = await self._score([prompt], salt, {"logprobs": len(part), "logprob_token_ids": part})
            found |= {token: told[token] for token in part if token in told}
        return found

    async def draw(self, prompt: Sequence[int], row: RowSampling, salt: str) -> int:
        """The server's own draw behind a prompt, under all of the row's sampling. Raises EngineError."""
        fields = sampling_fields(row, stream=False)
        if row.allowed is not None:
            fields["allowed_token_ids"] = [*map(int, row.allowed[: row.vocab_size].nonzero()[0])]
        body = {"prompt": [*prompt], "max_tokens": 1, "return_token_ids": True, "cache_salt": salt, **fields}
        answer = await self._post(body, salt)
        return self._token(answer["choices"][0]["token_ids"][0])

    async def _score(
        self, prompts: Sequence[Sequence[int]], salt: str, fields: Mapping[str, Any]
    ) -> list[dict[int, float]]:
        """Log-probabilities by id behind each prompt, asked for again where others' calls spoil them."""
        body = scoring(prompts, fields) | {"cache_salt": salt}
        for _ in range(SPOILT_TRIES):
            async with self._turns.taken(names="logprob_token_ids" in fields):
                answer = await self._post(body, salt)
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if len(choices) != len(prompts):
                raise EngineError(f"the model's server answered {len(choices)} of {len(prompts)} prompts")
            told = [likeliest_of(choice["logprobs"], 0) for choice in choices]
            if min(map(len, told)) >= fields["logprobs"]:
                break
        else:
            raise EngineError("the model's server tells fewer log-probabilities than it was asked for")
        known = [self._known(each) for each in told]
        if not all(known):
            raise EngineError("the model's server told no log-probability of its vocabulary")
        return known

    async def stream(
        self, prompt: Sequence[int], row: RowSampling, max_tokens: int, salt: str, banned: Sequence[int] = ()
    ) -> AsyncIterator[list[Drawn]]:
        """Tokens that follow a prompt, as they are drawn: by the row's sampling from its position on, the end of the
        text included. Ends there or after `max_tokens`. Raises EngineError, and ConnectionError for one that was cut.

        banned: ids that are never drawn.
        """
        fields = sampling_fields(row, stream=True, banned=banned) | {"max_tokens": max_tokens, "ignore_eos": True}
        fields["stop_token_ids"] = self.eos_ids
        if row.num_top:
            fields["logprobs"] = max(LEAST_HEAD, row.num_top)
        returned = {"return_token_ids": True, "return_tokens_as_token_ids": True, "stream": True}
        written, last = [*prompt], -1
        async for event in self._stream({"prompt": [*prompt], "cache_salt": salt, **returned, **fields}, salt):
            for choice in event.get("choices", ()):
                if drawn := self._drawn(choice):
                    last = drawn[-1].token
                    if row.num_top and self.abilities.scores:
                        drawn = [
                            await self._whole(each, [*written, *_tokens(drawn[:at])], fields, salt)
                            for at, each in enumerate(drawn)
                        ]
                    written += _tokens(drawn)
                    yield drawn
                    max_tokens -= len(drawn)
                    if max_tokens < 0:
                        raise EngineError("the model's server writes more tokens than it was asked for")
                if choice.get("finish_reason") == "stop" and last not in self.eos_ids:
                    yield [Drawn(self.eos_ids[0], {})]  # some keep the end to themselves

    async def _whole(self, drawn: Drawn, prompt: Sequence[int], fields: Mapping[str, Any], salt: str) -> Drawn:
        """The token with its likeliest ids, asked for again where others' calls have spoilt them."""
        if len(drawn.likeliest) >= fields["logprobs"]:
            return drawn
        (told,) = await self._score([prompt], salt, {"logprobs": fields["logprobs"]})
        return Drawn(drawn.token, told | {each: own for each, own in drawn.likeliest.items() if each == drawn.token})

    def _drawn(self, choice: Mapping[str, Any]) -> list[Drawn]:
        if not self.abilities.returns_ids:
            return [Drawn(token, {}) for token in self._text.encode(choice.get("text") or "")]
        ids, told = choice["token_ids"] or (), choice.get("logprobs")
        if not told:
            return [Drawn(self._token(token), {}) for token in ids]
        return [Drawn(self._token(token), self._known(likeliest_of(told, place))) for place, token in enumerate(ids)]

    def _token(self, token: object) -> int:
        """Raises EngineError for one that the vocabulary does not have."""
        if not isinstance(token, int) or not 0 <= token < self.info.vocab_size:
            raise EngineError(
                f"the model's server told the token {str(token)[:40]}, which its vocabulary does not have"
            )
        return token

    def _known(self, likeliest: Mapping[int, float]) -> dict[int, float]:
        """Without ids beyond the vocabulary, to which a model's rows may be padded. Raises EngineError for values that
        are no log-probabilities."""
        for value in likeliest.values():
            if not isinstance(value, int | float) or not value <= MOST_LOGPROB:  # NaN is not
                raise EngineError(f"the model's server told the log-probability {str(value)[:40]}")
        return {token: value for token, value in likeliest.items() if 0 <= token < self.info.vocab_size}

    # ---- connections ------------------------------------------------------------------------------------------------
    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _post(self, body: Mapping[str, Any], salt: str) -> Any:
        faults: list[EngineError] = []
        for server in self._order(salt):
            try:
                answer = await self._open().post(server.url + COMPLETIONS, json={**body, "model": server.model})
            except httpx.TransportError as error:
                faults.append(self._lost(server, error))
                continue
            if answer.status_code == 200:
                server.away_until = 0.0
                return answer.json()
            faults.append(self._refused(server, answer))
        raise _told_to_client(faults)

    async def _stream(self, body: Mapping[str, Any], salt: str) -> AsyncIterator[Mapping[str, Any]]:
        """Events of a stream. Once it has begun it is cut, not asked for again: the caller knows what has come."""
        faults, now = list[EngineError](), asyncio.get_running_loop().time
        for server in self._order(salt):
            begun = False
            try:
                call = {**body, "model": server.model}
                async with self._open().stream("POST", server.url + COMPLETIONS, json=call) as answer:
                    if answer.status_code != 200:
                        await answer.aread()
                        faults.append(self._refused(server, answer))
                        continue
                    server.away_until = 0.0
                    lines, end = answer.aiter_lines(), now() + READ_S
                    while (event := await self._event(lines, end)) is not None:
                        yield event
                        if any(choice.get("token_ids") or choice.get("text") for choice in event.get("choices", ())):
                            begun, end = True, now() + READ_S  # the reader's time is not the server's
                    return
            except httpx.TransportError as error:
                faults.append(self._lost(server, error))
                if begun:
                    raise ConnectionError(str(error)) from error
        raise _told_to_client(faults)

    async def _event(self, lines: AsyncIterator[str], end: float) -> Mapping[str, Any] | None:
        """The next event of a stream; None after the last one. end: when it must have come, loop's time.

        Raises TransportError for a stream that is cut, by words or without, and EngineRefusal.
        """
        try:
            async with asyncio.timeout_at(end):
                async for line in lines:
                    if line == "data: [DONE]":
                        return None
                    if line.startswith("data: "):
                        event: dict[str, Any] = json.loads(line[6:])
                        if (error := event.get("error")) is None:
                            return event
                        if isinstance(error, dict) and error.get("code") in REFUSED:
                            raise self._refusal(error["code"], str(error.get("message")))
                        raise httpx.RemoteProtocolError(f"it failed: {error}")
        except TimeoutError:
            raise httpx.ReadTimeout("it keeps the stream open and writes nothing") from None
        raise httpx.RemoteProtocolError("the stream ended early")

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
            self._client = httpx.AsyncClient(headers=self._headers, timeout=timeout, limits=limits, trust_env=False)
        return self._client

    def _order(self, salt: str) -> list[_Server]:
        """Servers in the order in which they are asked. One owner's requests prefer one, whose cache has their rows."""
        now = time.monotonic()

        def rank(server: _Server) -> tuple[float, bytes]:
            return max(0.0, server.away_until - now), hashlib.blake2b(f"{server.url} {salt}".encode()).digest()

        return sorted(self._servers, key=rank)

    def _lost(self, server: _Server, why: object, seconds: int | None = None) -> EngineError:
        """Note that a server cannot be asked now. seconds: when it can, by its own word."""
        said = self._quoted(why) or type(why).__name__
        log.warning("the model's server %s does not answer: %s", server.url, said)
        server.away_until = time.monotonic() + (seconds or AWAY_S)
        return EngineRefusal(
            "none of the model's servers answers",  # the log says which
            status=503,
            type="server_error",
            code="model_unavailable",
            retry_after=seconds,
        )

    def _refused(self, server: _Server, answer: httpx.Response) -> EngineError:
        """The fault of an answer with another status than 200, where other servers may be asked.

        Raises EngineRefusal where all would refuse.
        """
        status, after = answer.status_code, answer.headers.get("Retry-After", "")
        seconds = int(after) if _SECONDS.fullmatch(after) else None
        if status in REFUSED:
            raise self._refusal(status, answer.text)
        lost = self._lost(server, f"status {status}: {answer.text}", seconds)
        if status >= 500:
            return lost
        if status == 429:
            return EngineRefusal(
                f"the model's servers are busy: {self._quoted(answer.text)}",
                status=429,
                type="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=seconds,
            )
        return EngineError(f"the model's server refuses a request (status {status}): {self._quoted(answer.text)}")

    def _refusal(self, status: int, said: str) -> EngineRefusal:
        return EngineRefusal(
            f"the model's server refuses a request (status {status}): {self._quoted(said)}",
            code="context_length_exceeded" if _TOO_LONG.search(said) else None,
        )

    def _quoted(self, said: object) -> str:
        """A server's words, for clients and the log, without the key: some repeat the one that they refuse."""
        return (str(said).replace(self._key, "(key)") if self._key else str(said))[:300]


def _told_to_client(faults: Sequence[EngineError]) -> EngineError:
    """The fault, of all servers', that says most of when to come back: that one is busy, then that one is lost."""

    def rank(fault: EngineError) -> tuple[int, int]:
        return (fault.status, fault.retry_after or 0) if isinstance(fault, EngineRefusal) else (1000, 0)

    return min(faults, key=rank)


def _tokens(drawn: Sequence[Drawn]) -> list[int]:
    return [each.token for each in drawn]


def headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def scoring(prompts: Sequence[Sequence[int]], fields: Mapping[str, object]) -> dict[str, Any]:
    """A call that generates one token behind each prompt, and tells log-probabilities."""
    return {
        "prompt": [[*prompt] for prompt in prompts],
        "max_tokens": 1,
        "temperature": 0.0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **fields,
    }


def likeliest_of(logprobs: Mapping[str, Any], place: int) -> dict[int, float]:
    """Log-probabilities by id, where tokens are named `token_id:ID`."""
    return {int(name.removeprefix("token_id:")): value for name, value in logprobs["top_logprobs"][place].items()}


def sampling_fields(row: RowSampling, *, stream: bool, banned: Sequence[int] = ()) -> dict[str, Any]:
    """A row's sampling in vLLM's words. All of them are said: what is left out is the server's own default.

    stream: the server counts the tokens that it draws itself, for the penalties; else those before the row are biases.
    Not equal to ours: with min_p and top_p together min_p applies first there, and a bias before the repetition
    penalty; temperatures below 0.01 are 0.01.
    """
    params = row.params
    biases = dict(params.logit_bias) if stream else logit_shifts(params, row.counts)
    biases |= dict.fromkeys(banned, BANNED)
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty if stream else 0.0,
        "frequency_penalty": params.frequency_penalty if stream else 0.0,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in biases.items()} or None,
        "seed": (params.seed + row.position * GAMMA) % (1 << 63),
    }
