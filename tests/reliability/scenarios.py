"""The 34 reliability scenarios: what each does. Their tests are the modules `test_rNN_*` of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SCENARIOS: Final[Mapping[int, str]] = {
    1: "peer killed in mid-stream",
    2: "peer stopped or cut off without a word",
    3: "server killed, stream resumed",
    4: "two owners of one answer after a partition",
    5: "link cut again and again, storm of devices",
    6: "client leaves",
    7: "server told to stop",
    8: "cloud dead or slow from the start",
    9: "power cut while documents are read and deleted",
    10: "same text and same distribution in every mode",
    11: "no mode slower than plain decoding",
    12: "energy budget kept",
    13: "peer of another version, vocabulary or model",
    14: "malformed frames and messages",
    15: "huge, endless and dribbled frames",
    16: "half-open handshakes",
    17: "slow readers",
    18: "replayed handshakes and frames",
    19: "pairing, revocation, renewal",
    20: "fuzzed HTTP requests",
    21: "every route without a key",
    22: "limits of a request",
    23: "overload",
    24: "another user's ids, timing of caches",
    25: "names of uploads",
    26: "URLs in requests",
    27: "documents that are bombs",
    28: "model files that run code",
    29: "instructions in retrieved text",
    30: "marked private documents",
    31: "membership test by the cloud",
    32: "data at rest, deletion",
    33: "soak",
    34: "full disk, failing disk",
}

# No test here, and why.
UNTESTED: Final[Mapping[int, str]] = {
    4: "held by tests/fleet/test_shared_stores.py; servers that are killed or stand still, by `python -m lab.fleet`",
    11: "speed is measured in bench/, as a ratio within rounds of one run",
    12: "pure: held by tests/core/offloading/test_draft_length.py, for requests by tests/runtime/test_energy.py",
}


# Gaps, rates or times of honest clients are compared with those of a calm run: nothing else may run beside these.
MEASURED: Final = frozenset({14, 17, 22, 23, 24})


def name(scenario: int) -> str:
    return f"R{scenario}"
