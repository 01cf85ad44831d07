"""The servers of one model at the start: whether they answer, and what they can do.

What they can do is tried, since a field that a server does not know is ignored without a word.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx

from paceline.engine.base import ModelInfo, TextModel
from paceline.engine.model_config import sampling_defaults
from paceline.engine.remote.rows import HEAD
from paceline.engine.remote.servers import (
    COMPLETIONS,
    CONNECT_S,
    READ_S,
    SPOILT_TRIES,
    Abilities,
    RemoteModel,
    headers,
    likeliest_of,
    scoring,
)
from paceline.errors import ConfigError
from paceline.hub.quantize import header_of

log = logging.getLogger("paceline.engine")

PROBE_TOKENS: Final = 96  # of prompts at the start: several blocks of a server's prefix cache
CACHE_TOLERANCE: Final = 0.02  # nats, between scores with and without the prefix cache
POSITIONS: Final = 4096  # of a server that does not tell


def open_remote(
    urls: Sequence[str], directory: Path, text: TextModel, *, name: str, key: str | None = None
) -> RemoteModel:
    """The model behind these URLs, whose tokenizer and recommended sampling are in a folder.

    Raises ConfigError unless every server answers and serves one model of this vocabulary.
    """
    servers: list[tuple[str, str]] = []
    abilities: Abilities | None = None
    positions = POSITIONS
    timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
    with httpx.Client(headers=headers(key), timeout=timeout, trust_env=False) as client:
        for url in urls:
            try:
                model, most = _served(client, url, name)
                _check_vocabulary(client, url, model, text)
                found = _Probe(client, url, model, text.vocab_size).abilities()
            except httpx.HTTPError as error:
                raise ConfigError(
                    f"The model's server {url} does not answer: {error}. Start it, or correct the URL."
                ) from error
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
                raise ConfigError(f"The server {url} does not speak OpenAI's API: {error!r}.") from error
            positions = most if not servers else min(positions, most)
            abilities = found if abilities is None else abilities.and_those_of(found)
            servers.append((url, model))
    assert abilities is not None, "at least one URL"
    log.info("%s is run by %s", name, ", ".join(urls))
    for what in abilities.missing():
        log.warning("the model's servers: %s", what)
    identity = hashlib.sha256(f"paceline remote {text.fingerprint} {servers[0][1]}".encode()).hexdigest()
    info = ModelInfo(
        name,
        identity,
        text.vocab_size,
        positions,
        "",
        "http",
        sampling_defaults(directory),
        num_weights=_weights(directory),
        doubt="; ".join(abilities.missing()),
        thinking=text.thinking,
    )
    return RemoteModel(servers, info, abilities, text, key)


def _weights(directory: Path) -> int:
    """How many numbers the weights are, where their files are here; 0: not known."""
    tensors = (tensor for file in directory.glob("*.safetensors") for tensor in header_of(file)[1].values())
    return sum(math.prod(tensor["shape"]) for tensor in tensors)


def _served(client: httpx.Client, url: str, name: str) -> tuple[str, int]:
    """(the model's name at a server, positions). Raises ConfigError."""
    answer = client.get(f"{url}/v1/models")
    if answer.status_code in (401, 403):
        raise ConfigError(f"The model's server {url} wants a key: set PACELINE_ENGINE_KEY.")
    answer.raise_for_status()
    models = answer.json()["data"]
    model = next((each for each in models if each["id"] == name), models[0] if len(models) == 1 else None)
    if model is None:
        names = ", ".join(each["id"] for each in models)
        raise ConfigError(f"The server {url} serves {names}: give one of these names to --model.")
    most = model.get("max_model_len") or (model.get("meta") or {}).get("n_ctx_train") or POSITIONS
    return str(model["id"]), int(most)


def _check_vocabulary(client: httpx.Client, url: str, model: str, text: TextModel) -> None:
    """Raises ConfigError where the server encodes a text otherwise; a server without `/tokenize` is believed."""
    sample = "The quick brown fox jumps over 13 lazy dogs — naïvely.\n"
    answer = client.post(f"{url}/tokenize", json={"model": model, "prompt": sample, "add_special_tokens": False})
    if (
        answer.status_code == 200
        and isinstance(tokens := answer.json().get("tokens"), list)
        and all(isinstance(token, int) for token in tokens)
    ) and tokens != text.encode(sample):
        raise ConfigError(f"The model of {url} has another vocabulary than --model: give the tokenizer of that model.")


class _Probe:
    """Trials at one server."""

    def __init__(self, client: httpx.Client, url: str, model: str, vocab_size: int) -> None:
        self._client, self._url, self._model = client, url, model
        chance = random.Random()
        self._prompt = [chance.randrange(vocab_size // 2) for _ in range(PROBE_TOKENS)]
        self._vocab_size = vocab_size

    def abilities(self) -> Abilities:
        plain = self._ask({"prompt": self._prompt[:8], "max_tokens": 1, "temperature": 0.0, "return_token_ids": True})
        if plain is None:
            raise ConfigError(f"The server {self._url} refuses a prompt of token ids at {COMPLETIONS}.")
        ids = plain["choices"][0].get("token_ids")
        if not (isinstance(ids, list) and len(ids) == 1):
            return Abilities()
        found = Abilities(returns_ids=True)
        first = next((told for told in (self._told(HEAD), self._told(5)) if told), None)
        if first is None:
            return found
        again = self._told(len(first))
        begun = time.perf_counter()
        self._ask({"prompt": self._prompt, "max_tokens": 1, "temperature": 0.0})
        seconds = time.perf_counter() - begun
        return replace(
            found,
            head=len(first),
            whole=self._is_refused_nothing(),
            lists=self._lists(),
            allows=self._draw({"allowed_token_ids": [7]}) == 7,
            same_cached=again is not None
            and again.keys() == first.keys()
            and max(abs(again[token] - first[token]) for token in first) <= CACHE_TOLERANCE,
            decode_s=seconds,
        )

    def _ask(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """None for what is refused."""
        answer = self._client.post(self._url + COMPLETIONS, json={**body, "model": self._model})
        return dict(answer.json()) if answer.status_code == 200 else None

    def _told(self, head: int) -> dict[int, float] | None:
        """Likeliest ids behind the prompt, asked for with another; None unless so many are told of each."""
        asked = [self._prompt, self._prompt[:-1]]
        for _ in range(SPOILT_TRIES):  # by others' calls, if there are any
            answer = self._ask(scoring(asked, {"logprobs": head}))
            try:
                choices = answer["choices"] if answer is not None else ()
                told = [likeliest_of(each["logprobs"], 0) for each in sorted(choices, key=lambda each: each["index"])]
            except (KeyError, TypeError, ValueError):
                return None
            if len(told) != len(asked):
                return None
            if all(len(each) >= head for each in told):
                return told[0]
        return None

    def _is_refused_nothing(self) -> bool:
        answer = self._ask(scoring([self._prompt[:8]], {"logprobs": -1}))
        return answer is not None and len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) >= self._vocab_size

    def _lists(self) -> bool:
        wanted = [*range(11, 11 + 40)]
        answer = self._ask(scoring([self._prompt], {"logprobs": 40, "logprob_token_ids": wanted}))
        return answer is not None and set(wanted) <= likeliest_of(answer["choices"][0]["logprobs"], 0).keys()

    def _draw(self, fields: Mapping[str, Any]) -> int | None:
        answer = self._ask(
            {"prompt": self._prompt, "max_tokens": 1, "temperature": 0.0, "return_token_ids": True, **fields}
        )
        return None if answer is None else int(answer["choices"][0]["token_ids"][0])
