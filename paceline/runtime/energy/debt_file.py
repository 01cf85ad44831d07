"""The energy that a device has spent beyond its budget, kept in its state directory over restarts.

Written whole or not at all, every half minute in which it has changed, and at the end. What a crash loses is the
drafting of half a minute. Not handled: two agents on one state directory; the later one's value stays.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Final

from paceline.core.offloading import EnergyDebt
from paceline.errors import ConfigError
from paceline.secret_files import private_folder, read_private, write_private

FILE: Final = "energy.json"
FORMAT: Final = 1
SAVE_S: Final = 30.0

log = logging.getLogger("paceline.energy")


class DebtFile:
    """Methods may be called on any thread, one at a time."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / FILE
        self.debt = EnergyDebt(self._read())
        self._saved = self.debt.joules

    def save(self) -> None:
        """Write the debt if it has changed. A disk that takes nothing costs a line in the log."""
        joules = self.debt.joules
        if joules == self._saved:
            return
        content = json.dumps({"format": FORMAT, "spent_beyond_budget_j": joules}).encode()
        try:
            private_folder(self.path.parent)
            write_private(self.path, content)
        except (OSError, ConfigError) as error:
            log.warning("the energy spent beyond the budget cannot be kept in %s: %s", self.path, error)
            return
        self._saved = joules

    def _read(self) -> float:
        try:
            content = read_private(self.path, otherwise="remove it")
            if content is None:
                return 0.0
            found = json.loads(content)
            if found["format"] != FORMAT:
                raise ValueError("another format")
            joules = float(found["spent_beyond_budget_j"])
            if not 0.0 <= joules < math.inf:
                raise ValueError("no amount of energy")
        except (ConfigError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is damaged (%s): what was spent beyond the energy budget is forgotten", self.path, error)
            return 0.0
        return joules
