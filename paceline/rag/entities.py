"""Names in a text by a model that labels tokens (`AutoModelForTokenClassification` of transformers), on this machine.

A finder for `core.redaction`. Long texts are read in windows that overlap. Weights are safetensors; nothing is
downloaded, and code shipped with a model is never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from paceline.core.redaction import Entity, Finder
from paceline.errors import ConfigError
from paceline.hub.cache import find
from paceline.rag.embedder import ComputeThreads
from paceline.rag.rerank import limit_threads, loaded_encoder, max_tokens

WINDOW: Final = 256  # tokens; less where the model reads less
OVERLAP: Final = 32
_WORD: Final = re.compile(r"\w+")
_KINDS: Final = {
    **dict.fromkeys(("PER", "PERSON", "NAME"), "PERSON"),
    **dict.fromkeys(("ORG", "ORGANIZATION", "ORGANISATION"), "ORGANISATION"),
    **dict.fromkeys(("LOC", "GPE", "FAC", "PLACE", "LOCATION", "ADDRESS"), "PLACE"),
}


def load_entity_model(path_or_name: str | Path) -> Finder:
    """The finder of a model. Raises ConfigError where it is not here, cannot be loaded, or names no kinds."""
    directory = find(path_or_name, download=False)
    wanted = "a model for named entities, whose labels are such as B-PER and I-PER"
    model, tokenizer = loaded_encoder(directory, "AutoModelForTokenClassification", "model of named entities", wanted)
    named = {int(place): str(label).upper() for place, label in (model.config.id2label or {}).items()}
    labels = [label for _, label in sorted(named.items())]
    kinds = ["" if label == "O" else label.removeprefix("B-").removeprefix("I-") for label in labels]
    if "" not in kinds or not set(kinds) & set(_KINDS) or not tokenizer.is_fast:
        raise ConfigError(f"{directory} has the labels {', '.join(labels)[:200]}: give {wanted}.")
    window = max_tokens(model, tokenizer, WINDOW)
    threads = ComputeThreads(1, "paceline-entities", 1, limit_threads)

    def labelled(text: str) -> list[tuple[int, int, str]]:
        """Tokens that are a part of a name."""
        import torch

        read = tokenizer(
            text,
            truncation=True,
            max_length=window,
            stride=min(OVERLAP, window // 4),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        found = []
        for ids, offsets in zip(read["input_ids"], read["offset_mapping"], strict=True):
            with torch.inference_mode():
                chosen = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
            found += [(start, end, kinds[label]) for (start, end), label in zip(offsets, chosen, strict=True)]
        return sorted({each for each in found if each[2] and each[0] < each[1]})

    def find_labelled(text: str) -> Iterator[Entity]:
        """Words of which a token is a part of a name, and those of one kind that follow each other as one."""
        tokens, at, name = threads.run(lambda: labelled(text)), 0, None
        for word in _WORD.finditer(text):
            while at < len(tokens) and tokens[at][1] <= word.start():
                at += 1
            if at == len(tokens) or tokens[at][0] >= word.end():
                continue
            kind = _KINDS.get(tokens[at][2], "NAME")
            if name is not None and name.kind == kind and word.start() - name.end <= 1:
                name = name._replace(end=word.end())
                continue
            if name is not None:
                yield name
            name = Entity(word.start(), word.end(), kind)
        if name is not None:
            yield name

    return find_labelled
