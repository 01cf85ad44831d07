"""Train the reader, in two steps:

    python -m lab.training.reading.encode --data DATA --out DIR
    python -m lab.training.reading.train --examples DIR --out RUN --seconds 150

The first makes token ids of all examples, and needs the installed embedder; the second does not, and takes a GPU where
there is one. The encoder's word embeddings stay as they are, so that only the rest is stored.

The loss of an example is that of its first and last token, with CLS for none (Devlin et al. 2019, section 4.3). The
examples of one question also share one normalisation (Clark and Gardner 2018, section 3.3): the odds of all pairs of
tokens of all its passages against none add up, since in serving they compete. A student has 0.7 of its teachers' mean
distributions in place of that part of the loss. The weights kept are a moving average of those of the steps.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from lab.training.reading.examples import Encodings, Ints
from paceline.encoder import EPSILON, HEADS, LAYERS, POSITIONS, WIDTH, WORDS

HEAD: Final = "heads"  # (2, WIDTH): scores of a first and of a last token; CLS scores that there is none
FOLDERS, MIXTURE, HELD_OUT = "folders.npz", "mixture.npz", "held_out.npz"  # of the folder of encoded examples
BEGUN: Final = "begun.safetensors"  # the weights that training begins with, those of the words among them
MOST_RIVALS: Final = 4  # passages of a question in a batch that do not answer it
DROPPED: Final = 0.1  # of the encoder's inner values
WARM_UP: Final = 200  # steps
SHARED: Final = 0.5  # weight of the shared normalisation
TAUGHT: Final = 0.7  # weight of what teachers say
AVERAGED: Final = 0.999  # of the moving average, a step
_POOL: Final = 4096  # examples drawn at a time and grouped by length
_LONGEST_SPAN: Final = 24  # tokens, as in serving
_NEVER: Final = -1e4
_TELL_S: Final = 15

Weights = dict[str, Tensor]


# ---- the encoder, with gradients ------------------------------------------------------------------------------------
def outputs(weights: Mapping[str, Tensor], ids: Tensor, lengths: Tensor, documents: Tensor, dropped: float) -> Tensor:
    """`paceline.encoder.outputs` of padded inputs: (inputs, longest, WIDTH). documents: where each input's begins."""

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x.float(), (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], EPSILON)

    def drop(x: Tensor) -> Tensor:
        return functional.dropout(x, dropped, training=dropped > 0)

    inputs, longest = ids.shape
    at = torch.arange(longest, device=ids.device)
    kinds = functional.embedding((at >= documents[:, None]).long(), weights["embeddings.token_type_embeddings.weight"])
    summed = functional.embedding(ids, weights[WORDS]) + weights[POSITIONS][:longest] + kinds
    hidden = drop(norm(summed, "embeddings.LayerNorm"))
    seen = (at < lengths[:, None])[:, None, None, :]
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        parts = (linear(hidden, f"{layer}.attention.self.{part}") for part in ("query", "key", "value"))
        query, key, value = (part.view(inputs, longest, HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropped)
        mixed = linear(mixed.transpose(1, 2).reshape(inputs, longest, WIDTH), f"{layer}.attention.output.dense")
        hidden = norm(hidden + drop(mixed), f"{layer}.attention.output.LayerNorm")
        wide = functional.gelu(linear(hidden, f"{layer}.intermediate.dense"))
        hidden = norm(hidden + drop(linear(wide, f"{layer}.output.dense")), f"{layer}.output.LayerNorm")
    return hidden


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded inputs. answers: see `Encodings.padded`. questions: of each input the number of its question."""

    ids: Tensor
    lengths: Tensor
    documents: Tensor
    answers: Tensor
    questions: Tensor

    @staticmethod
    def of(examples: Encodings, rows: Ints, device: torch.device, *, together: bool) -> Batch:
        """together: the rows of one question share their normalisation."""
        ids, answers = examples.padded(rows)
        questions = np.unique(examples.groups[rows], return_inverse=True)[1] if together else np.arange(len(rows))
        arrays = (ids, examples.lengths[rows], examples.documents[rows], answers, questions)
        return Batch(*(torch.from_numpy(np.asarray(each, np.int64)).to(device) for each in arrays))


def scores(weights: Mapping[str, Tensor], batch: Batch, dropped: float = 0.0) -> Tensor:
    """(2, inputs, longest): of the first and the last token; only CLS and the document can be either."""
    half = torch.autocast("cuda", dtype=torch.bfloat16) if batch.ids.is_cuda else nullcontext()
    with half:
        hidden = outputs(weights, batch.ids, batch.lengths, batch.documents, dropped)
    at = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    can = (at == 0) | ((at >= batch.documents[:, None]) & (at < batch.lengths[:, None] - 1))
    return (hidden @ weights[HEAD].T).permute(2, 0, 1).masked_fill(~can, _NEVER)


# ---- the loss -------------------------------------------------------------------------------------------------------
def loss_of(scored: Tensor, batch: Batch, taught: Tensor | None = None) -> Tensor:
    """taught: (2, inputs, longest) mean probabilities of teachers."""
    logs = scored.log_softmax(-1)
    alone = -_summed(logs, batch.answers).mean()
    loss = (1 - SHARED) * alone + SHARED * shared_loss(scored, batch).mean()
    if taught is None:
        return loss
    return (1 - TAUGHT) * loss - TAUGHT * (taught * logs.clamp_min(-50)).sum(-1).mean() * 2


def shared_loss(scored: Tensor, batch: Batch) -> Tensor:
    """(questions,) -log of the share that the right spans, or none, have of the odds of all pairs of tokens, and 1."""
    none = scored[:, :, 0].sum(0)
    spans = scored.clone()
    spans[:, :, 0] = _NEVER
    every = spans.logsumexp(-1).sum(0) - none
    is_answer = batch.answers[:, :, 0] > 0
    answers = batch.answers.where(is_answer[:, :, None], -1)
    right = torch.where(is_answer.any(1), _summed(scored, answers) - none, _NEVER)
    asked = torch.zeros(int(batch.questions.max()) + 1, device=scored.device)
    top = asked.scatter_reduce(0, batch.questions, every.detach(), "amax")  # at least 0, the log odds of none

    def total(values: Tensor) -> Tensor:
        return asked.index_add(0, batch.questions, torch.exp(values - top[batch.questions]))

    whole = torch.log(total(every) + torch.exp(-top))
    is_answered = asked.index_add(0, batch.questions, is_answer.any(1).float()) > 0
    return whole - torch.where(is_answered, torch.log(total(right).clamp_min(1e-30)), -top)


def _summed(values: Tensor, answers: Tensor) -> Tensor:
    """(inputs,) log of the sum over a row's answers; values of (2, inputs, longest)."""
    pairs = sum(values[end].gather(1, answers[:, :, end].clamp_min(0)) for end in (0, 1))
    assert isinstance(pairs, Tensor)
    return pairs.masked_fill(answers[:, :, 0] < 0, -1e9).logsumexp(1)


# ---- batches --------------------------------------------------------------------------------------------------------
def drawn(examples: Encodings, rng: np.random.Generator, *, together: bool) -> Iterator[Ints]:
    """Rows that stay in one batch, again and again in another order. together: of a question one or two that answer and
    one to `MOST_RIVALS` that do not; else each row alone, of those that do not answer at most as many as of others."""
    order = np.argsort(examples.groups, kind="stable")
    questions = np.split(order, np.flatnonzero(np.diff(examples.groups[order])) + 1)
    answering, silent = (np.flatnonzero(is_so) for is_so in (examples.counts > 0, examples.counts == 0))
    while True:
        if not together:
            kept = rng.permutation(silent)[: len(answering)]
            yield from rng.permutation(np.concatenate([answering, kept]))[:, None]
            continue
        for at in rng.permutation(len(questions)):
            rows = questions[at]
            parts = [(rows[examples.counts[rows] > 0], 2), (rows[examples.counts[rows] == 0], MOST_RIVALS)]
            yield np.concatenate([rng.permutation(part)[: rng.integers(1, most + 1)] for part, most in parts])


def stream(
    sources: Sequence[tuple[Encodings, float, bool]], rng: np.random.Generator, tokens: int, device: torch.device
) -> Iterator[Batch]:
    """sources: examples, their share, and whether those of a question stay together. tokens: of a padded batch."""
    draws = [drawn(examples, rng, together=together) for examples, _, together in sources]
    while True:
        found: list[tuple[int, Ints]] = []
        for number, (examples, share, _) in enumerate(sources):
            pool: list[Ints] = []
            while sum(map(len, pool)) < share * _POOL:
                pool.append(next(draws[number]))
            found += [(number, rows) for rows in _packed(pool, examples.lengths, tokens)]
        for at in rng.permutation(len(found)):
            number, rows = found[at]
            yield Batch.of(sources[number][0], rows, device, together=sources[number][2])


def _packed(pool: list[Ints], lengths: Ints, tokens: int) -> Iterator[Ints]:
    batch: list[Ints] = []
    for rows in sorted(pool, key=lambda each: int(lengths[each].max())):  # the last is the longest so far
        if batch and (sum(map(len, batch)) + len(rows)) * int(lengths[rows].max()) > tokens:
            yield np.concatenate(batch)
            batch = []
        batch.append(rows)
    if batch:
        yield np.concatenate(batch)


# ---- the run --------------------------------------------------------------------------------------------------------
def share_right(weights: Mapping[str, Tensor], examples: Encodings, device: torch.device) -> dict[str, float]:
    """Shares of questions that a passage answers whose best span of all passages is right, or overlaps a right one; of
    pairs of a passage that answers and one that does not, those whose first has the better best span."""
    best: dict[int, list[tuple[float, bool, bool, bool]]] = {}
    starts = np.cumsum(examples.counts) - examples.counts
    for rows in np.array_split(np.argsort(examples.lengths), max(1, len(examples) // 128)):
        batch = Batch.of(examples, rows, device, together=False)
        with torch.inference_mode():
            first, last = scores(weights, batch)
            pairs = first[:, :, None] + last[:, None, :]
            longest = pairs.shape[-1]
            can = torch.ones(longest, longest, dtype=torch.bool, device=device).triu().tril(_LONGEST_SPAN - 1)
            can[0] = False
            odds, places = pairs.masked_fill(~can, 2 * _NEVER).flatten(1).max(1)
            odds -= first[:, 0] + last[:, 0]
        for row, score, place in zip(rows.tolist(), odds.tolist(), places.tolist(), strict=True):
            a, b = divmod(place, longest)
            right = examples.answers[starts[row] : starts[row] + examples.counts[row]].tolist()
            overlaps = any(a <= end and begin <= b for begin, end in right)
            found = (score, [a, b] in right, overlaps, bool(right))
            best.setdefault(int(examples.groups[row]), []).append(found)
    answered = [max(found) for found in best.values() if any(each[3] for each in found)]
    passages = [each for found in best.values() for each in found]
    known, silent = (np.array([each[0] for each in passages if each[3] == is_known]) for is_known in (True, False))
    above = np.searchsorted(np.sort(silent), known).mean() / max(1, len(silent))
    exact, overlapping = (float(np.mean([each[i] for each in answered])) for i in (1, 2))
    return {"exact": round(exact, 4), "overlapping": round(overlapping, 4), "answering above": round(float(above), 4)}


@dataclass(frozen=True, slots=True)
class Plan:
    """Options of a run."""

    examples: Path
    out: Path
    seconds: float
    rate: float
    tokens: int
    mixture: float
    seed: int
    teachers: Sequence[Path]
    begun: Path | None


class Run:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(plan.seed)
        self._weights = self._load(plan.examples / BEGUN)
        if plan.begun is not None:
            self._weights |= self._load(plan.begun)
        self._teachers = [{WORDS: self._weights[WORDS]} | self._load(each) for each in plan.teachers]
        self._trained = {name: each.requires_grad_() for name, each in self._weights.items() if name != WORDS}
        self._average = {name: each.detach().clone() for name, each in self._trained.items()}
        matrices = [each for each in self._trained.values() if each.ndim > 1]
        plain = [each for each in self._trained.values() if each.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))

    def _load(self, file: Path) -> Weights:
        return {name: each.float().to(self._device) for name, each in load_file(file).items()}

    def train(self) -> None:
        plan, step, losses = self._plan, 0, list[Tensor]()
        begun = told = time.monotonic()
        for batch in self._ahead():
            share = (time.monotonic() - begun) / plan.seconds
            if share >= 1:
                break
            for group in self._optimizer.param_groups:
                group["lr"] = plan.rate * min(1.0, (step + 1) / WARM_UP) * max(0.01, 1 - share)
            taught = None
            if self._teachers:
                with torch.no_grad():
                    said = [scores(each, batch).softmax(-1) for each in self._teachers]
                    taught = torch.stack(said).mean(0)
            loss = loss_of(scores(self._weights, batch, DROPPED), batch, taught)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            torch.nn.utils.clip_grad_norm_(list(self._trained.values()), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            step += 1
            with torch.no_grad():
                kept = min(AVERAGED, step / (step + 50))
                for name, each in self._average.items():
                    each.lerp_(self._trained[name], 1 - kept)
            losses.append(loss.detach())
            if time.monotonic() - told > _TELL_S:
                self._tell({"step": step, "loss": round(float(torch.stack(losses).mean()), 4)})
                told, losses = time.monotonic(), []
        final = self._weights | self._average
        halves = {name: each.half().cpu().contiguous() for name, each in self._average.items()}
        save_file(halves, plan.out / "model.safetensors")
        held_out = Encodings.load(plan.examples / HELD_OUT)
        self._tell({"step": step, **share_right(final, held_out, self._device)})

    def _ahead(self) -> Iterator[Batch]:
        """Batches, made beside the steps."""
        plan, made = self._plan, queue.Queue[Batch | Exception](maxsize=16)
        folders, mixture = (Encodings.load(plan.examples / name) for name in (FOLDERS, MIXTURE))
        sources = ((folders, 1 - plan.mixture, True), (mixture, plan.mixture, False))
        source = stream(sources, np.random.default_rng(plan.seed), plan.tokens, self._device)

        def make() -> None:
            try:
                for each in source:
                    made.put(each)
            except Exception as error:  # whatever it is, the steps must not wait for ever
                made.put(error)

        threading.Thread(target=make, daemon=True).start()
        while True:
            if isinstance(batch := made.get(), Exception):
                raise batch
            yield batch

    def _tell(self, row: Mapping[str, float]) -> None:
        with (self._plan.out / "curve.jsonl").open("a") as curve:
            curve.write(json.dumps(row) + "\n")
        sys.stdout.write(f"{self._plan.out} {row}\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--tokens", type=int, default=12_288, help="of a padded batch")
    parser.add_argument("--mixture", type=float, default=0.3, help="share of examples that are not of folders")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--teachers", type=Path, nargs="*", default=(), help="weights of earlier runs to learn from")
    parser.add_argument("--begun", type=Path, help="weights of an earlier run to go on from")
    plan = Plan(**vars(parser.parse_args()))
    plan.out.mkdir(parents=True, exist_ok=True)
    Run(plan).train()


if __name__ == "__main__":
    main()
