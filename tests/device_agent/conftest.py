from __future__ import annotations

from tests.server.conftest import cheap_codes

__all__ = ["cheap_codes"]
