"""Train the demo pair: `python -m lab.training.train --out DIR [--data DIR] [--minutes N] [--stage
device|cloud]`.

The device model starts from random weights; the cloud model is grown from the trained device model.
"""

import argparse
import json
import math
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from lab.training.architecture import Reader, Shape, load_model, save_model
from lab.training.batches import Batch, Example, Weights, batches, encode_all, repeats
from lab.training.data_parallel import Group, gather
from lab.training.model_growth import grow
from lab.training.optimizer import MuonAdam
from lab.training.texts.corpus import Conversation, converse, document_turn, draw_facts, write_document
from lab.training.texts.squad import Squad
from lab.training.vocabulary import corpus_texts, save_tokenizer, train_tokenizer

BACKWARD_SHARE = 0.4  # without it, values that precede their entity are learnt far later than the rest
EARLY, LATE = Weights(), Weights(prompt=0.02, missing=0.05)
RIVALS_SHARE = 0.6  # a document of eight facts then has a plausible wrong answer to nearly every question


@dataclass(frozen=True, slots=True)
class Lesson:
    """Parameters of the corpus at one point of the curriculum."""

    facts: int
    turns: int
    filler: float
    repeats: float
    tokens: int
    squad: float = 0.12  # share of real text
    weights: Weights = EARLY


def lesson(stage: str, progress: float) -> Lesson:
    """The curriculum: short documents and plain repetition first, since copying must be learnt before reading.

    The last part is reading alone: by then tokens that cannot be predicted are most of the loss, and nearly all noise.
    """
    if stage == "cloud" or progress >= 0.5:
        return Lesson(8, 7, 0.5, 0.0, 8192, 0.05, LATE)
    if progress < 0.05:
        return Lesson(2, 2, 0.1, 0.4 * (1 - progress / 0.05) + 0.1, 4096)
    if progress < 0.15:
        return Lesson(3, 3, 0.15, 0.1, 4096)
    if progress < 0.3:
        return Lesson(5, 4, 0.3, 0.03, 8192)
    return Lesson(8, 7, 0.5, 0.0, 8192)


@dataclass(slots=True)
class Source:
    """Draw examples for the current lesson."""

    tokenizer: Tokenizer
    rng: random.Random
    squad: Squad | None
    lesson: Lesson = field(default_factory=lambda: lesson("device", 0.0))

    def _conversation(self, now: Lesson) -> Conversation:
        # Real text is mixed in after the lessons of short documents.
        if self.squad is not None and now.facts >= 5 and self.rng.random() < now.squad:
            return self.squad.converse(self.rng)
        return converse(self.rng, "train", now.facts, now.turns, now.filler, BACKWARD_SHARE, RIVALS_SHARE)

    def draw(self, count: int) -> list[Example]:
        now = self.lesson
        copies = round(count * now.repeats)
        examples = encode_all(self.tokenizer, [self._conversation(now) for _ in range(count - copies)], now.weights)
        return examples + [repeats(self.rng, self.tokenizer.get_vocab_size(), 40) for _ in range(copies)]


def loss_of(model: Reader, batch: Batch) -> torch.Tensor:
    hidden = model(batch.ids).flatten(0, 1).index_select(0, batch.where)
    losses = functional.cross_entropy(model.logits(hidden).float(), batch.targets, reduction="none")
    return (losses * batch.weights).sum() / batch.weights.sum()


@torch.no_grad()
def exact_match(model: Reader, examples: list[Example]) -> float:
    """The share of answers that greedy decoding reproduces exactly, computed with one forward pass each."""
    right = 0
    for example in examples:
        ids = torch.tensor([example.ids])
        begin = next(i for i, weight in enumerate(example.weights) if weight == 1.0)
        hidden = model(ids[:, :-1])[0, begin - 1 :]
        right += bool((model.logits(hidden).argmax(-1) == ids[0, begin:]).all())
    return right / len(examples)


def held_out_examples(tokenizer: Tokenizer, count: int, seed: int = 1) -> list[Example]:
    """One question to each of `count` documents of held-out names, for facts that the documents state."""
    rng = random.Random(seed)
    conversations: list[Conversation] = []
    while len(conversations) < count:
        facts = draw_facts(rng, "held_out", rng.randint(1, 8))
        turn = document_turn(rng, "held_out", facts)
        if turn.values and not turn.missing:
            conversations.append(Conversation(write_document(rng, "held_out", facts, 0.3), [turn]))
    return encode_all(tokenizer, conversations)


def schedule(progress: float, warm: float = 0.01, hold: float = 0.45) -> float:
    """Factor of the learning rates: linear warm-up, constant, then linear decay to zero."""
    if progress < warm:
        return max(0.05, progress / warm)
    return 1.0 if progress < hold else max(0.0, (1 - progress) / (1 - hold))


@dataclass(slots=True)
class Trainer:
    """A training run: the model, its output folder and its duration."""

    model: Reader
    source: Source
    out: Path
    stage: str
    minutes: float
    group: Group
    begin: float = 0.0
    rate: float = 1.0
    curve: list[dict[str, float]] = field(default_factory=list)

    def run(self) -> None:
        optimizer = MuonAdam(self.model, self.group)
        first = self.group.rank == 0
        shadow = Reader(self.model.shape).to(torch.bfloat16)
        examples = held_out_examples(self.source.tokenizer, 120) if first else []
        started, step, tokens, recent = time.monotonic(), 0, 0, 0.0
        stream, tokens_a_batch = None, 0
        while (progress := self._progress(started)) < 1:
            self.source.lesson = lesson(self.stage, progress)
            if stream is None or tokens_a_batch != self.source.lesson.tokens:
                tokens_a_batch = self.source.lesson.tokens
                stream = batches(self.source.draw, self.source.rng, tokens_a_batch // self.group.size, 1024)
            batch = next(stream)
            loss = loss_of(self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = optimizer.step(self.rate * schedule(progress) * min(1.0, (step + 1) / 40))
            step, tokens = step + 1, tokens + batch.ids.numel() * self.group.size
            recent = loss.item() if step == 1 else recent + 0.05 * (loss.item() - recent)
            if not math.isfinite(recent):
                raise RuntimeError("the loss is not finite any more; train with smaller rates")
            wall = time.monotonic() - started
            if first and step % 25 == 0:
                _log(f"{step} loss {recent:.3f} norm {norm:.2f} tok/s {tokens / wall:.0f} wall {wall:.0f}")
            if first and step % 200 == 0:
                self._check(optimizer, shadow, examples, step, tokens, wall, recent)
        if first:
            self._check(optimizer, shadow, examples, step, tokens, time.monotonic() - started, recent)

    def _progress(self, started: float) -> float:
        """The finished share of the run, by the first process's clock, so that all processes stop at the same step."""
        mine = self.begin + (1 - self.begin) * (time.monotonic() - started) / (self.minutes * 60)
        return float(self.group.total(torch.tensor([mine if self.group.rank == 0 else 0.0])))

    def _check(self, optimizer: MuonAdam, shadow: Reader, examples: list[Example], *figures: float) -> None:
        shadow.load_state_dict(optimizer.average)
        step, tokens, wall, loss = figures
        match = exact_match(shadow, examples)
        point = {"step": step, "tokens": tokens, "wall_s": round(wall, 1), "loss": round(loss, 4), "held_out": match}
        self.curve.append(point)
        _log(f"{self.stage} {json.dumps(point)}")
        save_model(self.out, self.model.shape, optimizer.average)
        (self.out.parent / f"curve_{self.stage}.json").write_text(json.dumps(self.curve) + "\n")


def _log(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def work(group: Group, args: argparse.Namespace, tokenizer_path: Path, start: Path | None) -> None:
    """Train in one process of a run."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    rng = random.Random(f"{args.seed} {args.stage} {group.rank} {args.begin}")
    if start is None:
        model = Reader(Shape())
        model.initialise(args.seed)
    else:
        model = load_model(start)
        model = grow(model) if args.stage == "cloud" and not args.start else model
    source = Source(tokenizer, rng, Squad(args.data, "train") if args.data else None)
    trainer = Trainer(model.to(torch.bfloat16), source, args.out / args.stage, args.stage, args.minutes, group)
    trainer.begin, trainer.rate = args.begin, args.rate
    trainer.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets device/ and cloud/")
    parser.add_argument("--data", type=Path, help="folder with squad/: mixes real questions in")
    parser.add_argument("--minutes", type=float, default=55.0)
    parser.add_argument("--stage", choices=("device", "cloud"), default="device")
    parser.add_argument("--start", type=Path, help="go on from the model in this folder")
    parser.add_argument("--begin", type=float, default=0.0, help="the share of the curriculum already done")
    parser.add_argument("--rate", type=float, default=1.0, help="multiplies all learning rates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    out, device = args.out / args.stage, args.out / "device"
    start: Path | None = args.start or (device if args.stage == "cloud" else None)
    if start is None:
        texts = list(corpus_texts(random.Random(args.seed), 6000))
        if args.data:
            texts += [text for text, _ in Squad(args.data, "train").items] * 2
        tokenizer = train_tokenizer(texts)
    else:
        tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    save_tokenizer(tokenizer, out)
    gather(work, 16_000_000, args.processes, args, out / "tokenizer.json", start)


if __name__ == "__main__":
    main()
