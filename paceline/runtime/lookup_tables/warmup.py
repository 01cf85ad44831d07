"""Warm-up: a model reads dialogues, and the base table learns what it thought after each of their tokens.

The dialogues are JSON lines: {"messages": [{"role", "content"}]} as in OpenAI's API, {"turns": [...]} as in Spec-Bench,
or {"conversations": [{"from", "value"}]} as in ShareGPT. They are the operator's choice: what they say becomes a draft
for anybody, and though drafts are never seen, how fast an answer comes can tell that one was right.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS, LookupTable, bigram_key
from paceline.engine.base import Engine, LoadedModel
from paceline.errors import ConfigError

Message = Mapping[str, str]
Dialogue = Sequence[Message]

WEIGHT: Final = 0.1  # of a new law in a row: the rows are to suit all dialogues
CHUNK: Final = 32  # rows a forward: at 152k tokens their laws are 40 MB
_ROLES: Final = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_SEQ: Final = SeqId(1 << 40)  # no session's


def read_dialogues(file: Path) -> Iterator[Dialogue]:
    """One for each line of a JSONL file, gzip or not. Raises ConfigError that names the file and the line."""
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        yield _dialogue(json.loads(line))
                    except (ValueError, KeyError, TypeError, AttributeError) as error:
                        raise ConfigError(
                            f"{file}, line {number}, is no dialogue ({type(error).__name__}: {error}): "
                            'give JSON lines such as {"messages": [{"role": "user", "content": "..."}]}'
                        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def warm(
    model: LoadedModel,
    table: LookupTable,
    dialogues: Iterable[Dialogue],
    *,
    max_tokens: int = 2048,
    answer_tokens: int = 0,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Read them all; tokens read. On the engine's own thread, with nothing else running.

    max_tokens: of one dialogue, and the context is never exceeded. answer_tokens: how many the model writes, greedily,
    behind a dialogue that ends with the user. progress: told the tokens read so far.
    """
    limit = min(max_tokens, model.engine.info.max_positions)
    total = 0
    for dialogue in dialogues:
        tokens = list(model.tokenizer.chat(dialogue))[:limit]
        wanted = answer_tokens if dialogue[-1]["role"] == "user" else 0
        stop = min(len(tokens) + wanted, limit)
        start = 0
        try:
            while start < len(tokens):
                rows = tokens[start : start + CHUNK]
                following = _learn(model.engine, table, start, tokens[start - 1] if start else -1, rows)
                start += len(rows)
                if start == len(tokens) < stop and following not in model.tokenizer.eos_ids:
                    tokens.append(following)
                total += len(rows)
                if progress is not None:
                    progress(total)
        finally:
            model.engine.release(_SEQ)
    return total


def _learn(engine: Engine, table: LookupTable, start: int, before: int, rows: Sequence[int]) -> int:
    """One forward; what the model would say next. before: the token before these, -1: none."""
    output = engine.forward(Batch((Segment(_SEQ, start, tuple(rows), logits="all"),)))
    for token, dist in zip(rows, output.dists[0], strict=True):
        # What an engine's vocabulary is padded with means nothing.
        ids, probs = zip(
            *((each, prob) for each, prob in dist.top(NUM_SUCCESSORS) if each < table.vocab_size), strict=True
        )
        table.blend(token, ids, probs, WEIGHT)
        if table.bigrams is not None and before >= 0:
            table.bigrams.blend(bigram_key(before, token), ids, probs, WEIGHT)
        before = token
    return output.dists[0][-1].argmax()


def _dialogue(line: dict[str, object]) -> Dialogue:
    """Raises ValueError, KeyError, TypeError or AttributeError for what is none."""
    if isinstance(line.get("messages"), list):
        found = [(message["role"], message["content"]) for message in line["messages"]]  # type: ignore[attr-defined]
    elif isinstance(line.get("turns"), list):
        found = [("user", turn) for turn in line["turns"]]  # type: ignore[attr-defined]
    elif isinstance(line.get("conversations"), list):
        found = [(_ROLES[message["from"]], message["value"]) for message in line["conversations"]]  # type: ignore[attr-defined]
    else:
        raise ValueError("neither messages, turns nor conversations")
    if not found or not all(isinstance(text, str) and role in _ROLES.values() for role, text in found):
        raise ValueError("each message has a role and a text")
    return [{"role": role, "content": text} for role, text in found]
