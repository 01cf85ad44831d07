"""Running until a signal."""

from __future__ import annotations

import asyncio
import gc
import os
import signal

from paceline.api.app import create_app
from paceline.api.http.auth import Keyring
from paceline.api.http.server import listen, serve
from tests.api.scripted import ScriptedService


def test_the_heap_is_frozen_while_serving() -> None:
    app = create_app(ScriptedService(), keyring=Keyring({}))
    spared: list[int] = []

    def ready() -> None:
        spared.append(gc.get_freeze_count())
        os.kill(os.getpid(), signal.SIGTERM)

    asyncio.run(serve(app, listen("127.0.0.1", 0), on_ready=ready))

    assert spared[0] > 0
    assert gc.get_freeze_count() == 0
