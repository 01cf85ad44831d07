"""Training batches: conversations as ids and loss weights, grouped by length so that hardly a token is padding."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from paceline.models.corpus import Conversation
from paceline.models.vocabulary import ASSISTANT, END, PAD, PREAMBLE, SYSTEM, USER

PROMPT_WEIGHT = 0.05
_KEPT = 0.25  # the share of prompt positions that are scored: their logits are most of the cost of the loss
_GRAIN = 16


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids and, for each, the weight of predicting it."""

    ids: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of ids, and the scored positions: flat indices, their next tokens and weights."""

    ids: Tensor  # (rows, length)
    where: Tensor  # (n,)
    targets: Tensor  # (n,)
    weights: Tensor  # (n,)


def encode_all(tokenizer: Tokenizer, conversations: list[Conversation]) -> list[Example]:
    """Encode conversations; preamble, document and the rest are tokenised apart, as they are when they are served."""
    parts: list[list[int | tuple[str, float]]] = []
    for conversation in conversations:
        told: list[int | tuple[str, float]] = []
        if conversation.document is not None:
            told += [SYSTEM, (PREAMBLE, 0.0), (conversation.document, PROMPT_WEIGHT), END]
        if conversation.system is not None:
            told += [SYSTEM, (conversation.system, PROMPT_WEIGHT), END]
        for turn in conversation.turns:
            # A fact the document lacks is noise to learn from: needed for a diffuse answer, but not at full weight.
            weight = 0.3 if turn.values and not turn.known else 1.0
            told += [USER, (turn.question, PROMPT_WEIGHT), END, ASSISTANT, (turn.answer, weight), -END]
        parts.append(told)
    texts = [part[0] for told in parts for part in told if isinstance(part, tuple)]
    encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    examples = []
    for told in parts:
        ids: list[int] = []
        weights: list[float] = []
        for part in told:
            if isinstance(part, tuple):
                piece = next(encoded).ids
                ids += piece
                weights += [part[1]] * len(piece)
            else:
                ids.append(abs(part))
                weights.append(1.0 if part < 0 else 0.0)
        examples.append(Example(ids, weights))
    return examples


def repeats(rng: random.Random, vocabulary: int, longest: int) -> Example:
    """Random tokens, told twice or more: the shortest lesson in copying from context."""
    length = rng.randint(8, longest)
    once = [rng.randrange(END + 1, vocabulary) for _ in range(length)]
    again = rng.randint(1, 2)
    return Example(once * (1 + again), [0.0] * length + [1.0] * length * again)


def collate(examples: list[Example], rng: random.Random) -> Batch:
    length = -(-max(len(e.ids) for e in examples) // _GRAIN) * _GRAIN
    ids = np.full((len(examples), length), PAD, dtype=np.int64)
    weights = np.zeros((len(examples), length), dtype=np.float32)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = example.ids
        weights[row, : len(example.ids) - 1] = example.weights[1:]
    thin = (weights > 0) & (weights <= PROMPT_WEIGHT)
    kept = np.random.default_rng(rng.getrandbits(32)).random(weights.shape) < _KEPT
    weights = np.where(thin, np.where(kept, weights / _KEPT, 0), weights)
    flat = ids.reshape(-1)
    where = np.flatnonzero(weights)
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(where),
        torch.from_numpy(flat[where + 1]),
        torch.from_numpy(weights.reshape(-1)[where]),
    )


def batches(draw: Callable[[int], list[Example]], rng: random.Random, tokens: int, longest: int) -> Iterator[Batch]:
    """Endless batches of about `tokens` tokens; `draw(n)` gives n fresh examples."""
    while True:
        pool = sorted((e for e in draw(384) if len(e.ids) <= longest), key=lambda e: len(e.ids))
        groups: list[list[Example]] = [[]]
        for example in pool:
            if groups[-1] and (len(groups[-1]) + 1) * len(example.ids) > tokens:
                groups.append([])
            groups[-1].append(example)
        rng.shuffle(groups)
        for group in groups:
            yield collate(group, rng)
