"""What a document store tells of its documents. Knows neither files nor indexes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]  # (texts, dimensions), each of unit norm
Zone = Literal["device", "edge", "cloud"]  # where a document may be: on the device, on its owner's edge, in the cloud
ZONES: tuple[Zone, ...] = ("device", "edge", "cloud")

DEFAULT_COLLECTION = "default"
"""What `paceline docs` manages and answers read unless a request names others. Other collections are vector stores."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which documents are searched."""

    collections: tuple[str, ...] = (DEFAULT_COLLECTION,)
    document_ids: frozenset[str] | None = None  # ids of documents: of those collections only these


MANAGED = Selection()

MIN_SCORE = 0.25
"""The least cosine at which a passage counts as relevant, measured with MiniLM and the default chunks.

Of 400 SQuAD questions 96 % have their right paragraph above it, of 334 paragraphs for questions that need two (HotpotQA
and 2WikiMultihopQA) 90 %; of arbitrary paragraphs 1.8 % are. At 0.3 it would be 94, 83 and 0.7 %; at 0.2 98, 95 and
4 %. What slips through weighs little: right paragraphs lie at 0.56 in the median, and weights are exp(cosine / 0.1).
"""


@dataclass(frozen=True, slots=True)
class Document:
    id: str
    name: str
    sha256: str  # hex, of the text
    zone: Zone
    added_at: float  # s since 1970
    num_chunks: int
    source: str = ""  # whole path of the file it was read from, "" where there is none


@dataclass(frozen=True, slots=True)
class IngestResult:
    """What became of one file. `note` says why it was skipped, or which document has the same text."""

    name: str
    status: Literal["added", "replaced", "unchanged", "duplicate", "skipped"]
    id: str = ""
    num_chunks: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    name: str
    file: int  # from 0
    num_files: int
    chunk: int  # chunks of this file embedded so far
    num_chunks: int


@dataclass(frozen=True, slots=True)
class Passage:
    document: str  # its name
    chunk_id: int
    title: str  # "" when there is none or the text begins with it
    text: str
    score: float  # cosine similarity to the query: the same scale on both sides, -1 to 1
    file_id: str = ""  # of the uploaded file it is of; of a document that was not uploaded, the document's
    collection: str = DEFAULT_COLLECTION

    @property
    def titled(self) -> str:
        """Title line and text: what was embedded, and what a model reads."""
        return titled(self.title, self.text)


def titled(title: str, text: str) -> str:
    return f"{title}\n{text}" if title else text
