"""Prompts of many kinds of chat templates: equal to transformers' own, and whole where one leaves something out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import tokenizers
from jinja2 import TemplateError
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.engine.chat_template import ChatTemplate
from paceline.engine.families import format_of
from paceline.engine.tokenizer import PREAMBLE, Tokenizer
from paceline.errors import ConfigError, RequestError

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
MARKS = ["<think>", "</think>", "<tool_call>"]  # added tokens that are text

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{%generation%}{{ m.content }}{%- endgeneration -%}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%B %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|system|>\n' }}{%- if tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Today: ' + date_string + '\n\n' + system_message + '<|end|>' }}
{%- for message in messages %}{{- '<|' + message['role'] + '|>\n\n' + message['content'] | trim + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n\n' }}{%- endif %}"""
DEFAULT_SYSTEM = """{%- if tools %}{{- '# Tools\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{%- endif %}
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>system\nYou help.<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
{%- if (m.role == 'user') or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
LAST_QUERY = """{%- set ns = namespace(multi=true, last=messages | length - 1) %}
{%- for m in messages[::-1] %}{%- set index = messages | length - 1 - loop.index0 %}
{%- if ns.multi and m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set ns.multi = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{%- set content = m.content %}{%- set reasoning = '' %}
{%- if m.reasoning_content is string %}{%- set reasoning = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and reasoning %}{{- '<think>\n' + reasoning + '\n</think>\n\n' }}{%- endif %}
{{- content + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
STRIPPED = """{% set ns = namespace(system='') %}{%- for m in messages %}{%- if m['role'] == 'system' %}
{%- set ns.system = ns.system + m['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for m in messages %}{%- if m['role'] == 'user' %}{{ '<|user|>' + m['content'] }}{%- endif %}
{%- if m['role'] == 'assistant' and m['content'] is not none %}{% set content = m['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<|assistant|>' + content + '</s>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"""
NO_SYSTEM = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{- '<|im_start|>' + role + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"""
LAST_USER = """{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set ns = namespace() %}{%- set ns.index = 0 %}
{%- for m in loop_messages %}{%- if (m["role"] == "user") != (ns.index % 2 == 0) %}
{{- raise_exception("Roles must alternate.") }}{%- endif %}{%- set ns.index = ns.index + 1 %}{%- endfor %}
{{- bos_token }}{%- for m in loop_messages %}{%- if m["role"] == "user" %}
{%- if loop.last and system_message is defined %}{{- "<|user|>" + system_message + "\n\n" + m["content"] + "<|end|>" }}
{%- else %}{{- "<|user|>" + m["content"] + "<|end|>" }}{%- endif %}
{%- else %}{{- " " + m["content"] | trim + eos_token }}{%- endif %}{%- endfor %}"""
SILENT = """{{ bos_token }}{% for m in messages %}
{%- if m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '<|end|>\n' }}
{%- elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
GROUNDED = """{%- if documents is not none %}{{- '<|system|>' + documents | tojson(indent=4) + '<|end|>' }}{%- endif %}
{%- if tools is not none %}{{- '<|system|>' + tools | tojson(True, 2, (',', ':')) + '<|end|>' }}{%- endif %}
{%- for m in messages %}{%- if m.role not in ['system', 'user', 'assistant'] %}{%- continue %}{%- endif %}
{{- '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{%- endfor %}{{- '<|assistant|>' if add_generation_prompt }}"""
PARTS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{%- if part.type == 'text' %}{{ part.text }}
{%- elif part.type == 'image' %}<image>{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PARTS_ALONE = """{% for m in messages %}{{ m.role | capitalize }}:{% for part in m.content %}
{%- if part['type'] == 'text' %} {{ part['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
USER_PARTS = """{% for m in messages %}<|im_start|>{{ m.role }} {% if m.role == 'user' %}{{ m.content[0]['text'] }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant {% endif %}"""
SWITCHES = """{%- set ns = namespace(system='', messages=messages) %}{%- if messages[0].role == 'system' %}
{%- set ns.system = messages[0].content.replace('/no_think', '') | trim %}{%- set ns.messages = messages[1:] %}
{%- endif %}
{{- '<|im_start|>system\nReasoning: ' + ('off' if '/no_think' in messages[0].content else 'on') + '\n' + ns.system }}
{{- '<|im_end|>\n' }}{%- for m in ns.messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
LAST_ONLY = "<|user|>{{ messages[-1].content }}<|end|>{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEMPLATES = {name: text for name, text in globals().items() if isinstance(text, str) and "{%" in text}
PARTIAL = ("NO_SYSTEM", "SILENT", "LAST_ONLY")  # those without a place for system messages

SYSTEM = {"role": "system", "content": "Be brief, and say\n  where it stands."}
TURNS = (
    [],
    [("user", "Which pump?"), ("assistant", "Pump 4A.")],
    [("user", "Which pump?"), ("assistant", "<think>\nlook it up\n</think>\n\nPump 4A. ")],
    [("user", " Which? "), ("assistant", "<think>the first</think>A."), ("user", "Why?"), ("assistant", "So it says.")],
)
QUESTION = {"role": "user", "content": "Where is\n\nit stored?"}
CONVERSATIONS = [
    [*system, *({"role": role, "content": content} for role, content in turns), QUESTION]
    for system, turns in itertools.product(([], [SYSTEM]), TURNS)
]


def folder(template: str | None, files: dict[str, object] | None = None, **config: object) -> Path:
    """A model folder with a tokenizer of single bytes, whose added tokens `MARKS` are not special."""
    path = Path(mkdtemp())
    hf = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    hf.pre_tokenizer, hf.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    hf.add_special_tokens(SPECIAL)
    hf.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    hf.save(str(path / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    for name, content in {
        "tokenizer_config.json": named | {"chat_template": template} | config,
        **(files or {}),
    }.items():
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@cache
def both(name: str) -> tuple[Tokenizer, AutoTokenizer]:
    path = folder(TEMPLATES[name])
    return Tokenizer.load(path), AutoTokenizer.from_pretrained(path)


def written(tokenizer: Tokenizer, ids: list[int]) -> str:
    return "".join(map(tokenizer.token_name, ids))


def in_parts(messages: list[dict[str, str]]) -> list[dict[str, object]]:
    return [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_transformers_own_token_for_token(name: str, messages: list[dict[str, str]]) -> None:
    ours, theirs = both(name)
    if name in PARTIAL and SYSTEM in messages:
        return  # the next test
    written_so = {"PARTS_ALONE": in_parts(messages), "USER_PARTS": in_parts(messages)}.get(name, messages)
    if name == "USER_PARTS":
        written_so = [part if part["role"] == "user" else own for part, own in zip(written_so, messages, strict=True)]
    expected = theirs.apply_chat_template(written_so, add_generation_prompt=True)["input_ids"]
    assert ours.chat(messages) == ours.chat(in_parts(messages)) == expected


FRAGMENTS = {
    "JSON": "{{ messages[0] | tojson }}{{ {'b': '<é>', 'a': [1, none]} | tojson(indent=2, sort_keys=true) }}"
    "{{ {'b': 'é'} | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "LOOPS": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{{ m.content }}{% break %}{% endfor %}",
    "NAMES": "{% set ns = namespace(self=1, found=false) %}{% for m in messages %}{% set ns.found = m.role %}"
    "{% endfor %}{{ ns.found }}{{ ns.self }}{{ dict(a=1, **{'b': 2}).items() | list }}{{ dict.fromkeys(['x'], 0) }}",
    "GIVEN": "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ own }}"
    "{{ chat_template is defined }}",
    "THOUGHTS": "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }}/{{ m.reasoning }};{% endfor %}",
    "BLOCKS": "  {% if true %}\n  x\n  {%- generation %} y {% endgeneration %}\n{% endif %}\n"
    "{{ messages[-1].content }}",
    "TRIMMED": "{% for m in messages %}[{{ m.content | trim }}] {% endfor %}",
    "HIDDEN": "{{ messages[0].role }} content",
    "REFUSES": "{{ raise_exception('no') }}",
    "ESCAPES": "{{ ''.__class__.__mro__ }}",
    "UNDERSCORED": "{% set ns = namespace(_x=1) %}",
    "UNDERSCORED_LATER": "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "CLASSES": "{{ dict.__call__ }}{{ dict.mro }}{{ namespace.__init__ }}",
    "CHANGES": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("name", FRAGMENTS)
def test_what_a_template_may_use_is_what_transformers_gives_it(name: str, continues: bool) -> None:
    """Texts and kinds of errors, also of an answer that has begun."""
    messages = [
        {"role": "user", "content": " Why <so>? \ud83d", "reasoning": "old"},
        {"role": "assistant", "content": "Because  ", "thinking": "newer", "reasoning_content": None},
    ]
    options = {"add_generation_prompt": not continues, "continue_final_message": continues}

    def outcome(render: Callable[[], str]) -> str | type[Exception]:
        try:
            return render()
        except (TemplateError, ValueError, TypeError) as error:
            return type(error)

    ours = outcome(lambda: ChatTemplate(FRAGMENTS[name]).render(messages, {"own": "o"}, continues=continues))
    theirs = outcome(lambda: render_jinja_template([messages], chat_template=FRAGMENTS[name], own="o", **options)[0][0])
    assert ours == theirs


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_system_says_and_the_last_question_are_in_every_prompt(name: str) -> None:
    tokenizer, _ = both(name)
    more = [{"role": "user", "content": "Hm."}, {"role": "system", "content": "In French."}, QUESTION]
    for messages in CONVERSATIONS:
        for asked in (messages, [messages[0], *more], [*messages, SYSTEM]):
            text = written(tokenizer, tokenizer.chat(asked))
            said = [message["content"].strip() for message in asked if message["role"] == "system"]
            assert QUESTION["content"] in text and all(content in text for content in said), asked


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_turn_has_a_place_for_a_document_behind_one_beginning(name: str) -> None:
    tokenizer, _ = both(name)
    for messages in CONVERSATIONS:
        head, document, tail = tokenizer.document_prompt(messages, "It is </s> in aisle 4.")
        assert document == tokenizer.encode("It is </s> in aisle 4.")
        assert written(tokenizer, head).endswith(PREAMBLE) and written(tokenizer, tail).count(QUESTION["content"]) == 1
        assert all(
            message["content"] in written(tokenizer, tail) for message in messages if message["role"] == "system"
        )
        # cached keys and values serve every question, and hold none
        assert head == tokenizer.document_prompt([{"role": "user", "content": "Another one?"}], "Other text.")[0]
        plain = tokenizer.chat(messages)
        assert tail[-4:] == plain[-4:]


@pytest.mark.parametrize("name", ["LAST_QUERY", "STRIPPED"])
def test_earlier_reasoning_stays_out_although_its_marks_are_tokens(name: str) -> None:
    tokenizer, _ = both(name)
    talk = CONVERSATIONS[2]
    ids = tokenizer.chat(talk)
    assert "look it up" not in written(tokenizer, ids) and "Pump 4A." in written(tokenizer, ids)
    assert "look it up" not in written(tokenizer, tokenizer.document_prompt(talk, "Aisle 4.")[2])


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_text_of_a_request_becomes_a_special_token(name: str) -> None:
    tokenizer, _ = both(name)
    special = [tokenizer.encode(text) for text in SPECIAL]
    assert all(len(ids) > 1 for ids in special)
    marked = "".join(SPECIAL)
    plain, hostile = ([{"role": "user", "content": f"{text}Where?"}] for text in ("", marked))
    count = [[i for i in tokenizer.chat(messages) if not tokenizer.token_bytes(i)] for messages in (plain, hostile)]
    assert count[0] == count[1]
    told = tokenizer.chat(plain, template_kwargs={"date_string": marked, "enable_thinking": [{marked: marked}]})
    assert [i for i in told if not tokenizer.token_bytes(i)] == count[0]


def test_variables_of_a_request_reach_the_template() -> None:
    ours, theirs = both("LAST_QUERY")
    for switch in (False, True):
        expected = theirs.apply_chat_template([QUESTION], add_generation_prompt=True, enable_thinking=switch)
        assert ours.chat([QUESTION], template_kwargs={"enable_thinking": switch}) == expected["input_ids"]
    *_, tail = ours.document_prompt([QUESTION], "Aisle 4.", template_kwargs={"enable_thinking": False})
    assert written(ours, tail).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "chat_template", "continue_final_message", "self"])
def test_what_the_server_sets_itself_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"may not set {name}") as refused:
        both("GROUNDED")[0].chat([QUESTION], template_kwargs={name: []})
    assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_assistants_last_message_is_continued(name: str) -> None:
    tokenizer, _ = both(name)
    messages = [QUESTION, {"role": "assistant", "content": "It is in"}]
    assert written(tokenizer, tokenizer.chat(messages)).endswith("It is in")
    *_, tail = tokenizer.document_prompt(messages, "Aisle 4.")
    assert written(tokenizer, tail).endswith("It is in")


def test_a_text_that_a_template_hides_is_continued_behind_the_start_of_an_answer() -> None:
    tokenizer, _ = both("STRIPPED")
    begun = tokenizer.chat([QUESTION, {"role": "assistant", "content": "<think>a</think>"}])
    assert written(tokenizer, begun) == written(tokenizer, tokenizer.chat([QUESTION])) + "<think>a</think>"


def test_roles_that_must_alternate_are_made_to() -> None:
    tokenizer, _ = both("NO_SYSTEM")
    apart = [SYSTEM, {"role": "user", "content": "One."}, {"role": "user", "content": "Two."}]
    assert tokenizer.chat(apart) == tokenizer.chat(
        [{"role": "user", "content": f"{SYSTEM['content']}\n\nOne.\n\nTwo."}]
    )
    assert tokenizer.chat([SYSTEM]) == tokenizer.chat([SYSTEM | {"role": "user"}])
    with pytest.raises(RequestError, match="must alternate"):
        tokenizer.chat([{"role": "assistant", "content": "Hello."}, QUESTION])


def test_a_switch_that_a_template_takes_out_of_a_text_is_no_loss() -> None:
    tokenizer, theirs = both("SWITCHES")
    messages = [{"role": "system", "content": "Be /no_think brief."}, QUESTION]
    assert tokenizer.chat(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize("template", ["<|user|>{{ messages[0].content[:10] }}", "Hello.", "{{ bos_token }}"])
def test_a_template_that_shows_no_question_is_refused_with_a_sentence(template: str) -> None:
    tokenizer = Tokenizer.load(folder(template))
    with pytest.raises(RequestError, match="leaves out the system message or a part of the last question"):
        tokenizer.chat([SYSTEM, QUESTION])
    with pytest.raises(RequestError, match="no place for a document"):
        tokenizer.document_prompt([QUESTION], "Aisle 4.")


FAULTS = (
    "{{ 1 / (messages | length - 1) }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{{ messages | tojson(unknown=2) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ nothing.at.all }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{{ 'x' * 10 ** 15 }}",
    "{{ messages[0]['content'].encode('latin-1').decode('ascii') }}\xff{{ 'é'.encode('ascii') }}",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_a_template_is_a_sentence(fault: str) -> None:
    tokenizer = Tokenizer.load(folder(fault + "{{ messages[0].content }}"))
    for refused in (lambda: tokenizer.chat([QUESTION]), lambda: tokenizer.document_prompt([QUESTION], "Aisle 4.")):
        with pytest.raises(RequestError, match="The model's chat template"):
            refused()


def test_a_template_that_cannot_be_read_fails_at_the_start() -> None:
    for template in ("{% for %}", "{{ 'a' | nofilter }}", "{% endgeneration %}"):
        with pytest.raises(ConfigError, match="chat template cannot be read"):
            Tokenizer.load(folder(template))


def test_a_template_may_have_a_file_of_its_own() -> None:
    for file in ({"chat_template.jinja": CHATML}, {"chat_template.json": {"chat_template": CHATML}}):
        assert Tokenizer.load(folder(None, files=file)).chat([QUESTION]) == both("CHATML")[0].chat([QUESTION])
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": CHATML}]
    several = Tokenizer.load(folder(named))  # type: ignore[arg-type]
    assert several.chat([QUESTION]) == both("CHATML")[0].chat([QUESTION])


def test_a_switch_of_thinking_reaches_a_template_by_either_name() -> None:
    template = CHATML + "{% if add_generation_prompt and thinking %}<think>\n{% endif %}"
    ours = Tokenizer.load(folder(template))
    assert ours.thinking is None  # nothing tells where it ends
    for on in (True, False):
        text = written(ours, ours.chat([QUESTION], template_kwargs={"enable_thinking": on}))
        assert text.endswith("<think>\n") is on
    assert "<think>" in written(ours, ours.chat([QUESTION], template_kwargs={"enable_thinking": False, "thinking": 1}))


def test_special_marks_of_thinking_are_text_of_an_answer() -> None:
    template = CHATML + "{# [THINK] and [/THINK] #}"
    first = 256 + len(SPECIAL) + len(MARKS)
    added = {
        str(first + place): {"content": mark, "special": True} for place, mark in enumerate(("[THINK]", "[/THINK]"))
    }
    ours = Tokenizer.load(folder(template, added_tokens_decoder=added))
    begin, end = (ours.encode(mark, own=True) for mark in ours.thinking or ())
    assert len(begin) == len(end) == 1
    assert (ours.token_bytes(begin[0]), ours.token_bytes(end[0])) == (b"[THINK]", b"[/THINK]")
    asked = ours.chat([{"role": "user", "content": "[THINK] of it"}])
    assert begin[0] not in asked and "[THINK] of it" in written(ours, asked)


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=example>", "qwen3_coder"),
        ("<|start_header_id|>assistant{{ '\"parameters\": ' }}", "llama3"),
        ("[TOOL_CALLS] [", "mistral_list"),
        ("[TOOL_CALLS]' + name + '[ARGS]", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['type'] + '<｜tool▁sep｜>' + '\n```json\n", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>", "deepseek_v31"),
        ("no tools", "hermes"),
    ],
)
def test_a_template_shows_how_a_model_writes_calls(shown: str, name: str) -> None:
    assert format_of(shown).name == name


def test_special_marks_of_calls_are_text_of_an_answer() -> None:
    first = 256 + len(SPECIAL) + len(MARKS)
    added = {
        str(first): {"content": "[TOOL_CALLS]", "special": True},
        str(first + 1): {"content": "[INST]", "special": True},
    }
    ours = Tokenizer.load(folder(CHATML + "{# [TOOL_CALLS] #}", added_tokens_decoder=added))
    assert (ours.tools, ours.token_bytes(first), ours.token_bytes(first + 1)) == ("mistral_list", b"[TOOL_CALLS]", b"")
