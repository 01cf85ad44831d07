"""Encrypting a plain store in place.

All rows are encrypted in one transaction, with the store's seal as the last of them: a kill leaves the store plain or
sealed, never half. Sealed copies of uploaded files are written before, beside the plain ones; whichever does not belong
to the store's state is removed, now or at the next opening. Then the database is written anew, since free pages and the
log may hold plain text. Not reached: blocks that the disk keeps of what was there before.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from paceline.rag.database import Database
from paceline.rag.document_kv import FOLDER as KV
from paceline.rag.document_kv import DocumentKvStore
from paceline.rag.rows import document_id, seal_chunk, seal_record, stored_source
from paceline.rag.store.files import FOLDER, seal_file_name, stored_name, write_pieces
from paceline.rag.store.vector_stores import seal_attributes, seal_error, seal_metadata, seal_name
from paceline.sealing import Seal, StoreKey

_UNFINISHED = "unfinished"  # in `meta`: plain text is left outside the rows
_logger = logging.getLogger("paceline.rag")


def encrypt_store(directory: Path, database: Database) -> None:
    """Encrypt a plain store. Raises ConfigError; then nothing has changed."""
    plain, seal = database.seal, StoreKey(directory).new_seal()
    try:
        with database.writing():
            database.seal = seal
            database.execute("PRAGMA defer_foreign_keys = ON")  # until the commit: ids of documents change
            _seal_files(directory / FOLDER, database)
            _seal_documents(database)
            _seal_vector_stores(database)
            database.bump()
            database.execute("INSERT OR REPLACE INTO meta VALUES ('seal', ?), (?, '1')", seal.name, _UNFINISHED)
    except BaseException:
        database.seal = plain
        raise
    finish_encryption(directory, database)
    _logger.info("the documents in %s are encrypted now; their key: %s", directory, StoreKey(directory).path)


def finish_encryption(directory: Path, database: Database) -> None:
    """Remove what is left in plain text of a store that has been encrypted; at an opening, after a kill."""
    with database.reading():
        if _UNFINISHED not in database.meta():
            return
        ids = [row[0] for row in database.execute("SELECT id FROM files")]
    for file_id in ids:
        (directory / FOLDER / stored_name(file_id, sealed=False)).unlink(missing_ok=True)
    DocumentKvStore(directory / KV, 0).retain(set)
    database.vacuum()
    with database.writing():
        database.execute("DELETE FROM meta WHERE key = ?", _UNFINISHED)


def _seal_documents(database: Database) -> None:
    seal: Seal = database.seal
    database.execute("DELETE FROM readings")  # they can be had again
    rows = database.execute("SELECT id, name, sha256, source, stamp, file FROM documents").fetchall()
    for before, name, sha256, source, stamp, file in rows:
        # The id of a document without a file is taken from its text: a hash of it would tell a guess right or wrong.
        after = before if file else document_id(database, sha256)
        key, box = seal.make_key(after)
        for table in ("chunks", "texts"):
            database.execute(f"UPDATE {table} SET document = ? WHERE document = ?", after, before)
        database.execute(
            "UPDATE documents SET id = ?, name = ?, sha256 = ?, source = ?, stamp = ?, key = ?, sealed = ? "
            "WHERE id = ?",
            after, seal.lookup(name), seal.lookup(sha256), stored_source(database, source), seal.lookup(stamp), key,
            seal_record(box, name, sha256, source), before,
        )  # fmt: skip
        chunks = database.execute(
            "SELECT id, position, title, text, embedding, place FROM chunks WHERE document = ?", after
        )
        for chunk_id, position, title, text, embedding, place in chunks.fetchall():
            database.execute(
                "UPDATE chunks SET title = ?, text = ?, embedding = ?, place = ? WHERE id = ?",
                *seal_chunk(box, position, title, text, embedding, place), chunk_id,
            )  # fmt: skip
        for (text,) in database.execute("SELECT text FROM texts WHERE document = ?", after).fetchall():
            database.execute("UPDATE texts SET text = ? WHERE document = ?", box.seal_text(text, "whole text"), after)


def _seal_vector_stores(database: Database) -> None:
    for store, name, metadata in database.execute("SELECT id, name, metadata FROM vector_stores").fetchall():
        database.execute(
            "UPDATE vector_stores SET name = ?, metadata = ? WHERE id = ?",
            seal_name(database, store, name), seal_metadata(database, store, json.loads(metadata)), store,
        )  # fmt: skip
    attached = database.execute("SELECT seq, store, file, attributes, error_message FROM attached").fetchall()
    for seq, store, file, attributes, message in attached:
        database.execute(
            "UPDATE attached SET attributes = ?, error_message = ? WHERE seq = ?",
            seal_attributes(database, store, file, json.loads(attributes)),
            seal_error(database, store, file, message), seq,
        )  # fmt: skip


def _seal_files(folder: Path, database: Database) -> None:
    """Write a sealed copy of every uploaded file, and the keys of these into their rows."""
    for file_id, name in database.execute("SELECT id, name FROM files").fetchall():
        key, box = database.seal.make_key(file_id)
        copy = folder / stored_name(file_id, sealed=True)
        copy.unlink(missing_ok=True)  # of an attempt that was killed
        plain = folder / stored_name(file_id, sealed=False)
        if plain.exists():
            with plain.open("rb") as content:
                write_pieces(copy, box.seal_file(content))
        database.execute("UPDATE files SET name = ?, key = ? WHERE id = ?", seal_file_name(box, name), key, file_id)
