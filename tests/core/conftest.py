"""Properties are checked on the same examples in every run, and a slow machine fails none of them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("core", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("core")
