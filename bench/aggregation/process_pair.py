"""Server and agent as linked processes, for benches whose claim is about the link."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.commands.demo import Children, Pair, configured, start_pair
from paceline.core.side import SIDES, Side

DOCUMENTS: Mapping[Side, str] = {
    "cloud": "The harbour library of Tarnwick opens at eight.\n",
    "device": "The harbour library of Tarnwick lends me books.\n",
}
DEVICE = "laptop"


@contextmanager
def linked_pair(directory: Path, *, model: str, emulate: Mapping[Side, str]) -> Iterator[Pair]:
    """Start both and wait until they are linked. emulate: `emulate` of each side, the link's part on the device."""
    documents = {side: directory / f"{side}.md" for side in SIDES}
    for side, file in documents.items():
        file.write_text(DOCUMENTS[side])
    flags = {
        side: configured(directory, "[tuning]", "threads = 1", f"emulate = {emulate.get(side, '')!r}") for side in SIDES
    }
    with Children(directory) as children:
        yield start_pair(
            children,
            documents,
            model=model,
            embedder="hash",
            device=DEVICE,
            flags=("--debug-options",),
            side_flags=flags,
        )
