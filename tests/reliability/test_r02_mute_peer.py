"""R2: a peer that is stopped without a word. Its answer goes on soon, and it is taken in again when it is continued."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from lab.baselines.dragon import shaped
from paceline.commands.demo import Child, configured
from paceline.core.clock import SILENCE_S
from paceline.core.side import SIDES, Side, other
from tests.e2e.pair import DEVICE, DOCUMENTS, Pair, running_pair
from tests.reliability.conftest import Figure, Size
from tests.reliability.real_server import quantile
from tests.reliability.streams import WAIT_S, Stream, until

MAX_TOKENS = 100
PAUSING = 40  # tokens of an answer that only has to wait in its middle
PARTIAL = 4  # bytes of a sign that is not whole yet; a token of the fake model is a byte
PACE = "forward=20ms"  # so that an answer takes long enough to be disturbed, and for the peer to be back in it


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("mute")
    flags = [configured(directory, f"tuning.emulate = {link + PACE!r}") for link in ("", "rtt=20ms,")]
    with running_pair(directory, cloud_flags=flags[0], agent_flags=flags[1]) as running:
        yield running


def ask(pair: Pair, front: Side, tokens: int = MAX_TOKENS, **options: object) -> Stream:
    # A question with which the cloud finds its passage, and both sides' distributions: each token needs both sides.
    joint = {"strategy": "aggregate", "report": True} | shaped("none", aggregator="mixture")
    paceline: dict[str, object] = {**joint, **options}
    if front == "cloud":
        paceline["device"] = DEVICE
    body = {
        "messages": [{"role": "user", "content": DOCUMENTS["cloud"]}],
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": 1,
        "logit_bias": {"256": -100},  # the end of text: the answer is as long as it may be
        "paceline": paceline,
    }
    return Stream(pair.url(front), body)


@pytest.fixture(scope="module")
def undisturbed(pair: Pair) -> dict[Side, Stream]:
    """The answer of each front."""
    asked = {front: ask(pair, front) for front in SIDES}  # at once
    answers = {front: answer.join() for front, answer in asked.items()}
    assert all(answer.whole and answer.degraded is None for answer in answers.values())
    return answers


def process_of(pair: Pair, side: Side) -> Child:
    return pair.started.cloud if side == "cloud" else pair.started.device


@contextmanager
def stopped(child: Child) -> Iterator[float]:
    """The time since when the program is stopped; continued at the end."""
    os.kill(child.process.pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        os.kill(child.process.pid, signal.SIGCONT)


def until_linked(pair: Pair, side: Side, linked: bool) -> float:
    """Seconds until a side reports its link so."""
    with httpx.Client(base_url=pair.url(side), timeout=WAIT_S, trust_env=False) as http:
        return until(lambda: bool(http.get("/readyz").json().get("linked")) == linked)


def passed_over(pair: Pair, front: Side) -> int:
    """How often a side has gone on without a mute peer."""
    return process_of(pair, front).log.read_text().count("is passed over: nothing is heard of it")


@pytest.mark.parametrize("front", SIDES)
def test_a_stopped_peer_is_passed_over_and_taken_in_again_when_it_is_continued(
    pair: Pair,
    undisturbed: dict[Side, Stream],
    front: Side,
    figure: Figure,
    size: Size,
    rng: random.Random,
) -> None:
    """Nothing of the delivered text is lost, repeated or changed, and the stream ends in order."""
    joint = undisturbed[front]
    peer, gaps, returns = other(front), list[float](), 0
    for _ in range(size(1, 100)):
        until_linked(pair, front, True)
        answer = ask(pair, front)
        answer.wait_for(rng.randrange(5, 20))
        with stopped(process_of(pair, peer)) as since:
            before = len(answer.text)
            until(lambda: passed_over(pair, front) > len(gaps))
            by_then = len(answer.text.encode())
            answer.wait_for(len(answer.pieces) + 4)
        answer.join()
        assert answer.whole, answer.error
        assert answer.degraded == f"{peer}_lost"
        assert answer.tokens == MAX_TOKENS
        assert answer.text[:before] == joint.text[:before], "the delivered text is the undisturbed one"
        gaps.append(answer.gap_after(since))
        returns += answer.tokens - answer.alone > by_then + PARTIAL
    assert returns, "no answer was long enough for the peer to be back in it"
    figure(f"{peer} stopped: gap until the next token, p95", quantile(gaps, 0.95), at_most=2.5, unit="s")
    figure("worst", max(gaps), unit="s")


@pytest.mark.parametrize("front", SIDES)
def test_a_pausing_answer_waits_for_a_stopped_peer_and_is_the_undisturbed_one(
    pair: Pair, undisturbed: dict[Side, Stream], front: Side, figure: Figure
) -> None:
    """One of the device for a moment, one of the cloud until the link has been declared dead."""
    until_linked(pair, front, True)
    answer = ask(pair, front, PAUSING, on_device_loss="pause")
    answer.wait_for(PAUSING // 2)
    with stopped(process_of(pair, other(front))) as since:
        if front == "cloud":
            until_linked(pair, front, False)
            figure("link declared dead after", time.monotonic() - since, at_most=10.0, unit="s")
        while time.monotonic() < since + 2 * SILENCE_S:
            time.sleep(0.05)  # the time that the peer is away
    answer.join()
    assert answer.whole and answer.degraded is None and answer.tokens == PAUSING
    assert undisturbed[front].text.startswith(answer.text)
    until_linked(pair, front, True)
