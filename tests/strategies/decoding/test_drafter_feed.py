"""What the drafter is fed: in order, in slices, and after a rest with a gap."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.drafting.tree_search import NO_DRAFT, DraftTree
from paceline.core.sampling.dist import Dist
from paceline.strategies.decoding.prefix_tree import MAX_BACKLOG, SLICE_TOKENS, DrafterFeed
from tests.strategies.cases import VOCAB, point


class Listener:
    """A drafter that remembers what it is told."""

    def __init__(self) -> None:
        self.heard: list[int | str] = []

    def read(self, tokens: Iterable[int]) -> None:
        self.heard += [*tokens, "end"]

    def observe(self, token: int) -> None:
        self.heard.append(token)

    def learn(self, token: int, dist: Dist, *, before: int | None = None, accepted: bool = True) -> None:
        del dist, before, accepted
        self.heard.append(f"lesson {token}")

    def draft(self, budget: int, position: int) -> DraftTree:
        del budget, position
        return NO_DRAFT


def fed() -> tuple[DrafterFeed, Listener]:
    listener = Listener()
    return DrafterFeed(listener, VOCAB, samples=True), listener


def test_documents_come_before_the_prompt_and_lessons_after_all_tokens() -> None:
    feed, listener = fed()
    feed.begin([(1, 2), (3, 4)])
    feed.append([5])
    feed.teach(feed.prompt_lessons((3,), (point(4),), 1))
    assert not feed.slice(1)
    assert listener.heard == [1, 2, "end", 3, 4, 5, "lesson 3"]


def test_a_long_prompt_is_read_in_slices_shorter_where_answers_are_many() -> None:
    for sequences in (1, 16):
        feed, listener = fed()
        feed.begin([range(200)])
        feed.teach(feed.prompt_lessons((3,), (point(4),), 1))
        slices = 1
        while feed.slice(sequences):
            assert len(listener.heard) == slices * SLICE_TOKENS // sequences
            slices += 1
        assert listener.heard == [*range(200), "lesson 3"]


def test_after_a_rest_the_text_goes_on_behind_a_gap() -> None:
    feed, listener = fed()
    feed.begin([(1, 2)])
    feed.append(range(MAX_BACKLOG))
    feed.rest(16)
    feed.catch_up()
    most = MAX_BACKLOG // 16
    assert listener.heard == ["end", *range(MAX_BACKLOG - most, MAX_BACKLOG)]


def test_a_short_rest_leaves_no_gap() -> None:
    feed, listener = fed()
    feed.begin([(1, 2)])
    feed.rest(16)
    feed.append([3])
    feed.catch_up()
    assert listener.heard == [1, 2, 3]
