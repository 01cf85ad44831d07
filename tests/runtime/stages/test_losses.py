"""Stages that are lost: others take their place, or answers fail with a sentence; strangers are not let in."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.sampler import RowSampling, SamplingParams
from paceline.engine.base import Engine, SampleRequest
from paceline.engine.loader import EngineOptions
from paceline.engine.stage import load_stage
from paceline.errors import ConfigError, EngineError, EngineRefusal, LinkClosed
from paceline.runtime.identity import PrivateKey
from paceline.runtime.stages import links, members, stage_head
from paceline.runtime.stages.links import dial_stage
from paceline.runtime.stages.members import LocalPlace, Place
from paceline.runtime.stages.pipeline import FarLogits
from paceline.runtime.stages.stage_server import failure_of
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Claim
from paceline.wire.stages.messages import BatchDone, RequestDone, RequestFailed
from tests.engine.trials import assert_same, scratch
from tests.runtime.stages.rig import DEMO, Rig, chain, even_spans, open_pipeline, rig, standing

pytestmark = pytest.mark.anyio

OPTIONS = EngineOptions(dtype="float32", kv_rows=2048)


def begin(made: Rig) -> None:
    """Two sequences, one with an open tree whose root was committed by a prune."""
    pipeline = made.pipeline
    pipeline.collect(pipeline.submit(chain(1, 0, (5, 6, 7))))
    pipeline.collect(pipeline.submit(chain(2, 0, (8, 9))))
    tree = Segment(SeqId(2), 2, (11, 12, 13), (-1, 0, 1), "all", (0, 1, 2))
    pipeline.collect(pipeline.submit(Batch((tree,))))
    pipeline.prune(SeqId(2), (0,), (1, 2), 2)


def go_on(made: Rig, whole: Engine) -> None:
    pipeline = made.pipeline
    assert_same(pipeline.collect(pipeline.submit(chain(1, 3, (3,)))).dists[0], scratch(whole, (5, 6, 7, 3))[3:])
    tree = Segment(SeqId(2), 5, (20, 21), (0, 2), "all", (3, 4))
    found = pipeline.collect(pipeline.submit(Batch((tree,)))).dists[0]
    assert_same(found[:1], scratch(whole, (8, 9, 11, 20))[3:])
    assert_same(found[1:], scratch(whole, (8, 9, 11, 12, 13, 21))[5:])
    pipeline.check()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_spare_takes_the_place_of_a_lost_stage_and_answers_go_on(place: int, whole: Engine) -> None:
    spans = even_spans(6, 3)
    with rig(DEMO, spans, options=OPTIONS, spares=[None]) as made:
        begin(made)
        pipeline = made.pipeline
        under_way = pipeline.submit(chain(3, 0, (1, 2)))
        made.stages[place].break_off()
        behind = pipeline.submit(chain(3, 2, (4,)))
        found = [*pipeline.collect(under_way).dists[0], *pipeline.collect(behind).dists[0]]
        assert_same(found, scratch(whole, (1, 2, 4)))
        go_on(made, whole)
        assert pipeline.losses == 1


def test_rows_that_were_scored_and_not_sampled_are_computed_again(whole: Engine) -> None:
    rows = (RowSampling(SamplingParams(temperature=0.0), 0, 2048),)
    with rig(DEMO, even_spans(6, 2), options=OPTIONS, spares=[None]) as made:
        pipeline = made.pipeline
        batch = Batch((Segment(SeqId(1), 0, (5, 6)),))
        output = pipeline.collect(pipeline.submit(batch))
        made.stages[1].break_off()
        (found,) = pipeline.sample([SampleRequest((output.logits,), rows)])
        assert found[0].token == scratch(whole, (5, 6))[1].argmax()
        assert_same(output.dists[0], scratch(whole, (5, 6))[1:])


def test_rows_that_were_to_be_sampled_with_their_batch_still_are(whole: Engine) -> None:
    rows = tuple(RowSampling(SamplingParams(temperature=0.0), position, 2048) for position in (0, 1))
    with rig(DEMO, even_spans(6, 2), options=OPTIONS, spares=[None]) as made:
        pipeline = made.pipeline
        ticket = pipeline.submit(chain(1, 0, (5, 6)))
        pipeline.sample_ahead(ticket, [rows])
        made.stages[1].break_off()
        output = pipeline.collect(ticket)
        (part,) = output.logits
        assert isinstance(part, FarLogits) and len(part.sampled) == 2
        (found,) = pipeline.sample([SampleRequest((output.logits,), rows)])
        assert [row.token for row in found] == [dist.argmax() for dist in scratch(whole, (5, 6))]
        assert not pipeline.requests


def test_without_anybody_answers_fail_within_seconds_and_the_stage_may_come_back(
    whole: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_head, "PATIENCE_S", 0.5)
    with rig(DEMO, even_spans(6, 2), options=OPTIONS) as made:
        pipeline = made.pipeline
        begin(made)
        lost = made.stages[1]
        lost.break_off()
        with pytest.raises(EngineRefusal, match="cannot run it now"):
            pipeline.collect(pipeline.submit(chain(1, 3, (3,))))
        with pytest.raises(EngineRefusal) as refused:
            pipeline.submit(chain(7, 0, (3,)))
        assert (refused.value.status, refused.value.code) == (503, "model_unavailable")
        assert re.search(r"stage 2 of 2, layers 3:6.*cannot reach", pipeline.gone or "")
        for seq in (1, 2):
            pipeline.release(SeqId(seq))
        made.begin_again(lost, (3, 6), OPTIONS)
        while True:
            try:
                ticket = pipeline.submit(chain(9, 0, (5, 6)))
                break
            except EngineError:
                time.sleep(0.05)
        assert_same(pipeline.collect(ticket).dists[0], scratch(whole, (5, 6)))
        pipeline.release(SeqId(9))
        pipeline.check()
        assert pipeline.free_rows() == 2048


def test_answers_outlive_a_loss_after_one_whose_stage_loaded_its_layers_for_too_long(
    whole: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage without layers knows no sizes, and answers were given up while it was the first one."""
    with rig(DEMO, even_spans(6, 2), options=OPTIONS) as made:
        pipeline, (first, second) = made.pipeline, made.stages

        def set_patience(seconds: float) -> None:
            monkeypatch.setattr(stage_head, "PATIENCE_S", seconds)
            monkeypatch.setattr(stage_head, "START_PATIENCE_S", seconds)

        def load_late(*args: Any, **options: Any) -> Any:
            set_patience(0.0)
            with pipeline.changed:
                assert pipeline.changed.wait_for(lambda: pipeline.gone is not None, 60)
            set_patience(60.0)
            return load_stage(*args, **options)

        set_patience(60.0)
        monkeypatch.setattr("tests.runtime.stages.rig.load_stage", load_late)
        first.break_off()
        made.begin_again(first, None, OPTIONS)
        with pipeline.changed:
            assert pipeline.changed.wait_for(lambda: pipeline.up and pipeline.gone is None, 60)
        monkeypatch.setattr("tests.runtime.stages.rig.load_stage", load_stage)
        pipeline.collect(pipeline.submit(chain(1, 0, (3, 4, 5))))
        second.break_off()
        made.begin_again(second, (3, 6), OPTIONS)
        found = pipeline.collect(pipeline.submit(chain(1, 3, (6,)))).dists[0]
        assert_same(found, scratch(whole, (3, 4, 5, 6))[3:])


def test_stages_that_do_not_fit_together_are_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"do not have all 6 layers.*0:3, 4:6"), rig(DEMO, [(0, 3), (4, 6)]):
        pass


def test_a_stage_whose_key_is_not_known_is_not_let_in() -> None:
    key = PrivateKey.generate()
    with standing([(0, 6)], key.public_key) as (stage,), pytest.raises(ConfigError, match="not let in"):
        open_pipeline(DEMO, [Place(stage.address)], key, {"s0": PrivateKey.generate().public_key})


@pytest.mark.parametrize("purpose", ["head", "rows"])
def test_a_stranger_is_refused_by_a_stage(purpose: str) -> None:
    with (
        standing([(0, 6)], PrivateKey.generate().public_key) as (stage,),
        pytest.raises(LinkClosed, match="may not dial"),
    ):

        async def admit(claim: Claim) -> bytes | CloseCode:
            return stage.key.public_key if claim.proves(stage.key.public_key) else CloseCode.BAD_CREDENTIAL

        asyncio.run(dial_stage(stage.address, PrivateKey.generate(), purpose, admit, received=print))  # type: ignore[arg-type]


class NeverAgain(Place):
    """A place whose stage can be reached once; starting it again takes for ever."""

    is_started_here = True
    asked = 0

    async def address(self) -> str:
        self.asked += 1
        if self.asked > 1:
            await asyncio.Event().wait()
        return await super().address()


def test_a_pipeline_ends_while_a_stage_is_being_started_again() -> None:
    key = PrivateKey.generate()
    with standing(even_spans(6, 2), key.public_key) as stages:
        places = [NeverAgain(stage.address) for stage in stages]
        pipeline = open_pipeline(DEMO, places, key, {stage.name: stage.key.public_key for stage in stages})
        stages[1].break_off()
        while places[1].asked < 2:
            time.sleep(0.01)
        pipeline.close()
        assert pipeline.losses == 1


def test_a_stranger_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "OPEN_S", 0.1)
    with (
        standing([None], PrivateKey.generate().public_key) as (stage,),
        socket.create_connection(("127.0.0.1", stage.port)) as silent,
    ):
        assert silent.recv(1) == b""


def test_rows_that_one_stage_has_imported_are_imported_again_when_another_is_lost(whole: Engine) -> None:
    tokens = (5, 6, 7)
    with rig(DEMO, even_spans(6, 2), options=OPTIONS, spares=[None]) as made:
        pipeline = made.pipeline
        pipeline.collect(pipeline.submit(chain(1, 0, tokens)))
        rows = pipeline.export_kv(SeqId(1), tokens)
        held = threading.Event()
        made.stages[1].server.worker.call(lambda: cast(None, held.wait(60)))
        importing = threading.Thread(target=pipeline.import_kv, args=(SeqId(2), rows))
        importing.start()
        asked = pipeline.requests
        with pipeline.changed:
            while not any(request.answer is not None for request in asked.values()):
                pipeline.changed.wait()
        held.set()
        made.stages[1].break_off()
        importing.join()
        found = pipeline.collect(pipeline.submit(chain(2, 3, (8,)))).dists[0]
        assert_same(found, scratch(whole, (*tokens, 8))[3:])
        pipeline.check()


def test_a_stage_that_comes_back_with_other_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_head, "PATIENCE_S", 0.5)
    with rig(DEMO, even_spans(6, 2), options=OPTIONS) as made:
        lost = made.stages[1]
        lost.break_off()
        made.begin_again(lost, (3, 6), OPTIONS._replace(dtype="bfloat16"))
        pipeline = made.pipeline
        with pipeline.changed:
            while "numbers in bfloat16" not in (pipeline.gone or ""):
                pipeline.changed.wait(0.05)
        assert re.search(r"stage 2 of 2.*has numbers in bfloat16.*the others have float32", pipeline.gone or "")
        with pytest.raises(EngineRefusal):
            pipeline.submit(chain(1, 0, (3,)))


async def test_no_process_is_started_whose_model_is_gone(tmp_path: Path) -> None:
    place = LocalPlace("local stage 1", bytes(32), (), model=tmp_path)
    with pytest.raises(LinkClosed, match=r"there is no model in .* any more"):
        await place.address()
    assert place.failed and place.process is None


async def test_a_process_that_ends_at_once_has_failed() -> None:
    place = LocalPlace("local stage 1", bytes(32), ("--layers", "none"))
    with pytest.raises(LinkClosed, match="its process ended with code 2"):
        await place.address()
    assert place.failed


def test_what_is_too_large_to_be_sent_is_answered_by_a_failure() -> None:
    assert failure_of(RequestDone(3), "too large") == RequestFailed(3, "too large")
    done = failure_of(BatchDone(1, 2, (None,), (1,), None), "too large")
    assert done == BatchDone(1, 2, (), (), "too large")


def test_a_stage_whose_key_is_revoked_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "STANDING_S", 0.02)
    monkeypatch.setattr(stage_head, "PATIENCE_S", 0.5)
    keys: dict[str, bytes] = {}

    async def registered(name: str, key: bytes) -> CloseCode | None:
        return None if keys.get(name) == key else CloseCode.REVOKED

    key = PrivateKey.generate()
    with standing([(0, 6)], key.public_key) as (stage,):
        keys["s0"] = stage.key.public_key
        pipeline = open_pipeline(DEMO, [Place(stage.address)], key, keys, registered)
        pipeline.collect(pipeline.submit(chain(1, 0, (5, 6))))
        del keys["s0"]
        with pipeline.changed:
            while pipeline.gone is None:
                pipeline.changed.wait(0.05)
        assert "not let in" in pipeline.gone
        with pytest.raises(EngineRefusal):
            pipeline.submit(chain(2, 0, (3,)))
        pipeline.close()


def test_an_end_is_no_loss(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Also where it waits for processes to end, while the closed connections are noticed."""

    async def stop(_: Place) -> None:
        for _turn in range(200):
            await asyncio.sleep(0)

    monkeypatch.setattr(Place, "stop", stop)
    with rig(DEMO, even_spans(6, 2), options=OPTIONS) as made:
        made.pipeline.collect(made.pipeline.submit(chain(1, 0, (5, 6))))
    assert made.pipeline.losses == 0 and not [each for each in caplog.records if each.levelno >= logging.WARNING]
