"""Look-up tables on disk and in memory: a common base, and over it one table for each owner.

A table holds n-grams of somebody's text. Each owner's table is therefore used for that owner's requests only, has a
file of its own and is erased by one call; the base comes from dialogues that the operator chose (`warm`). Rows of
answers written from documents are never in these tables, so that none outlives its document: see `DocumentTables`. A
file belongs to a vocabulary, not to a model: models with the same tokenizer share it. Files are safetensors, written to
a temporary name and renamed; a damaged one counts as missing.

An owner's file may be sealed, the base never is: then it holds one array of bytes, the table as another safetensors
file, encrypted with a key of its own that stands wrapped in the metadata, and is overwritten when the file is removed
or replaced. Names of owners and numbers of rows are not hidden. Tables in memory belong to the event loop, files to any
thread.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import logging
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Final, Literal, NamedTuple, cast

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS, Arrays, LookupTable, bigram_key
from paceline.engine.base import Engine, LoadedModel
from paceline.errors import ConfigError
from paceline.sealing import PLAIN, DamagedError, Seal
from paceline.secret_files import private_folder, write_private

log = logging.getLogger("paceline.tables")

FORMAT: Final = "paceline look-up table 1"
SUFFIX: Final = ".safetensors"
_SEALED: Final = "sealed"  # name of the only array of a sealed file
_OF_SEALED: Final = frozenset({"key", "rows"})  # further metadata of a sealed file
_PLACE: Final = "table"

Kind = Literal["base", "owner"]


class TableFile(NamedTuple):
    """A file in the folder, as `paceline tables list` shows it."""

    path: Path
    kind: Kind
    owner: str  # "" for a base
    vocabulary: str
    rows: int
    num_bytes: int


_FAULTS: Final = (OSError, ValueError, KeyError, SafetensorError, DamagedError)  # of a file that is no look-up table


def table_files(folder: Path) -> list[TableFile]:
    """Files of every vocabulary, without unreadable ones. No key is needed."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if (metadata := _metadata(path)) is not None:
            kind, owner = cast(Kind, metadata.get("kind")), metadata.get("owner", "")
            rows, size = int(metadata["rows"]), path.stat().st_size
            found.append(TableFile(path, kind, owner, metadata.get("vocabulary", ""), rows, size))
    return found


def encode_table(name: str, arrays: Arrays, metadata: dict[str, str], seal: Seal = PLAIN) -> bytes:
    """Content of the file of this name."""
    if not seal.is_on:
        return save(dict(arrays), metadata=metadata)
    key, box = seal.make_key(name)
    sealed = np.frombuffer(box.seal(save(dict(arrays)), _PLACE), np.uint8)
    return save({_SEALED: sealed}, metadata={**metadata, "rows": str(len(arrays["tokens"])), "key": key.hex()})


def read_table(path: Path, seal: Seal = PLAIN) -> tuple[dict[str, str], Arrays] | None:
    """Metadata and arrays; None where the file is missing or not a look-up table that `seal` opens."""
    while True:
        try:
            with path.open("rb", buffering=0) as held:  # while it is open, no other file has its inode
                try:
                    return _read(path, seal)
                except _FAULTS:
                    if _inode(path) == os.fstat(held.fileno()).st_ino:
                        raise
            # Another process has replaced it meanwhile, and overwritten the former's key.
        except FileNotFoundError:
            return None
        except _FAULTS as error:
            log.warning("a look-up table cannot be read: %s: %s", path.name, error)
            return None


def seal_plain_tables(folder: Path, seal: Seal) -> None:
    """Seal the owners' files that are in plain text. What cannot be written stays as it is, with a log message."""
    for path in folder.glob(f"owner-*{SUFFIX}"):
        metadata = _metadata(path)
        opened = read_table(path) if metadata is not None and "key" not in metadata else None
        if opened is not None:
            facts, arrays = opened
            write_table(path, encode_table(path.name, arrays, facts, seal), partial(replace_table, whole=True))


def write_table(path: Path, content: bytes, replace: Callable[[Path, Path], bool]) -> bool:
    """Write a file, on any thread. replace: puts the temporary one in its place, if it is still wanted. False where it
    is not, or, with a log message, where the disk fails."""
    part = path.with_name(f".{os.getpid()}-{threading.get_ident()}-{path.name}.part")
    try:
        try:
            private_folder(part.parent)
            write_private(part, content)
            return replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, ConfigError) as error:
        log.warning("a look-up table cannot be kept: %s", error)
        return False


def replace_table(part: Path, path: Path, *, whole: bool = False) -> bool:
    """Rename `part` to `path`, and overwrite the key of the file that was there; `whole`: all of it. Raises OSError."""
    try:
        former = path.open("r+b", buffering=0)
    except FileNotFoundError:
        part.replace(path)
        return True
    with former:
        part.replace(path)
        _overwrite(former, whole=whole)
    return True


def remove_table(path: Path) -> bool:
    """Overwrite and remove a file. False if there was none. Raises OSError."""
    try:
        file = path.open("r+b", buffering=0)
    except FileNotFoundError:
        return False
    with file:
        path.unlink(missing_ok=True)
        _overwrite(file, whole=True)
    return True


# ---- internal -------------------------------------------------------------------------------------------------------
def _read(path: Path, seal: Seal) -> tuple[dict[str, str], Arrays]:
    with safe_open(path, framework="numpy") as file:
        metadata = _checked(dict(file.metadata() or {}))
        if "key" not in metadata:
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        sealed = file.get_tensor(_SEALED).tobytes()
    if not seal.is_on:
        raise ValueError("it is encrypted, and its key is gone")
    arrays = load(seal.box(bytes.fromhex(metadata["key"]), path.name).open(sealed, _PLACE))
    return {name: value for name, value in metadata.items() if name not in _OF_SEALED}, arrays


def _metadata(path: Path) -> dict[str, str] | None:
    """Metadata with the number of rows, without reading the table; None as `read_table`."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = _checked(dict(file.metadata() or {}))
            return {"rows": str(file.get_slice("tokens").get_shape()[0]) if "key" not in metadata else "0", **metadata}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, SafetensorError) as error:
        log.warning("a look-up table cannot be read: %s: %s", path.name, error)
        return None


def _checked(metadata: dict[str, str]) -> dict[str, str]:
    if metadata.get("format") != FORMAT:
        raise ValueError("it is no look-up table")
    return metadata


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def _overwrite(file: FileIO, *, whole: bool) -> None:
    """Overwrite the header of a sealed file, which holds its key; of any other nothing, or all of it."""
    header = 8 + int.from_bytes(file.read(8), "little")
    size = os.fstat(file.fileno()).st_size
    sealed = header <= size and b'"key"' in file.read(header - 8)
    if sealed or whole:
        file.seek(0)
        file.write(bytes(header if sealed else size))
        os.fsync(file.fileno())


FOLDER: Final = "tables"  # in the state directory
OWNER_ROWS: Final = 1 << 14  # per owner: with those of bigrams 3.4 MiB at 152k tokens
OWNERS: Final = 32  # in memory; `shrink` writes the least recently used to their files
_FILES: Final = threading.Lock()  # held to erase files and to rename another to one; never on the event loop


def mark_erased(folder: Path, owner: str | None) -> None:
    """Mark this owner's tables, all for None, as erased for the programs that have them in memory."""
    if folder.is_dir():
        _mark(folder, owner).write_text(secrets.token_hex(8))


def _mark(folder: Path, owner: str | None) -> Path:
    name = "all" if owner is None else hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return folder / f"erased-{name}"


class TableStore:
    """Tables of one vocabulary."""

    def __init__(self, folder: Path | None, vocabulary: str, vocab_size: int, *, seal: Seal = PLAIN) -> None:
        """folder: None keeps everything in memory. vocabulary: fingerprint of the tokenizer. seal: of their files."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._tables: OrderedDict[str, LookupTable] = OrderedDict()
        self._erasing: set[str] = set()  # owners whose files are being erased
        self._marks: dict[str, tuple[str, str]] = {}  # erasure marks of the owners in memory, as read at loading
        self._seal = seal
        if folder is not None and seal.is_on:
            seal_plain_tables(folder, seal)
        self.base = self._load("base", "") or self._new()  # behind every owner's; changed by warm-up only

    def table(self, owner: str) -> LookupTable:
        """The owner's table over the base. owner: written into files, so never a secret."""
        table = self._tables.get(owner)
        if table is not None and self._was_erased(owner):
            self._forget(owner)
            table = None
        if table is None:
            marks = self._marks_of(owner)  # before the file, which another process may erase meanwhile
            known = None if owner in self._erasing else self._load("owner", owner, base=self.base)
            table = known or self._new(self.base)
            self._tables[owner], self._marks[owner] = table, marks
        self._tables.move_to_end(owner)
        while self._folder is None and self.full:
            self._drop(next(iter(self._tables)))
        return table

    @property
    def full(self) -> bool:
        """True if more tables are in memory than allowed; the caller must then `shrink`."""
        return len(self._tables) > OWNERS

    async def shrink(self) -> None:
        """Write the least recently used tables to their files and drop them. A table stays in use until its file is
        written, because neither the event loop nor a request of that owner may wait for the disk."""
        while self.full:
            owner, table = next(iter(self._tables.items()))
            if (write := self.writing(owner)) is not None:
                await asyncio.to_thread(write)
            if next(iter(self._tables.items()), None) == (owner, table):  # not used meanwhile
                self._drop(owner)

    async def erase(self, owner: str) -> bool:
        """Erase from memory and disk; an answer under way continues with an empty table that is never saved.

        False when there was nothing.
        """
        known = self._forget(owner)
        if self._folder is None:
            return known
        erasing = asyncio.ensure_future(asyncio.to_thread(self._remove, self._folder, owner))
        self._erasing.add(owner)
        erasing.add_done_callback(lambda _: self._erasing.discard(owner))
        return await asyncio.shield(erasing) or known

    def save(self) -> int:
        """Write every owner's table; the number written."""
        return sum(write() for owner in list(self._tables) if (write := self.writing(owner)) is not None)

    def save_base(self) -> bool:
        """Write the base. False without a folder or where the disk fails."""
        if self._folder is None:
            return False
        path, arrays, metadata = self._path("base", ""), self.base.arrays(), self._metadata("base", "")
        return write_table(path, encode_table(path.name, arrays, metadata), replace_table)

    # ---- inside -----------------------------------------------------------------------------------------------------
    def _new(self, base: LookupTable | None = None) -> LookupTable:
        """An empty table of an owner over the base; without `base`, an empty base."""
        capacity = None if base is None else OWNER_ROWS
        return LookupTable(self._vocab_size, base=base, capacity=capacity)

    def writing(self, owner: str) -> Callable[[], bool] | None:
        """What writes a copy of a table to its file, on any thread: True if it has. None without a folder, for an empty
        table, and for one that another process has erased."""
        if self._folder is None:
            return None
        if self._was_erased(owner):
            self._forget(owner)
            return None
        table, path = self._tables[owner], self._path("owner", owner)
        if not len(table):
            return None
        arrays, metadata = table.arrays(), self._metadata("owner", owner)

        def rename(part: Path, path: Path) -> bool:
            with _FILES:
                wanted = self._tables.get(owner) is table and not self._was_erased(owner)
                return wanted and replace_table(part, path)

        return lambda: write_table(path, encode_table(path.name, arrays, metadata, self._seal), rename)

    def _remove(self, folder: Path, owner: str) -> bool:
        """Remove the owner's files of every vocabulary: other models' tables, too, are in the folder, and may be in
        memory, where the mark has them forgotten. On any thread; False if there was none. Raises OSError."""
        with _FILES:
            mark_erased(folder, owner)
            files = [(path, _metadata(path)) for path in folder.glob(f"owner-*{SUFFIX}")]
            found = {path for path, metadata in files if metadata is not None and metadata.get("owner") == owner}
            return any([remove_table(path) for path in {self._path("owner", owner), *found}])

    def _was_erased(self, owner: str) -> bool:
        """True if another process has erased it: its mark has changed."""
        return self._folder is not None and self._marks.get(owner) != self._marks_of(owner)

    def _marks_of(self, owner: str) -> tuple[str, str]:
        """Erasure marks of this owner and of all owners, written by `mark_erased`; "" for none."""
        found = []
        for each in (owner, None):
            try:
                found.append("" if self._folder is None else _mark(self._folder, each).read_text("ascii"))
            except (OSError, UnicodeDecodeError):
                found.append("")
        return found[0], found[1]

    def _forget(self, owner: str) -> bool:
        table = self._drop(owner)
        if table is not None:
            table.erase()
        return table is not None

    def _drop(self, owner: str) -> LookupTable | None:
        self._marks.pop(owner, None)
        return self._tables.pop(owner, None)

    def _metadata(self, kind: Kind, owner: str) -> dict[str, str]:
        return {"format": FORMAT, "vocabulary": self._vocabulary, "kind": kind, "owner": owner}

    def _path(self, kind: Kind, owner: str) -> Path:
        assert self._folder is not None
        words = "\0".join((kind, owner, self._vocabulary)).encode("utf-8", "surrogatepass")
        return self._folder / f"{kind}-{hashlib.sha256(words).hexdigest()[:32]}{SUFFIX}"

    def _load(self, kind: Kind, owner: str, base: LookupTable | None = None) -> LookupTable | None:
        if self._folder is None:
            return None
        path = self._path(kind, owner)
        opened = read_table(path, self._seal)
        if opened is None:
            return None
        metadata, arrays = opened
        try:
            if metadata != self._metadata(kind, owner):
                raise ValueError("it is another table's")
            table = self._new(base)
            table.load(arrays)
            return table
        except ValueError as error:
            log.warning("a look-up table is damaged and begins anew: %s: %s", path.name, error)
            return None


Lifetime = Literal["owner", "documents", "answer"]
"""What the rows of an answer are kept with.

`owner`: written without any document, they may go to disk. `documents`: this side's documents took part, or may have
written earlier turns of the conversation, or a device has written its user's answer with its cloud; the rows go as soon
as one is removed here. `answer`: the other side takes part, and does not say when it removes a document; the rows end
with the answer.
"""


def over(table: LookupTable) -> LookupTable:
    """An empty table that reads `table` where it has no row, and never changes it."""
    return LookupTable(table.vocab_size, base=table, capacity=table.capacity)


class DocumentTables:
    """Look-up tables of what documents say, in memory only: one for each owner, over the owner's table on disk, for as
    long as no document is removed. Of `OWNERS` the least recently used is forgotten. Not thread-safe."""

    def __init__(self) -> None:
        self._removals = 0  # of documents, when these tables were made
        self._tables: OrderedDict[str, tuple[LookupTable, LookupTable]] = OrderedDict()  # the owner's, and that over it

    def table(self, owner: str, below: LookupTable, removals: int) -> LookupTable:
        """The table of an answer whose prompts were searched after so many removals. below: the owner's table; another
        one than before was erased or loaded again, and what was over it is erased too.

        A table of fewer removals than these tables have seen is a fresh one that nobody keeps.
        """
        self.erase_older(removals)
        if removals < self._removals:
            return over(below)
        known = self._tables.get(owner)
        if known is None or known[0] is not below:
            self._erase(owner)
            known = self._tables[owner] = below, over(below)
        self._tables.move_to_end(owner)
        while len(self._tables) > OWNERS:
            del self._tables[next(iter(self._tables))]
        return known[1]

    def erase_older(self, removals: int) -> None:
        """Erase every table if a document has been removed since they were made. An answer under way goes on with an
        empty one, which ends with it."""
        if removals > self._removals:
            for owner in list(self._tables):
                self._erase(owner)
            self._removals = removals

    def _erase(self, owner: str) -> None:
        if (known := self._tables.pop(owner, None)) is not None:
            known[1].erase()


# ---- warm-up: a model reads dialogues, and the base table records its distribution after each token -----------------
# The dialogues are JSON lines: {"messages": [{"role", "content"}]} as in OpenAI's API, {"turns": [...]} as in
# Spec-Bench, or {"conversations": [{"from", "value"}]} as in ShareGPT. The operator chooses them: their
# text becomes drafts for every client, and although drafts are not shown, the speed of an answer can reveal that one
# was accepted.
Message = Mapping[str, str]
Dialogue = Sequence[Message]

WEIGHT: Final = 0.1  # of a new distribution in a row: rows average over all dialogues
CHUNK: Final = 32  # rows per forward: at 152k tokens their distributions are 40 MB
_ROLES: Final = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_SEQ: Final = SeqId(1 << 40)  # not used by any session


def read_dialogues(file: Path) -> Iterator[Dialogue]:
    """Dialogues of a JSONL file, gzip or not, one a line. Raises ConfigError that names the file and the line."""
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        yield _dialogue(json.loads(line))
                    except (ValueError, KeyError, TypeError, AttributeError) as error:
                        raise ConfigError(
                            f"{file}, line {number}, is no dialogue ({type(error).__name__}: {error}): "
                            'give JSON lines such as {"messages": [{"role": "user", "content": "..."}]}'
                        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def warm(
    model: LoadedModel,
    table: LookupTable,
    dialogues: Iterable[Dialogue],
    *,
    max_tokens: int = 2048,
    answer_tokens: int = 0,
) -> int:
    """Fill the table from all dialogues; returns the tokens read. Runs on the engine's thread, with nothing else
    running.

    max_tokens: limit per dialogue; the context is never exceeded. answer_tokens: number the model writes greedily after
    a dialogue that ends with the user.
    """
    limit = min(max_tokens, model.engine.info.max_positions)
    total = 0
    for dialogue in dialogues:
        tokens = list(model.tokenizer.chat(dialogue))[:limit]
        max_answer = answer_tokens if dialogue[-1]["role"] == "user" else 0
        stop = min(len(tokens) + max_answer, limit)
        start = 0
        try:
            while start < len(tokens):
                rows = tokens[start : start + CHUNK]
                following = _record(model.engine, table, start, tokens[start - 1] if start else -1, rows)
                start += len(rows)
                if start == len(tokens) < stop and following not in model.tokenizer.eos_ids:
                    tokens.append(following)
                total += len(rows)
        finally:
            model.engine.release(_SEQ)
    return total


def _record(engine: Engine, table: LookupTable, start: int, before: int, rows: Sequence[int]) -> int:
    """Run one forward and record its distributions; the most probable next token. before: the preceding token, -1:
    none."""
    output = engine.forward(Batch((Segment(_SEQ, start, tuple(rows), logits="all"),)))
    for token, dist in zip(rows, output.dists[0], strict=True):
        # Ids that pad an engine's vocabulary have no meaning.
        ids, probs = zip(
            *((each, prob) for each, prob in dist.top(NUM_SUCCESSORS) if each < table.vocab_size), strict=True
        )
        table.blend(token, ids, probs, WEIGHT)
        if table.bigrams is not None and before >= 0:
            table.bigrams.blend(bigram_key(before, token), ids, probs, WEIGHT)
        before = token
    return output.dists[0][-1].argmax()


def _dialogue(line: dict[str, object]) -> Dialogue:
    """Parse one line. Raises ValueError, KeyError, TypeError or AttributeError for an invalid one."""
    if isinstance(line.get("messages"), list):
        messages = [(message["role"], message["content"]) for message in line["messages"]]  # type: ignore[attr-defined]
    elif isinstance(line.get("turns"), list):
        messages = [("user", turn) for turn in line["turns"]]  # type: ignore[attr-defined]
    elif isinstance(line.get("conversations"), list):
        messages = [(_ROLES[message["from"]], message["value"]) for message in line["conversations"]]  # type: ignore[attr-defined]
    else:
        raise ValueError("neither messages, turns nor conversations")
    if not messages or not all(isinstance(text, str) and role in _ROLES.values() for role, text in messages):
        raise ValueError("each message has a role and a text")
    return [{"role": role, "content": text} for role, text in messages]
