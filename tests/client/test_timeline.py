"""The timeline of an answer as text: its sums and courses, from a report of any shape."""

from __future__ import annotations

import pytest

from client.dialogue import BINS, timeline_lines

MOMENTS = [
    {"ms": 0, "side": "device", "kind": "search", "number": 2, "took_ms": 5},
    {"ms": 5, "side": "device", "kind": "strategy", "of": "aggregate", "number": 1},
    {"ms": 5, "side": "device", "kind": "cost_ms", "of": "aggregate", "number": 12.34},
    {"ms": 5, "side": "device", "kind": "cost_ms", "of": "draft_verify", "number": 0},
    {"ms": 6, "side": "device", "kind": "sent", "of": "open", "number": 245},
    {"ms": 8, "side": "cloud", "kind": "received", "of": "drafts", "number": 50},
    {"ms": 8, "side": "device", "kind": "round_trips", "number": 2, "took_ms": 30},
    {"ms": 20, "side": "device", "kind": "tokens", "number": 1},
    {"ms": 40, "side": "cloud", "kind": "lost", "number": 1},
    {"ms": 120, "side": "cloud", "kind": "tokens", "number": 4},
    {"ms": 120, "side": "cloud", "kind": "drafted", "number": 4},
    {"ms": 120, "side": "cloud", "kind": "accepted", "number": 3},
]
REPORT = {"strategy": "aggregate", "why": "both", "energy": {"device": {"joules": 1.5}}, "timeline": MOMENTS}


def test_sums_and_courses_are_told() -> None:
    *told, axis = timeline_lines(REPORT)
    assert told[:11] == [
        "aggregate: both",
        "compared, ms a token: aggregate 12.3, draft_verify (to be measured)",
        "device: 2 passages found in 5 ms",
        "tokens: 5 (device 1, cloud 4), the first after 20 ms, 40 a second",
        "drafts of the cloud: 3 of 4 accepted (75 %), 1 rolled back",
        "round trips: 2, 15 ms each",
        "bytes up from the device: 245 (open 245)",
        "bytes down from the cloud: 50 (drafts 50)",
        "40 ms: the cloud was lost",
        "energy of the device: 1.5 J",
        "device tokens   " + (" " * 9 + "█").ljust(BINS),
    ]
    assert [line.split()[1] for line in told[10:]] == ["tokens", "tokens", "drafted", "sent", "received"]
    assert axis.endswith("120 ms")


@pytest.mark.parametrize(
    "found",
    [None, "x", {}, [1, None, "x"], [{"ms": "x"}], [{"ms": float("nan")}, {"ms": -1}, {"kind": 5, "ms": 1, "of": []}]],
)
def test_a_timeline_of_any_shape_is_taken(found: object) -> None:
    assert next(timeline_lines({"timeline": found, "energy": [found]})) == "None: None"
    assert all(isinstance(line, str) for line in timeline_lines({"timeline": found, "energy": {"x": found}}))
