"""`paceline bench long`: questions over a hundred pages on the device, read by its model, written with a larger one.

Two folders: the pages of annual reports that FinanceBench cites (with a data folder), and made pages of a company with
a hundred plants, whose facts differ in names and years alone. Each question has one answer, or two, in a page or two of
its folder; an answer is right if each accepted text stands in it. Server and agent are processes, one thread each.

The workflow `long` is compared with `fast`, which reads the four best passages of a search, and with the cloud's model
alone, which is given the pages in two ways as far as its context is to go: in their order, and the best of a search
first. What the cloud is given in ours is counted by the rows that it computes, answers and drafts included; of the
cloud alone by the tokens of its prompts.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from lab.training.texts.squad import normal_form
from paceline.commands.demo import Children, configured, start_pair
from paceline.core.side import SIDES, Side
from paceline.rag.embedder import load_embedder
from paceline.rag.records import Passage
from paceline.rag.store.documents import DocumentStore

from .bootstrap import Estimate, estimate, share_of
from .findings import claimed
from .report import Options, Report
from .two_sided import lines

NAME: Final = "long"
SUMMARY: Final = "questions over a hundred pages: right answers and the cloud's tokens, of the cloud reading what fits"
MODELS: Final = True
QUESTIONS: Final = 10  # of a folder
FEW: Final = 2
CONTEXT: Final = 2000  # tokens that the cloud alone is given: more take minutes on two cores
PASSAGES: Final = 16  # that jobs read for a question, likewise
CHARACTERS: Final = 3.5  # of a token, about, with figures in it
ANSWER: Final = 48  # tokens
OURS, SEARCH = "long", "fast"
IN_ORDER, BEST = "cloud alone, in order", "cloud alone, the best first"
TUNING: Final = ("tuning.threads = 1", f"tuning.long_passages = {PASSAGES}", "tuning.longest_silent_answer = 0")
WAYS: Final = (OURS, SEARCH, IN_ORDER, BEST)
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    accepted: tuple[str, ...]  # each stands in a right answer


@dataclass(frozen=True, slots=True)
class Folder:
    pages: Mapping[str, str]  # by file name, in order
    questions: Sequence[Question]


@dataclass(frozen=True, slots=True)
class Answered:
    way: str
    question: str
    text: str
    right: bool
    cloud_tokens: int
    seconds: float
    jobs: str = ""  # what was told of them


def run(options: Options) -> Report:
    found: dict[str, list[Answered]] = {}
    for name, folder in folders(options).items():
        questions = folder.questions[: FEW if options.quick else QUESTIONS]
        with serving(folder, options) as pair:
            found[name] = [pair.ask(way, question) for question in questions for way in WAYS]
    return reported(found, options)


def reported(found: Mapping[str, Sequence[Answered]], options: Options) -> Report:
    """found: by folder."""
    rows: list[Row] = []
    every = [each for answers in found.values() for each in answers]
    for name, answers in {**found, "all": every}.items():
        for way in WAYS:
            of = [each for each in answers if each.way == way]
            right = share_of([each.right for each in of])
            tokens = [each.cloud_tokens for each in of]
            row: Row = {"folder": name, "way": way, "n": len(of), "right": right.value, "interval_90": right.interval}
            row |= {"cloud_tokens": sum(tokens) / len(tokens), "seconds": sum(each.seconds for each in of) / len(of)}
            rows.append(row)
    ours = [each for each in every if each.way == OURS]
    claims = []
    for name, way in (("in_order", IN_ORDER), ("best", BEST)):
        others = [each for each in every if each.way == way]
        claims += [
            claimed(f"long.right_of_cloud_{name}", _ratio(ours, others, "right"), 0.9, "higher"),
            claimed(f"long.tokens_of_cloud_{name}", _ratio(ours, others, "cloud_tokens"), 0.2, "lower"),
        ]
    conditions = {
        "models": options.models.label if options.models else "demo",
        "context": CONTEXT,
        "passages": PASSAGES,
        "embedder": "minilm",
        "temperature": 0,
        "privacy": "document-private",
    }
    return Report(NAME, conditions, rows, tuple(claims))


def _ratio(ours: Sequence[Answered], others: Sequence[Answered], field: str) -> Estimate:
    def statistic(among: Sequence[int]) -> float:
        mine, theirs = (sum(float(getattr(answers[i], field)) for i in among) for answers in (ours, others))
        return mine / max(theirs, 1.0)

    return estimate(len(ours), statistic)


# ---- the two sides ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Served:
    """A linked pair whose device has the folder."""

    urls: Mapping[Side, str]
    models: Mapping[Side, str]
    folder: Folder
    store: DocumentStore  # the same pages, for the cloud that is given the best of them

    def ask(self, way: str, question: Question) -> Answered:
        before = self._rows()
        if way in (OURS, SEARCH):
            body = self._body("device", question.text) | {"paceline": {"workflow": way, "report": True}}
            answer = self._post("device", body)
            tokens = self._rows() - before
        else:
            body = self._body("cloud", f"{self._given(way, question)}\n\n{question.text}")
            answer = self._post("cloud", body | {"paceline": {"documents": 0, "strategy": "autoregressive"}})
            tokens = int(answer["usage"]["prompt_tokens"])
        text = str(answer["choices"][0]["message"]["content"])
        told = answer.get("paceline", {}).get("steps", ())
        jobs = "; ".join(step["text"] for step in told if step["stage"].startswith("jobs"))
        return Answered(way, question.text, text, is_right(question, text), tokens, answer["seconds"], jobs)

    def _given(self, way: str, question: Question) -> str:
        """Pages up to the context, from their beginning."""
        texts = list(self.folder.pages.values())
        if way == BEST:
            found = self.store.search(question.text, int(CONTEXT * CHARACTERS / 200), min_score=-1.0)
            texts = [_titled(passage) for passage in found]
        whole, room = "", int(CONTEXT * CHARACTERS)
        for text in texts:
            whole += f"{text}\n\n"[: max(0, room - len(whole))]
        return whole

    def _body(self, side: Side, asked: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": asked}]
        return {"model": self.models[side], "messages": messages, "temperature": 0, "max_tokens": ANSWER}

    def _post(self, side: Side, body: Mapping[str, object]) -> dict[str, Any]:
        reply = httpx.post(f"{self.urls[side]}/v1/chat/completions", json=body, timeout=1800.0, trust_env=False)
        reply.raise_for_status()
        answer: dict[str, Any] = reply.json()
        return answer | {"seconds": reply.elapsed.total_seconds()}

    def _rows(self) -> int:
        """Rows that the cloud's engine has computed or found."""
        text = httpx.get(f"{self.urls['cloud']}/metrics", timeout=60.0, trust_env=False).text
        counts = re.findall(r"^paceline_engine_(?:cached_)?rows_total (\S+)$", text, re.MULTILINE)
        return int(sum(map(float, counts)))


def _titled(passage: Passage) -> str:
    return f"{passage.document}\n{passage.titled}"


@contextmanager
def serving(folder: Folder, options: Options) -> Iterator[Served]:
    real = options.models
    models: dict[Side, str] = {side: getattr(real, side) if real else "demo" for side in SIDES}
    with tempfile.TemporaryDirectory() as name, Children(base := Path(name)) as children:
        files: dict[Side, Path] = {side: base / f"documents of the {side}" for side in SIDES}
        for directory in files.values():
            directory.mkdir()
        (files["cloud"] / "about.md").write_text("This server has no reports.\n")
        for page, text in folder.pages.items():
            (files["device"] / page).write_text(text)
        flags = configured(base, *TUNING)
        pair = start_pair(children, files, model=models, embedder="minilm", device="bench", flags=flags)
        urls: dict[Side, str] = {side: pair.url(side) for side in SIDES}
        names: dict[Side, str] = {
            side: httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"] for side, url in urls.items()
        }
        with DocumentStore.open(base / "again", load_embedder("minilm")) as store:
            store.add(files["device"], zone="cloud")
            yield Served(urls, names, folder, store)


# ---- folders and their questions -------------------------------------------------------------------------------------
def folders(options: Options) -> dict[str, Folder]:
    made = {"made": plants()}
    return made if options.data is None else {**made, "finance": reports(options.data / "finance")}


def is_right(question: Question, answer: str) -> bool:
    said = f" {normal_form(answer.replace(',', ''))} "
    return all(f" {normal_form(each.replace(',', ''))} " in said for each in question.accepted)


TOWNS: Final = ("Ar Bel Car Dun Esk Fen Gar Hol Ing Kel", "wick mor row leth dale moor side beck ford ham")
NAMES: Final = ("Ada Bo Cora Dag Edda Finn Gro Hal Ines Jon", "Lind Marsh Venn Holm Pike Rowe Tarn Wyatt Sund Berg")
GOODS: Final = ("bearings", "valves", "glass", "paper", "cables", "pumps", "tiles", "ropes", "lenses", "springs")
YEARS: Final = (2021, 2022, 2023)
FILLER: Final = (
    "The plant is run under the rules of the group for safety, waste and water, which were last revised in the spring. "
    "An audit by an independent firm found no fault that had to be reported, and two that were mended at once. "
    "Energy is bought together with that of the other plants, so that its price is the same at all of them. "
    "The works council met four times, and agreed on shorter shifts for those who train apprentices. "
    "Repairs of the roof and of the eastern gate were put off until the next year for want of steel. "
)


def plants(count: int = 100) -> Folder:
    """A page for each plant: equal at every run."""
    chance = random.Random(37)
    towns = [first + last for first in TOWNS[0].split() for last in TOWNS[1].split()][:count]
    people = [f"{first} {last}" for first in NAMES[0].split() for last in NAMES[1].split()]
    chance.shuffle(towns)
    chance.shuffle(people)
    pages: dict[str, str] = {}
    facts: dict[str, dict[str, str]] = {}
    for number, town in enumerate(towns):
        turnover = {year: f"{chance.randint(11, 98)}.{chance.randint(1, 9)}" for year in YEARS}
        of = facts[town] = {
            "manager": people[number % len(people)],
            "staff": str(chance.randint(101, 989)),
            "opened": str(chance.randint(1951, 2012)),
            **{str(year): turnover[year] for year in YEARS},
        }
        sentences = [
            f"The plant of {town} makes {GOODS[number % len(GOODS)]}, and was opened in {of['opened']}.",
            *(f"Turnover of the {town} plant was {turnover[year]} million euros in {year}." for year in YEARS),
            f"{of['staff']} people worked at the {town} plant at the end of 2023.",
            f"The manager of the {town} plant is {of['manager']}.",
        ]
        chance.shuffle(sentences)
        fillers = FILLER.split(". ")
        text = " ".join(f"{sentence} {fillers[place % 5].rstrip('. ')}." for place, sentence in enumerate(sentences))
        pages[f"{number + 1:03}.md"] = f"# Annual report 2023, page {number + 1}: {town}\n\n{text} {FILLER}\n"
    asked = []
    for place, town in enumerate(chance.sample(towns, 2 * QUESTIONS)):
        of, year = facts[town], str(YEARS[place % 3])
        asked.append(
            (
                (f"what was the turnover of the {town} plant in {year}", of[year]),
                (f"who is the manager of the {town} plant", of["manager"]),
                (f"how many people worked at the {town} plant at the end of 2023", of["staff"]),
            )[place % 3]
        )
    single = [Question(f"{text[0].upper()}{text[1:]}?", (right,)) for text, right in asked[: QUESTIONS // 2]]
    rest = asked[QUESTIONS // 2 : QUESTIONS // 2 + QUESTIONS]
    double = [
        Question(f"{one[0].upper()}{one[1:]}, and {two}?", (first, second))
        for (one, first), (two, second) in zip(rest[::2], rest[1::2], strict=True)
    ]
    return Folder(pages, [each for both in zip(single, double, strict=True) for each in both])


_FIGURE: Final = re.compile(r"\d[\d,.]*\d")


def reports(data: Path) -> Folder:
    """All pages that FinanceBench's questions cite, and those questions whose answer is a figure that stands there."""
    pages: dict[str, str] = {}
    asked: list[Question] = []
    for record in lines(data / "financebench.jsonl"):
        evidence = record["evidence"]
        for each in evidence:
            name = f"{each['doc']}_{each['page']}.md"
            pages[name] = f"# {record['company']}, {each['doc'].replace('_', ' ')}\n\n{each['text'].strip()}\n"
        figures = [re.sub(r"\.0+$", "", found.rstrip(".")) for found in _FIGURE.findall(record["answer"])]
        told = " ".join(each["text"] for each in evidence).replace(",", "")
        if len(figures) == 1 and len(figures[0]) >= 3 and figures[0].replace(",", "") in told:
            asked.append(Question(record["question"], (figures[0],)))
    return Folder(dict(sorted(pages.items())), asked)
