"""The fake model: its text and where it ends, its agreement between prompts, and its noisy version."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.engine.base import Engine, TextModel
from paceline.engine.fake import EOS, ByteTokenizer, FakeEngine, fake_model
from paceline.errors import EngineError
from tests.core.dists import total_variation
from tests.engine.trials import scratch

TEXT: TextModel = ByteTokenizer()


def answer(engine: Engine, prompt: str, generator: np.random.Generator | None) -> bytes:
    """One answer, greedy without a generator, else at temperature 1."""
    seq, tokens, out = SeqId(1), TEXT.chat([{"role": "user", "content": prompt}]), bytearray()
    while True:
        (dist,) = engine.forward(Batch((Segment(seq, engine.length(seq), tuple(tokens)),))).dists[0]
        token = dist.argmax() if generator is None else int(generator.choice(dist.ids, p=dist.probs))
        if token == EOS:
            engine.release(seq)
            return bytes(out)
        out.append(token)
        tokens = [token]


@pytest.mark.parametrize("seed", range(4))
def test_greedy_answers_end_and_are_valid_text(seed: int) -> None:
    engine = fake_model(seed).engine
    for i in range(5):
        text = answer(engine, f"question {i}", None).decode()  # strict
        assert 10 <= len(text) <= 300


def test_sampled_answers_end_after_some_dozens_of_tokens() -> None:
    generator = np.random.Generator(np.random.PCG64(7))
    engine = FakeEngine()
    texts = [answer(engine, f"question {i}", generator) for i in range(40)]
    lengths = sorted(len(text) for text in texts)
    assert 30 <= lengths[20] <= 120 and lengths[-1] <= 200
    assert any(len(text.decode()) < len(text) for text in texts)  # some characters take more than one byte


def test_inside_a_character_only_bytes_that_continue_it_are_possible() -> None:
    for text, following in (("é", range(0x80, 0xC0)), ("語", range(0x80, 0xC0)), ("🙂", range(0x80, 0xC0))):
        encoded = text.encode()
        for cut in range(1, len(encoded)):
            dist = scratch(FakeEngine(), [*b"ab", *encoded[:cut]])[-1]
            assert {int(token) for token in dist.ids[dist.probs > 0]} <= set(following)
        after = scratch(FakeEngine(), [*b"ab", *encoded])[-1]
        assert not {int(token) for token in after.ids[after.probs > 0]} & set(range(0x80, 0xC0))


def _pair(engine: Engine, order: int = 200) -> list[tuple[Dist, Dist]]:
    """Distributions along one text after two prompts."""
    text = answer(engine, "anything", np.random.Generator(np.random.PCG64(1)))
    heads = [TEXT.encode("document one. assistant: "), TEXT.encode("another document! assistant: ")]
    rows = [scratch(engine, [*head, *text])[len(head) - 1 :] for head in heads]
    return list(zip(*rows, strict=True))[-order:]


def test_two_prompts_mostly_agree_and_never_wholly() -> None:
    differences = [total_variation(a, b) for a, b in _pair(FakeEngine())]
    assert 0.05 < float(np.mean(differences)) < 0.2
    assert min(differences[:-1]) > 0.0


def test_with_an_order_only_the_last_tokens_count() -> None:
    a, b = _pair(FakeEngine(order=3))[20]
    assert total_variation(a, b) < 1e-12


def test_seeds_are_different_models() -> None:
    assert fake_model(1).engine.info.fingerprint != fake_model(2).engine.info.fingerprint
    assert fake_model(1).tokenizer.fingerprint == fake_model(2).tokenizer.fingerprint
    prompt = TEXT.encode("hello wor")
    assert total_variation(scratch(FakeEngine(1), prompt)[-1], scratch(FakeEngine(2), prompt)[-1]) > 0.01


def test_options_that_make_no_model_are_refused() -> None:
    for spread, order in ((1.5, None), (0.1, 0)):
        with pytest.raises(EngineError):
            FakeEngine(spread=spread, order=order)


def test_byte_text_is_read_back_as_it_was_and_ends_add_nothing() -> None:
    text = "Grüße 🙂\n"
    assert TEXT.decode([*TEXT.encode(text), EOS]) == text
    assert TEXT.eos_ids == {EOS} and TEXT.token_bytes(EOS) == b"" and TEXT.token_bytes(0xC3) == b"\xc3"
    assert TEXT.vocab_size == FakeEngine().info.vocab_size


def test_a_document_comes_first_and_the_chat_last() -> None:
    messages: list[Mapping[str, object]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    preamble, document, tail = TEXT.document_prompt(messages, "facts")
    assert TEXT.decode([*preamble, *document, *tail]) == "document: facts\nsystem: be brief\nuser: hi\nassistant: "
    assert tail == TEXT.chat(messages)
