"""Records of documents, passages and selections that a document store takes and returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.core.side import Zone as Zone

Vectors = NDArray[np.float32]  # (texts, dimensions), each of unit norm

DEFAULT_COLLECTION = "default"
"""The collection that `paceline docs` manages and generation reads by default. All others are vector stores."""


@dataclass(frozen=True, slots=True)
class Selection:
    collections: tuple[str, ...] = (DEFAULT_COLLECTION,)
    document_ids: frozenset[str] | None = None  # only these documents of the collections; None: all
    barred: frozenset[str] = frozenset()  # and none of these


MANAGED = Selection()

MIN_SCORE = 0.25
"""Minimum cosine of a relevant passage, measured with MiniLM and the default chunks.

Above it are the right paragraphs of 96 % of 400 SQuAD questions, 90 % of 334 paragraphs for questions that need two
(HotpotQA and 2WikiMultihopQA), and 1.8 % of arbitrary paragraphs. A threshold of 0.3 gives 94, 83 and 0.7 %; 0.2 gives
98, 95 and 4 %. False positives weigh little: the median of right paragraphs is 0.56, and weights are exp(cosine / 0.1).
"""

LEADING_COSINE = 0.1
"""Minimum cosine of a passage that is among the first by words and holds a rare word of the query: it scores MIN_SCORE.

A note on a dozen things is not similar to a question about one of them, but has its word: of 151 questions on such
notes 16 find theirs by this alone, and one does not. Of 150 SQuAD questions over 300 paragraphs 91 % find theirs among
two (89 % without), with one more passage in 75 questions; where none of the paragraphs answers, with one more in 40.
"""

EXACT_SCORE = 0.56
"""Least score of a passage that holds nearly all words of a query, a rare one among them: the median of right ones. So
a number or a name is found that no vector tells, and its passage weighs in an answer like any other that is right."""


@dataclass(frozen=True, slots=True)
class Document:
    """A stored document, without its text."""

    id: str
    name: str
    sha256: str  # hex, of the text
    zone: Zone
    added_at: float  # s since 1970
    num_chunks: int
    source: str = ""  # whole path of the file it was read from; "" for a text without a file


@dataclass(frozen=True, slots=True)
class IngestResult:
    """The outcome for one file. `note`: why it was skipped or could not be read, which document has the same text, or
    why it was renamed."""

    name: str
    status: Literal["added", "replaced", "moved", "removed", "unchanged", "duplicate", "skipped", "failed"]
    id: str = ""
    num_chunks: int = 0
    note: str = ""


FilesProgress = Callable[[str, int, int], None]  # name of a file that is being read, files done, about, of so many


@dataclass(frozen=True, slots=True)
class Passage:
    """A chunk of a document, as found by a search."""

    document: str  # the document's name
    chunk_id: int
    title: str  # the document's; "" when there is none or the text begins with it
    text: str
    score: float  # cosine similarity to the query, -1 to 1, or EXACT_SCORE; comparable between the two sides
    file_id: str = ""  # id of the uploaded file; of the document where none was uploaded
    collection: str = DEFAULT_COLLECTION
    url: str = ""  # of the page of the web that it is from; then it is of no document
    place: str = ""  # in the document, for people; "" where it is not known

    @property
    def titled(self) -> str:
        """Title line and text, as embedded and as put into prompts."""
        return titled(self.title, self.text)


def titled(title: str, text: str) -> str:
    """The text after a line with the title, if there is one."""
    return f"{title}\n{text}" if title else text
