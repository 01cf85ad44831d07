"""R8: a device whose cloud is dead, mute or stopped answers by itself, soon, and says so."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from paceline.commands.demo import Children
from tests.e2e.pair import QUESTION, running_pair, started
from tests.reliability.conftest import Figure, Size
from tests.reliability.streams import WAIT_S, Stream

FIRST_TOKEN_S = 2.5  # a second after the threshold of 1.5 s


def ask(url: str, **paceline: object) -> Stream:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 16,
        "seed": 1,
        "logit_bias": {"256": -100},
        "paceline": {"report": True, **(paceline or {"strategy": "aggregate"})},
    }
    return Stream(url, body)


@contextmanager
def enrolled_agent(directory: Path, cloud: str) -> Iterator[str]:
    """URL of an agent that dials this cloud and has a code for it."""
    code = "K7QF-2M9X-4TBA-9HJC"  # of nobody
    with Children(directory) as children:
        yield started(children, "device", "agent", "--cloud", cloud, "--device", "phone", "--code", code).url


@pytest.mark.parametrize("cloud", ["dead", "mute"])
def test_a_cloud_that_was_never_there_is_not_waited_for(tmp_path: Path, cloud: str, size: Size, figure: Figure) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"  # takes connections, and never says a word
        if cloud == "dead":
            listener.close()
        with enrolled_agent(tmp_path, url) as agent:
            slowest = 0.0
            for _ in range(size(1, 100)):
                answer = ask(agent).join()
                assert answer.whole and answer.tokens == 16, answer.error
                assert answer.degraded == "cloud_missing"
                slowest = max(slowest, answer.pieces[0][0] - answer.began)
            figure(f"{cloud} cloud: first token", slowest, at_most=FIRST_TOKEN_S, unit="s")
            with httpx.Client(timeout=WAIT_S, trust_env=False) as http:
                assert http.get(f"{agent}/healthz").status_code == 200


def test_a_linked_cloud_that_is_stopped_before_the_question_is_passed_over(
    tmp_path: Path, size: Size, figure: Figure
) -> None:
    slowest: dict[str, float] = {}
    for number in range(size(1, 10)):
        for degraded, first in first_tokens_beside_a_stopped_cloud(tmp_path / str(number)).items():
            slowest[degraded] = max(slowest.get(degraded, 0.0), first)
    for degraded, first in slowest.items():
        figure(f"stopped cloud, {degraded}: first token", first, at_most=FIRST_TOKEN_S, unit="s")


def first_tokens_beside_a_stopped_cloud(directory: Path) -> dict[str, float]:
    """s to the first token, by what the answer says was lost, of one pair of programs."""
    directory.mkdir()
    firsts: dict[str, float] = {}
    with running_pair(directory) as pair:
        server = pair.started.cloud.process.pid
        os.kill(server, signal.SIGSTOP)
        try:
            searching = ask(pair.url("device"), privacy="answer-private")
            answer = ask(pair.url("device")).join()
            searching.join()
        finally:
            os.kill(server, signal.SIGCONT)
        for stream, degraded in ((answer, "cloud_lost"), (searching, "cloud_missing")):
            assert stream.whole and stream.tokens == 16, stream.error
            assert stream.degraded == degraded
            firsts[degraded] = stream.pieces[0][0] - stream.began
    return firsts
