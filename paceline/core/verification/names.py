"""Names of the verifiers."""

from __future__ import annotations

from typing import Literal

VerifierName = Literal["agreement", "rejection", "truncated"]
