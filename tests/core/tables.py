"""What holds of every look-up table."""

from __future__ import annotations

import numpy as np

from paceline.core.drafting.lookup_table import LookupTable


def check(table: LookupTable) -> None:
    """Rows are of distinct tokens and falling, with empty entries last."""
    arrays = table.arrays()
    tokens, ids, probs = arrays["tokens"], arrays["ids"], arrays["probs"]
    assert len(set(tokens.tolist())) == len(tokens) == len(table) <= table.capacity
    assert (np.diff(probs, axis=1) <= 0.0).all()
    assert ((ids >= 0) == (probs > 0.0)).all()
    if table.bigrams is not None:
        check(table.bigrams)
