"""Calendars, contacts and subtitles, a line for each entry: iCalendar (RFC 5545), vCard (RFC 6350), SubRip and WebVTT.

Times stand as they are written, without their zones; of an entry that repeats the rule is kept as it is. What only
programs read is left out: ids, stamps, alarms, pictures, settings of cues.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime

from paceline.rag.parsing.readers.content import ReadText, UnreadableError, decode, one_line

_NAMES: Mapping[str, str] = {  # of properties, as people say them
    "SUMMARY": "Event", "DTSTART": "Start", "DTEND": "End", "DUE": "Due", "LOCATION": "Place",
    "DESCRIPTION": "Description", "RRULE": "Repeats", "ORGANIZER": "Organizer", "ATTENDEE": "Attendee",
    "STATUS": "Status", "CATEGORIES": "Categories", "COMMENT": "Comment", "FN": "Name", "NICKNAME": "Nickname",
    "ORG": "Organization", "TITLE": "Title", "ROLE": "Role", "TEL": "Phone", "EMAIL": "E-mail", "ADR": "Address",
    "BDAY": "Birthday", "ANNIVERSARY": "Anniversary", "NOTE": "Note", "URL": "Website", "RELATED": "Related",
}  # fmt: skip
_PROPERTY = re.compile(r"(?:[\w-]++\.)?+([\w-]++)((?:;(?:[^:\"]|\"[^\"]*+\")*+)?+):(.*)", re.DOTALL)
_ENTRIES = ("VEVENT", "VTODO", "VJOURNAL", "VCARD")
_ESCAPED = re.compile(r"\\(.)")
_PARTS = re.compile(r"(?<!\\);")  # of an address or an organization
_ADDRESSED = ("ORGANIZER", "ATTENDEE")  # whose names are parameters
_CALLED = re.compile(r";CN=\"?([^\";]*)")
_STAMP = re.compile(r"(\d{8})(?:T(\d{4}))?")
_TIMES = re.compile(r"[\d:.,]+\s+-->\s")
_VOICE = re.compile(r"<v(?:\.[^\s>]*+)?+\s([^>]*+)>")
_MARK = re.compile(r"<[^>]*>|\{\\[^}]*\}")


def read_entries(data: bytes, _name: str) -> ReadText:
    lines = re.sub(r"\r?\n[ \t]", "", decode(data)).splitlines()
    if not lines or lines[0].strip().upper() not in ("BEGIN:VCALENDAR", "BEGIN:VCARD"):
        raise UnreadableError("is no calendar and no list of contacts; export it again", "invalid_file")
    title, entry, within = "", list[tuple[str, str]](), list[str]()
    made = []
    for line in lines:
        found = _PROPERTY.match(line)
        if found is None:
            continue
        name, parameters, value = found[1].upper(), found[2], found[3]
        if name == "BEGIN":
            within.append(value.strip().upper())
        elif name == "END":
            if within and within.pop() in _ENTRIES and entry:
                made.append("; ".join(f"{_NAMES[name]}: {said}" for name, said in sorted(entry, key=_order)))
                entry = []
        elif name == "X-WR-CALNAME":
            title = one_line(_plain(value))
        elif within and within[-1] in _ENTRIES and name in _NAMES and (said := _said(name, parameters, value)):
            entry.append((name, said))
    return ReadText(title, "\n".join(made))


def _order(entry: tuple[str, str]) -> int:
    return list(_NAMES).index(entry[0])


def _said(name: str, parameters: str, value: str) -> str:
    if name in _ADDRESSED and (called := _CALLED.search(parameters)):
        return called[1]
    if name in ("DTSTART", "DTEND", "DUE", "BDAY", "ANNIVERSARY") and (stamp := _STAMP.match(value.replace("-", ""))):
        with suppress(ValueError):  # no day of any calendar
            day = datetime.strptime(stamp[1], "%Y%m%d")
            hour = f", {stamp[2][:2]}:{stamp[2][2:]}" if stamp[2] else ""
            return f"{day:%A} {day.day} {day:%B %Y}{hour}"
    parts = _PARTS.split(value) if name in ("ADR", "ORG") else [value]
    return ", ".join(said for part in parts if (said := _plain(part)))


def _plain(value: str) -> str:
    """A value on one line, that no value of a next one begins in."""
    text = _ESCAPED.sub(lambda found: "\n" if found[1] in "nN" else found[1], value)
    return " ".join(text.replace("; ", ", ").split())


def read_subtitles(data: bytes, _name: str) -> ReadText:
    cues = list(_cues(decode(data)))
    if not cues:
        raise UnreadableError("has no subtitles with times; export it again, or name it .txt", "invalid_file")
    return ReadText("", "\n".join(cues))


def _cues(text: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        lines = block.split("\n")
        begun = next((number for number, line in enumerate(lines, 1) if _TIMES.match(line.lstrip())), 0)
        said = _MARK.sub("", _VOICE.sub(r"\1: ", " ".join(lines[begun:])))
        if begun and said.strip():
            yield " ".join(said.split())
