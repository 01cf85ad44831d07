"""How thorough the tests are that try many seeds: the whole suite must end within half an hour on two cores."""

from __future__ import annotations

import os

# Times as many seeds, and as many steps at which one is lost. Workers know it by the second name (`conftest`).
DEPTH = int(os.environ.get("PACELINE_TEST_DEPTH") or os.environ.get("TEST_DEPTH", "1"))
