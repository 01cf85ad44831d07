"""`paceline bench handoff`: which answers a small model may write alone, and what that costs in right ones.

200 questions, 50 each of SQuAD and HotpotQA (with the paragraph, or the three best of ten, in the message), GSM8K and
the notes of `questions/notes.json` (the two best in the message). Both models answer each of them greedily, once; an
answer is right if an accepted text stands in it as whole words, of GSM8K if its last number is the right one. What the
device had written when it became unsure is then continued by the cloud's model. Answers are kept in a file of the cache
(or that of PACELINE_HANDOFF_ANSWERS), so that a run that was cut goes on.

Nothing is fitted on what is reported: the weights of the score, and the thresholds, are learnt anew on four fifths of
the questions for each fifth.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from lab.training.difficulty import (
    SPENDS,
    Continued,
    Learnt,
    Outcome,
    Question,
    Record,
    as_good,
    batched,
    collect,
    fit,
    load,
    looks,
    mixed,
    played,
    prompt_of,
    text_of,
    worths_of,
    write,
)
from lab.training.texts import squad
from lab.training.texts.squad import normal_form
from paceline.core.side import SIDES, HandoffLevel
from paceline.engine.base import LoadedModel
from paceline.errors import ConfigError
from paceline.rag.embedder import Embedder, load_embedder

from .bootstrap import Estimate, estimate, share_of
from .findings import claimed
from .models import KEPT as KEPT_MODELS
from .notes import SET
from .notes import load as load_notes
from .plots import lines
from .report import Options, Report

NAME = "handoff"
SUMMARY = "what a small model may answer alone, and what that costs in right answers"
MODELS: Final = True
FEW, MANY = 4, 50  # questions of each kind
SHORT, LONG = 64, 240  # tokens of an answer at most; LONG: of one that reckons
PARAGRAPHS, NOTES = 3, 2  # in a message
BRIEFLY: Final = "Work it out step by step, one short line a step, and end with the number."  # else most run on
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_YES_OR_NO: Final = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_UNNAMED: Final = re.compile(r"[^\w.]+")
T = TypeVar("T")


def kinds(data: Path, embedder: Embedder, count: int = MANY) -> Mapping[str, Sequence[Question]]:
    """Questions by kind."""
    return {
        "SQuAD": list(_squad(data, count)),
        "GSM8K": list(_gsm8k(data, count)),
        "HotpotQA": list(_hotpot(data, embedder, count)),
        "own notes": list(_notes(embedder, count)),
    }


def _squad(data: Path, count: int) -> Iterator[Question]:
    texts = {each["pid"]: each["text"] for each in squad.records(data / "squad" / "paragraphs.jsonl.gz")}
    asked = [each for each in squad.records(data / "squad" / "questions.jsonl.gz") if each["answers"]]
    for each in _spread(asked, count):
        text = f"{texts[each['pid']]}\n\n{each['question'].strip()}"
        yield Question(each["id"], "SQuAD", text, SHORT, partial(stands, [each["answers"]]))


def _hotpot(data: Path, embedder: Embedder, count: int) -> Iterator[Question]:
    for each in _spread(squad.records(data / "hotpotqa" / "hotpotqa.jsonl.gz"), count):
        paragraphs = [f"{one['title']}: {one['text']}" for one in each["context"]]
        best = _best(embedder, each["question"], paragraphs, PARAGRAPHS)
        is_right: Callable[[str], bool] = partial(stands, [[each["answer"]]])
        if each["answer"] in ("yes", "no"):
            is_right = partial(_says, each["answer"])
        yield Question(each["id"], "HotpotQA", "\n\n".join([*best, each["question"]]), SHORT, is_right)


def _gsm8k(data: Path, count: int) -> Iterator[Question]:
    for each in _spread(squad.records(data / "gsm8k" / "test.jsonl"), count):
        text = f"{each['question']}\n\n{BRIEFLY}"
        yield Question(each["id"], "GSM8K", text, LONG, partial(_reckons, each["answer"]))


def _notes(embedder: Embedder, count: int) -> Iterator[Question]:
    documents, asked = load_notes(SET)
    texts = [f"{each.name}: {each.text}" for each in documents]
    for at, each in enumerate(_spread([one for one in asked if one.answers], count)):
        text = "\n\n".join([*_best(embedder, each.text, texts, NOTES), each.text])
        yield Question(f"notes_{at}", "own notes", text, SHORT, partial(stands, each.answers))


def _best(embedder: Embedder, question: str, texts: Sequence[str], count: int) -> list[str]:
    """The texts that are nearest to the question, in their own order."""
    vectors = embedder.embed([question, *texts])
    scores = (vectors[1:] @ vectors[0]).tolist()
    best = sorted(range(len(texts)), key=lambda at: -scores[at])[:count]
    return [texts[at] for at in sorted(best)]


def stands(facts: Sequence[Sequence[str]], text: str) -> bool:
    """True if an accepted text of each fact stands in the answer as whole words."""
    said = f" {normal_form(text)} "
    return all(any(f" {normal_form(each)} " in said for each in texts) for texts in facts)


def _says(word: str, text: str) -> bool:
    found = _YES_OR_NO.search(text)
    return found is not None and found.group().lower() == word


def _reckons(number: str, text: str) -> bool:
    found = _NUMBER.findall(text)
    return bool(found) and float(found[-1].replace(",", "")) == float(number.replace(",", ""))


def _spread(items: Sequence[T], count: int) -> Sequence[T]:
    """As many of them at most, evenly."""
    number = min(count, len(items))
    return [items[at * len(items) // number] for at in range(number)]


# ---- what is reported ------------------------------------------------------------------------------------------------
FOLDS: Final = 5
LEVELS: Final[tuple[HandoffLevel, ...]] = ("quality", "balanced", "cheap")
STEPS: Final = 6  # thresholds of the curve
BINS: Final = 5  # of the calibration
RESAMPLES: Final = 1000
KEPT, MOST_TOKENS = 0.95, 0.4  # aims of `balanced`


def run(options: Options) -> Report:
    if options.models is None or options.data is None:
        raise ConfigError("bench handoff asks two real models questions of published sets: give --models and --data.")
    usual = KEPT_MODELS.parent / f"handoff-{_name(options.models.label)}.jsonl"
    file = Path(os.environ.get("PACELINE_HANDOFF_ANSWERS", usual))
    file.parent.mkdir(parents=True, exist_ok=True)
    models = {side: options.models.load(side) for side in SIDES}
    asked = [*mixed(kinds(options.data, load_embedder("minilm"), FEW if options.quick else MANY))]
    collect(models, asked, file)
    known = {record.name: record for record in load(file)}
    records = [known[each.name] for each in asked]
    chosen = folds(records)
    continued = go_on(models["cloud"], asked, wanted(records, chosen), file.with_suffix(".continued"))
    return reported(records, chosen, continued, options.models.label, quick=options.quick)


def folds(records: Sequence[Record]) -> list[Learnt]:
    """For each record what is learnt of those outside its fold; a fold has every kind alike."""
    learnt = [fit([each for at, each in enumerate(records) if at % FOLDS != fold]) for fold in range(FOLDS)]
    return [learnt[at % FOLDS] for at in range(len(records))]


def thresholds(records: Sequence[Record], learnt: Sequence[Learnt]) -> list[float]:
    """Worths between which as many questions change who ends them."""
    worths = sorted(max(worths_of(record, of.weights)) for record, of in zip(records, learnt, strict=True))
    return [worths[at * (len(worths) - 1) // STEPS] for at in range(STEPS + 1)]


def wanted(records: Sequence[Record], learnt: Sequence[Learnt]) -> dict[str, set[int]]:
    """Where answers are handed over in their middle, by question, at any threshold that is reported."""
    found: dict[str, set[int]] = {}
    curve = thresholds(records, learnt)
    for record, of in zip(records, learnt, strict=True):
        for worth in (*of.worths.values(), *curve):
            if at := played(record, of.weights, worth).at:
                found.setdefault(record.name, set()).add(at)
    return found


def go_on(
    cloud: LoadedModel, asked: Sequence[Question], places: Mapping[str, set[int]], file: Path
) -> dict[tuple[str, int], tuple[int, bool]]:
    """What the cloud's model writes behind the device's tokens; kept in the file."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    found = {(name, at): (length, right) for name, at, length, right in map(json.loads, lines)}
    begun = {record.name: record.device.tokens for record in load(file.with_suffix(".jsonl"))}
    missing = [(each, at) for each in asked for at in sorted(places.get(each.name, ())) if (each.name, at) not in found]
    with file.open("a", encoding="utf-8") as kept:
        for group in batched(missing):
            prompts = [prompt_of(cloud, each) for each, _ in group]
            before = [begun[each.name][:at] for each, at in group]
            for (each, at), (tokens, _) in zip(
                group, write(cloud, prompts, [e.limit for e, _ in group], before), strict=True
            ):
                found[each.name, at] = len(tokens) - at, each.is_right(text_of(cloud, tokens))
                kept.write(json.dumps([each.name, at, *found[each.name, at]]) + "\n")
            kept.flush()
    return found


def reported(
    records: Sequence[Record], learnt: Sequence[Learnt], continued: Continued, label: str, *, quick: bool
) -> Report:
    pairs = list(zip(records, learnt, strict=True))
    cloud = [Outcome(each.cloud.right, len(each.cloud.tokens), each.prompt, 0, 0.0) for each in records]
    device = [Outcome(each.device.right, 0, 0, None, 0.0) for each in records]
    better = max(cloud, device, key=lambda of: sum(each.right for each in of))
    ways: dict[str, list[Outcome]] = {"always (cloud)": cloud, "never (device)": device}
    for level in LEVELS:
        ways[level] = [played(each, of.weights, of.worths[level], continued) for each, of in pairs]
    curve = {
        f"risk {1000 * worth:.2f} a 1,000 tokens": [played(each, of.weights, worth, continued) for each, of in pairs]
        for worth in thresholds(records, learnt)
    }
    best = [cloud[at] if each.cloud.right > each.device.right else device[at] for at, each in enumerate(records)]
    ways["best choice, in hindsight"] = best
    rows = [_row("way", name, of, better, cloud, device) for name, of in ways.items()]
    rows += [_row("curve", name, of, better, cloud, device) for name, of in curve.items()]
    for kind in dict.fromkeys(each.kind for each in records):
        among = [at for at, each in enumerate(records) if each.kind == kind]
        for name in ("always (cloud)", "never (device)", "balanced"):
            rows.append({"part": "kind", "way": f"{kind}, {name}", **_sums([ways[name][at] for at in among])})
    chances = [looks(each, of.weights)[0][1].chance for each, of in pairs]  # at the first look
    good = [as_good(each) for each in records]
    rows += calibration(chances, good)
    balanced = ways["balanced"]
    off = estimate(len(records), partial(_miscalibration, chances, good), RESAMPLES)
    claims = (
        claimed("handoff.kept", _share(balanced, better, "right"), KEPT, "higher"),
        claimed("handoff.cloud_tokens", _share(balanced, cloud, "written"), MOST_TOKENS, "lower"),
        claimed("handoff.cloud_reads", _share(balanced, cloud, "read"), None, "lower"),
        claimed("handoff.beyond_random", _beyond(balanced, cloud, device), None, "higher"),
        claimed("handoff.calibration", off, None, "lower"),
    )
    told = {
        "models": label,
        "temperature": 0.0,
        "answers": f"at most {SHORT} tokens, GSM8K {LONG}; numbers of llama.cpp or torch, side by side",
        "questions": len(records),
        "learnt": f"on the other {FOLDS - 1} of {FOLDS} folds: weights, and thresholds",
        "spends": f"of the cloud's tokens, where that is learnt: {dict(SPENDS)}",
        "interval_90": "resampled questions",
        "quick": quick,
    }
    return Report(NAME, told, rows, claims)


def _sums(of: Sequence[Outcome]) -> dict[str, object]:
    return {
        "n": len(of),
        "right": sum(each.right for each in of),
        "cloud_tokens": sum(each.written for each in of),
        "cloud_reads": sum(each.read for each in of),
        "handed_over": sum(each.at is not None for each in of),
        "in_the_middle": sum(bool(each.at) for each in of),
    }


def _row(
    part: str,
    name: str,
    of: Sequence[Outcome],
    better: Sequence[Outcome],
    cloud: Sequence[Outcome],
    device: Sequence[Outcome],
) -> dict[str, object]:
    kept, tokens = _share(of, better, "right"), _share(of, cloud, "written")
    told: dict[str, object] = {"kept": round(kept.value, 3), "kept_90": kept.interval}
    told |= {"tokens": round(tokens.value, 3), "tokens_90": tokens.interval}
    by_lot = sum(each.right for each in of) - _beyond(of, cloud, device).value * len(of)
    random = by_lot / sum(each.right for each in better)
    return {"part": part, "way": name, **_sums(of), **told, "random_kept": round(random, 3)}


def _share(of: Sequence[Outcome], whole: Sequence[Outcome], what: str) -> Estimate:
    """How much of this column there is, of what there is in the other way's."""
    ours, theirs = ([float(getattr(each, what)) for each in way] for way in (of, whole))

    def ratio(among: Sequence[int]) -> float:
        return sum(ours[at] for at in among) / max(1.0, sum(theirs[at] for at in among))

    return estimate(len(ours), ratio, RESAMPLES)


def _beyond(of: Sequence[Outcome], cloud: Sequence[Outcome], device: Sequence[Outcome]) -> Estimate:
    """Share of the questions right beyond what as many of the cloud's tokens give that are spent by lot."""
    rows = [(a.right, b.right, c.right, a.written, b.written) for a, b, c in zip(of, cloud, device, strict=True)]

    def beyond(among: Sequence[int]) -> float:
        right, whole, none, spent, all_ = (
            float(sum(column)) for column in zip(*(rows[at] for at in among), strict=True)
        )
        return (right - none - spent / max(1.0, all_) * (whole - none)) / len(among)

    return estimate(len(rows), beyond, RESAMPLES)


# ---- calibration -----------------------------------------------------------------------------------------------------
def calibration(chances: Sequence[float], good: Sequence[bool]) -> list[dict[str, object]]:
    """What was expected and what came, in bins of as many questions."""
    order = sorted(range(len(chances)), key=lambda at: chances[at])
    rows: list[dict[str, object]] = []
    for number in range(BINS):
        among = order[number * len(order) // BINS : (number + 1) * len(order) // BINS]
        if among:
            found = share_of([good[at] for at in among])
            expected = sum(chances[at] for at in among) / len(among)
            rows.append({"part": "calibration", "expected": round(expected, 3), "as_good": round(found.value, 3)})
            rows[-1] |= {"as_good_90": found.interval, "n": len(among)}
    return rows


def _miscalibration(chances: Sequence[float], good: Sequence[bool], among: Sequence[int]) -> float:
    """Mean over the bins of how far what came is from what was expected."""
    pairs = sorted((chances[at], good[at]) for at in among)
    bins = [pairs[number * len(pairs) // BINS : (number + 1) * len(pairs) // BINS] for number in range(BINS)]
    return sum(abs(sum(chance - came for chance, came in each)) / len(each) for each in bins if each) / BINS


def plot(report: Report) -> str:
    return draw_calibration(report.rows)


def draw_calibration(rows: Sequence[Mapping[str, Any]]) -> str:
    """The share of answers that were as good as the cloud's over the chance that was expected."""
    bins = [{**row, "perfect": row["expected"]} for row in rows if row.get("part") == "calibration"]
    return lines(bins, x="expected", ys=("as_good", "perfect"), unit="share as good as the cloud's", title=NAME)


def draw_curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """Right answers over cloud tokens, by threshold and by lot."""
    points = sorted((row for row in rows if row.get("part") == "curve"), key=lambda row: float(row["tokens"]))
    by_tokens = [{**row, "cloud tokens": round(row["tokens"], 2), "by lot": row["random_kept"]} for row in points]
    return lines(by_tokens, x="cloud tokens", ys=("kept", "by lot"), unit="right, of the better side's", title=NAME)


def _name(label: str) -> str:
    return _UNNAMED.sub("-", label)[:80]
