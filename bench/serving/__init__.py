"""`paceline bench serving`: a server with many clients, against other servers on the same weights, and its own costs.

Real server processes on loopback, random weights of Qwen2.5-0.5B's shape with its vocabulary of 151,936 ids, greedy
text of equal length unless a row says `sampled`. The bench's parts, each of which can be run alone with
`python -m bench.serving --only PART`:

- `throughput`: tokens per second and time to first token at 1 to 64 clients; baselines where they are installed.
- `sharing`: the prefix cache in conversations, and with one long document that several clients ask about.
- `gaps`: gaps between tokens of short answers beside a prompt of 30,000 tokens;
- `host`: time of a step outside the model's forward, 64 answers in a batch, in process.
- `joint`: targets a second of joint answers, the engine's time taken out;
- `memory`: resident memory of a server over the bytes of its weights.

`vocabulary` and `model_files` make the model, `gguf_file` copies it for llama.cpp, `systems` starts the servers,
`clients` ask them, `findings` holds the rows and claims of a part.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from paceline.commands.demo import Children

from ..bootstrap import INSIDE
from ..findings import Findings
from ..random_model import Shape
from ..report import Options, Report
from . import gaps, host_time, joint, memory, sharing, throughput
from .model_files import ModelFiles

NAME = "serving"
SUMMARY = "tokens/s and TTFT at 1-64 clients against other servers; prefix cache, host time, joint answers and memory"
PARTS: Final = ("throughput", "sharing", "gaps", "host", "joint", "memory")


@dataclass(frozen=True, slots=True)
class Workload:
    """Model and sizes of all parts."""

    parts: Sequence[str] = PARTS
    shape: Shape = field(default_factory=lambda: Shape(positions=32_768))
    throughput: throughput.Load = field(default_factory=throughput.Load)
    sharing: sharing.Load = field(default_factory=sharing.Load)
    gaps: gaps.Load = field(default_factory=gaps.Load)
    host: host_time.Load = field(default_factory=host_time.Load)
    joint: joint.Load = field(default_factory=joint.Load)


QUICK = Workload(
    shape=Shape(layers=2, hidden=64, inner=128, heads=4, kv_heads=2, vocab=2048, positions=2048, small=True),
    throughput=throughput.Load(
        clients=(1, 4), sampled_clients=(1, 4), compared_clients=4, rounds=2, prompt=16, tokens=8
    ),
    sharing=sharing.Load(
        conversations=2, turns=3, question=16, answer=8, document=128, readers=2, document_rounds=1, document_answer=2
    ),
    gaps=gaps.Load(clients=2, question=8, answer=12, alone=2, long_prompt=1800, rounds=1),
    host=host_time.Load(sequences=8, tokens=8, tree_tokens=6),
    joint=joint.Load(vocab=2048, tokens=8, rounds=2, answers=2),
)


def run(options: Options, workload: Workload | None = None) -> Report:
    load = workload or (QUICK if options.quick else Workload())
    found = Findings()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        model = ModelFiles.write(Path(directory) / "model", load.shape)
        for part in load.parts:
            with Children(Path(directory)) as children:  # its servers end with it
                found.add(_part(part, children, model, load))
        conditions = _conditions(model, load, options) | {f"interval_{100 * INSIDE:.0f}": found.intervals}
    return Report(NAME, conditions, found.rows, found.claims)


def _part(part: str, children: Children, model: ModelFiles, load: Workload) -> Findings:
    match part:
        case "throughput":
            return throughput.measure(children, model, load.throughput).findings()
        case "sharing":
            return sharing.measure(children, model, load.sharing)
        case "gaps":
            return gaps.measure(children, model, load.gaps)
        case "host":
            return host_time.measure(model, load.host)
        case "joint":
            return joint.measure(load.joint)
        case "memory":
            return memory.measure(children, model)
        case _:
            raise AssertionError(f"no part {part}: there are {', '.join(PARTS)}")


def _conditions(model: ModelFiles, load: Workload, options: Options) -> dict[str, object]:
    shape, parts = load.shape, load.throughput
    return {
        "model": f"random Qwen2, hidden {shape.hidden}, {shape.layers} layers, vocabulary {shape.vocab}",
        "parameters": model.parameters,
        "dtype": model.dtype,
        "weights_mb": round(model.weight_bytes / 1e6),
        "length": "no server ends an answer: the files name no end token, and its logit is far below the others; "
        "every answer's tokens are counted and must be those asked for",
        "prompt_tokens": parts.prompt,
        "output_tokens": parts.tokens,
        "greedy_text": "of random weights: it may repeat itself, which favours the default strategy's drafts; the "
        "claims are those of `autoregressive`",
        "sampled": f"temperature {throughput.TEMPERATURE}, top_p {throughput.TOP_P}",
        "threads_of_a_server": "as many as cores",
        "clients": "httpx, one process, loopback, on the servers' cores",
        "statistic": f"medians of {parts.rounds} rounds, all ways in turn; claims are medians of ratios within a round",
        "clock": "real",
        "parts": list(load.parts),
        "quick": options.quick,
    }
