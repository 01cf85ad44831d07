"""Links over a pair of queues, without network or delays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from paceline.errors import ConfigError, LinkClosed
from paceline.runtime.identity import PrivateKey
from paceline.runtime.link import connection
from paceline.runtime.link.connection import Dialer, KeyKeeper, KeyStore, Link, back_off
from paceline.runtime.link.transport import TransportClosed, is_secret
from paceline.wire.close_codes import ADVICE, MAX_DELAY_S, CloseCode
from paceline.wire.codec import encode
from paceline.wire.effects import Claim
from paceline.wire.messages import OpenSession
from tests.wire.identities import LAPTOP, admit, cloud_end, device_end
from tests.wire.samples import closing, draft, found, have, opening, targets

pytestmark = pytest.mark.anyio


class Pipe:
    """One end of a connection in memory."""

    def __init__(self) -> None:
        self.peer: Pipe = self
        self.incoming: asyncio.Queue[bytes | TransportClosed] = asyncio.Queue()
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.said_goodbye: tuple[int, str] | None = None
        self.sent: list[bytes] = []

    async def send_bytes(self, data: bytes) -> None:
        await self.may_send.wait()
        self.sent.append(data)
        self.peer.incoming.put_nowait(data)

    async def recv_bytes(self) -> bytes:
        item = await self.incoming.get()
        if isinstance(item, bytes):
            return item
        raise item

    async def close(self, code: int, reason: str) -> None:
        self.said_goodbye = code, reason
        self.peer.incoming.put_nowait(TransportClosed(code, reason))

    def abort(self) -> None:
        self.peer.incoming.put_nowait(TransportClosed(1006, ""))


def pipes() -> tuple[Pipe, Pipe]:
    left, right = Pipe(), Pipe()
    left.peer, right.peer = right, left
    return left, right


@asynccontextmanager
async def linked(
    keys: KeyStore | None = None, keep: KeyKeeper | None = None
) -> AsyncIterator[tuple[Link, Link, Pipe, Pipe]]:
    """(device, cloud, device's end, cloud's end), both up; both closed at the end."""
    left, right = pipes()
    device = Link(left, device_end(), key_store=keys)
    cloud = Link(right, cloud_end(), authenticate=admit, vocab_size=100, keep_key=keep)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(device.run())
        tasks.create_task(cloud.run())
        await device.up.wait()
        await cloud.up.wait()
        yield device, cloud, left, right
        await device.close()
        await cloud.closed.wait()


async def test_a_sessions_messages_reach_its_handler_and_no_other() -> None:
    async with linked() as (device, cloud, _, _):
        at_cloud: list[object] = []
        at_device: list[object] = []
        ended = asyncio.Event()

        def join(message: OpenSession) -> None:
            cloud.attach(message.session, at_cloud.append)
            cloud.send(found(message.session))

        def received(message: object) -> None:
            at_device.append(message)
            if message == closing(1):
                ended.set()

        cloud.on_open = join
        number = device.open_session(received)
        assert number == 1
        assert device.send(opening(number)) == len(encode(opening(number)))
        device.send(draft(number))
        other = device.open_session(at_device.append)
        device.send(opening(other))
        device.send(closing(other))
        device.send(have(number))
        while have(number) not in at_cloud:
            await asyncio.sleep(0)
        cloud.send(targets(number))
        cloud.send(closing(number))
        await ended.wait()
        assert at_cloud == [draft(1), closing(3), have(1)]
        assert [message for message in at_device if message != found(3)] == [found(1), targets(1), closing(1)]
        assert device.send(draft(number)) == 0  # ended by the peer
    assert device.close_code == cloud.close_code == CloseCode.CLOSING
    assert device.close_reason == cloud.close_reason == ADVICE[CloseCode.CLOSING]
    assert "other side" not in ADVICE[CloseCode.CLOSING], "whoever closes it says so too"


async def test_a_handler_that_fails_ends_its_own_session_only(caplog: pytest.LogCaptureFixture) -> None:
    async with linked() as (device, cloud, _, _):
        received: asyncio.Queue[object] = asyncio.Queue()

        def join(message: OpenSession) -> None:
            cloud.attach(message.session, fail if message.session == 1 else cloud.send)

        def fail(message: object) -> None:
            raise KeyError(message)

        cloud.on_open = join
        for _ in range(2):
            device.send(opening(device.open_session(received.put_nowait)))
        device.send(have(1))
        assert await received.get() == closing(1, "cancelled")
        device.send(have(3))
        assert await received.get() == have(3)
    assert "handler failed" in caplog.text


async def test_drained_links_close_when_the_last_session_has_ended() -> None:
    async with linked() as (device, cloud, _, right):
        received: asyncio.Queue[object] = asyncio.Queue()
        cloud.on_open = lambda message: cloud.attach(message.session, received.put_nowait)
        device.send(opening(device.open_session(received.put_nowait)))
        device.send(have(1))
        assert await received.get() == have(1)
        cloud.drain()
        with pytest.raises(LinkClosed):
            cloud.open_session(print)
        cloud.send(targets(1))
        assert await received.get() == targets(1)
        with pytest.raises(LinkClosed):
            device.open_session(print)
        device.send(closing(1))
        await device.closed.wait()
    assert right.said_goodbye == (CloseCode.DRAINED, "")
    assert device.close_code == CloseCode.DRAINED


async def test_a_link_to_a_peer_that_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_QUEUED_BYTES", 1000)
    async with linked() as (device, cloud, _, right):
        downs: list[int | None] = []
        cloud.on_down = lambda: downs.append(cloud.close_code)
        right.may_send.clear()
        cloud.send(opening(cloud.open_session(print)))
        with pytest.raises(LinkClosed):
            for _ in range(1000):
                cloud.send(have(0))
        await device.closed.wait()
    assert downs == [CloseCode.TOO_SLOW]
    assert right.said_goodbye is not None
    assert device.close_code == CloseCode.TOO_SLOW


async def test_a_device_that_cannot_be_checked_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    async def check(_: Claim) -> bytes | CloseCode:
        raise OSError("the database is gone")

    ups: list[Link] = []
    left, right = pipes()
    device = Link(left, device_end(), on_up=ups.append)
    cloud = Link(right, cloud_end(), authenticate=check, on_up=ups.append)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(device.run())
        tasks.create_task(cloud.run())
    assert ups == []
    assert device.close_code == cloud.close_code == CloseCode.INTERNAL_ERROR
    assert "could not be checked" in caplog.text


# ---- dialing --------------------------------------------------------------------------------------------------------
def test_the_wait_before_the_next_attempt_is_random_up_to_a_doubling_bound() -> None:
    assert [back_off(attempt, 1.0) for attempt in range(10)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]
    assert back_off(10_000, 0.5) == 15
    assert back_off(3, 0.0) == 0


class Clouds:
    """Scripted results of a dialer's attempts, and its waits between them."""

    def __init__(self, *attempts: Callable[[Pipe], Awaitable[None]] | None) -> None:
        self.attempts = list(attempts)
        self.urls: list[str] = []
        self.waits: list[float] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.device_pipes: list[Pipe] = []
        self.over = asyncio.Event()

    async def connect(self, url: str) -> Pipe:
        self.urls.append(url)
        attempt = self.attempts.pop(0)
        if attempt is None:
            raise LinkClosed("cannot reach ws://cloud/link: refused")
        left, right = pipes()
        self.device_pipes.append(left)
        self.tasks.append(asyncio.create_task(attempt(right)))  # type: ignore[arg-type]  # all are coroutines
        return left

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        if not self.attempts:
            self.over.set()
            await asyncio.Event().wait()

    async def run(self, *others: str, up: Callable[[Link], None] = lambda _: None) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(connection, "dial", self.connect)
            patched.setattr(connection, "random", SimpleNamespace(random=lambda: 0.5))
            patched.setattr(connection, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": self.sleep}))
            async with asyncio.timeout(10):
                task = asyncio.create_task(Dialer("ws://cloud/link", device_end, others=others, up=up).run())
                await self.over.wait()
                task.cancel()
                await asyncio.wait([task, *self.tasks])


async def refuse(pipe: Pipe) -> None:
    async def revoked(_: Claim) -> bytes | CloseCode:
        return CloseCode.REVOKED

    await Link(pipe, cloud_end(), authenticate=revoked).run()


async def welcome(pipe: Pipe) -> None:
    await Link(pipe, cloud_end(), authenticate=admit).run()


async def test_a_dialer_waits_longer_at_each_failure_and_briefly_after_a_link_that_was_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []
    clouds = Clouds(None, None, None, welcome, welcome, None)

    def break_at_once(link: Link) -> None:
        seen.append(link.peer.model_name)
        clouds.device_pipes[-1].incoming.put_nowait(TransportClosed(1006, ""))

    await clouds.run(up=break_at_once)
    assert seen == ["large", "large"]
    assert clouds.waits == [0.2, 0.4, 0.8, 0.1, 0.1, 0.2]
    assert caplog.text.count("cannot reach ws://cloud/link: refused") == 2, "once until it is linked"


async def test_a_dialer_whose_server_is_lost_tries_the_others_at_once_and_stays_where_it_was_linked() -> None:
    clouds = Clouds(welcome, None, welcome, None, None, welcome)
    ups = 0

    def break_at_once(_: Link) -> None:
        nonlocal ups
        ups += 1
        clouds.device_pipes[-1].incoming.put_nowait(TransportClosed(1006, ""))

    await clouds.run("ws://b/link", up=break_at_once)
    a, b = "ws://cloud/link", "ws://b/link"
    assert clouds.urls == [a, a, b, b, a, b] and ups == 3
    assert clouds.waits == [0.5, 0.5, 0.2, 0.5], "after links, and after a round without one"


async def test_a_dialer_whose_server_fell_silent_begins_with_another() -> None:
    clouds = Clouds(welcome, welcome)
    silent = TransportClosed(CloseCode.HEARTBEAT_LOST, "")
    await clouds.run("ws://b/link", up=lambda _: clouds.device_pipes[-1].incoming.put_nowait(silent))
    assert clouds.urls == ["ws://cloud/link", "ws://b/link"] and clouds.waits == [0.5, 0.5]


async def test_a_dialer_refused_with_a_fatal_code_retries_rarely_and_logs_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clouds = Clouds(refuse, refuse, refuse)
    await clouds.run()
    assert clouds.waits == [MAX_DELAY_S] * 3
    assert caplog.text.count("ask for a new code") == 1
    assert "revoked this device" in caplog.text


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("wss://cloud.example/link", True),
        ("ws://127.0.0.1:8000/link", True),
        ("ws://localhost/link", True),
        ("ws://[::1]:8000/link", True),
        ("ws://cloud.example/link", False),
        ("ws://127.0.0.1.example/link", False),
    ],
)
def test_a_link_is_unencrypted_if_it_leaves_this_machine_without_tls(url: str, secret: bool) -> None:
    assert is_secret(url) is secret


class Keys:
    """A device's keys in memory. `fails`: nothing can be stored."""

    def __init__(self, *, fails: bool = False) -> None:
        self.held = [LAPTOP]
        self.fails = fails
        self.settled = asyncio.Event()

    async def make_key(self) -> PrivateKey:
        if self.fails:
            raise ConfigError("the disk is full")
        self.held.append(PrivateKey.generate())
        return self.held[-1]

    async def settle(self, public_key: bytes) -> None:
        self.held = [key for key in self.held if key.public_key == public_key]
        self.settled.set()


@pytest.mark.parametrize("fault", ["the registry refuses", "the registry fails", "the device cannot store"])
async def test_a_failed_renewal_leaves_the_link_and_the_key_alone(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    keys, tried = Keys(fails="store" in fault), asyncio.Event()

    async def keep(*_: object) -> bool:
        tried.set()
        if "fails" in fault:
            raise OSError("the database is gone")
        return False

    async with linked(keys, keep) as (device, cloud, _, _):
        received: asyncio.Queue[object] = asyncio.Queue()
        cloud.renew_key()
        if not keys.fails:
            await tried.wait()
        device.send(opening(device.open_session(received.put_nowait)))
        assert await received.get() == closing(1, "refused: this side takes part in no sessions")
        assert cloud.renewal.present == LAPTOP.public_key and LAPTOP in keys.held
        assert not keys.settled.is_set()
    assert ("cannot be renewed: the disk is full" in caplog.text) == keys.fails
    assert ("could not be renewed" in caplog.text) == ("fails" in fault)
