"""Warm-up: a model reads dialogues, and the base table records its distribution after each token.

The dialogues are JSON lines: {"messages": [{"role", "content"}]} as in OpenAI's API, {"turns": [...]} as in Spec-Bench,
or {"conversations": [{"from", "value"}]} as in ShareGPT. The operator chooses them: their text becomes drafts for
every client, and although drafts are not shown, the speed of an answer can reveal that one was accepted.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS, LookupTable, bigram_key
from paceline.engine.base import Engine, LoadedModel
from paceline.errors import ConfigError

Message = Mapping[str, str]
Dialogue = Sequence[Message]

WEIGHT: Final = 0.1  # of a new distribution in a row: rows average over all dialogues
CHUNK: Final = 32  # rows per forward: at 152k tokens their distributions are 40 MB
_ROLES: Final = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_SEQ: Final = SeqId(1 << 40)  # not used by any session


def read_dialogues(file: Path) -> Iterator[Dialogue]:
    """Dialogues of a JSONL file, gzip or not, one a line. Raises ConfigError that names the file and the line."""
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
) -> int:
    """Fill the table from all dialogues; returns the tokens read. Runs on the engine's thread, with nothing else
    running.

    max_tokens: limit per dialogue; the context is never exceeded. answer_tokens: number the model writes greedily after
    a dialogue that ends with the user.
    """
    limit = min(max_tokens, model.engine.info.max_positions)
    total = 0
    for dialogue in dialogues:
        tokens = list(model.tokenizer.chat(dialogue))[:limit]
        max_answer = answer_tokens if dialogue[-1]["role"] == "user" else 0
        stop = min(len(tokens) + max_answer, limit)
        start = 0
        try:
            while start < len(tokens):
                rows = tokens[start : start + CHUNK]
                following = _record(model.engine, table, start, tokens[start - 1] if start else -1, rows)
                start += len(rows)
                if start == len(tokens) < stop and following not in model.tokenizer.eos_ids:
                    tokens.append(following)
                total += len(rows)
        finally:
            model.engine.release(_SEQ)
    return total


def _record(engine: Engine, table: LookupTable, start: int, before: int, rows: Sequence[int]) -> int:
    """Run one forward and record its distributions; the most probable next token. before: the preceding token, -1:
    none."""
    output = engine.forward(Batch((Segment(_SEQ, start, tuple(rows), logits="all"),)))
    for token, dist in zip(rows, output.dists[0], strict=True):
        # Ids that pad an engine's vocabulary have no meaning.
        ids, probs = zip(
            *((each, prob) for each, prob in dist.top(NUM_SUCCESSORS) if each < table.vocab_size), strict=True
        )
        table.blend(token, ids, probs, WEIGHT)
        if table.bigrams is not None and before >= 0:
            table.bigrams.blend(bigram_key(before, token), ids, probs, WEIGHT)
        before = token
    return output.dists[0][-1].argmax()


def _dialogue(line: dict[str, object]) -> Dialogue:
    """Parse one line. Raises ValueError, KeyError, TypeError or AttributeError for an invalid one."""
    if isinstance(line.get("messages"), list):
        messages = [(message["role"], message["content"]) for message in line["messages"]]  # type: ignore[attr-defined]
    elif isinstance(line.get("turns"), list):
        messages = [("user", turn) for turn in line["turns"]]  # type: ignore[attr-defined]
    elif isinstance(line.get("conversations"), list):
        messages = [(_ROLES[message["from"]], message["value"]) for message in line["conversations"]]  # type: ignore[attr-defined]
    else:
        raise ValueError("neither messages, turns nor conversations")
    if not messages or not all(isinstance(text, str) and role in _ROLES.values() for role, text in messages):
        raise ValueError("each message has a role and a text")
    return [{"role": role, "content": text} for role, text in messages]
