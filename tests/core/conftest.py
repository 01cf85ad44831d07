"""Hypothesis profile: the same examples in every run, and no deadlines for slow machines."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("core", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("core")
