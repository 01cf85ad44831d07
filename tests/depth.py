"""How thorough the tests are that try many seeds: the whole suite must end within half an hour on two cores."""

from __future__ import annotations

import os

DEPTH = int(os.environ.get("PACELINE_TEST_DEPTH", "1"))  # times as many seeds, and as many steps at which one is lost
