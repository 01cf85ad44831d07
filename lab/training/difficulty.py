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
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.difficulty import HEAD, HELD, Features, Glance, Sureness, Weights, glance
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
SPENDS: Final[Mapping[HandoffLevel, float]] = {"quality": 0.6, "balanced": 0.35, "cheap": 0.15}
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
    risks: Mapping[HandoffLevel, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    right: bool
    written: int  # tokens by the cloud
    read: int  # tokens by the cloud, before it writes
    at: int | None  # tokens of the device's, before; None: the cloud was not asked
    chance: float  # as it was seen last


def as_good(record: Record) -> bool:
    return record.device.right or not record.cloud.right


def chances(record: Record, weights: Weights) -> list[tuple[int, float]]:
    """Where the answer may be handed over, as tokens of the device's before, with the chance that is seen there; the
    end last, as all its tokens."""
    reading, rows = Sureness(record.prompt), record.device.rows
    found: list[tuple[int, float]] = []
    for number, row in enumerate(rows, 1):
        reading.add(row)
        last = number == len(rows)
        if number == HELD or (last and number < HELD):
            found.append((0, reading.chance(weights)))
        elif number > HELD and not last:
            found.append((number - 1, reading.chance(weights)))
    return [*found, (len(rows), reading.chance(weights))]


def played(record: Record, weights: Weights, most: float, continued: Continued | None = None) -> Outcome:
    """The answer at a level of risk. continued: None: what is handed over in its middle counts as the cloud's own."""
    points = chances(record, weights)
    for at, chance in points[:-1]:
        if 1.0 - chance > most:
            length, right = len(record.cloud.tokens), record.cloud.right
            if at and continued is not None:
                length, right = continued[record.name, at]
            return Outcome(right, length, record.prompt + at, at, chance)
    return Outcome(record.device.right, 0, 0, None, points[-1][1])


def fit(records: Sequence[Record]) -> Learnt:
    """Weights by ridge-penalised logistic regression over prefixes, then the lowest risk of each level that spends no
    more than its share of the cloud's tokens."""
    rows, labels, share = [], [], []
    for record in records:
        prefixes = _prefixes(record)
        rows += prefixes
        labels += [float(as_good(record))] * len(prefixes)
        share += [1.0 / len(prefixes)] * len(prefixes)
    features = np.array(rows)
    mean, scale = features.mean(axis=0), features.std(axis=0) + 1e-9
    bias, found = _logistic((features - mean) / scale, np.array(labels), np.array(share))
    of = found / scale
    agreement = sum(sum(record.agreed) / len(record.agreed) for record in records) / len(records)
    weights = Weights(float(bias - of @ mean), Features(*map(float, of)), agreement)
    return Learnt(weights, {level: _most(records, weights, spends) for level, spends in SPENDS.items()})


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


def _most(records: Sequence[Record], weights: Weights, spends: float) -> float:
    """The lowest risk above which no more than this share of the cloud's tokens is handed over."""
    worst = sorted(((max(risks_of(record, weights)), len(record.cloud.tokens)) for record in records), reverse=True)
    left = spends * sum(length for _, length in worst)
    for risk, length in worst:
        left -= length
        if left < 0:
            return risk
    return 0.0


def risks_of(record: Record, weights: Weights) -> list[float]:
    return [1.0 - chance for _, chance in chances(record, weights)[:-1]]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("answers", type=Path, help="file of `bench.handoff`")
    learnt = fit(load(asked.parse_args().answers))
    weights = learnt.weights
    rounded = Weights(
        round(weights.bias, 4),
        Features(*(round(each, 4) for each in weights.of)),
        round(weights.agreement, 3),
    )
    risks = {level: round(risk, 3) for level, risk in learnt.risks.items()}
    sys.stdout.write(f"WEIGHTS: Final = {rounded}\nRISKS: Final = {risks}\n")


if __name__ == "__main__":
    main()
