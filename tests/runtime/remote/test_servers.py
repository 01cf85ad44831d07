"""What is asked of a model's servers at the start: abilities by trial, never by their word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from paceline.commands.diagnosis import model
from paceline.core.sampling.sampler import RowSampling, SamplingParams
from paceline.engine.base import TextModel
from paceline.engine.fake import ByteTokenizer, FakeEngine
from paceline.engine.remote import servers
from paceline.engine.remote.opening import open_remote
from paceline.engine.remote.servers import RemoteModel
from paceline.engine.tokenizer import Tokenizer
from paceline.errors import ConfigError, EngineError
from paceline.models import DEVICE
from paceline.settings import ServerSettings
from tests.runtime.remote.standin import StandIn, installed

pytestmark = pytest.mark.anyio


def opened(stand_in: StandIn, *hosts: str, key: str | None = None, text: TextModel | None = None) -> RemoteModel:
    with installed(stand_in, *(hosts or ("one",))) as urls:
        return open_remote(urls, Path(), text or ByteTokenizer(), name="fake", key=key)


def test_the_settings_name_servers_and_doctor_tries_them(tmp_path: Path) -> None:
    words = Tokenizer.load(DEVICE)
    for ignored, level in ((frozenset[str](), "ok"), (frozenset({"logprob_token_ids"}), "warn")):
        stand_in = StandIn(FakeEngine(vocab_size=words.vocab_size), words, ignores=ignored)
        with installed(stand_in, "one", "two") as urls:
            settings = ServerSettings(
                model=str(DEVICE), engine_url=[f"{url}/v1" for url in urls], state_dir=tmp_path, name="fake"
            )
            assert settings.engine_url == tuple(urls)
            found, text = model(settings, settings.first_model)
        assert found == level and "fake: run by http://one:8000, http://two:8000, 4096 tokens" in text
    for wrong in (
        {"engine_url": ["gpu:8000"]},
        {"engine_url": ["http://me:pass@gpu:8000"]},
        {"engine_url": urls, "stages": "3"},
        {"engine_url": urls},
    ):
        with pytest.raises(ValueError, match=r"URL such as|engine_url needs one model"):
            ServerSettings.model_validate({"state_dir": tmp_path} | wrong)


def test_what_a_server_can_do_is_found_by_trial() -> None:
    found = opened(StandIn()).abilities
    assert found.returns_ids and found.lists and found.allows and found.same_cached
    assert (found.head, found.whole) == (20, False) and found.missing() == []
    whole = opened(StandIn(head=257))
    assert whole.abilities.whole and whole.info.max_positions == 4096


@pytest.mark.parametrize(
    ("field", "ability"),
    [("return_token_ids", "returns_ids"), ("logprob_token_ids", "lists"), ("allowed_token_ids", "allows")],
)
def test_a_field_that_is_ignored_without_a_word_is_an_ability_that_is_missing(field: str, ability: str) -> None:
    found = opened(StandIn(ignores=frozenset({field}))).abilities
    assert not getattr(found, ability) and len(found.missing()) >= 1


def test_servers_that_differ_do_what_all_of_them_do() -> None:
    everything, little = opened(StandIn()).abilities, opened(StandIn(head=5)).abilities
    both = everything.and_those_of(little)
    assert (both.head, both.lists) == (5, True)


def test_a_server_that_cannot_be_used_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="PACELINE_ENGINE_KEY"):
        opened(StandIn(key="secret"))
    assert opened(StandIn(key="secret"), key="secret").abilities.scores
    with pytest.raises(ConfigError, match="serves a, b: give one of these"):
        opened(StandIn(models=("a", "b")))

    class OtherWords(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(text)[::-1]

    with pytest.raises(ConfigError, match="another vocabulary"):
        opened(StandIn(), text=OtherWords())
    silent = StandIn()
    with installed(silent, "one") as urls, pytest.raises(ConfigError, match="does not answer"):
        silent.servers["one"].down = True
        open_remote(urls, Path(), ByteTokenizer(), name="fake")


@pytest.mark.parametrize(
    "content", [b"[1]", b"null", b"<html>", b"[" * 100_000, b'{"data": [{"id": "fake", "max_model_len": 1e999}]}']
)
def test_a_server_of_another_kind_is_refused_at_the_start(content: bytes) -> None:
    class Other(StandIn):
        def handle(self, request: httpx.Request) -> httpx.Response:  # noqa: ARG002
            return httpx.Response(200, content=content)

    with pytest.raises(ConfigError, match="does not speak OpenAI's API"):
        opened(Other())


@dataclass(eq=False)
class Spoilt(StandIn):
    """Answers the trials as it should, and then with this."""

    status_code: int = 200
    content: bytes = b""

    async def handle_async(self, request: httpx.Request) -> httpx.Response:  # noqa: ARG002
        return httpx.Response(self.status_code, content=self.content)


def choice(token: object, told: str = "null") -> bytes:
    told = told if told == "null" else f'{{"top_logprobs": [{told}]}}'
    return f'data: {{"choices": [{{"token_ids": [{token}], "logprobs": {told}}}]}}\n\n'.encode()


@pytest.mark.parametrize(
    ("status", "content", "said"),
    [
        (401, b"Incorrect key: Bearer hush", r"status 401\): Incorrect key: Bearer \(key\)"),
        (200, b'data: {"error": "no hush"}\n\n', "none of the model's servers answers"),
        (200, b'data: {"error": {"code": 400, "message": "no hush"}}\n\n', r"status 400\): no \(key\)"),
        (200, choice(10**12), "the token 1000000000000, which its vocabulary does not have"),
        (200, choice(-1), "the token -1,"),
        (200, choice('"a"'), "the token a,"),
        (200, choice(97, '{"token_id:97": NaN}'), "the log-probability nan"),
        (200, choice(97, '{"token_id:97": 1e308}'), "the log-probability 1e"),
        (200, choice(97) * 5, "more tokens than it was asked for"),
    ],
)
async def test_what_a_server_may_not_send_fails_a_stream_with_a_sentence_that_holds_no_key(
    status: int, content: bytes, said: str
) -> None:
    spoilt = Spoilt(status_code=status, content=content, key="hush")
    with installed(spoilt, "one") as urls:
        far = open_remote(urls, Path(), ByteTokenizer(), name="fake", key="hush")
        with pytest.raises(EngineError, match=said) as error:
            async for _ in far.stream([97], RowSampling(SamplingParams(), 0, 257), 3, ""):
                pass
        await far.close()
    assert "hush" not in str(error.value)


@pytest.mark.parametrize(
    "piece",
    [b": ping\n", b"x", b'data: {"choices": [{"index": 0, "token_ids": []}]}\n\n'],
    ids=["ping", "line", "empty"],
)
async def test_a_server_that_keeps_a_stream_open_and_writes_no_token_is_given_up(
    monkeypatch: pytest.MonkeyPatch, piece: bytes
) -> None:
    async def without_end() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            yield piece

    model = opened(StandIn())
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=without_end()))
    monkeypatch.setattr(model, "_client", httpx.AsyncClient(transport=transport))
    monkeypatch.setattr(servers, "READ_S", 0.0)
    with pytest.raises(EngineError, match="none of the model's servers answers") as failed:
        _ = [each async for each in model.stream([1], RowSampling(SamplingParams(), 0, 257), 8, "")]
    assert "http" not in str(failed.value), "addresses are not told"
    await model.close()
