"""Answers of both models to the same questions, from which the score of difficulty is learnt.

    python -m lab.training.difficulty answers.jsonl

prints what `paceline.core.difficulty` holds. The file is written by `bench handoff`, one line a question as soon as
both models have answered it, greedily and side by side, so that a run that was cut goes on: how sure the device's model
was of each token, which answer is right, and of how many of the cloud's tokens the device's model, behind the same
tokens, would have drafted the same.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.difficulty import HEAD, HELD, Features, Glance, Linear, Look, Sureness, Weights, glance
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import head
from paceline.core.side import SIDES, HandoffLevel, Side
from paceline.engine.base import LoadedModel

Floats = NDArray[np.float64]
T = TypeVar("T")
AT_ONCE: Final = 8  # answers that are written side by side
DEVICE: Final[Side] = "device"
CACHED: Final = "answers"  # salt of prompts that are read once


@dataclass(frozen=True, slots=True)
class Question:
    name: str
    kind: str
    text: str  # of the message
    limit: int  # tokens of an answer
    is_right: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: with that which ends it, where one does."""

    tokens: tuple[int, ...]
    rows: tuple[Glance, ...]  # at each of them
    text: str
    right: bool


@dataclass(frozen=True, slots=True)
class Record:
    """One question, answered by both."""

    name: str
    kind: str
    prompt: int  # tokens
    device: Answer
    cloud: Answer
    agreed: tuple[bool, ...]  # of each of the cloud's tokens: the device's model, behind the same, writes it too

    def as_line(self) -> str:
        return json.dumps(asdict(self), default=tuple)

    @staticmethod
    def of(line: str) -> Record:
        found: dict[str, Any] = json.loads(line)
        for side in SIDES:
            of = found[side]
            rows = tuple(Glance(*row) for row in of["rows"])
            found[side] = Answer(tuple(of["tokens"]), rows, of["text"], of["right"])
        return Record(**found | {"agreed": tuple(found["agreed"])})


def load(file: Path) -> list[Record]:
    return [Record.of(line) for line in file.read_text("utf-8").splitlines()]


def batched(items: Iterable[T], size: int = AT_ONCE) -> Iterator[tuple[T, ...]]:
    rest = iter(items)
    while part := tuple(islice(rest, size)):
        yield part


def mixed(kinds: Mapping[str, Sequence[Question]]) -> Iterator[Question]:
    """Questions of all kinds in turn, a batch of each."""
    for parts in zip_longest(*(batched(each) for each in kinds.values()), fillvalue=()):
        for part in parts:
            yield from part


def collect(models: Mapping[Side, LoadedModel], questions: Iterable[Question], file: Path) -> None:
    """Append the records of the questions that the file does not have."""
    known = {record.name for record in load(file)} if file.exists() else set()
    asked = [each for each in questions if each.name not in known]
    with file.open("a", encoding="utf-8") as lines:
        for group in batched(asked):
            for record in _records(models, group):
                lines.write(record.as_line() + "\n")
            lines.flush()


def _records(models: Mapping[Side, LoadedModel], asked: Sequence[Question]) -> Iterator[Record]:
    prompts = [prompt_of(models[DEVICE], each) for each in asked]
    limits = [each.limit for each in asked]
    answers = {side: write(models[side], prompts, limits) for side in SIDES}
    behind = [(prompt, answer[0]) for prompt, answer in zip(prompts, answers["cloud"], strict=True)]
    agreed = _agreed(models[DEVICE], behind)
    for at, question in enumerate(asked):
        each = {side: _answer(models[side], question, *answers[side][at]) for side in SIDES}
        yield Record(question.name, question.kind, len(prompts[at]), each["device"], each["cloud"], agreed[at])


def prompt_of(model: LoadedModel, question: Question) -> tuple[int, ...]:
    return tuple(model.tokenizer.chat([{"role": "user", "content": question.text}]))


def _answer(model: LoadedModel, question: Question, tokens: tuple[int, ...], rows: tuple[Glance, ...]) -> Answer:
    text = text_of(model, tokens)
    return Answer(tokens, rows, text, question.is_right(text))


def text_of(model: LoadedModel, tokens: Sequence[int]) -> str:
    return model.tokenizer.decode([token for token in tokens if token not in model.tokenizer.eos_ids])


def write(
    model: LoadedModel, prompts: Sequence[Sequence[int]], limits: Sequence[int], begun: Sequence[Sequence[int]] = ()
) -> list[tuple[tuple[int, ...], tuple[Glance, ...]]]:
    """Greedy answers side by side, with how sure the model was of each token. begun: what they begin with; the rows are
    of what follows."""
    engine, eos = model.engine, model.tokenizer.eos_ids
    vocab = min(engine.info.vocab_size, model.tokenizer.vocab_size)
    tokens = [list(each) for each in begun] or [[] for _ in prompts]
    rows: list[list[Glance]] = [[] for _ in prompts]
    waiting = [(*prompt, *before) for prompt, before in zip(prompts, tokens, strict=True)]
    starts = [engine.begin(SeqId(at), rest, CACHED) for at, rest in enumerate(waiting)]
    waiting = [rest[start:] for rest, start in zip(waiting, starts, strict=True)]
    under_way = [at for at in range(len(prompts)) if len(tokens[at]) < limits[at]]
    while under_way:
        segments = tuple(Segment(SeqId(at), starts[at], waiting[at], None, "last") for at in under_way)
        for at, dists in zip(under_way, engine.forward(Batch(segments)).dists, strict=True):
            starts[at] += len(waiting[at])
            dist = dists[0].within(vocab)
            token = dist.argmax()
            tokens[at].append(token)
            rows[at].append(seen(dist, token))
            waiting[at] = (token,)
        under_way = [at for at in under_way if tokens[at][-1] not in eos and len(tokens[at]) < limits[at]]
    for at in range(len(prompts)):
        engine.release(SeqId(at))
    return [(tuple(each), tuple(of)) for each, of in zip(tokens, rows, strict=True)]


def seen(dist: Dist, token: int) -> Glance:
    return Glance(*(round(each, 6) for each in glance(head(dist, HEAD), token)))


def _agreed(model: LoadedModel, behind: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[bool, ...]]:
    found: list[tuple[bool, ...]] = []
    for prompt, tokens in behind:
        rows, seq = (*prompt, *tokens[:-1]), SeqId(0)
        start = min(model.engine.begin(seq, rows, CACHED), len(prompt) - 1)
        model.engine.truncate(seq, start)
        segment = Segment(seq, start, rows[start:], None, len(tokens))
        (dists,) = model.engine.forward(Batch((segment,))).dists
        model.engine.release(seq)
        found.append(tuple(dist.argmax() == token for dist, token in zip(dists, tokens, strict=True)))
    return found


# ---- what is learnt --------------------------------------------------------------------------------------------------
SPENDS: Final[Mapping[HandoffLevel, float]] = {"quality": 0.6, "balanced": 0.3, "cheap": 0.15}
"""Share of the tokens that the larger model would write in all answers, that a level may spend."""
SIGNS: Final = Features(prompt=0, tokens=0, nats=-1, surprise=-1, doubt=-1, margin=1)
"""Signs that weights may have: a surer model has a better chance, whatever few answers say; 0: any."""
EVERY: Final = 8  # tokens between prefixes that are learnt from
RIDGE: Final = 3.0  # on weights of features of unit variance
Continued = Mapping[tuple[str, int], tuple[int, bool]]
"""By question and tokens of the device's before: tokens that the cloud then writes, and whether the whole is right."""


@dataclass(frozen=True, slots=True)
class Learnt:
    weights: Weights
    worths: Mapping[HandoffLevel, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    right: bool
    written: int  # tokens by the cloud
    read: int  # tokens by the cloud, before it writes
    at: int | None  # tokens of the device's, before; None: the cloud was not asked
    chance: float  # as it was seen last


def as_good(record: Record) -> bool:
    return record.device.right or not record.cloud.right


def looks(record: Record, weights: Weights) -> list[tuple[int, Look]]:
    """Where the answer may be handed over, as tokens of the device's before, with what is thought of it there; the end
    last, as all its tokens."""
    reading, rows = Sureness(record.prompt), record.device.rows
    found: list[tuple[int, Look]] = []
    for number, row in enumerate(rows, 1):
        reading.add(row)
        last = number == len(rows)
        if number == HELD or (last and number < HELD):
            found.append((0, reading.look(weights)))
        elif number > HELD and not last:
            found.append((number - 1, reading.look(weights)))
    return [*found, (len(rows), reading.look(weights))]


def played(record: Record, weights: Weights, worth: float, continued: Continued | None = None) -> Outcome:
    """The answer, handed over where a token is worth more than this. continued: None: what is handed over in its middle
    counts as the cloud's own."""
    points = looks(record, weights)
    for at, look in points[:-1]:
        if look.worth > worth:
            length, right = len(record.cloud.tokens), record.cloud.right
            if at and continued is not None:
                length, right = continued[record.name, at]
            return Outcome(right, length, record.prompt + at, at, look.chance)
    return Outcome(record.device.right, 0, 0, None, points[-1][1].chance)


def fit(records: Sequence[Record]) -> Learnt:
    """Weights by ridge-penalised regression over prefixes, logistic and linear, then the least worth of a token at each
    level that spends no more than its share of the cloud's tokens."""
    rows, labels, lengths, share = [], [], [], []
    for record in records:
        prefixes = _prefixes(record)
        rows += prefixes
        labels += [float(as_good(record))] * len(prefixes)
        lengths += [math.log(len(record.cloud.tokens))] * len(prefixes)
        share += [1.0 / len(prefixes)] * len(prefixes)
    features = np.array(rows)
    mean, scale = features.mean(axis=0), features.std(axis=0) + 1e-9
    scaled, shares = (features - mean) / scale, np.array(share)
    sure, length = _logistic(scaled, np.array(labels), shares), _least_squares(scaled, np.array(lengths), shares)
    agreement = sum(sum(record.agreed) / len(record.agreed) for record in records) / len(records)
    weights = Weights(_unscaled(*sure, mean, scale), _unscaled(*length, mean, scale), agreement)
    return Learnt(weights, {level: _least(records, weights, spends) for level, spends in SPENDS.items()})


def _unscaled(bias: float, found: Floats, mean: Floats, scale: Floats) -> Linear:
    of = found / scale
    return Linear(float(bias - of @ mean), Features(*map(float, of)))


def _prefixes(record: Record) -> list[Features]:
    """Features at the end of the first tokens, then every so many, and at the end."""
    reading, rows = Sureness(record.prompt), record.device.rows
    found: list[Features] = []
    for number, row in enumerate(rows, 1):
        reading.add(row)
        if number == len(rows) or (number >= HELD and (number - HELD) % EVERY == 0):
            found.append(reading.features)
    return found


def _logistic(features: Floats, labels: Floats, share: Floats) -> tuple[float, Floats]:
    """Bias and weights, by Newton's method; weights of the wrong sign are left out, and the others found anew."""
    kept = list(range(features.shape[1]))
    while True:
        bias, found = _newton(features[:, kept], labels, share)
        wrong = [at for at, weight in zip(kept, found, strict=True) if weight * SIGNS[at] < 0.0]
        if not wrong:
            weights = np.zeros(features.shape[1])
            weights[kept] = found
            return bias, weights
        kept = [at for at in kept if at not in wrong]


def _least_squares(features: Floats, values: Floats, share: Floats) -> tuple[float, Floats]:
    rows = np.column_stack([np.ones(len(features)), features])
    penalty = np.diag([1e-9, *[RIDGE] * features.shape[1]])
    found = np.linalg.solve((rows * share[:, None]).T @ rows + penalty, rows.T @ (share * values))
    return float(found[0]), np.asarray(found[1:], np.float64)


def _newton(features: Floats, labels: Floats, share: Floats) -> tuple[float, Floats]:
    rows = np.column_stack([np.ones(len(features)), features])
    penalty = np.diag([0.0, *[RIDGE] * features.shape[1]])
    found = np.zeros(rows.shape[1])
    for _ in range(50):
        chance = 1.0 / (1.0 + np.exp(-rows @ found))
        gradient = rows.T @ (share * (labels - chance)) - penalty @ found
        curvature = (rows * (share * chance * (1.0 - chance))[:, None]).T @ rows + penalty
        step = np.linalg.solve(curvature + 1e-9 * np.eye(len(found)), gradient)
        found += step
        if np.abs(step).max() < 1e-9:
            break
    return float(found[0]), found[1:]


def _least(records: Sequence[Record], weights: Weights, spends: float) -> float:
    """The least worth above which no more than this share of the cloud's tokens is handed over."""
    dearest = sorted(((max(worths_of(record, weights)), len(record.cloud.tokens)) for record in records), reverse=True)
    left = spends * sum(length for _, length in dearest)
    for worth, length in dearest:
        left -= length
        if left < 0:
            return worth
    return 0.0


def worths_of(record: Record, weights: Weights) -> list[float]:
    return [look.worth for _, look in looks(record, weights)[:-1]]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("answers", type=Path, help="file of `bench.handoff`")
    learnt = fit(load(asked.parse_args().answers))
    sure, length = _rounded(learnt.weights.sure), _rounded(learnt.weights.length)
    weights = Weights(sure, length, round(learnt.weights.agreement, 3))
    worths = {level: float(f"{worth:.3g}") for level, worth in learnt.worths.items()}
    sys.stdout.write(f"WEIGHTS: Final = {weights}\nWORTHS: Final = {worths}\n")


def _rounded(of: Linear) -> Linear:
    return Linear(round(of.bias, 4), Features(*(round(each, 4) for each in of.of)))


if __name__ == "__main__":
    main()
