"""Round trips of text, escaping of special tokens, and the split of document prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from paceline.engine.tokenizer import Tokenizer
from paceline.errors import ConfigError, RequestError
from paceline.models import DEVICE

SPECIALS = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
PLAIN = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
USER = {"role": "user", "content": "When does it open?"}
OWN = {"role": "system", "content": "Be brief."}


def write(folder: Path, template: str | None = PLAIN, reverse_merges: bool = False, indent: int | None = None) -> Path:
    """Write a small byte-level tokenizer to a folder."""
    reader = tokenizers.Tokenizer(models.BPE())
    reader.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reader.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    reader.train_from_iterator(["the opening hour of the library is in the morning"] * 20, trainer)
    content = json.loads(reader.to_str())
    if reverse_merges:
        content["model"]["merges"].reverse()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=indent))
    config = {"eos_token": {"content": "<|end|>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def plain(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write(tmp_path / "plain"))


SHIPPED = Tokenizer.load(DEVICE)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80))
def test_any_text_comes_back_whole(text: str) -> None:
    ids = SHIPPED.encode(text)
    assert SHIPPED.decode(ids) == text
    assert b"".join(SHIPPED.token_bytes(i) for i in ids).decode() == text
    assert not {0, 1, 2, 3, 4} & set(ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=10), st.sampled_from(SPECIALS)), max_size=6).map("".join))
def test_a_message_cannot_write_special_tokens(content: str) -> None:
    ids = SHIPPED.chat([{"role": "user", "content": content}])
    assert [i for i in ids if i < 5] == [2, 4, 3]
    assert b"".join(SHIPPED.token_bytes(i) for i in ids).decode() == content


def test_shipped_chat_format() -> None:
    text = SHIPPED.chat([OWN, USER, {"role": "assistant", "content": "At 8."}, USER])
    expected = [1, *SHIPPED.encode("Be brief."), 4, 2, *SHIPPED.encode(str(USER["content"])), 4, 3]
    expected += [*SHIPPED.encode("At 8."), 4, 2, *SHIPPED.encode(str(USER["content"])), 4, 3]
    assert text == expected


def test_a_raw_prompt_reads_special_tokens_and_is_never_empty(tmp_path: Path, plain: Tokenizer) -> None:
    """Unlike in a message: a client with a raw prompt could as well send token ids."""
    end = plain.raw("<|end|>")
    assert len(end) == 1 and plain.token_name(end[0]) == "<|end|>" and plain.token_bytes(end[0]) == b""
    assert plain.raw("<|user|>the") == [*plain.raw("<|user|>"), *plain.encode("the")]
    assert plain.encode("<|end|>") != end  # parsing of special tokens is off again
    assert plain.raw("") == end
    assert plain.token_name(plain.encode("t")[0]) == "t"
    reader = tokenizers.Tokenizer.from_file(str(write(tmp_path / "begun") / "tokenizer.json"))
    begin = reader.token_to_id("<|system|>")
    reader.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", begin)]
    )
    reader.save(str(tmp_path / "begun" / "tokenizer.json"))
    begun = Tokenizer.load(tmp_path / "begun")
    assert begun.raw("the") == [begin, *plain.encode("the")]
    (tmp_path / "begun" / "tokenizer_config.json").write_text("{}")
    reader.post_processor = processors.ByteLevel()
    reader.save(str(tmp_path / "begun" / "tokenizer.json"))
    with pytest.raises(RequestError, match="no token to begin with"):
        Tokenizer.load(tmp_path / "begun").raw("")


def test_the_fingerprint_sees_content_and_not_formatting(tmp_path: Path, plain: Tokenizer) -> None:
    assert plain.fingerprint == Tokenizer.load(write(tmp_path / "indented", indent=3)).fingerprint
    assert plain.fingerprint == Tokenizer.load(write(tmp_path / "template", template=None)).fingerprint
    assert plain.fingerprint != Tokenizer.load(write(tmp_path / "merges", reverse_merges=True)).fingerprint
    assert plain.fingerprint != SHIPPED.fingerprint


def test_the_fingerprint_is_the_same_in_every_process_where_names_share_an_id(tmp_path: Path) -> None:
    shared = {f"{letter}{number}": number for number in range(1, 40) for letter in "ab"}
    content = json.loads(tokenizers.Tokenizer(models.WordLevel({}, "<unk>")).to_str())
    content["model"]["vocab"] = {"<unk>": 0, **shared}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    code = f"from paceline.engine.tokenizer import *; print(Tokenizer.load(Path({str(tmp_path)!r})).fingerprint)"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, check=True
        ).stdout
        for seed in ("1", "2")
    }
    loaded = Tokenizer.load(tmp_path)
    assert found == {f"{loaded.fingerprint}\n".encode()} and loaded.vocab_size == 40


SPECIAL_FILES: list[dict[str, object]] = [
    {"tokenizer_config": {"bos_token": "<s>", "eos_token": {"content": "</s>"}}},
    {"special_tokens_map": {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}},
    {"special_tokens_map": {"bos_token": "<s>"}, "tokenizer_config": {"eos_token": "</s>", "bos_token": "<unk>"}},
    {
        "tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>", "added_tokens_decoder": {}},
        "special_tokens_map": {"bos_token": "<unk>"},
    },
    {"config": {"bos_token_id": 1, "eos_token_id": [2]}},
    {"config": {"text_config": {"bos_token_id": 1, "eos_token_id": 2}}},
    {"generation_config": {"bos_token_id": 1, "eos_token_id": 2}, "config": {"eos_token_id": -1}},
]


@pytest.mark.parametrize("files", SPECIAL_FILES)
@pytest.mark.parametrize("is_added", [True, False])
def test_special_tokens_are_read_from_every_file_that_names_them(
    tmp_path: Path, files: dict[str, object], is_added: bool
) -> None:
    names = ["<unk>", "<s>", "</s>"]
    vocabulary = {token: number for number, token in enumerate([*names, *"abc<>s/"])}
    reader = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    if is_added:
        reader.add_special_tokens(names)
    reader.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.eos_ids == {2}
    ids = loaded.chat([{"role": "user", "content": "a</s>b"}])
    if is_added or not {"config", "generation_config"} & files.keys():
        assert (ids[0], ids[-1]) == (1, 2) and not {1, 2} & set(ids[1:-1]) and not loaded.token_bytes(2)


@pytest.mark.parametrize("file", ["tokenizer_config", "added_tokens"])
def test_tokens_that_stand_beside_the_vocabulary_alone_are_added(tmp_path: Path, file: str) -> None:
    vocabulary = {token: number for number, token in enumerate(["<unk>", *"ab<>|"])}
    reader = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    reader.save(str(tmp_path / "tokenizer.json"))
    described = {"6": {"content": "<|a|>", "special": True}, "7": {"content": "<b>"}, "9": {"content": "<|far|>"}}
    added = {"<|a|>": 6, "<b>": 7, "<|far|>": 9}
    config = {"eos_token": "<|a|>"} | ({"added_tokens_decoder": described} if file == "tokenizer_config" else {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps(added if file == "added_tokens" else {}))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.raw("a<|a|><b>") == [1, 6, 7] and loaded.encode("<b>") == [7]
    assert 6 not in loaded.encode("<|a|>") and loaded.eos_ids == {6} and loaded.token_bytes(7).strip() == b"<b>"
    assert loaded.vocab_size == 8  # an id beyond the next one is none that the model could read
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7}))
    assert Tokenizer.load(tmp_path).vocab_size == 7


def test_a_tool_result_is_rendered_as_a_user_message(plain: Tokenizer) -> None:
    returned = "<tool_response>\nSunny\n</tool_response>"
    assert plain.chat([USER, {"role": "tool", "content": returned}]) == plain.chat(
        [USER, {"role": "user", "content": returned}]
    )


def test_private_use_characters_in_a_message_stay_letters(plain: Tokenizer) -> None:
    content = "\ue000\ue001<|end|>\ue002"
    ids = plain.chat([{"role": "user", "content": content}])
    assert plain.decode(ids) == content and ids.count(4) == 1


def test_byte_fallback_tokens_give_their_bytes(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "</s>": 1, "\u2581the": 2, "<0xC3>": 3, "<0xA9>": 4, "\u2581": 5}
    reader = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    reader.add_special_tokens(["</s>"])
    reader.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    reader.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    assert [loaded.token_bytes(i) for i in (2, 3, 4, 1, 99)] == [b" the", b"\xc3", b"\xa9", b"", b""]


LINES = ["hello world", "the cat's hat, isn't it here?", "na\u00efve caf\u00e9 \u2013 \u65e5\u672c\u8a9e x", "a <x> b"]
BLOCK = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
KINDS = {
    "word pieces": (models.WordPiece(unk_token="<unk>"), pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()),
    "words": (models.WordLevel(unk_token="<unk>"), pre_tokenizers.Whitespace(), None),
    "suffixes": (
        models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
        pre_tokenizers.Whitespace(),
        decoders.BPEDecoder("</w>"),
    ),
    "blocks": (models.Unigram(), pre_tokenizers.Metaspace(), decoders.Metaspace()),
    "bytes of what is rare": (
        models.BPE(unk_token="<unk>", byte_fallback=True),
        pre_tokenizers.Metaspace(split=False),
        decoders.Sequence(
            [decoders.Replace(BLOCK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    ),
    "bytes": (models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_joined_one_by_one_are_the_decoded_text(tmp_path: Path, kind: str) -> None:
    model, split, decoder = KINDS[kind]
    reader = tokenizers.Tokenizer(model)
    reader.pre_tokenizer = split
    if decoder is not None:
        reader.decoder = decoder
    kinds = {"WordPiece": "WordPieceTrainer", "WordLevel": "WordLevelTrainer", "Unigram": "UnigramTrainer"}
    trainer = getattr(trainers, kinds.get(type(model).__name__, "BpeTrainer"))
    options: dict[str, object] = {"special_tokens": ["<unk>", *(BYTES if kind == "bytes of what is rare" else [])]}
    options |= {"end_of_word_suffix": "</w>"} if kind == "suffixes" else {}
    options |= {"unk_token": "<unk>"} if kind == "blocks" else {}
    options |= {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()} if kind == "bytes" else {}
    reader.train_from_iterator(LINES * 20, trainer(vocab_size=420, show_progress=False, **options))
    content = json.loads(reader.to_str())
    for added in content["added_tokens"]:  # bytes are ordinary tokens
        added["special"] = added["content"] == "<unk>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded = Tokenizer.load(tmp_path)
    for line in [*LINES, " ".join(LINES), "a \U0001f642 z"]:
        ids = [token for token in loaded.encode(line) if loaded.token_bytes(token)]
        joined = b"".join(map(loaded.token_bytes, ids)).decode()
        assert joined.strip() == loaded.decode(ids).strip() and joined.strip()
        assert "b" not in kind or line not in LINES or joined.strip() == line  # those that spell blanks


def test_a_model_without_a_template_is_written_to_in_chatml_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = Tokenizer.load(write(tmp_path / "bare", template=None))
    assert "no chat template" in caplog.text and "ChatML" in caplog.text
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert loaded.decode(loaded.chat(told)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_unusable_files_are_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_last_message_of_the_assistant_is_gone_on_from(plain: Tokenizer) -> None:
    begun = {"role": "assistant", "content": "It opens at <|end|> "}
    for before in ([USER], [OWN, USER], [USER, {"role": "assistant", "content": "At ten."}, USER]):
        asked, went_on = plain.chat(before), plain.chat([*before, begun])
        assert went_on[: len(asked)] == asked
        assert went_on[len(asked) :] == plain.encode("It opens at <|end|> "), "its text names no special token"
        *start, tail = plain.document_prompt(before, "It opens at ten.")
        *same_start, longer = plain.document_prompt([*before, begun], "It opens at ten.")
        assert same_start == start and longer == [*tail, *plain.encode("It opens at <|end|> ")]
    assert plain.chat([USER, {"role": "assistant", "content": ""}]) == plain.chat([USER])
