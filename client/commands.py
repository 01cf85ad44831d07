"""The commands `paceline chat`, `verify`, `mcp`, `status`, `demo`, `policy check`. httpx and rich: when they run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from paceline.commands.options import Json as AsJson
from paceline.commands.options import group_of, path, show, spread, write_json
from paceline.core.printable import printable, printable_lines
from paceline.errors import ConfigError, PacelineError
from paceline.secret_files import given_secret

from .demo import demo

if TYPE_CHECKING:
    from .conversation import Conversation, Json


URL, AGENT = BOTH = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")


@dataclass(frozen=True, repr=False)
class At:
    """The side that is asked, and the key for it."""

    url: Annotated[str | None, typer.Option("--url", help="a server or an agent, with or without /v1")] = URL
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            help="the key, where one is needed; other users of the machine see it on a command line: give - to be "
            "asked for it or read it from the first line of standard input, or --key-file",
        ),
    ] = None
    key_file: Annotated[
        Path | None, typer.Option("--key-file", parser=path, help="file whose first line is the key; -: standard input")
    ] = None

    def conversation(self, usual: str = URL, **options: Any) -> Conversation:
        """usual: where no URL, or an empty one, was given. options: see `Conversation`."""
        from .conversation import Conversation

        return Conversation(self.url or usual, key=given_secret("key", self.key, self.key_file), **options)


SERVER, DEVICE, EITHER = At(), At(AGENT), At(None)


# ---- `paceline status` and `paceline policy check`: who is linked, what runs, what rules make of a question ---------
SILENCE_S = 5.0  # a program that is well answers at once, and health checks wait for this one
WATCH_S = 2.0
RATES = {"steps": "steps", "rows": "rows", "sent_bytes": "bytes sent", "received_bytes": "bytes received"}


def status(
    where: At = EITHER,
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
    given = given_secret("key", where.key, where.key_file)
    urls = (where.url,) if where.url else BOTH
    if watch:
        if as_json:
            raise ConfigError("--watch shows lines for people: leave --json out")
        _watch(urls, given, ready=ready)
        return
    found, faults = _asked(urls, given, ready=ready)
    rows = [{"url": each, **found.get(each, {"error": faults.get(each)})} for each in (*found, *faults)]
    lines = (printable(line) for each, state in found.items() for line in _lines(each, state))
    show(rows, *lines, beside="\n".join(map(printable, faults.values())), as_json=as_json)
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


def check(
    question: Annotated[str, typer.Argument(help="what would be asked")],
    where: At = DEVICE,
    privacy: Annotated[
        str | None, typer.Option("--privacy", help="level that is asked for; default: the usual")
    ] = None,
    of_key: Annotated[
        str | None, typer.Option("--for", help="name of the key that would ask; default: this one")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what would happen to a question, and why: documents, level, strategy, and what would leave.

    Nothing is sent to the other side.
    """
    body = {"question": question} | ({} if of_key is None else {"key": of_key})
    extension = {} if privacy is None else {"paceline": {"privacy": privacy}}
    with where.conversation(AGENT) as conversation:
        found = conversation.post("/policy/check", {**body, **extension})
    if as_json:
        show(found, as_json=True)
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
    show(found, *map(printable, lines), as_json=False)


# ---- `paceline chat` and `verify`, and `mcp` ------------------------------------------------------------------------
VERIFY_S = 600.0  # for an answer that is computed while others wait


def register(app: typer.Typer) -> None:
    app.command(epilog='Example: paceline chat "When does the museum open?"')(spread(chat))
    app.command(epilog="Example: paceline verify resp_0123…")(spread(verify))
    app.command(epilog="Example: paceline status --json")(spread(status))
    app.command(epilog="Example: paceline demo --check")(demo)
    app.command(epilog="Example: paceline mcp --url http://127.0.0.1:8001")(spread(mcp))
    told = "What the rules of [policy] make of a question, and documents that they ask their owner for."
    example = 'paceline policy check "What does my contract say?"'
    group_of(app, "policy", told, example).command(epilog=f"Example: {example}")(spread(check))


def chat(
    question: Annotated[list[str] | None, typer.Argument(help="what to ask; without it, a conversation")] = None,
    where: At = SERVER,
    model: Annotated[str | None, typer.Option("--model", help="default: the first the server has")] = None,
    device: Annotated[str | None, typer.Option("--device", help="the device that joins, at a server")] = None,
    strategy: Annotated[str | None, typer.Option("--strategy", help="default: the server chooses")] = None,
    privacy: Annotated[
        str | None,
        typer.Option("--privacy", help="what may leave a device: open, document-private, answer-private, local-only"),
    ] = None,
    documents: Annotated[int | None, typer.Option("--documents", min=0, help="passages that each side reads")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="at most so many")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0, max=2, help="0: no chance")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="the same seed gives the same answer")] = None,
    history: Annotated[
        Path | None, typer.Option("--history", parser=path, help="file that keeps your questions; default: none does")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a question, or hold a conversation; shows which side's documents each word came from.

    In a conversation /help lists the commands. From a pipe each line is a question; the answers have no colours then,
    and failures go to standard error, with exit code 1 at the end.
    """
    from .dialogue import Screen

    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    asked = " ".join(question or []).strip()
    extension = {"device": device, "strategy": strategy, "privacy": privacy, "documents": documents}
    extension["timeline"] = None if asked else True  # for /how
    if as_json and not asked:
        raise ConfigError('--json needs a question: paceline chat --json "…"')
    with where.conversation(model=model, options=_given(options), extension=_given(extension)) as conversation:
        if as_json:
            for _ in conversation.ask(asked):
                pass
            write_json(conversation.answer.as_json())
        elif asked:
            screen = Screen()
            screen.show(conversation.ask(asked))
            screen.show_sources(conversation.answer)
        else:
            _converse(conversation, history)


def verify(
    response: Annotated[str, typer.Argument(help="id of a stored answer of /v1/responses")],
    where: At = SERVER,
    as_json: AsJson = False,
) -> None:
    """Have a stored answer computed again, and say which of its tokens are those that its strategy gives.

    Exit code 1 where a token differs, 2 where not all can be computed again.
    """
    with where.conversation(silence=VERIFY_S) as conversation:
        found = conversation.post(f"/responses/{quote(response, safe='')}/verify", {})
    show(found, *(() if as_json else map(printable_lines, verdict(found))), as_json=as_json)
    if found.get("differing"):
        raise typer.Exit(1)
    if found.get("not_provable"):
        raise typer.Exit(2)


def verdict(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines about an answer that was computed again."""
    again = f", {found['asked_again']} of them asked of both sides once more" if found["asked_again"] else ""
    yield f"{found['proven']} of {found['tokens']} tokens proven{again}"
    if found["differing"]:
        yield f"{'index':>6}  {'told':24}  expected"
    for one in found["differing"]:
        told = "(the end)" if one["token"] is None else f"{one['token']} {one['text']!r}"
        yield f"{one['index']:>6}  {told:24}  {one['expected']} {one['expected_text']!r}"
    for one in found["not_provable"]:
        yield f"{one['tokens']} tokens cannot be proven: {one['reason']}"


def mcp(where: At = SERVER) -> None:
    """Offer a side's documents to another program as tools, over the Model Context Protocol on standard input.

    For programs that start such commands themselves; others are given URL/mcp. A key needs the scope `vector_stores`,
    or all, and cannot come from standard input. What is found goes to that program, and to the model that it asks.
    """
    from .conversation import json_object

    version: dict[str, str] = {}  # of the protocol, once it has been agreed on
    with where.conversation() as conversation:
        for line in sys.stdin.buffer:
            try:
                answer = conversation.relay(line, version)
            except PacelineError as error:
                asked = json_object(line).get("id")
                fault = {"code": -32000, "message": str(error)}
                answer = json.dumps({"jsonrpc": "2.0", "id": asked, "error": fault}).encode()
                if asked is None:  # a notification, which gets no answer
                    continue
            result = json_object(answer).get("result")
            if isinstance(result, dict) and "protocolVersion" in result:
                version = {"mcp-protocol-version": str(result["protocolVersion"])}
            if answer:
                typer.echo(answer.strip())


def _given(options: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}


def _converse(conversation: Conversation, history: Path | None) -> None:
    """Answer questions until the input ends. A failed or interrupted answer does not end the conversation."""
    from .dialogue import HELP, Dialogue, PipedInput, Screen, Terminal

    screen = Screen()
    if sys.stdin.isatty():
        screen.say(f"{conversation.model} at {conversation.url}. /help lists commands, Ctrl-C stops an answer.")
        screen.show_legend()
        Dialogue(conversation, screen, Terminal(HELP, history), fail=screen.say).run()
        return
    failed: list[str] = []

    def fail(sentence: str) -> None:
        failed.append(sentence)
        typer.echo(f"paceline: {printable_lines(sentence)}", err=True)

    Dialogue(conversation, screen, PipedInput(), fail=fail).run()
    if failed:
        raise typer.Exit(1)
