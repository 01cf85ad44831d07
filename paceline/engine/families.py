"""Forms in which families of models write what is not their answer: thinking, and calls of tools.

*Thinking* stands between two marks: which marks a chat template knows, whether a prompt ends between them, how a text
is divided at them, and masks that hold for the answer alone or bring the thinking to its end. The text of an answer is,
in this order: blanks, the first mark, thinking, the second mark, the answer. Without the first mark all of it is the
answer, and after a prompt that ends with the first mark it begins with thinking. Blanks around marks belong to neither
part. Marks are found by their text, however they are divided into tokens. An answer of gpt-oss is several messages,
each headed by a channel, which says whether it is thinking, the answer or a call (OpenAI's Harmony).

*Calls of tools*, as data: the text before, between and behind name and arguments, by the family that a chat template
shows. Calls are enforced (`grammar.json_schema`), parsed and written into prompts by the same data. A call is `head`,
name, `middle`, arguments, `tail`; calls stand between `begin` and `end`, with `between` among them. Arguments are a
JSON object, or parameters in tags, each a text of its own (`tagged`).

Not handled: a second thinking within one answer, but in channels; calls of Python, as Llama 4 writes them; ids of
calls, as Mistral's of one release and Kimi's; gpt-oss's own tools.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.batching.segment import common_length
from paceline.core.sampling.sampler import Mask, Thinking
from paceline.engine.base import TextModel

Part = Literal["before", "thinking", "answer"]  # before: it is not known yet which of the others follows

SWITCH: Final = "enable_thinking"  # variable by which most chat templates turn it on and off
NO_THINKING: Final[Mapping[str, object]] = MappingProxyType({SWITCH: False})
MARKS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
CHANNELS: Final = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
"""Around the first message of gpt-oss, in which it thinks."""
_FINAL, _CALL = "<|channel|>final<|message|>", "<|channel|>commentary to"  # how what is said begins, and a call
_MESSAGE, _END = "<|message|>", "<|end|>"
_MAX_HEADER: Final = 256  # characters before `_MESSAGE`; what has more of them is none


def marks_of(template: str) -> tuple[str, str] | None:
    """The marks of a model by its chat template; None: it does not think."""
    return CHANNELS if CHANNELS[0] in template else next((marks for marks in MARKS if marks[1] in template), None)


def switched(variables: Mapping[str, object]) -> Mapping[str, object]:
    """A template's variables, with the switch by its other name as well, which Granite and DeepSeek-V3.1 read."""
    return {"thinking": variables[SWITCH], **variables} if SWITCH in variables else variables


def thinking_after(prompt: str, marks: tuple[str, str], begun: str, budget: int | None) -> Thinking | None:
    """What the text after a prompt begins with; None where that is the answer. prompt: its end. begun: the beginning of
    the answer, with which a prompt ends that goes on from one."""
    begin, end = marks
    head = prompt.removesuffix(begun).rstrip()
    if head.endswith(end) and marks != CHANNELS:  # whose second mark every prompt ends with
        return None
    text = begun.lstrip()
    is_open = head.endswith(begin) or text.startswith(begin)
    if end in text or (text and not is_open):
        return None
    return Thinking(begin, end, is_open, budget)


def with_thinking(reasoning: str, content: str, marks: tuple[str, str]) -> str:
    """An earlier answer with its thinking, as the model wrote it: what stays of that is the template's to say. In
    channels without it, which they leave out."""
    return content if marks == CHANNELS else f"{marks[0]}\n{reasoning.strip()}\n{marks[1]}\n\n{content}"


class Piece(NamedTuple):
    text: str
    thought: bool  # else it is the answer's


class ThinkingText:
    """Divides the text of one answer while it comes. Where it is cut makes no difference."""

    def __init__(self, thinking: Thinking | None) -> None:
        """thinking: None where there is none, and all text is the answer's."""
        self._thinking = thinking
        self.part: Part = "answer" if thinking is None else "thinking" if thinking.begun else "before"
        self.held = ""  # text that may be a mark, or blanks around one
        self._at_start = thinking is not None  # nothing of this part has come, and blanks are dropped

    def push(self, text: str) -> list[Piece]:
        """The pieces that have become final, none of them empty."""
        self.held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """What was held back, at the end."""
        held, self.held = self.held, ""
        text = held.rstrip() if self.part == "thinking" else held
        return [Piece(text, self.part == "thinking")] if text else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Read as far as the present part goes. False when more text is needed."""
        if self.part == "before":
            return self._before()
        if self._at_start:
            self.held = self.held.lstrip()
            self._at_start = not self.held
        if self.part == "answer":
            text, self.held = self.held, ""
        else:
            text = self._thought()
        if text:
            pieces.append(Piece(text, self.part == "thinking"))
        if self.part == "answer" or not self.held.lstrip().startswith(self._marks.end):
            return False
        self.held = self.held.lstrip()[len(self._marks.end) :]
        self.part, self._at_start = "answer", True
        return True

    @property
    def _marks(self) -> Thinking:
        assert self._thinking is not None, "without thinking there is the answer alone"
        return self._thinking

    def _before(self) -> bool:
        begin, text = self._marks.begin, self.held.lstrip()
        if text.startswith(begin):
            self.part, self.held = "thinking", text[len(begin) :]
        elif begin.startswith(text):
            return False
        else:
            self.part, self._at_start = "answer", False
        return True

    def _thought(self) -> str:
        """The text up to the second mark, or to where that may begin; blanks before it are held back."""
        end = self._marks.end
        at = self.held.find(end)
        if at < 0:
            at = len(self.held) - next((n for n in range(len(end) - 1, 0, -1) if self.held.endswith(end[:n])), 0)
        text = self.held[:at].rstrip()
        self.held = self.held[len(text) :]
        return text


class ChannelText:
    """Divides the text of one answer in channels while it comes, as `ThinkingText` does. A call is text of the answer,
    as `HARMONY` writes it, wherever its header names the function. Messages of one part are lines."""

    def __init__(self, begun: bool) -> None:
        """begun: the prompt ends with the header of thinking."""
        self.part: Part = "thinking" if begun else "before"
        self.held = ""  # text that may be a mark, or a header
        self._in_header = not begun

    def push(self, text: str) -> list[Piece]:
        """The pieces that have become final, none of them empty."""
        self.held += text
        pieces: list[Piece] = []
        while self._header(pieces) if self._in_header else self._content(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """Give what was held back, at the end, unless it is a header."""
        is_header = self._in_header and (self.part != "before" or "<|channel|>" in self.held)
        text, self.held = "" if is_header else self.held, ""
        return [Piece(text, self.part == "thinking")] if text else []

    def _header(self, pieces: list[Piece]) -> bool:
        self.held = self.held.lstrip("\n") if self.part == "before" else self.held
        at = self.held.find(_MESSAGE)
        begins = ("<|channel|>", " to=")  # the first header; others begin with the speaker
        may_be = self.part != "before" or any(self.held.startswith(x) or x.startswith(self.held) for x in begins)
        if may_be and at < 0 and len(self.held) < _MAX_HEADER + len(_MESSAGE):
            return False
        self._in_header = False
        if not may_be or not 0 <= at <= _MAX_HEADER:
            self.part = "answer"
            return True
        header, self.held = self.held[:at], self.held[at + len(_MESSAGE) :]
        _, is_call, called = header.partition(" to=functions.")
        if is_call:
            name = "".join(called.partition("<|")[0].split()[:1])
            pieces.append(Piece(HARMONY.head + name + HARMONY.middle, thought=False))
        before, self.part = self.part, "thinking" if "analysis" in header and not is_call else "answer"
        if before == self.part and not is_call:
            pieces.append(Piece("\n", self.part == "thinking"))
        return True

    def _content(self, pieces: list[Piece]) -> bool:
        text, mark, rest = self.held.partition(_END)
        if not mark:
            kept = next((n for n in range(len(_END) - 1, 0, -1) if text.endswith(_END[:n])), 0)
            text, rest = text[: len(text) - kept], text[len(text) - kept :]
        if text:
            pieces.append(Piece(text, self.part == "thinking"))
        self.held, self._in_header = rest, bool(mark)
        return bool(mark)


def text_parts(thinking: Thinking | None) -> ThinkingText | ChannelText:
    """Make what divides the text of an answer that may begin with this thinking."""
    if thinking is not None and (thinking.begin, thinking.end) == CHANNELS:
        return ChannelText(thinking.begun)
    return ThinkingText(thinking)


class ThinkingMask(Mask):
    """`core.sampling.sampler.Mask` that lets any thinking come first: the form holds behind it, the budget ends it.

    One blank token, a line end or two, may stand between the second mark and the answer, as models write it.
    """

    def __init__(
        self, form: Mask | None, thinking: Thinking, tokenizer: TextModel, calls: Literal["no", "may", "must"] = "no"
    ) -> None:
        """form: what the answer keeps to; None: nothing. calls: whether these may be what it holds."""
        self._form, self._thinking, self._tokenizer = form, thinking, tokenizer
        self._path = _Path(thinking, tokenizer.token_bytes)
        self._begin = tokenizer.encode(thinking.begin, own=True)
        self._end = tokenizer.encode(thinking.end, own=True)
        heads = {"no": (_FINAL,), "may": (_FINAL, _CALL), "must": (_CALL,)}[calls]
        self._in_channels = (thinking.begin, thinking.end) == CHANNELS
        self._heads = [tokenizer.encode(head, own=True) for head in heads if self._in_channels]
        self._lead = self._heads[0] if self._heads and calls != "must" else []  # which the form does not see
        blanks = (tokenizer.encode(text) for text in ("\n", "\n\n"))
        self._blanks = frozenset(ids[0] for ids in blanks if len(ids) == 1)
        size = tokenizer.vocab_size
        self._no_eos = np.ones(size, dtype=np.bool_)
        self._no_eos[[token for token in tokenizer.eos_ids if token < size]] = False
        self._no_eos.flags.writeable = False

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        part, at = self._path.read(path)
        if part == "answer":
            answer = self._answer(path, at)
            if (headed := self._headed(answer, self._heads)) is not None:
                return headed
            found = None if self._form is None else self._form.allowed(self._formed(answer))
            if self._in_channels and found is not None:
                return _but(found, self._end[0])  # the message behind the thinking is the last
            return _also(found, self._blanks) if len(path) == at > 0 and not answer else found
        if part == "before":
            return self._before(path)
        budget, ending = self._thinking.budget, self._next_of_end(path)
        if (budget is not None and len(path) - at >= budget) or (self._in_channels and ending != self._end[0]):
            return _only((ending,), self._tokenizer.vocab_size)
        return None if self._form is None else self._no_eos

    def complete(self, path: Sequence[int]) -> bool:
        part, at = self._path.read(path)
        if self._form is None:
            return True
        answer = self._answer(path, at) if part == "answer" else path
        if part == "thinking" or self._headed(answer, self._heads) is not None:
            return False
        return self._form.complete(self._formed(answer))

    def _headed(self, answer: Sequence[int], heads: Sequence[list[int]]) -> NDArray[np.bool_] | None:
        """Tokens that follow where one of the heads has not ended; None elsewhere."""
        place = len(answer)
        following = [head[place] for head in heads if place < len(head) and list(answer) == head[:place]]
        return _only(following, self._tokenizer.vocab_size) if following else None

    def _formed(self, answer: Sequence[int]) -> Sequence[int]:
        """Leave out the header, which the form does not see."""
        size = len(self._lead)
        return answer[size:] if list(answer[:size]) == self._lead else answer

    def _answer(self, path: Sequence[int], at: int) -> Sequence[int]:
        """The answer's tokens, from `at` on. What the last token of the mark holds beyond it is encoded anew."""
        rest = self._tokenizer.encode(text) if (text := self._path.rest(at)) else []
        answer = list(path[at:])
        return [*rest, *(answer[1:] if at > 0 and not rest and answer and answer[0] in self._blanks else answer)]

    def _before(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """Where the first mark may still follow: it, or what the form allows."""
        place = len(path)
        thinking = [self._begin] if self._in_channels and self._thinking.budget != 0 else []
        if (headed := self._headed(path, [*self._heads, *thinking])) is not None:
            return headed
        found = None if self._form is None else self._form.allowed(path)
        if place >= len(self._begin) or list(path) != self._begin[:place]:
            return found
        if self._thinking.budget != 0:
            return _also(found, (self._begin[place],))
        if place + 1 < len(self._begin):
            return found
        return _but(np.ones(self._tokenizer.vocab_size, np.bool_) if found is None else found, self._begin[place])

    def _next_of_end(self, path: Sequence[int]) -> int:
        """The token of the second mark that follows as much of it as the path ends with."""
        longest = min(len(self._end) - 1, len(path))
        return self._end[next((n for n in range(longest, 0, -1) if list(path[-n:]) == self._end[:n]), 0)]


def _also(allowed: NDArray[np.bool_] | None, tokens: Sequence[int] | frozenset[int]) -> NDArray[np.bool_] | None:
    if allowed is None:
        return None
    more = allowed.copy()
    more[list(tokens)] = True
    return more


def _but(allowed: NDArray[np.bool_], token: int) -> NDArray[np.bool_]:
    fewer = allowed.copy()
    fewer[token] = False
    return fewer


def _only(tokens: Sequence[int], size: int) -> NDArray[np.bool_]:
    allowed = np.zeros(size, dtype=np.bool_)
    allowed[list(tokens)] = True
    return allowed


class _Path:
    """Bytes of the last path that was read, of which the next one mostly shares the beginning."""

    def __init__(self, thinking: Thinking, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._begin, self._end = thinking.begin.encode(), thinking.end.encode()
        self._begun = thinking.begun
        self._tokens: list[int] = []
        self._starts = [0]  # in the text, of each token and of what follows them
        self._text = bytearray()
        self._after = 0  # where the second mark ends

    def read(self, path: Sequence[int]) -> tuple[Part, int]:
        """The part in which the path ends, and its tokens before that part."""
        self._go_to(list(path))
        at = 0
        if not self._begun:
            text = self._text.lstrip()
            if not text.startswith(self._begin):
                return ("before" if self._begin.startswith(text) else "answer"), 0
            at = len(self._text) - len(text) + len(self._begin)
        found = self._text.find(self._end, at)
        if found < 0:
            return "thinking", bisect_left(self._starts, at)
        self._after = found + len(self._end)
        return "answer", bisect_left(self._starts, self._after)

    def rest(self, at: int) -> str:
        """The text between the second mark and the token `at`, which another token holds; without blanks before it."""
        between = self._text[self._after : self._starts[at]] if at > 0 else b""
        return between.decode(errors="replace").lstrip()

    def _go_to(self, tokens: list[int]) -> None:
        common = common_length(self._tokens, tokens)
        del self._tokens[common:], self._starts[common + 1 :], self._text[self._starts[common] :]
        for token in tokens[common:]:
            self._text += self._token_bytes(token)
            self._tokens.append(token)
            self._starts.append(len(self._text))


# ---- calls of tools -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family writes calls."""

    name: str
    signs: tuple[str, ...]  # all of them stand in a template of this family
    mark: str  # a call begins where it stands
    head: str
    middle: str
    tail: str
    begin: str = ""
    between: str = "\n"
    end: str = ""
    many: bool = True  # several calls may stand in one answer
    alone: bool = False  # the mark is one at the beginning of an answer only
    tagged: bool = False  # parameters in tags

    @property
    def opening(self) -> str:
        """From the mark on, up to the first name."""
        return self.begin + self.head

    @property
    def text(self) -> str:
        """All of its marks: tokens that are special elsewhere are text where they stand in it."""
        return "".join((self.begin, self.head, self.middle, self.tail, self.between, self.end))

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as the model writes them. calls: name and JSON of the arguments of each."""
        texts = (
            f"{self.head}{name if self.tagged else json.dumps(name, ensure_ascii=False)[1:-1]}{self.middle}"
            f"{self._arguments(given)}{self.tail}"
            for name, given in calls
        )
        return self.begin + self.between.join(texts) + self.end

    def _arguments(self, given: str) -> str:
        values = json.loads(given) if self.tagged else None
        if not isinstance(values, Mapping):
            return given
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        return "".join(f"{TAG}{key}{TAG_END}{text}{CLOSING}" for key, text in texts.items())


TAG, TAG_END = "<parameter=", ">\n"  # around a tagged parameter's name
CLOSING = "\n</parameter>\n"  # behind its text

HERMES: Final = ToolFormat(
    "hermes",
    ("<tool_call>",),
    "<tool_call>",
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</tool_call>",
)
"""Of Hermes, Qwen2.5 and Qwen3; for models whose template shows no other."""
HARMONY: Final = ToolFormat(  # gpt-oss
    "harmony",
    (CHANNELS[0],),
    "<|channel|>commentary to=functions.",
    "<|channel|>commentary to=functions.",
    " <|constrain|>json<|message|>",
    "",
    between="",
    many=False,
)
FORMATS: Final = (
    HARMONY,
    ToolFormat(  # Qwen3-Coder, Qwen3.5
        "qwen3_coder",
        ("<tool_call>", "<function="),
        "<tool_call>",
        "<tool_call>\n<function=",
        ">\n",
        "</function>\n</tool_call>",
        tagged=True,
    ),
    HERMES,
    ToolFormat(
        "llama3",
        ('"parameters": ', "<|start_header_id|>"),
        "{",
        '{"name": "',
        '", "parameters": ',
        "}",
        many=False,
        alone=True,
    ),
    ToolFormat("mistral", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", "", between=""),
    ToolFormat(  # earlier releases
        "mistral_list",
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        '{"name": "',
        '", "arguments": ',
        "}",
        begin="[TOOL_CALLS][",
        between=", ",
        end="]",
    ),
    ToolFormat(  # DeepSeek-V3, R1
        "deepseek_v3",
        ("<｜tool▁calls▁begin｜>", "```json"),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        "deepseek_v31",
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        between="",
        end="<｜tool▁calls▁end｜>",
    ),
)
BY_NAME: Final = {each.name: each for each in FORMATS}


def texts_of(schema: Mapping[str, object]) -> list[str] | None:
    """The texts that a tagged parameter may have, [] for any; None where it is JSON."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    texts = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
    if texts and texts == values:
        return texts
    return [] if schema.get("type") == "string" and "enum" not in schema and "const" not in schema else None


def format_of(template: str) -> ToolFormat:
    """The format of a model by its chat template."""
    return next((each for each in FORMATS if all(sign in template for sign in each.signs)), HERMES)
