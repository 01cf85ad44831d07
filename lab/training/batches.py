"""Training batches: conversations as token ids and loss weights, grouped by length to minimise padding."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from lab.training.texts.corpus import Conversation, Turn
from lab.training.vocabulary import ASSISTANT, END, PAD, PREAMBLE, SYSTEM, USER

_THIN = 0.06
_KEPT = 0.25  # share of low-weight positions that are scored: their logits are most of the cost of the loss
_GRAIN = 16


@dataclass(frozen=True, slots=True)
class Weights:
    """Loss weights of tokens that cannot be predicted; a predictable token of an answer has weight 1.

    Such tokens teach fluent text and spread the probability of an unknown value, but are noise otherwise: at higher
    weights they outweigh the answers by far, because they can never be predicted.
    """

    prompt: float = 0.05  # documents, system prompts and questions
    missing: float = 0.3  # a value that the document lacks


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids and, for each, the loss weight of predicting it."""

    ids: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of token ids, and the scored positions: flat indices, next tokens and weights."""

    ids: Tensor  # (rows, length)
    where: Tensor  # (n,)
    targets: Tensor  # (n,)
    weights: Tensor  # (n,)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A text tokenised on its own, the weight of its tokens, and its spans of lower weight."""

    text: str
    weight: float
    missing: tuple[tuple[int, int], ...] = ()  # characters, [start, end)


def _answer(turn: Turn) -> _Piece:
    lower = turn.answer.lower()  # a value at the beginning is capitalised
    starts = [(lower.rindex(value.lower()), len(value)) for value in turn.missing]
    return _Piece(turn.answer, 1.0, tuple((start, start + length) for start, length in starts))


def _weights_of(piece: _Piece, offsets: list[tuple[int, int]], missing: float) -> list[float]:
    return [
        missing if any(start < high and low < end for low, high in piece.missing) else piece.weight
        for start, end in offsets
    ]


def encode_all(tokenizer: Tokenizer, conversations: list[Conversation], weights: Weights = Weights()) -> list[Example]:
    """Encode conversations; preamble, document and the rest are tokenised separately, as in serving."""
    prompt = weights.prompt
    parts: list[list[int | _Piece]] = []
    for conversation in conversations:
        pieces: list[int | _Piece] = []
        if conversation.document is not None:
            pieces += [SYSTEM, _Piece(PREAMBLE, 0.0), _Piece(conversation.document, prompt), END]
        if conversation.system is not None:
            pieces += [SYSTEM, _Piece(conversation.system, prompt), END]
        for turn in conversation.turns:
            pieces += [USER, _Piece(turn.question, prompt), END, ASSISTANT, _answer(turn), -END]
        parts.append(pieces)
    texts = [part.text for pieces in parts for part in pieces if isinstance(part, _Piece)]
    encoded = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    examples = []
    for pieces in parts:
        ids: list[int] = []
        counted: list[float] = []
        for part in pieces:
            if isinstance(part, _Piece):
                piece = next(encoded)
                ids += piece.ids
                counted += _weights_of(part, piece.offsets, weights.missing)
            else:
                ids.append(abs(part))
                counted.append(1.0 if part < 0 else 0.0)
        examples.append(Example(ids, counted))
    return examples


def repeats(rng: random.Random, vocabulary: int, longest: int) -> Example:
    """Random tokens repeated once or twice: the shortest exercise in copying from context."""
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
    thin = (weights > 0) & (weights <= _THIN)
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
    """Endless batches of about `tokens` tokens; `draw(n)` returns n fresh examples."""
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
