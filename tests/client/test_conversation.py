"""The terminal client: its requests, its output, and its error messages."""

from __future__ import annotations

import io
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from client.commands import AGENT, register
from client.conversation import Conversation
from client.dialogue import Screen
from paceline.api.http.server import listen, url_of
from paceline.commands.main import main
from paceline.errors import EngineError, PacelineError
from paceline.runtime.service import Citation, TextDelta
from tests.api.real import serving_documents
from tests.api.scripted import Script, ScriptedService, answering, done, serving
from tests.device_agent.test_link_check import self_signed


def invoked(*arguments: str, input: str | None = None) -> Result:
    """The outcome of a command of the client."""
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, arguments, input=input)


def chat(*arguments: str, input: str | None = None) -> Result:
    return invoked("chat", *arguments, input=input)


def sentence(result: Result) -> str:
    """The error message that the root command prints before it exits with 2."""
    assert isinstance(result.exception, PacelineError), result.output
    return str(result.exception)


def test_a_question_is_answered(url: str, service: ScriptedService) -> None:
    result = chat("Who", "are you?", "--url", url, "--seed", "5", "--max-tokens", "9", "--temperature", "0")
    assert result.exit_code == 0 and result.stdout == "Hello there.\n"
    asked = service.requests[0]
    assert asked.prompt.messages == ({"role": "user", "content": "Who are you?"},)
    assert (asked.wish.sampling.seed, asked.output.max_tokens, asked.wish.sampling.temperature) == (5, 9, 0)


def test_a_conversation_remembers_what_was_said(url: str, service: ScriptedService) -> None:
    result = chat("--url", f"{url}/v1", input="One?\n\nTwo?\n/quit now\nThree?\n")
    assert result.exit_code == 0
    assert result.stdout == "Hello there.\nHello there.\n", "plain in a pipe: no prompt, no banner, no colour"
    contents = [message["content"] for message in service.requests[1].prompt.messages]
    assert contents == ["One?", "Hello there.", "Two?"]


def test_a_line_of_a_pipe_that_is_no_utf8_fails_alone(
    url: str, service: ScriptedService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped = io.BytesIO("Wann \xf6ffnet\n".encode("latin-1") + "Wann öffnet es?\n".encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(piped, encoding="ascii", errors="strict"))
    monkeypatch.setattr("sys.argv", ["paceline", "chat", "--url", url])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (1, "Hello there.\n") and "bytes that are no UTF-8" in said.err
    assert [request.prompt.messages[-1]["content"] for request in service.requests] == ["Wann öffnet es?"]


def test_an_answer_that_fails_is_forgotten_and_the_conversation_goes_on(url: str, service: ScriptedService) -> None:
    service.script = Script([TextDelta("Half", 1), EngineError("Out of memory.")])
    result = chat("--url", url, input="One?\nTwo?\n")
    assert result.exit_code == 1 and result.stderr.count("Out of memory.") == 2
    assert result.stdout == "Half\nHalf\n"
    assert len(service.requests[1].prompt.messages) == 1
    alone = chat("Hi", "--url", url)
    assert alone.stdout == "Half\n" and "Out of memory." in sentence(alone)


def test_sources_and_a_lost_side_are_shown(url: str, service: ScriptedService) -> None:
    citations = (Citation("cloud", "museum.md", "…", 0.9), Citation("device", "", "", 0.8))
    service.script = Script(answering("At nine.", citations=citations, degraded="device_lost"))
    shown = chat("When?", "--url", url).stdout
    assert "[1] museum.md (cloud)" in shown and "[2] a private document (device)" in shown
    assert "the device was lost" in shown
    service.script = Script(answering("At nine.", degraded="device_refused"))
    assert "Note: the device did not take part: " in chat("When?", "--url", url).stdout


def test_a_source_is_read_by_its_number(url: str, service: ScriptedService) -> None:
    citations = (
        Citation("cloud", "museum.md", "Open from nine.", 0.9, place="page 2"),
        Citation("device", "", "", 0.8),
    )
    service.script = Script(answering("At nine.", citations=citations))
    said = chat("--url", url, input="When?\n/source 1\n/source 2\n/source 3\n")
    assert said.stdout.count("[1] museum.md, page 2 (cloud)") == 2 and "\nOpen from nine.\n" in said.stdout
    assert "Its text may not leave its side." in said.stdout
    assert said.exit_code == 1 and "has 2 sources" in said.stderr


def test_the_documents_that_can_be_read_are_listed(tmp_path: Path) -> None:
    with serving_documents(tmp_path, {"museum.md": "# Museum\n\nThe museum opens at nine every day."}) as url:
        said = chat("--url", url, input="/docs\n").stdout
    assert said.splitlines() == ["museum.md  When does the museum open?", "documents listed: 1 (cloud)"]


def test_reasoning_is_dim_at_a_terminal_and_left_out_of_pipes(url: str, service: ScriptedService) -> None:
    service.script = Script([TextDelta("Let me see.", 1, thinking=True), TextDelta("At nine.", 1), done()])
    assert chat("When?", "--url", url).stdout == "At nine.\n"
    assert json.loads(chat("--json", "When?", "--url", url).stdout)["reasoning"] == "Let me see."
    screen = io.StringIO()
    with Conversation(url) as conversation:
        Screen(Console(file=screen, force_terminal=True, color_system="standard")).show(conversation.ask("When?"))
    assert screen.getvalue() == "\x1b[2;3mLet me see.\x1b[0m\n\nAt nine.\n"
    assert conversation.messages[-1]["content"] == "At nine."


def test_json_has_the_whole_answer(url: str, service: ScriptedService) -> None:
    service.script = Script([TextDelta("é", 1, "cloud"), done("length", degraded="device_missing")])
    body = json.loads(chat("--json", "When?", "--url", url).stdout)
    assert (body["content"], body["finish_reason"], body["usage"]["total_tokens"]) == ("é", "length", 10)
    assert body["paceline"]["degraded"] == "device_missing" and body["paceline"]["strategy"] == "aggregate"


def test_lanes_have_colours_and_control_characters_do_not_reach_the_terminal(
    url: str, service: ScriptedService
) -> None:
    service.script = Script(
        [TextDelta("a\x1b[2J", 1, "cloud"), TextDelta("b\r\n", 1, "device"), TextDelta("[red]c", 1), done()]
    )
    screen = io.StringIO()
    with Conversation(url) as conversation:
        Screen(Console(file=screen, force_terminal=True, color_system="standard")).show(conversation.ask("?"))
    shown = screen.getvalue()
    assert "\x1b[36ma[2J\x1b[0m" in shown and "\x1b[35mb\x1b[0m\n" in shown and "[red]c" in shown


def test_without_a_server_the_error_names_the_command_to_start_one() -> None:
    listener = listen("127.0.0.1", 0)
    url = url_of(listener)
    listener.close()
    said_so = sentence(chat("Hi", "--url", url))
    assert "paceline serve" in said_so and "paceline agent" in said_so and "--url" in said_so
    assert "refused" in said_so and "does not speak https" not in said_so
    assert "--url" in sentence(chat("Hi", "--url", "http://["))


def test_a_refusal_is_the_servers_sentence_and_a_missing_key_is_asked_for(url: str) -> None:
    assert "gpt-4o" in sentence(chat("Hi", "--url", url, "--model", "gpt-4o"))
    assert "strategy" in sentence(chat("Hi", "--url", url, "--strategy", "telepathy"))
    with serving(ScriptedService(), {"right": None}) as url:
        assert "--key" in sentence(chat("Hi", "--url", url))
        assert chat("Hi", "--url", url, "--key", "right").stdout == "Hello there.\n"


def test_a_truncated_stream_is_not_taken_for_a_whole_one() -> None:
    from client.conversation import Answer, _pieces

    def lines() -> Iterator[str]:
        yield 'data: {"choices":[{"delta":{"content":"Half"}}]}'

    answer = Answer("m")
    with pytest.raises(PacelineError, match="cut"):
        list(_pieces(lines(), answer))
    assert answer.text == "Half"


def test_a_command_of_the_device_asks_nobody_else_if_its_address_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a variable that is not set."""
    asked: list[str] = []

    def post(self: Conversation, *_: object) -> dict[str, object]:
        asked.append(self.url)
        return {}

    monkeypatch.setattr(Conversation, "post", post)
    assert invoked("policy", "check", "Who?", "--url", "", "--json").stdout == "{}\n"
    assert asked == [f"{AGENT}/v1"]


def test_json_is_what_came_also_where_this_release_cannot_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conversation, "post", lambda *_: {"proven": 3})
    result = invoked("verify", "resp_1", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout) == {"proven": 3}


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "socks4://127.0.0.1:9"])
def test_a_proxy_of_the_environment_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    assert "the proxy that ALL_PROXY names cannot be used" in sentence(chat("--url", "https://a.invalid", "Who?"))
    assert "ALL_PROXY" in invoked("status", "--url", "https://a.invalid").stderr


def test_a_proxy_of_the_environment_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{closed.getsockname()[1]}")
        said = sentence(chat("--url", "https://a.invalid", "Who?"))
    assert "through the proxy that HTTPS_PROXY or ALL_PROXY names" in said and "refused" in said


def test_a_server_whose_certificate_is_not_trusted_is_not_said_to_be_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"https://localhost:{server.server_port}"
        for said in (sentence(chat("Hi", "--url", url)), invoked("status", "--ready", "--url", url).stderr):
            assert "does not trust (self-signed certificate)" in said and "SSL_CERT_FILE" in said
            assert "paceline serve" not in said
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert "answered 501" in sentence(chat("Hi", "--url", url)), "it is trusted now"
        server.shutdown()


def test_an_address_and_a_key_that_are_none_are_said_to_be_none(url: str) -> None:
    for key in ("schlüssel", "a\x1bb"):
        assert "The key has characters that no key has" in sentence(chat("--url", url, "--key", key, "Who?"))
    for url in ("ftp://example.org", "http://[::1", "localhost:8000", "http:/x"):
        assert "is no address: give one such as" in sentence(chat("--url", url, "Who?"))
