"""State of running programs: `paceline status` shows who is linked, what runs and what was sent, `paceline policy
check` what the rules of a side make of a question.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.core.printable import printable, printable_json
from paceline.errors import ConfigError, PacelineError
from paceline.secret_files import given_secret

if TYPE_CHECKING:
    from .conversation import Json


# Options that commands of the client share, each with one spelling.
Url = Annotated[str | None, typer.Option("--url", help="a server or an agent, with or without /v1")]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        help="the key, where one is needed; other users of the machine see it on a command line: give - to be "
        "asked for it or read it from the first line of standard input, or --key-file",
    ),
]
KeyFile = Annotated[Path | None, typer.Option("--key-file", help="file whose first line is the key; -: standard input")]
AsJson = Annotated[bool, typer.Option("--json", help="write JSON to standard output")]


SILENCE_S = 5.0  # a program that is well answers at once, and health checks wait for this one
WATCH_S = 2.0
RATES = {"steps": "steps", "rows": "rows", "sent_bytes": "bytes sent", "received_bytes": "bytes received"}
BOTH = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")


def status(
    url: Url = None,
    key: Key = None,
    key_file: KeyFile = None,
    ready: Annotated[
        bool, typer.Option("--ready", help="only say whether it can be asked, for which no key is needed")
    ] = False,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="show it every two seconds, with rates, until Ctrl-C")] = False,
) -> None:
    """Show who is linked, what runs, and what was sent to the other side.

    Without --url: at a server and an agent of this machine, on their usual ports. A key needs the scope `devices`, or
    all. Exit code 1 if the one that was named does not answer, or none does.
    """
    given = given_secret("key", key, key_file)
    urls = (url,) if url else BOTH
    if watch:
        if as_json:
            raise ConfigError("--watch shows lines for people: leave --json out")
        _watch(urls, given, ready=ready)
        return
    found, faults = _asked(urls, given, ready=ready)
    if as_json:
        rows = [{"url": each, **found.get(each, {"error": faults.get(each)})} for each in (*found, *faults)]
        typer.echo(printable_json(json.dumps(rows, indent=2, ensure_ascii=False)))
    else:
        for each, state in found.items():
            typer.echo("\n".join(printable(line) for line in _lines(each, state)))
        for sentence in faults.values():
            typer.echo(printable(sentence), err=True)
    if not found:
        raise typer.Exit(1)


def _asked(urls: Sequence[str], key: str | None, *, ready: bool) -> tuple[dict[str, Json], dict[str, str]]:
    """State of each server by its URL, and faults of those that tell none."""
    from .conversation import Conversation

    found: dict[str, Json] = {}
    faults: dict[str, str] = {}
    for each in urls:
        try:
            with Conversation(each, key=key, silence=SILENCE_S) as conversation:
                found[each] = conversation.readiness() if ready else conversation.get("/status")
        except PacelineError as error:
            faults[each] = str(error)
    return found, faults


def _watch(urls: Sequence[str], key: str | None, *, ready: bool) -> None:
    """Show the state again and again in its place, or one below the other where there is no terminal."""
    from rich.live import Live
    from rich.text import Text

    before: dict[str, Json] = {}
    at = 0.0
    with suppress(KeyboardInterrupt), Live(auto_refresh=False, vertical_overflow="crop") as shown:
        while True:
            found, faults = _asked(urls, key, ready=ready)
            now = time.monotonic()
            lines = [line for each, state in found.items() for line in _lines(each, state)]
            for each, state in found.items():
                lines += _rates(each, before.get(each, {}), state, now - at)
            text = "\n".join(printable(line) for line in (*lines, *faults.values()))
            if shown.console.is_terminal:
                shown.update(Text(text), refresh=True)
            else:
                typer.echo(text)
            before, at = found, now
            time.sleep(WATCH_S)


def _rates(url: str, before: Json, state: Json, seconds: float) -> Iterator[str]:
    """Lines of rates since the last look: of tokens, and of bytes on links."""
    then, load = before.get("load"), state.get("load")
    if not (isinstance(then, dict) and isinstance(load, dict)):
        return
    rates = []
    for name, what in RATES.items():
        old, new = then.get(name), load.get(name)
        if isinstance(old, int) and isinstance(new, int) and new >= old:
            rates.append(f"{(new - old) / max(seconds, 1e-3):.3g} {what}")
    if rates:
        yield f"{url} now, a second: {', '.join(rates)}"


def _lines(url: str, state: Json) -> Iterator[str]:
    ready = "ready" if state.get("ready") else "not ready"
    version = f", Paceline {state['version']}" if "version" in state else ""
    yield f"{state.get('side')} at {url}: {ready}{version}"
    yield f"  model {state.get('model')}, {state.get('documents')} documents"
    load = state.get("load")
    if isinstance(load, dict):
        yield f"  answers under way {load.get('answers')}; {load.get('steps')} steps and {load.get('rows')} rows so far"
        rows, free = load.get("kv_rows"), load.get("kv_free_rows")
        if isinstance(rows, int) and isinstance(free, int):
            yield f"  KV memory: {rows - free} of {rows} rows in use"
    links = state.get("links")
    if not isinstance(links, list):
        return
    for link in links:
        if isinstance(link, dict):
            yield _link(link)
    if not links:
        yield "  linked with nobody"


def _link(link: Json) -> str:
    rtt, sent = link.get("rtt_s"), link.get("sent")
    told = f", round trip {rtt * 1000:.0f} ms" if isinstance(rtt, int | float) else ""
    sizes = {kind: size for kind, size in sent.items() if isinstance(size, int)} if isinstance(sent, dict) else {}
    kinds = ", ".join(f"{kind} {size}" for kind, size in sorted(sizes.items()))
    return f"  linked with {link.get('peer')}{told}; sent {sum(sizes.values())} bytes{f' ({kinds})' if kinds else ''}"


AGENT = "http://127.0.0.1:8001"


def check(
    question: Annotated[str, typer.Argument(help="what would be asked")],
    url: Url = AGENT,
    privacy: Annotated[
        str | None, typer.Option("--privacy", help="level that is asked for; default: the usual")
    ] = None,
    of_key: Annotated[
        str | None, typer.Option("--for", help="name of the key that would ask; default: this one")
    ] = None,
    key: Key = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Say what would happen to a question, and why: documents, level, strategy, and what would leave.

    Nothing is sent to the other side.
    """
    from .conversation import Conversation

    body = {"question": question} | ({} if of_key is None else {"key": of_key})
    extension = {} if privacy is None else {"paceline": {"privacy": privacy}}
    with Conversation(url or AGENT, key=given_secret("key", key, key_file)) as conversation:
        found = conversation.post("/policy/check", {**body, **extension})
    if as_json:
        typer.echo(printable_json(json.dumps(found, indent=2, ensure_ascii=False)))
        return
    rule = found.get("rule")
    lines = [
        f"level     {found.get('level')}, {f'by the rule {rule}' if rule else 'as asked for'}",
        f"strategy  {found.get('strategy')}: {found.get('why')}",
        f"leaves    {found.get('leaves')}",
    ]
    documents, waiting, left = (found.get(name) for name in ("documents", "confirmation_needed", "budgets_left"))
    for each in documents if isinstance(documents, list) else ():
        lines.append(f"reads     {each.get('document')}{''.join(f', {told}' for told in each.get('rules', ()))}")
    for each in waiting if isinstance(waiting, list) else ():
        lines.append(f"waits     {each.get('document')}: paceline policy allow {each.get('id')}")
    lines += [f"left      {name} {amount:g}" for name, amount in left.items()] if isinstance(left, dict) else []
    typer.echo("\n".join(map(printable, lines)))
