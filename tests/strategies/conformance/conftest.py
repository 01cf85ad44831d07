"""Quick are cases of two of these: one sampling, the default way, the toy strategy. The others are slow."""

from tests.slow import slow_in

QUICK = ("sampled", "private trees]", "alone]", "toy")
pytest_collection_modifyitems = slow_in(__file__, unless=lambda case: sum(way in case for way in QUICK) >= 2)
