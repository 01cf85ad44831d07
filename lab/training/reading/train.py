"""Train the reader: `python -m lab.training.reading.train --out DIR --data DATA --minutes 46`.

The encoder of the installed embedder with two heads; its word embeddings stay as they are, so that only the rest is
stored. AdamW, a short warm-up, then a rate that falls with the time that is left. Checkpoints hold the optimizer; a run
that was stopped goes on from its folder with the same command.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from lab.training.data_parallel import Group, flatten, gather, unflatten
from lab.training.reading.examples import Encoded, batches, encode
from lab.training.reading.notes import notes_example
from lab.training.reading.sources import cropped, draw, generated, mixture, squad
from paceline.encoder import (
    EPSILON,
    HEADS,
    LAYERS,
    POSITIONS,
    WIDTH,
    WORDS,
    installed_tokenizer,
    installed_weights,
    neighbours,
)

HEAD: Final = "heads"  # (2, WIDTH): scores of a first and of a last token; CLS scores that there is none
BATCH_TOKENS: Final = 768
MEETING: Final = 16  # steps between two averages of the weights
AHEAD: Final = 512  # examples drawn at a time and grouped by length
WARM_UP: Final = 60  # steps
_SAVE_S: Final = 240
_NEVER: Final = -1e4


def outputs(weights: Mapping[str, Tensor], texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> Tensor:
    """`paceline.encoder.outputs` with gradients: (tokens of all texts, WIDTH)."""

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], EPSILON)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed: list[Tensor] = []
        for start, end, length in spans:
            own_query, own_key, own_value = (
                x[start:end].view(-1, length, HEADS, WIDTH // HEADS).transpose(1, 2) for x in (query, key, value)
            )
            own = functional.scaled_dot_product_attention(own_query, own_key, own_value)
            mixed.append(own.transpose(1, 2).reshape(-1, WIDTH))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    spans = neighbours([len(text) for text in texts])
    ids = torch.tensor([token for text in texts for token in text])
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    kinds = weights["embeddings.token_type_embeddings.weight"]
    kind = kinds[torch.tensor([each for text in types for each in text])]
    hidden = norm(weights[WORDS][ids] + weights[POSITIONS][positions] + kind, "embeddings.LayerNorm")
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        mixed = attend(*(linear(hidden, f"{layer}.attention.self.{part}") for part in ("query", "key", "value")))
        hidden = norm(hidden + linear(mixed, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        wide = functional.gelu(linear(hidden, f"{layer}.intermediate.dense"))
        hidden = norm(hidden + linear(wide, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return hidden


def fresh(begun: Path | None = None) -> dict[str, Tensor]:
    """The encoder with new heads, or weights that an earlier run has ended with."""
    installed = {
        name: value for name, value in installed_weights().items() if name.startswith(("embeddings", "encoder"))
    }
    wanted = {name: torch.from_numpy(value.copy()) for name, value in installed.items()}
    if begun is not None:
        return wanted | {name: value.float() for name, value in load_file(begun).items()}
    return wanted | {HEAD: torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(5)) * 0.02}


def scores(weights: dict[str, Tensor], batch: Sequence[Encoded]) -> Tensor:
    """(2, batch, longest): scores of the first and the last token; only CLS and the document can be either."""
    lengths = [len(each.ids) for each in batch]
    types = [[int(at >= each.document) for at in range(len(each.ids))] for each in batch]
    hidden = outputs(weights, [each.ids for each in batch], types)
    padded = pad_sequence(list(torch.split(hidden @ weights[HEAD].T, lengths)), batch_first=True)
    at = torch.arange(max(lengths))
    document = torch.tensor([each.document for each in batch])
    can = (at == 0) | ((at >= document[:, None]) & (at < torch.tensor(lengths)[:, None] - 1))
    return padded.permute(2, 0, 1).masked_fill(~can, _NEVER)


def loss_of(weights: dict[str, Tensor], batch: Sequence[Encoded]) -> Tensor:
    """The mean of -log of the probability that the right pairs of tokens have together."""
    logs = scores(weights, batch).log_softmax(-1)
    losses = []
    for row, each in enumerate(batch):
        pairs = each.answers or ((0, 0),)
        losses.append(-torch.logsumexp(torch.stack([logs[0, row, a] + logs[1, row, b] for a, b in pairs]), 0))
    return torch.stack(losses).mean()


def share_right(weights: dict[str, Tensor], examples: Sequence[Encoded]) -> tuple[float, float]:
    """Shares of the answered and of the unanswered ones whose best pair, or none, is right."""
    right = {True: 0, False: 0}
    count = {True: 0, False: 0}
    with torch.inference_mode():
        for batch in batches(examples, BATCH_TOKENS):
            first, last = scores(weights, batch)
            for row, each in enumerate(batch):
                table = first[row][:, None] + last[row][None, :]
                table = table.masked_fill(torch.ones_like(table).triu().tril(23) == 0, _NEVER)
                table[0, 1:] = _NEVER
                best = int(table.argmax())
                pair = best // len(table), best % len(table)
                count[bool(each.answers)] += 1
                right[bool(each.answers)] += pair in (each.answers or ((0, 0),))
    return right[True] / max(1, count[True]), right[False] / max(1, count[False])


def stream(tokenizer: Tokenizer, data: Path, rng: random.Random) -> Iterator[list[Encoded]]:
    sources = list(mixture(data))
    while True:
        drawn = [encode(tokenizer, example) for example in draw(rng, sources, AHEAD)]
        grouped = batches(drawn, BATCH_TOKENS)
        rng.shuffle(grouped)
        yield from grouped


def held_out(tokenizer: Tokenizer, data: Path, count: int) -> dict[str, list[Encoded]]:
    rng = random.Random(11)
    real = squad(data, "held_out")
    kept = rng.sample(real, min(count, len(real)))
    sets = {
        "squad": [cropped(rng, each) for each in kept],
        "generated": [generated(rng, "held_out") for _ in range(count)],
        "notes": [notes_example(rng) for _ in range(count)],
    }
    return {name: [encode(tokenizer, each) for each in examples] for name, examples in sets.items()}


@dataclass(frozen=True, slots=True)
class Plan:
    """Options of a run."""

    out: Path
    data: Path
    minutes: float
    rate: float
    seed: int
    held_out: int
    begun: Path | None


class Run:
    """One process's part of a run: its own batches and optimizer; weights are averaged every few steps."""

    def __init__(self, group: Group, plan: Plan) -> None:
        self._group, self._plan = group, plan
        self._tokenizer = installed_tokenizer()
        self._weights = fresh(plan.begun)
        self._trained = {name: value.requires_grad_() for name, value in self._weights.items() if name != WORDS}
        plain = [value for value in self._trained.values() if value.ndim < 2]
        matrices = [value for value in self._trained.values() if value.ndim >= 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
        self._state = plan.out / f"state{group.rank}.safetensors"
        self._step, self._spent = 0, 0.0
        if self._state.exists():
            self._resume(load_file(self._state))
        self._begun = time.monotonic() - self._spent

    def _resume(self, kept: dict[str, Tensor]) -> None:
        step, self._spent = kept["clock"].tolist()
        self._step = int(step)
        for name, value in self._trained.items():
            value.data.copy_(kept[f"weight {name}"])
            self._optimizer.state[value] = {part: kept[f"{part} {name}"] for part in ("step", "exp_avg", "exp_avg_sq")}

    def train(self) -> None:
        plan, group = self._plan, self._group
        seed = plan.seed + 1000 * group.rank + self._step
        losses: list[float] = []
        saved = time.monotonic()
        for batch in stream(self._tokenizer, plan.data, random.Random(seed)):
            share = (time.monotonic() - self._begun) / (60 * plan.minutes)
            rate = plan.rate * min(1.0, (self._step + 1) / WARM_UP) * max(0.02, 1.0 - share)
            for each in self._optimizer.param_groups:
                each["lr"] = rate
            loss = loss_of(self._weights, batch)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            torch.nn.utils.clip_grad_norm_(list(self._trained.values()), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._step += 1
            losses.append(loss.item())
            if self._step % MEETING:
                continue
            if not self._meet(share >= 1.0):
                break
            if time.monotonic() - saved > _SAVE_S:
                self._save(losses)
                saved, losses = time.monotonic(), []
        self._save(losses)

    def _meet(self, is_over: bool) -> bool:
        """Average the weights of all processes. False once time is up for one of them."""
        vector = torch.cat([flatten({k: v.detach() for k, v in self._trained.items()}), torch.tensor([float(is_over)])])
        total = self._group.total(vector)
        mean = unflatten(total[:-1] / self._group.size, self._trained)
        for name, value in mean.items():
            self._trained[name].data.copy_(value)
        return not total[-1].item()

    def _save(self, losses: Sequence[float]) -> None:
        spent = time.monotonic() - self._begun
        kept = {"clock": torch.tensor([self._step, spent], dtype=torch.float64)}
        for name, value in self._trained.items():
            kept |= {f"{part} {name}": each for part, each in self._optimizer.state[value].items()}
            kept[f"weight {name}"] = value.detach()
        partial = self._state.with_suffix(".new")
        save_file(kept, partial)
        partial.replace(self._state)
        if self._group.rank:
            return
        halves = {name: value.detach().half().contiguous() for name, value in self._trained.items()}
        save_file(halves, self._plan.out / "model.safetensors")
        row: dict[str, object] = {"steps": self._step * self._group.size, "minutes": round(spent / 60, 1)}
        row["loss"] = round(sum(losses) / max(1, len(losses)), 3)
        if self._plan.held_out:
            for name, examples in held_out(self._tokenizer, self._plan.data, self._plan.held_out).items():
                row[name] = [round(share, 3) for share in share_right(self._weights, examples)]
        with (self._plan.out / "curve.jsonl").open("a") as curve:
            curve.write(json.dumps(row) + "\n")
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()


def work(group: Group, plan: Plan) -> None:
    Run(group, plan).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=36.0)
    parser.add_argument("--rate", type=float, default=1.5e-4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", type=int, default=0, help="held-out questions examined at every checkpoint")
    parser.add_argument("--begun", type=Path, help="weights of an earlier run, such as the shipped ones, to go on from")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(args.out, args.data, args.minutes, args.rate, args.seed, args.held_out, args.begun)
    size = sum(value.numel() for name, value in fresh().items() if name != WORDS) + 1
    gather(work, size, args.processes, plan)


if __name__ == "__main__":
    main()
