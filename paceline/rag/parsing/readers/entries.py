"""Calendars, contacts and subtitles, a line for each entry: iCalendar (RFC 5545), vCard (RFC 6350, and 2.1 of old
telephones), SubRip and WebVTT.

Times stand as they are written, of UTC where they are; a day that ends an event is its last one. What only programs
read is left out: ids, stamps, alarms, pictures, settings of cues. Not handled: zones, and the days of a repetition.
"""

from __future__ import annotations

import quopri
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from html import unescape
from pathlib import PurePath
from typing import NamedTuple

from paceline.rag.parsing.kinds import MAX_TITLE
from paceline.rag.parsing.readers.content import ReadText, UnreadableError, decode, one_line

_NAMES: Mapping[str, str] = {  # of properties, as people say them, in the order in which they are told
    "SUMMARY": "Event", "DTSTART": "Start", "DTEND": "End", "DUE": "Due", "DURATION": "Duration", "RRULE": "Repeats",
    "EXDATE": "Not on", "RECURRENCE-ID": "In place of", "LOCATION": "Place", "DESCRIPTION": "Description",
    "ORGANIZER": "Organizer", "ATTENDEE": "Attendee", "STATUS": "Status", "COMPLETED": "Completed",
    "CATEGORIES": "Categories", "COMMENT": "Comment", "FN": "Name", "NICKNAME": "Nickname", "ORG": "Organization",
    "TITLE": "Title", "ROLE": "Role", "TEL": "Phone", "EMAIL": "E-mail", "ADR": "Address", "BDAY": "Birthday",
    "ANNIVERSARY": "Anniversary", "NOTE": "Note", "URL": "Website", "RELATED": "Related",
}  # fmt: skip
_ORDER = {name: place for place, name in enumerate(_NAMES)}
_ENTRIES = ("VEVENT", "VTODO", "VJOURNAL", "VCARD")
_FOLD = re.compile(rb"(?:(?<!=)\r\n|(?<![=\r])\n)[ \t]")  # may be within a character; behind "=" it is told later
_PICTURE = re.compile(rb"^(?:[\w-]++\.)?(?:PHOTO|LOGO|SOUND|KEY|ATTACH)[;:][^\n]*+\n?", re.IGNORECASE | re.MULTILINE)
_PROPERTY = re.compile(r"(?:([\w-]++)\.)?+([\w-]++)((?:;(?:[^:\"]|\"[^\"]*+\")*+)?+):(.*)", re.DOTALL)
_PARAMETER = re.compile(r";(?:([\w-]++)=)?+(\"[^\"]*+\"|[^;\"]*+)")
_ESCAPED = re.compile(r"\\(.)")
_PARTS = re.compile(r"(?<!\\)[;,]")
_FIELDS = re.compile(r"(?<!\\);")
_STAMP = re.compile(r"(\d{4}|--)-?(\d\d)-?(\d\d)(?:T(\d\d):?(\d\d)[\d:.]*+(Z?))?")
_NO_YEAR = ("--", "1604")  # Apple writes a leap year
_UNTOLD = frozenset({"PREF", "VOICE", "INTERNET"})  # what most telephones and addresses are
_DAYS = {day[:2].upper(): day for day in ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")}


class _Property(NamedTuple):
    group: str  # what Apple's labels belong to
    name: str
    parameters: Mapping[str, str]  # by name in capitals; several TYPEs joined by a comma
    value: str


def read_entries(data: bytes, name: str) -> ReadText:
    if b"\0" not in data[:64]:  # else UTF-16
        data = _PICTURE.sub(b"", _FOLD.sub(b"", data))
    properties = list(_properties(decode(data).split("\n")))
    if not properties or properties[0].name != "BEGIN" or properties[0].value not in ("VCALENDAR", "VCARD"):
        raise UnreadableError("is no calendar and no list of contacts; export it again", "invalid_file")
    titles = {one_line(_plain(each.value)) for each in properties if each.name == "X-WR-CALNAME"}
    title = titles.pop() if len(titles) == 1 else PurePath(name).name[:MAX_TITLE]
    return ReadText(title, "\n".join(filter(None, map(_line, _entries(properties)))))


def _properties(lines: list[str]) -> Iterator[_Property]:
    at = 0
    while at < len(lines):
        found, at = _PROPERTY.match(lines[at].lstrip()), at + 1
        if found is None:
            continue
        parameters: dict[str, str] = {}
        for given, value in _PARAMETER.findall(found[3]):
            name = given.upper() or ("ENCODING" if value.upper() == "QUOTED-PRINTABLE" else "TYPE")  # bare in 2.1
            parameters[name] = ",".join(filter(None, (parameters.get(name, ""), value.strip('"'))))
        value = found[4]
        if parameters.get("ENCODING", "").upper() == "QUOTED-PRINTABLE":
            while value.endswith("=") and at < len(lines):
                value, at = value[:-1] + lines[at], at + 1
            value = decode(quopri.decodestring(value.encode()), parameters.get("CHARSET", ""))
        while at < len(lines) and lines[at][:1] in (" ", "\t"):
            value, at = value + lines[at][1:], at + 1
        name = found[2].upper()
        yield _Property(found[1] or "", name, parameters, value.strip().upper() if name in ("BEGIN", "END") else value)


def _entries(properties: list[_Property]) -> Iterator[list[_Property]]:
    within = list[str]()  # components that are open
    entry = list[_Property]()
    for each in properties:
        if each.name == "BEGIN":
            if each.value in _ENTRIES and any(kind in _ENTRIES for kind in within):  # the end of that is missing
                within = [kind for kind in within if kind not in _ENTRIES]
                yield entry
                entry = []
            within.append(each.value)
        elif each.name == "END":
            if each.value in _ENTRIES:
                yield entry
                entry = []
            del within[within.index(each.value) if each.value in within else len(within) :]
        elif within and within[-1] in _ENTRIES:
            entry.append(each)
    yield entry


def _line(entry: list[_Property]) -> str:
    labels = {each.group: _plain(each.value).strip("_$!<>") for each in entry if each.name == "X-ABLABEL"}
    if not any(each.name == "FN" and each.value.strip() for each in entry):
        names = [_FIELDS.split(each.value) for each in entry if each.name == "N"]
        entry += [_Property("", "FN", {}, " ".join([*parts[1:2], *parts[:1]])) for parts in names]
    starts = {_said(each) for each in entry if each.name == "DTSTART"}
    starts |= {_time(each.value, is_end=True) for each in entry if each.name == "DTSTART"}  # an end of old programs
    told = []
    for each in sorted((each for each in entry if each.name in _NAMES), key=lambda each: _ORDER[each.name]):
        if (value := _said(each)) and not (each.name == "DTEND" and value in starts):
            kinds = [kind for kind in each.parameters.get("TYPE", "").split(",") if kind.upper() not in _UNTOLD]
            label = labels.get(each.group, "") or ", ".join(kind.lower() for kind in kinds if kind)
            named = each.name in ("TEL", "EMAIL", "ADR", "URL", "RELATED") and label
            told.append(f"{_NAMES[each.name]} ({label}): {value}" if named else f"{_NAMES[each.name]}: {value}")
    return "; ".join(told)


def _said(each: _Property) -> str:
    name, value = each.name, each.value
    if name in ("DTSTART", "DTEND", "DUE", "COMPLETED", "RECURRENCE-ID", "BDAY", "ANNIVERSARY"):
        return _time(value, is_end=name == "DTEND")
    if name == "EXDATE":
        return ", ".join(_time(day) for day in value.split(","))
    if name == "RRULE":
        return _repetition(dict(part.partition("=")[::2] for part in value.upper().split(";")))
    if name == "DURATION":
        return " ".join(f"{count} {unit}" for count, unit in _AMOUNT.findall(value)).translate(_UNITS)
    if name in ("ORGANIZER", "ATTENDEE"):
        declined = " (declined)" if each.parameters.get("PARTSTAT", "").upper() == "DECLINED" else ""
        return _plain(each.parameters.get("CN", "") or value) + declined
    parts = _PARTS.split(value) if name == "ADR" else _FIELDS.split(value) if name == "ORG" else [value]
    return ", ".join(said for part in parts if (said := _plain(part)))


_AMOUNT = re.compile(r"(?<!\d)(\d++)([WDHM])")
_UNITS = str.maketrans({"W": "weeks", "D": "days", "H": "h", "M": "min"})


def _time(value: str, *, is_end: bool = False) -> str:
    """A day with its name, and the hour; as it stands where it is none. is_end: a day alone is the one after."""
    if (stamp := _STAMP.fullmatch(value.strip())) is None:
        return _plain(value)
    year, month, day, hour, minute, zone = stamp.groups()
    with suppress(ValueError, OverflowError):  # no day of any calendar
        found = datetime(2000 if year in _NO_YEAR else int(year), int(month), int(day))
        if is_end and hour is None:
            found -= timedelta(days=1)
        if year in _NO_YEAR:
            return f"{found.day} {found:%B}"
        told = f"{found:%A} {found.day} {found:%B %Y}"
        return told if hour is None else f"{told}, {hour}:{minute}{' UTC' if zone else ''}"
    return _plain(value)


def _repetition(rule: Mapping[str, str]) -> str:
    told = [rule.get("FREQ", "").lower()]
    if rule.get("INTERVAL", "1") != "1":
        told.append(f"every {rule['INTERVAL']}")
    if days := [
        re.sub("[A-Z]{2}$", lambda day: _DAYS.get(day[0], day[0]), day) for day in rule.get("BYDAY", "").split(",")
    ]:
        told += [f"on {', '.join(days)}"] if days != [""] else []
    if "COUNT" in rule:
        told.append(f"{rule['COUNT']} times")
    if "UNTIL" in rule:
        told.append(f"until {_time(rule['UNTIL'])}")
    return " ".join(told)


def _plain(value: str) -> str:
    """A value on one line, that no value of a next one begins in."""
    text = _ESCAPED.sub(lambda found: "\n" if found[1] in "nN" else found[1], value)
    text = " ".join(text.replace(";", ",").split())
    return text[text.lower().startswith(("mailto:", "tel:")) and text.index(":") + 1 :]


# ---- subtitles ------------------------------------------------------------------------------------------------------
_TIMES = re.compile(r"\s*\d[\d:.,]*+\s*-->")
_VOICE = re.compile(r"<v(?:\.[^\s<>]*+)?+\s([^<>]*+)>")
_MARK = re.compile(r"<[/a-zA-Z\d][^<>]*+>|\{\\[^{}]*+\}")
_BLOCK = re.compile(r"(?:NOTE|STYLE|REGION)\b")


def read_subtitles(data: bytes, name: str) -> ReadText:
    cues = list(_cues(decode(data).split("\n")))
    if not cues:
        raise UnreadableError("has no subtitles with times; export it again, or name it .txt", "invalid_file")
    return ReadText(PurePath(name).name[:MAX_TITLE], "\n".join(cues))


def _cues(lines: list[str]) -> Iterator[str]:
    """The lines between two times, without a number before the second; a line that is shown again counts once."""
    starts = [at for at, line in enumerate(lines) if _TIMES.match(line)]
    shown = ""
    for start, end in zip(starts, [*starts[1:], len(lines) + 1], strict=False):
        own = [line.strip() for line in lines[start + 1 : end - 1]]
        if end <= len(lines) and own[-1:] != [""] and not lines[end - 1].strip().isdecimal() and lines[end - 1].strip():
            own.append(lines[end - 1].strip())  # no number, and no name of a cue, which a blank line is before
        if note := next((at for at, line in enumerate(own) if _BLOCK.match(line) and own[at - 1 : at] == [""]), None):
            del own[note:]
        said = []
        for line in own:
            text = " ".join(unescape(_MARK.sub("", _VOICE.sub(r"\1: ", line))).split())
            if text and text != shown:
                said.append(text)
                shown = text
        if said:
            yield " ".join(said)
