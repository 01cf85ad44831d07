"""Two-hop questions about made-up towns, with documents of both sides and pages of a web: equal at every run.

A museum's founder is in one side's documents, the founder's year of birth in the other's, and what the museum shows is
on a page. Besides, every document names things that nobody asks about, so that searches find several passages.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final
from urllib.parse import parse_qs, urlsplit

from paceline.core.side import Side

TOWNS: Final = ("Arnwick", "Belmor", "Carrow", "Dunleth", "Eskdale", "Fenmoor", "Garside", "Holbeck")
PEOPLE: Final = ("Ada Lind", "Bo Marsh", "Cora Venn", "Dag Holm", "Edda Pike", "Finn Rowe", "Gro Tarn", "Hal Wyatt")
SHOWN: Final = ("clocks", "boats", "maps", "bells", "kites", "coins", "masks", "looms")
OTHERS: Final = ("market", "bridge", "school", "chapel")


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and what each agent is to ask for."""

    question: str
    script: Mapping[str, Sequence[str]]


def questions() -> list[Asked]:
    return [
        Asked(
            f"When was the founder of the museum of {town} born?",
            {
                "rewrite": [f"Who founded the museum of {town}?", f"When was {person} born?"],
                "plan": [f"museum of {town}", f"{person} founder"],
                "look": [f"museum of {town} {shown}"],
            },
        )
        for town, person, shown in zip(TOWNS, PEOPLE, SHOWN, strict=True)
    ]


def documents() -> dict[Side, str]:
    """A text of each side, a paragraph a passage."""
    device = [
        f"The museum of {town} was founded by {person}. The {other} of {town} was opened by a mayor, and the museum of "
        f"{town} lies beside it. Whoever was born in {town} may visit it for nothing on the first day of a month."
        for town, person in zip(TOWNS, PEOPLE, strict=True)
        for other in OTHERS
    ]
    cloud = [
        f"{person} was born in {1801 + 7 * place + row}, and went to school in {town}. When {person} was young, the "
        f"{other} of {town} was built. A founder of a museum, {person} was born to a family of weavers."
        for place, (town, person) in enumerate(zip(TOWNS, PEOPLE, strict=True))
        for row, other in enumerate(OTHERS)
    ]
    return {"device": "\n\n".join(device), "cloud": "\n\n".join(cloud)}


@contextmanager
def web(wait_s: float) -> Iterator[str]:
    """URL of a SearXNG with three pages for each query, and of the pages; each answer waits, as the Internet does."""
    asleep = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asleep.wait(wait_s)
            url = urlsplit(self.path)
            if url.path == "/search":
                town = next((each for each in TOWNS if each in parse_qs(url.query)["q"][0]), TOWNS[0])
                found = [
                    {"url": f"{base}/{town}/{other}", "title": f"{other} of {town}", "content": town}
                    for other in OTHERS[:3]
                ]
                self._reply(json.dumps({"results": found}).encode(), "application/json")
            else:
                self._reply(_page(*url.path.strip("/").split("/")).encode(), "text/html")

        def _reply(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        base = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield base
        server.shutdown()
        thread.join()


def _page(town: str, other: str) -> str:
    shown = SHOWN[TOWNS.index(town)] if town in TOWNS else ""
    paragraphs = [
        f"<p>The museum of {town} shows {shown}, and its founder was born nearby. By the {other} of {town} there is "
        f"room {number}, in which {shown} of the museum are repaired for those who were born here.</p>"
        for number in range(6)
    ]
    return f"<title>{other} of {town}</title>{''.join(paragraphs)}"
