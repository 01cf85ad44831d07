"""Zip containers, judged by their table of contents before anything in them is unpacked.

Sizes that the table understates do no harm: a member is never unpacked beyond the size it declares.
"""

from __future__ import annotations

import io
from zipfile import BadZipFile, ZipFile

from lxml import etree

from paceline.rag.parsing.readers.content import UnreadableError

MAX_MEMBERS = 10_000
MAX_UNPACKED = 256 * 2**20  # bytes, of all members together
MAX_RATIO = 200  # unpacked to packed, of all members together; XML of office programs is packed 5 to 50 times
_SMALL = 16 * 2**20  # bytes unpacked that are allowed at any ratio
_ENCRYPTED = 0x1  # in a member's flags


def open_archive(data: bytes) -> ZipFile:
    """Raises UnreadableError for a damaged or protected archive, and for one that would unpack to too much."""
    try:
        archive = ZipFile(io.BytesIO(data))
    except (BadZipFile, ValueError, NotImplementedError, OSError):
        raise UnreadableError("is a damaged archive; save or download it again", "invalid_file") from None
    members = archive.infolist()
    unpacked = sum(member.file_size for member in members)
    if len(members) > MAX_MEMBERS or unpacked > MAX_UNPACKED or unpacked > max(_SMALL, MAX_RATIO * len(data)):
        raise UnreadableError(
            f"would unpack to {unpacked >> 20} MiB in {len(members)} parts, too much for a document; remove what it "
            "embeds, or split it",
            "invalid_file",
        )
    if any(member.flag_bits & _ENCRYPTED for member in members):
        raise UnreadableError("is protected by a password; save a copy without one")
    return archive


def member(archive: ZipFile, name: str) -> bytes:
    """A member's bytes. Raises UnreadableError when it is missing or damaged."""
    try:
        return archive.read(name)
    except (KeyError, BadZipFile, EOFError, NotImplementedError, ValueError, OSError):
        raise UnreadableError(f"is damaged: its part {name[:80]!r} cannot be unpacked", "invalid_file") from None


def xml_member(archive: ZipFile, name: str) -> etree._Element:
    """A member as XML: no entities, no DTD, no network."""
    parser = etree.XMLParser(
        resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False, remove_comments=True, remove_pis=True
    )
    root = etree.fromstring(member(archive, name), parser)
    if root.getroottree().docinfo.internalDTD is not None:
        raise UnreadableError("defines XML entities, which no such file needs; export it again", "invalid_file")
    return root
