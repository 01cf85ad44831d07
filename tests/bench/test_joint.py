"""Joint answers with 152,000 ids, torch logits and two documents a side: heads give the text of whole distributions."""

from __future__ import annotations

from itertools import cycle

import pytest

from bench.serving.joint import SAMPLINGS, Load, ZipfEngine, play

VOCAB = 151_936


@pytest.mark.parametrize(("name", "private"), list(zip(SAMPLINGS, cycle((True, False)))))
def test_heads_give_the_text_of_whole_distributions(name: str, private: bool) -> None:
    load = Load(vocab=VOCAB, tokens=10, answers=1)
    engines = {side: ZipfEngine(VOCAB) for side in ("cloud", "device")}
    texts = [
        play(load, engines, SAMPLINGS[name], 5, private=private, needs_dists=needs_dists).texts
        for needs_dists in (False, True)
    ]
    assert texts[0] == texts[1] and len(texts[0][0]) == load.tokens
