"""`paceline bench greedy`: the greedy text of a real model against transformers' and llama.cpp's, token by token.

All compute in float32 with the same weights, to 500 prompts of real text or made-up ones: ours writes, through the
sessions that serve, sixteen answers at a time; the others read prompt and answer in one forward and say of each token
how far its logit is below their own best. Where that is nothing for every token they would have written the same text.
Up to the first near tie (the two logits less than 1e-3 apart) texts must be equal; behind it they may part.

llama.cpp reads the file that the folder came from with its weights decoded, since its kernels for quantised weights
round activations to 8 bits too. With the file as it is (`llama.cpp, quantised`) no two programs need agree: what is
told is the share of tokens that it would have written as well, and how far below its best the others are. It is left
out where llama-cpp-python is not installed, or the model is no GGUF file.
"""

from __future__ import annotations

import asyncio
import gzip
import importlib
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lab.configs import a_config
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import LoadedModel
from paceline.engine.loader import find, load_model, quiet, served_name
from paceline.hub.cache import find_stored
from paceline.hub.gguf import SUFFIX, GgufFile
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.strategies.solo import Solo

from .bootstrap import share_of
from .drafting.single_session import together
from .findings import claimed
from .models import SMOLLM, RealModels
from .report import Claim, Options, Report
from .retrieval.articles import encyclopaedia

NAME = "greedy"
SUMMARY = "greedy text of a real model against transformers' and llama.cpp's with the same weights"
MODELS: Final = True  # the cloud's

PROMPTS, FEW = 500, 12
PROMPT: Final = 24  # tokens at most
TOKENS: Final = 16  # of an answer
TOGETHER: Final = 16
TIE: Final = 1e-3
SEED: Final = 5

Ids = tuple[int, ...]
Below = NDArray[np.float32]  # (tokens,) how far each token's logit is below the best


def run(options: Options) -> Report:
    name = (options.models or RealModels.parse(SMOLLM)).cloud
    model = load_model(find(name), dtype="float32", threads=1)  # on torch, a GGUF file too
    count = FEW if options.quick else PROMPTS
    prompts = [tuple(model.tokenizer.encode(text)[:PROMPT]) for text in texts(options.data, count)]
    answers = asyncio.run(written(model, prompts))
    rows, claims = [], list[Claim]()
    for reader, make in readers(name).items():
        read = make()
        below = [read(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        every = np.concatenate(below)
        equal = [is_same(each) for each in below]
        rows.append(
            {
                "reader": reader,
                "answers": len(below),
                "equal": sum(equal),
                "of_these_to_a_tie": sum(same and bool(each.any()) for same, each in zip(equal, below, strict=True)),
                "tokens": len(every),
                "tokens_equal": float((every == 0).mean()),
                "furthest_below": float(every.max()),
                "below_99": float(np.quantile(every, 0.99)),
            }
        )
        aim = None if reader == QUANTISED else 1.0
        claims.append(claimed(f"greedy.{reader.replace('.', '_').replace(', ', '_')}", share_of(equal), aim, "higher"))
    conditions = {
        "model": served_name(name),
        "dtype": "float32, but for the quantised file",
        "prompts": f"{count}, the first {PROMPT} tokens of each at most",
        "answers": f"{TOKENS} tokens, {TOGETHER} answers at a time",
        "tie": TIE,
        "llama_cpp": _version(),
        "clock": "none: nothing is timed",
        "quick": options.quick,
    }
    return Report(NAME, conditions, rows, claims)


def texts(data: Path | None, count: int) -> list[str]:
    """Prompts of people, or sentences of the made-up encyclopaedia without a folder."""
    if data is None:
        return [fact for entry in encyclopaedia(random.Random(SEED), "train", count) for _, fact in entry.facts][:count]
    with gzip.open(data / "chat_prompts" / "prompts.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in islice(lines, count)]


async def written(model: LoadedModel, prompts: Sequence[Ids]) -> list[Ids]:
    """Our answers; an end token is one as any other."""
    vocab = model.engine.info.vocab_size
    config = a_config("cloud", True, SamplingParams(temperature=0.0), TOKENS, frozenset(), vocab)
    worker, answers = EngineWorker(model.engine), list[Ids]()
    await worker.start()
    try:
        for start in range(0, len(prompts), TOGETHER):
            group = prompts[start : start + TOGETHER]
            done = await together(worker, [partial(Solo, config)] * len(group), group)
            answers += [tuple(answer.tokens) for answer in done]
    finally:
        await worker.stop()
    return answers


def is_same(below: Below) -> bool:
    """Up to the first token that is not the reader's own best; that one a near tie."""
    other = np.flatnonzero(below)
    return not len(other) or bool(below[other[0]] < TIE)


# ---- who reads them --------------------------------------------------------------------------------------------------
QUANTISED: Final = "llama.cpp, quantised"
Read = Callable[[Ids, Ids], Below]


def readers(name: str) -> dict[str, Callable[[], Read]]:
    """Each made when its turn comes, so that one model at a time is in memory beside ours."""
    found: dict[str, Callable[[], Read]] = {"transformers": partial(_transformers, find(name))}
    path = Path(name).expanduser()
    file = path if path.suffix == SUFFIX else find_stored(name)
    if file is not None and find_spec("llama_cpp"):
        found |= {"llama.cpp": partial(_decoded_llama_cpp, file), QUANTISED: partial(_llama_cpp, file)}
    return found


def _transformers(folder: Path) -> Read:
    import torch
    from transformers import AutoModelForCausalLM

    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.eval()

    def read(prompt: Ids, answer: Ids) -> Below:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        return _below(logits.numpy(), answer)

    return read


def _llama_cpp(file: Path) -> Read:
    api: Any = importlib.import_module("llama_cpp")  # not a dependency
    model: Any = api.Llama(str(file), n_ctx=PROMPT + TOKENS, n_threads=1, logits_all=True, verbose=False)

    def read(prompt: Ids, answer: Ids) -> Below:
        model.reset()
        model.eval(prompt + answer[:-1])
        return _below(model.scores[len(prompt) - 1 : len(prompt) + len(answer) - 1], answer)

    return read


def _decoded_llama_cpp(file: Path) -> Read:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        decoded = Path(folder) / "float32.gguf"
        decode(file, decoded)
        return _llama_cpp(decoded)  # which maps the file


def decode(file: Path, into: Path) -> None:
    """The same model with weights in float32, rounded as in our folder: to float16, but for norms."""
    import gguf  # an extra: who names a GGUF file has it

    reader, opened = gguf.GGUFReader(file), GgufFile.open(file)
    writer = gguf.GGUFWriter(into, opened.get("general.architecture"))
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if not tensor.name.endswith("norm.weight"):
            values = values.astype(np.float16).astype(np.float32)
        writer.add_tensor(tensor.name, values.reshape(opened.shapes[tensor.name]))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def _below(logits: NDArray[np.float32], answer: Ids) -> Below:
    return np.asarray(logits.max(axis=-1) - logits[np.arange(len(answer)), answer], np.float32)


def _version() -> str | None:
    with suppress(ImportError):
        return str(importlib.import_module("llama_cpp").__version__)
    return None
