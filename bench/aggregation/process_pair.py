"""The pair of processes that benches measure whose claim is about the link."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.commands.local_pair import Pair, start_pair
from paceline.commands.processes import Children
from paceline.core.side import SIDES, Side

DOCUMENTS: Mapping[Side, str] = {
    "cloud": "The harbour library of Tarnwick opens at eight.\n",
    "device": "The harbour library of Tarnwick lends me books.\n",
}
DEVICE = "laptop"


@contextmanager
def linked_pair(directory: Path, *, model: str, emulate: Mapping[Side, str]) -> Iterator[Pair]:
    """Both ready and linked. emulate: `--emulate` of each side; what is said of the link belongs to the device."""
    documents = {side: directory / f"{side}.md" for side in SIDES}
    for side, file in documents.items():
        file.write_text(DOCUMENTS[side])
    flags = {side: ("--emulate", said) for side, said in emulate.items() if said}
    with Children(directory) as children:
        yield start_pair(
            children,
            documents,
            model=model,
            embedder="hash",
            device=DEVICE,
            flags=("--threads", "1"),
            side_flags=flags,
        )
