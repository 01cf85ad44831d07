"""Offsets and names of tokens in `/v1/completions`, with characters split over tokens."""

from __future__ import annotations

import codecs
import math

from hypothesis import given
from hypothesis import strategies as st

from paceline.api.completions import EchoedPrompt, Entry, Offsets, _text, entries
from paceline.runtime.service import Logprobs, TokenLogprob


def logprobs(data: bytes) -> Logprobs:
    chosen = TokenLogprob(data.decode("utf-8", "replace"), math.log(0.5), tuple(data))
    return chosen, (chosen, TokenLogprob("other", math.log(0.25), tuple(b"other")))


def offsets_of(found: list[Entry]) -> list[int]:
    return [entry.offset for entry in found]


@st.composite
def cut(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A text, and its bytes split into tokens at random."""
    text = draw(st.text(min_size=1, max_size=40))
    data = text.encode()
    places = sorted(draw(st.sets(st.integers(1, max(len(data) - 1, 1)), max_size=20)) & set(range(1, len(data))))
    return text, [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@given(cut())
def test_a_token_begins_where_its_first_character_stands(case: tuple[str, list[bytes]]) -> None:
    text, tokens = case
    result = entries([logprobs(token) for token in tokens], Offsets())
    before = b""
    for token, (name, _, _, offset) in zip(tokens, result, strict=True):
        assert offset == len(before.decode("utf-8", "ignore"))
        try:
            whole = token.decode()
        except UnicodeDecodeError:
            assert name == "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
        else:
            assert name == whole
            if before.decode("utf-8", "ignore").encode() == before:  # not inside a character
                assert text[offset : offset + len(whole)] == whole
        before += token
    assert offsets_of(result) == sorted(offsets_of(result))


@given(st.lists(st.binary(min_size=0, max_size=4), min_size=1, max_size=20))
def test_offsets_never_leave_the_text_whatever_the_bytes(tokens: list[bytes]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    result = entries([logprobs(token) for token in tokens], Offsets())
    for index, offset in enumerate(offsets_of(result)):
        assert offset == len(text)
        text += decoder.decode(tokens[index])


@given(cut(), cut(), st.integers(1, 9))
def test_offsets_go_on_from_the_prompt_and_from_part_to_part(
    first: tuple[str, list[bytes]], second: tuple[str, list[bytes]], size: int
) -> None:
    prompt, spelled = first
    _, tokens = second
    offsets = Offsets()
    echo = EchoedPrompt(prompt, tuple(spelled), tuple(logprobs(token) for token in spelled[1:]))
    result = echo.entries(offsets)
    assert result[0][1:] == (None, None, 0)
    offsets.restart(len(prompt))
    parts = [
        entries([logprobs(token) for token in tokens[at : at + size]], offsets) for at in range(0, len(tokens), size)
    ]
    alone = entries([logprobs(token) for token in tokens], Offsets())
    assert [offset - len(prompt) for part in parts for offset in offsets_of(part)] == offsets_of(alone)


def test_a_beginning_that_the_text_does_not_show_takes_no_place_in_it() -> None:
    spelled = (b"<s>", b" Good", b" day")
    rest = (logprobs(b" Good"), logprobs(b" day"))
    result = EchoedPrompt("Good day", spelled, rest).entries(Offsets())  # a tokenizer that puts a space in front
    assert offsets_of(result) == [0, 0, 4]
    result = EchoedPrompt(_text(spelled), spelled, rest).entries(Offsets())
    assert EchoedPrompt(_text(spelled), spelled, rest).text == "<s> Good day" and offsets_of(result) == [0, 3, 8]


def test_alternatives_of_one_name_keep_the_likelier() -> None:
    chosen = TokenLogprob("a", -3.0, (97,))
    result = entries([(chosen, (TokenLogprob("a", -1.0, (97,)), TokenLogprob("b", -math.inf, (98,))))], Offsets())
    assert result[0].top == {"a": -1.0, "b": -9999.0}
