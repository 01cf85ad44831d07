"""Worth of a memory of earlier answers: an agent's tool calls, which repeat each other, and prose, which does not.

Made-up texts, played again by the served machine in virtual time: each answer is a request of its own, and the look-up
table, which remembers the owner's answers, is kept from one to the next.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import numpy as np

from lab.configs import a_config
from lab.simulation import SimulatedRequest, Simulation
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.loader import load_model
from paceline.models import CLOUD
from paceline.strategies.base import Branch
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import Options as StrategyOptions

from ..retrieval.articles import encyclopaedia
from ..speculation.recorded import RecordedEngine, Recording

Row = dict[str, object]
GREEDY: Final = SamplingParams(temperature=0.0)
FORWARD_S: Final = 0.05
CALLS: Final = (
    ('{{"tool": "search_documents", "arguments": {{"query": "{0}", "collection": "default", "max_results": 10}}}}'),
    ('{{"tool": "read_document", "arguments": {{"id": "doc-{1}", "from_page": 1, "to_page": 3}}}}'),
    ('{{"tool": "write_note", "arguments": {{"title": "{0}", "tags": ["research", "draft"], "overwrite": false}}}}'),
    ('{{"tool": "finish", "arguments": {{"status": "done", "summary": "The notes on {0} are complete."}}}}'),
)


def tool_calls(tasks: int) -> list[tuple[str, str]]:
    """(prompt, answer) of an agent's calls: each task asks for the same tools about something else."""
    chance = random.Random(5)
    turns = []
    for entry in encyclopaedia(chance, "train", tasks):
        subject = " ".join(entry.facts[0][1].split()[:4])
        history = f"user: Collect what is known of {subject}.\n"
        for call in CALLS:
            answer = call.format(subject, chance.randrange(1000, 9999))
            turns.append((history[-600:] + "assistant: ", answer))
            history += f"assistant: {answer}\ntool: ok\n"
    return turns


def prose(count: int) -> list[tuple[str, str]]:
    return [
        (f"user: Tell of this: {entry.facts[0][1]}\nassistant: ", entry.retelling)
        for entry in encyclopaedia(random.Random(6), "train", count)
    ]


def rows(tasks: int) -> list[Row]:
    """Tokens a forward with the memory, and with one that is erased after each answer."""
    tokenizer = load_model(CLOUD).tokenizer
    encode, vocab_size = tokenizer.encode, tokenizer.vocab_size
    found: list[Row] = []
    for name, turns in (("tool calls", tool_calls(tasks)), ("prose", prose(tasks))):
        recorded = [_recording(encode(prompt), encode(answer), vocab_size) for prompt, answer in turns]
        kept, erased = (_tokens_a_forward(recorded, vocab_size, keeps=keeps) for keeps in (True, False))
        found.append({"texts": name, "without_memory": erased, "with_memory": kept, "ratio": kept / erased})
    return found


def _recording(prompt: Sequence[int], answer: Sequence[int], vocab_size: int) -> Recording:
    others = [(token + 1) % vocab_size for token in answer]
    dists = tuple(
        Dist(np.array(sorted((token, other)), np.int32), np.array([0.9, 0.1] if token < other else [0.1, 0.9]), 0.0)
        for token, other in zip(answer, others, strict=True)
    )
    return Recording(tuple(prompt), GREEDY, tuple(answer), dists)


def _tokens_a_forward(recorded: Sequence[Recording], vocab_size: int, *, keeps: bool) -> float:
    table, stats = LookupTable(vocab_size), OnlineStats()
    forwards = tokens = 0.0
    for each in recorded:
        config = a_config(
            "cloud",
            True,
            GREEDY,
            len(each.tokens),
            frozenset(),
            vocab_size,
            StrategyOptions(rescoring=False),
            needs_dists=False,
            table=table,
            stats=stats,
        )
        request = SimulatedRequest(STRATEGIES["lookup_tree"], "cloud", config, {"cloud": (Branch(each.prompt, None),)})
        world = Simulation(
            request,
            {"cloud": RecordedEngine(each, vocab_size)},
            forward={"cloud": lambda rows: FORWARD_S + 1e-4 * rows},
        )
        answer = world.run(checks=False)
        assert tuple(answer.tokens) == each.tokens and answer.finished is not None, "the text is that of the recording"
        forwards += answer.finished.stats["forwards"]
        tokens += len(answer.tokens)
        if not keeps and table.texts is not None:
            table.texts.erase()
    return tokens / forwards
