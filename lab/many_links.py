"""Thousands of devices that link at once to two real servers over a real PostgreSQL, of which one is then killed:
`python -m lab.many_links --devices 2000`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

from lab.fleet import fleet, processor_s
from paceline.postgres import Postgres
from paceline.runtime.identity import PrivateKey, device_handshake
from paceline.runtime.link.connection import Dialer, Link
from paceline.settings import PREFIX
from paceline.wire.messages import Introduction
from server.devices import Registry
from server.program import common_key

if TYPE_CHECKING:
    from tests.postgres import RealPostgres


async def linked(postgres: RealPostgres, count: int) -> str:
    """So many devices link at once; then one of their two servers is killed."""
    seeds = [number.to_bytes(32) for number in range(1, count + 1)]
    keys = {f"device-{number}": PrivateKey(seed) for number, seed in enumerate(seeds)}
    lost: dict[str, float] = {}
    pauses: list[float] = []
    many = {f"{PREFIX}TUNING_STRANGERS_PER_ADDRESS": "1024"}  # one address has them all
    async with fleet(postgres) as servers, asyncio.TaskGroup() as dialling:
        servers.running = [servers.begin(**many) for _ in range(2)]
        for server in servers.running:
            await server.ready()
        with closing(Postgres(servers.database)) as database:
            now, tables = time.time(), Registry(database)._tables
            pinned = common_key(servers.folder, database).public_key
            with tables.changing() as rows:
                rows.execute(
                    "INSERT INTO identities SELECT name, key, NULL, ?, ?, NULL, 'device' FROM "
                    "unnest(?::text[], ?::bytea[]) AS made (name, key)",
                    (now, now, [*keys], [key.public_key for key in keys.values()]),
                )  # fmt: skip
        peers = Introduction("0" * 64, "0" * 64, "fake", ["aggregate"], 0)

        def dialler(name: str, key: PrivateKey, first: int) -> Dialer:
            def up(link: Link) -> None:
                if name in lost:
                    pauses.append(time.monotonic() - lost.pop(name))
                there.add(name)
                dialling.create_task(down(link))

            async def down(link: Link) -> None:
                await link.closed.wait()
                there.discard(name)
                lost[name] = time.monotonic()

            urls = [server.url.replace("http", "ws") + "/v1/link" for server in servers.running]
            return Dialer(
                urls[first], lambda: device_handshake(peers, device=name, keys=[key], server_key=pinned),
                others=[urls[1 - first]], up=up,
            )  # fmt: skip

        there: set[str] = set()
        used, began = [processor_s(server.process.pid) for server in servers.running], time.monotonic()
        tasks = [
            dialling.create_task(dialler(name, key, number % 2).run())
            for number, (name, key) in enumerate(keys.items())
        ]
        while len(there) < count:
            await asyncio.sleep(0.05)
        took = time.monotonic() - began
        spent = sum(processor_s(server.process.pid) for server in servers.running) - sum(used)
        resting = sum(processor_s(server.process.pid) for server in servers.running)
        await asyncio.sleep(10)
        resting = sum(processor_s(server.process.pid) for server in servers.running) - resting
        servers.running[0].kill()
        while len(pauses) < count // 2:
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
    pauses.sort()
    return (
        f"{count} devices linked in {took:.1f} s, {1e3 * spent / count:.2f} ms of the servers each; at rest "
        f"{1e6 * resting / 10 / count:.0f} us a device and second; of a killed server {len(pauses)} were elsewhere: "
        f"median {statistics.median(pauses):.2f} s, p95 {pauses[int(0.95 * len(pauses))]:.2f}, most {pauses[-1]:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2000)
    asked = parser.parse_args()
    logging.getLogger("paceline.link").setLevel(logging.ERROR)
    from tests.postgres import real_postgres  # of a checkout

    with real_postgres() as postgres:
        sys.stdout.write(asyncio.run(linked(postgres, asked.devices)) + "\n")


if __name__ == "__main__":
    main()
