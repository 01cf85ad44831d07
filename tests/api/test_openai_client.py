"""The official client, sync and async, reads answers, streams and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from paceline.errors import LinkClosed, RequestError
from paceline.runtime.service import TextDelta
from tests.api.scripted import Script, ScriptedService, Signal, serving

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def async_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_a_whole_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=MESSAGES, n=2, seed=1)
    assert [choice.message.content for choice in answer.choices] == ["Hello there."] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.total_tokens == 13
    assert answer._request_id is not None and answer._request_id.startswith("req_")


def test_the_stream_helper_accumulates(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="scripted", messages=MESSAGES) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello there."


def test_errors_become_the_clients_own_classes(client: openai.OpenAI, service: ScriptedService) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
    assert not_found.value.code == "model_not_found" and not_found.value.request_id is not None
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="scripted", messages=MESSAGES, temperature=101)
    assert bad.value.param == "temperature"
    service.script = Script(refusal=RequestError("Full.", status=429, type="rate_limit_error"))
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)


def test_a_failure_in_a_stream_is_raised_to_its_reader(client: openai.OpenAI, service: ScriptedService) -> None:
    service.script = Script([TextDelta("a", 1), LinkClosed("The device has gone.")])
    stream = client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="The device has gone"):
        list(stream)


def test_a_wrong_key_is_an_authentication_error() -> None:
    with (
        serving(ScriptedService(), {"right": None}) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client,
    ):
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert client.with_options(api_key="right").models.list().data


@pytest.mark.anyio
async def test_the_async_client_streams_and_waits(async_client: openai.AsyncOpenAI) -> None:
    whole = await async_client.chat.completions.create(model="scripted", messages=MESSAGES)
    assert whole.choices[0].message.content == "Hello there."
    stream = await async_client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello there."


@pytest.mark.anyio
async def test_leaving_the_async_stream_ends_the_generation(
    async_client: openai.AsyncOpenAI, service: ScriptedService
) -> None:
    script = service.script = Script([TextDelta("a", 1), Signal()])
    stream = await async_client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await script.ended.reached()
