"""One schema for flags, variables and a file: precedence, origins, unknown keys, sentences."""

from __future__ import annotations

import errno
import grp
import itertools
import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from paceline import settings_sources
from paceline.bootstrap import open_reranker
from paceline.commands import diagnosis
from paceline.commands.main import build
from paceline.core.addresses import is_loopback
from paceline.core.policy import DocumentFacts
from paceline.errors import ConfigError
from paceline.model_opening import workflow_units
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.settings import (
    PROGRAMS,
    SCHEMAS,
    AgentSettings,
    NodeSettings,
    ProgramSettings,
    ServerSettings,
    StageSettings,
    variable,
)
from paceline.settings_sources import describe, describe_given, paths, resolve
from paceline.system import is_others


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return path


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_flag_beats_environment_beats_table_beats_key_beats_default(tmp_path: Path) -> None:
    for flag, environment, table, key in itertools.product(*((number, None) for number in range(4))):
        lines = [f"port = {key}"] if key is not None else []
        lines += ["[agent]", f"port = {table}"] if table is not None else []
        file = written(tmp_path, "\n".join(lines))
        env = {} if environment is None else {"PACELINE_PORT": str(environment)}
        settings, origins = resolve(AgentSettings, {"port": flag}, env, file)
        expected = [
            (flag, "flag --port"),
            (environment, "environment PACELINE_PORT"),
            (table, f"file {file} [agent]"),
            (key, f"file {file}"),
            (8001, "default"),
        ]
        assert (settings.port, origins["port"]) == next(pair for pair in expected if pair[0] is not None)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_defaults_listen_on_loopback_and_need_nothing(schema: type[NodeSettings], own_state_directory: Path) -> None:
    settings, origins = resolve(schema, {}, {})
    assert (settings.model, settings.first_model) == (("demo",), "demo")
    assert is_loopback(settings.host)
    assert settings.state_dir == own_state_directory / "paceline" / schema.side
    assert settings.docs_dir == settings.state_dir / "docs"
    assert set(origins) == set(paths(schema))
    assert set(origins.values()) == {"default"}


def test_documents_lie_in_the_state_directory_that_was_given(tmp_path: Path) -> None:
    settings, origins = resolve(ServerSettings, {"state_dir": tmp_path / "here"}, {})
    assert (settings.docs_dir, origins["docs_dir"]) == (tmp_path / "here" / "docs", "default")


@pytest.mark.parametrize("key", ["state_dir", "docs_dir"])
@pytest.mark.parametrize("source", ["variable", "key"])
def test_a_folder_named_for_both_sides_gives_each_its_own_below_it(tmp_path: Path, key: str, source: str) -> None:
    env = {f"PACELINE_{key.upper()}": str(tmp_path / "both")} if source == "variable" else {}
    file = written(tmp_path, f"{key} = {str(tmp_path / 'both')!r}" if source == "key" else "")
    for schema in SCHEMAS:
        settings, origins = resolve(schema, {}, env, file)
        assert getattr(settings, key) == tmp_path / "both" / schema.side
        assert origins[key] == (f"environment PACELINE_{key.upper()}" if source == "variable" else f"file {file}")


@pytest.mark.parametrize("key", ["state_dir", "docs_dir"])
def test_a_folder_named_for_one_side_is_taken_as_it_is(tmp_path: Path, key: str) -> None:
    file = written(tmp_path, f"{key} = 'shared'\n[server]\n{key} = {str(tmp_path / 'table')!r}")
    assert getattr(resolve(ServerSettings, {}, {}, file)[0], key) == tmp_path / "table"
    flags, env = {key: tmp_path / "flag"}, {f"PACELINE_{key.upper()}": str(tmp_path / "both")}
    assert getattr(resolve(ServerSettings, flags, env, file)[0], key) == tmp_path / "flag"


@pytest.mark.parametrize(
    ("key", "left"),
    [("state_dir", "keys.sqlite"), ("state_dir", "docs/documents.sqlite"), ("docs_dir", "documents.sqlite")],
)
def test_what_a_side_kept_in_the_folder_of_both_is_not_lost_in_silence(tmp_path: Path, key: str, left: str) -> None:
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).write_bytes(b"")
    env = {f"PACELINE_{key.upper()}": str(tmp_path)}
    with pytest.raises(ConfigError, match=f"{left} is there: stop the programs and move") as caught:
        resolve(ServerSettings, {}, env)
    assert str(tmp_path / "cloud") in str(caught.value) and str(tmp_path / "device") in str(caught.value)
    resolve(ServerSettings, {key: tmp_path / "elsewhere"}, env)  # a flag has precedence, so no error


@pytest.mark.parametrize(("flags", "embedder"), [({}, "minilm"), ({"model": "fake"}, "hash")])
def test_the_fake_model_gets_the_embedder_without_a_model(flags: dict[str, object], embedder: str) -> None:
    assert resolve(ServerSettings, flags, {})[0].embedder == embedder


@pytest.mark.parametrize(
    ("flags", "env", "text", "sentence"),
    [
        ({"prot": 1}, {}, "", "unknown flag --prot: did you mean --port?"),
        ({}, {"PACELINE_PROT": "1"}, "", "unknown environment variable PACELINE_PROT: did you mean PACELINE_PORT?"),
        ({}, {}, "modle = 'fake'", "did you mean model?"),
        ({}, {}, "[agent]\nclod = 'x'", "did you mean cloud?"),
        ({}, {}, "[agnet]\nport = 1", "did you mean agent?"),
        ({}, {}, "[server]\ncloud = 'http://127.0.0.1'", "cloud: it is one of [agent]"),
        ({}, {}, "[tuning]\nkv_mibs = 3", "did you mean kv_mib?"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest_known_one(
    tmp_path: Path, flags: dict[str, object], env: dict[str, str], text: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(ServerSettings, flags, env, written(tmp_path, text))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("port = true", "true and false are for switches"),
        ("[tuning]\nresponses_days = false", "true and false are for switches"),
        ("[policy]\nnever_leaves = 'diary'", 'a list is meant, as ["x"]'),
        ("[server]\npublic_url = 'server.example.org'", "give an address such as https://paceline.example.org"),
        ("[server]\nserver_url = 'http://a?b'", "give an address such as https://paceline.example.org"),
    ],
)
def test_a_value_of_another_kind_says_what_is_meant(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(ServerSettings, {}, {}, written(tmp_path, text))
    assert sentence in str(error.value)


@given(st.text(min_size=1).filter(lambda key: key not in paths(AgentSettings)))
def test_no_key_that_nobody_knows_passes_in_silence(key: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean|is now|is one of"):
        resolve(AgentSettings, {key: "1"}, {})


@pytest.mark.parametrize("schema", PROGRAMS)
def test_what_stands_in_a_table_and_is_given_elsewhere_is_told_where_it_is(
    tmp_path: Path, schema: type[ProgramSettings]
) -> None:
    for path in (path for path in paths(schema) if "." in path):
        table, key = path.split(".")
        said = f"{key} in \\[{table}\\] of the file, see --config, or {variable(path)}"
        bare: tuple[tuple[dict[str, str], dict[str, str], str], ...] = (
            ({key: "1"}, {}, ""),
            ({}, {f"PACELINE_{key.upper()}": "1"}, ""),
            ({}, {}, f"{key} = 1"),
            ({}, {}, f"[{schema.table}]\n{key} = 1"),
        )
        own = any(key in paths(each) for each in PROGRAMS)  # then the bare key means that
        for flags, env, text in (({path.replace(".", "_"): "1"}, {}, ""), *(() if own else bare)):
            with pytest.raises(ConfigError, match=said):
                resolve(schema, flags, env, written(tmp_path, text))


def test_a_table_stands_in_the_file_or_in_that_of_a_program_and_a_variable_comes_first(tmp_path: Path) -> None:
    text = "[tuning]\nthreads = 2\nstep_rows = 64\ncloud_texts = false\n[agent.tuning]\nstep_rows = 32\n"
    file = written(tmp_path, text + "[energy]\nmeter = 'off'")
    env = {"PACELINE_ANSWERS_TOP_K": "5"}
    agent, origins = resolve(AgentSettings, {}, env, file)
    server, _ = resolve(ServerSettings, {}, env | {"PACELINE_TUNING_THREADS": "3"}, file)
    assert (agent.tuning.threads, agent.tuning.step_rows, agent.tuning.cloud_texts) == (2, 32, False)
    assert (server.tuning.threads, server.tuning.step_rows, server.answers.top_k) == (3, 64, 5)
    assert agent.energy.meter == server.energy.meter == "off"
    assert (origins["tuning.step_rows"], origins["tuning.threads"], origins["answers.top_k"]) == (
        f"file {file} [agent]",
        f"file {file}",
        "environment PACELINE_ANSWERS_TOP_K",
    )
    for wrong, sentence in (
        ("tuning = 3", r"tuning in .* must be a table: \[tuning\]"),
        ("[agent]\ntuning = 3", r"agent.tuning in .* must be a table: \[agent.tuning\]"),
        ("[agent.tuning]\ncredential_hours = 3", "unknown key in .agent. of .*: tuning.credential_hours: it is one of"),
        ("[tuning]\nthraeds = 3", "did you mean tuning.threads?"),
        ("[tuning]\nthreads = 0", r"tuning.threads = 0 \(file .*\) cannot be used: input should be greater than"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            resolve(AgentSettings, {}, {}, written(tmp_path, wrong))


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ('never_leave = ["x"]', "did you mean policy.never_leaves"),
        ('never_leaves = ["a[b"]', r"has a \[ without its \]"),
        ('never_leaves = "diary"', "cannot be used"),
        ('ask_me = ["**"]', "names every document, or none"),
        ("keys.phone = {read = []}", "policy.keys.phone.read = .* cannot be used"),
        ('keys.phone = {privacy = "secret"}', "cannot be used"),
        ("bytes = -1", "cannot be used"),
    ],
)
def test_a_policy_that_is_not_understood_is_refused(tmp_path: Path, policy: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(AgentSettings, {}, {}, written(tmp_path, f"[agent.policy]\n{policy}"))


def test_a_pattern_holds_for_the_folder_behind_a_link_and_rules_are_read_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    text = f"""[policy]
never_leaves = ["{tmp_path}/link", "{tmp_path}/link/*.md"]
keys."*" = {{reads = ["~/work"], confirms = true}}
joules = 5"""
    policy = resolve(ServerSettings, {}, {}, written(tmp_path, text))[0].policy.policy()
    real = DocumentFacts((str(tmp_path / "real" / "a.md"),))
    assert [each.rule for each in policy.of(real)] == ["never leaves", "never leaves"]
    assert policy.keys["*"].confirms and policy.budgets == {"joules": 5.0} and not policy.models


def test_the_other_programs_keys_are_left_to_it(tmp_path: Path) -> None:
    file = written(tmp_path, "cloud = 'http://127.0.0.1:1'\n[agent]\ndevice = 'laptop'\nport = 3")
    env = {"PACELINE_CODE": "123", "OTHER_PORT": "x"}
    settings, origins = resolve(ServerSettings, {}, env, file)
    assert settings.port == 8000
    assert set(origins.values()) == {"default"}


def test_a_file_of_the_working_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    file = Path("paceline.toml")
    file.write_text("port = 9")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for place in (file, tmp_path):
        mode = place.stat().st_mode
        for open_to in (0o002, 0o022):
            place.chmod(mode | open_to)
            with pytest.raises(ConfigError, match=rf"may write {place.absolute()}: .* name it with --config"):
                resolve(AgentSettings, {}, {})
            assert resolve(AgentSettings, {}, {}, file)[0].port == 9, "one that was named is read"
            assert resolve(AgentSettings, {}, {"PACELINE_CONFIG": "paceline.toml"})[0].port == 9
        place.chmod(mode)
    assert resolve(AgentSettings, {}, {})[0].port == 9
    file.rename(elsewhere / "other.toml")
    file.symlink_to(elsewhere / "other.toml")
    assert resolve(AgentSettings, {}, {})[0].port == 9
    elsewhere.chmod(0o777)
    with pytest.raises(ConfigError, match=f"may write {elsewhere}"):
        resolve(AgentSettings, {}, {})


def _folder(file: Path) -> None:
    file.mkdir()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_folder, "no regular file"),
        (os.mkfifo, "no regular file"),
        (lambda file: file.symlink_to("gone"), "No such file"),
        (lambda file: file.symlink_to(file), "Too many levels"),
    ],
    ids=["folder", "pipe", "link to nothing", "link to itself"],
)
def test_a_file_of_the_working_directory_that_is_there_and_is_none_is_refused(
    make: Callable[[Path], None], why: str
) -> None:
    make(Path("paceline.toml"))
    with pytest.raises(ConfigError, match=f"cannot read the configuration file paceline.toml: .*{why}"):
        resolve(AgentSettings, {}, {})


def test_where_the_working_directory_may_not_be_entered_there_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "paceline.toml").write_text("port = 9")

    def refused(file: object, **_: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    with monkeypatch.context() as patched:
        patched.setattr(os, "lstat", refused)
        patched.setattr(os, "stat", refused)
        settings, _ = resolve(AgentSettings, {}, {})
    assert settings.port == 8001


@pytest.mark.parametrize("text", ["port = 9", "port = 9\r\n"])
def test_a_file_may_begin_with_the_mark_of_windows_editors(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "settings.toml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert resolve(AgentSettings, {}, {}, file)[0].port == 9


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"model = {'[' * 5000}{']' * 5000}", "is not a TOML file: maximum recursion"),
        (r'state_dir = "a\u0000b"', r"state_dir \(file .*\) has a character of the number 0"),
        (r"[server]" "\n" r'api_key_file = "a\u0000b"', r"api_key_file \(file .*\) has a character of the number 0"),
        ("state_dir = ''", "state_dir = '' .* cannot be used: it is empty"),
        ("[server]\ndocs_dir = ''", "docs_dir = '' .* cannot be used: it is empty"),
    ],
    ids=["nested", "zero in a folder", "zero in a file", "no folder", "no folder of a side"],
)
def test_a_file_that_cannot_be_meant_is_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(ServerSettings, {}, {}, written(tmp_path, text))


@pytest.mark.parametrize(
    "command",
    ["serve --state-dir", "agent --docs-dir", "serve --api-key-file", "keys list --state-dir", "docs list --docs-dir"],
)
def test_an_empty_path_on_the_command_line_is_refused_before_anything_is_made(tmp_path: Path, command: str) -> None:
    ended = CliRunner().invoke(build(), [*command.split(), ""])
    assert ended.exit_code == 2 and "it is empty" in ended.output
    assert not list(tmp_path.iterdir())


def test_a_group_of_this_user_alone_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path.stat()
    assert not is_others(status)
    for mode, group_name, members, others in (
        (0o775, "me", [], False),
        (0o775, "me", ["me"], False),
        (0o775, "me", ["me", "you"], True),
        (0o775, "staff", [], True),
        (0o777, "me", [], True),
        (0o755, "staff", ["you"], False),
    ):
        user = pwd.struct_passwd(("me", "x", os.geteuid(), status.st_gid, "", "/", "/bin/sh"))
        monkeypatch.setattr("pwd.getpwuid", lambda _, user=user: user)
        group = grp.struct_group((group_name, "x", status.st_gid, members))
        monkeypatch.setattr("grp.getgrgid", lambda _, group=group: group)
        tmp_path.chmod(mode)
        assert is_others(tmp_path.stat()) is others, (oct(mode), group_name, members)


TRUSTING = """port = 9
[agent]
cloud = "http://127.0.0.1:9"
code = "abcd"
cloud_may_ask = "on"
encrypt_documents = false
share_distributions = false
embedder = "hash"
"""


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("command", [["agent", "--show-settings"], ["docs", "list", "--side", "device"]])
def test_what_a_file_of_the_working_directory_trusts_is_said_by_every_command(
    tmp_path: Path, command: list[str]
) -> None:
    Path("paceline.toml").write_text(f'{TRUSTING}state_dir = "{tmp_path}/state"')

    def told(*more: str) -> str:
        done = [sys.executable, "-m", "paceline", *command, *more]
        return subprocess.run(done, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL).stderr

    said = told()
    trusts = "cloud = http://127.0.0.1:9, cloud_may_ask = on, code = (set), encrypt_documents = "
    assert f"this machine trusts: {trusts}" in said and "chmod 600 paceline.toml" in said
    assert said.count("Named with --config") == 1 and "share_distributions" not in said and "abcd" not in said
    assert "trusts" not in told("--config", "paceline.toml")


def test_a_command_that_asks_for_both_programs_settings_says_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Path("paceline.toml").write_text(TRUSTING)
    settings_sources._tell.cache_clear()
    monkeypatch.setattr(diagnosis, "run", lambda *_: [])
    CliRunner().invoke(build(()), ["doctor"])
    assert caplog.text.count("Named with --config") == 1


@pytest.mark.parametrize("key", ['[server]\napi_keys = ["k"]', '[agent]\ncode = "abcd"', 'api_keys = ["k"]'])
def test_a_file_with_secrets_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    file = written(tmp_path, key)
    file.chmod(0o600)
    resolve(ServerSettings, {}, {}, file)
    assert not caplog.text
    file.chmod(0o644)
    resolve(ServerSettings, {}, {}, file)
    assert "can be read by others" in caplog.text
    caplog.clear()
    resolve(ServerSettings, {}, {}, written(tmp_path, "port = 9"))
    assert not caplog.text


def test_a_file_that_was_named_must_exist_and_be_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*nowhere.toml: No such file"):
        resolve(ServerSettings, {}, {}, tmp_path / "nowhere.toml")
    for text in (b"port = ", b"\xff"):
        (tmp_path / "bad.toml").write_bytes(text)
        with pytest.raises(ConfigError, match=r"bad.toml is not a TOML file"):
            resolve(ServerSettings, {}, {}, tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match=r"must be a table: \[agent\]"):
        resolve(AgentSettings, {}, {}, written(tmp_path, "agent = 1"))


def test_keys_are_a_list_in_the_file_and_separated_by_commas_in_a_variable(tmp_path: Path) -> None:
    assert resolve(ServerSettings, {}, {"PACELINE_API_KEYS": "a, b=laptop,"})[0].api_keys == ("a", "b=laptop")
    assert resolve(ServerSettings, {}, {}, written(tmp_path, "api_keys = ['a', 'b']"))[0].api_keys == ("a", "b")
    assert resolve(ServerSettings, {"api_keys": ["a", "b,c"]}, {})[0].api_keys == ("a", "b", "c")


def test_an_unencrypted_link_to_another_machine_must_be_asked_for() -> None:
    for url in ("http://example.org", "ws://192.168.1.4:8000"):
        with pytest.raises(ConfigError, match="would not be encrypted"):
            resolve(AgentSettings, {"cloud": url}, {})
        assert resolve(AgentSettings, {"cloud": url, "insecure": True}, {})[0].cloud == url
    for url in ("http://127.0.0.1:8000/", "http://[::1]:8000", "https://example.org"):
        assert resolve(AgentSettings, {"cloud": url}, {})[0].cloud == url.rstrip("/")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"port": "x"}, "port = 'x' (flag --port) cannot be used: input should be a valid integer"),
        ({"port": 70_000}, "less than or equal to 65535"),
        ({"dtype": "int4"}, "input should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ({"cloud": "example.org"}, "must be a URL such as"),
        ({"kv_mib": 0}, "kv_mib = 0"),
        ({"state_dir": 3}, "state_dir = 3 (flag --state-dir)"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_its_origin_and_what_would_be(
    flags: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(AgentSettings, flags, {})
    assert sentence in str(error.value)


def test_secrets_are_shown_nowhere() -> None:
    env = {"PACELINE_API_KEYS": "hush-1,hush-2", "PACELINE_CODE": "hush-3"}
    settings, origins = resolve(AgentSettings, {}, env)
    shown = "\n".join([*describe(settings, origins), describe_given(settings, origins), repr(settings)])
    assert "hush" not in shown
    assert "(2 set)  (environment PACELINE_API_KEYS)" in shown
    server, origins = resolve(ServerSettings, {}, {"PACELINE_ENGINE_KEY": "hush-4"})
    assert "hush" not in "\n".join([*describe(server, origins), describe_given(server, origins), repr(server)])
    with pytest.raises(ConfigError) as error:
        resolve(AgentSettings, {"code": ["hush"]}, {})
    assert "hush" not in str(error.value)


def test_a_start_tells_what_was_set_and_every_value_can_be_shown_with_its_origin() -> None:
    settings, origins = resolve(AgentSettings, {"kv_mib": 2}, {"PACELINE_MODEL": "fake"})
    assert describe_given(settings, origins) == (
        "model = fake (environment PACELINE_MODEL), kv_mib = 2 (flag --kv-mib); --show-settings lists all"
    )
    assert describe_given(*resolve(AgentSettings, {}, {})).startswith("nothing was set; ")
    lines = describe(settings, origins)
    assert len(lines) == len(paths(AgentSettings))
    assert any(line.split() == ["kv_mib", "=", "2", "(flag", "--kv-mib)"] for line in lines)
    assert any(line.split() == ["model", "=", "fake", "(environment", "PACELINE_MODEL)"] for line in lines)
    assert any(line.split() == ["cloud", "=", "(none)", "(default)"] for line in lines)


def test_the_engines_settings_reach_it(tmp_path: Path) -> None:
    """KV memory as rows of blocks, the size of a step, and a device that is not there as a sentence."""
    from paceline.model_opening import open_model, step_rows
    from paceline.models import shipped

    flags = {"model": "demo-causal", "state_dir": tmp_path, "kv_mib": 1}
    settings, _ = resolve(ServerSettings, flags, {"PACELINE_TUNING_STEP_ROWS": "64", "PACELINE_TUNING_THREADS": "1"})
    engine = open_model(settings, shipped("cloud")).engine
    assert step_rows(settings, engine.info) == 64
    rows = engine.free_rows()
    twice, _ = resolve(ServerSettings, flags | {"kv_mib": 2}, {})
    assert rows and open_model(twice, shipped("cloud")).engine.free_rows() == pytest.approx(2 * rows, abs=16)
    missing, _ = resolve(ServerSettings, flags | {"engine_device": "cuda:9"}, {})
    with pytest.raises(ConfigError, match="no such device"):
        open_model(missing, shipped("cloud"))


def test_a_device_may_not_be_away_too_long_before_its_key_is_renewed() -> None:
    hours = {"PACELINE_TUNING_CREDENTIAL_HOURS": "48"}
    for allowed in (0.0, 2.0, 30.0):
        env = hours | {"PACELINE_TUNING_DEVICE_DAYS": str(allowed)}
        assert resolve(ServerSettings, {}, env)[0].tuning.device_days == allowed
    with pytest.raises(ConfigError, match="credential_hours"):
        resolve(ServerSettings, {}, hours | {"PACELINE_TUNING_DEVICE_DAYS": "1"})


def test_a_stage_is_set_by_variables_and_its_table_and_leaves_the_others_alone(tmp_path: Path) -> None:
    text = (
        "model = 'demo-causal'\ntuning.threads = 2\n"
        "[stage]\nlayers = '0:3'\nserver = 'http://127.0.0.1:1'\n[server]\nstages = '2'"
    )
    env = {"PACELINE_LISTEN": "10.0.0.7:8010", "PACELINE_STAGES": "3"}
    settings, origins = resolve(StageSettings, {}, env, written(tmp_path, text))
    assert (settings.span, settings.listen, settings.tuning.threads) == ((0, 3), "10.0.0.7:8010", 2)
    assert origins["layers"].endswith("[stage]") and origins["listen"] == "environment PACELINE_LISTEN"
    assert resolve(ServerSettings, {}, env, written(tmp_path, text))[0].stages == ("3",)


@pytest.mark.parametrize("layers", ["3", "3:3", "a:4", "-1:4"])
def test_layers_of_a_stage_are_a_span(layers: str) -> None:
    with pytest.raises(ConfigError, match=r"layers = .* cannot be used: give FIRST:STOP"):
        resolve(StageSettings, {"layers": layers}, {})


CORE = min(os.sched_getaffinity(0))
DECLARED = f"""
[agent.tuning.units.left]
cores = [{CORE}]
does = ["rerank", "embed"]
[agent.tuning.units.right]
[agent.tuning.units.chat]
kind = "engine"
lanes = 2
"""


def test_units_are_tables(tmp_path: Path) -> None:
    settings, _ = resolve(AgentSettings, {}, {}, written(tmp_path, DECLARED))
    found = workflow_units(settings)
    assert [(host.name, sorted(host.cores)) for host in found.hosts] == [("left", [CORE]), ("right", [])]
    assert (found.engine, found.lanes) == ("chat", 2)


@pytest.mark.parametrize(
    ("units", "sentence"),
    [
        ("left.cores = [100000]", r"tuning.units.left.cores = .* this process has the cores"),
        ("web = {}", "a unit cannot be called 'web'"),
        ("left.does = ['rerank']", "no unit does search and embed"),
        ("left.does = ['dance']", "units.left.does.0 = 'dance' .* input should be 'search', 'rerank' or 'embed'"),
        ("left.cors = [0]", "units.left.cors = .* extra inputs are not permitted"),
        ("left.lanes = 2", "only a unit of the kind engine has lanes"),
        ("left = {kind = 'engine', does = ['search']}", "writes texts: leave does out"),
        ("left.kind = 'gpu'", "units.left.kind = 'gpu' .* input should be 'cpu' or 'engine'"),
        ("a.kind = 'engine'\nb.kind = 'engine'", "one unit of the kind engine at most"),
    ],
)
def test_units_that_cannot_be_are_a_sentence_at_the_start(tmp_path: Path, units: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(ServerSettings, {}, {}, written(tmp_path, f"[server.tuning.units]\n{units}"))


def test_a_reranker_that_is_not_here_is_refused_at_the_start(tmp_path: Path) -> None:
    with DocumentStore.open(tmp_path, HashEmbedder()) as store:
        settings, _ = resolve(ServerSettings, {"model": "fake"}, {"PACELINE_TUNING_RERANKER": "nobody/has-this"})
        with pytest.raises(ConfigError, match="neither a directory here nor a model that was downloaded"):
            open_reranker(settings, store)
        assert open_reranker(resolve(ServerSettings, {}, {})[0], store) is None


@pytest.mark.parametrize("flags", [{"name": "caf\udce9"}, {"model": ["fake", "caf\udce9"]}])
def test_a_name_in_another_encoding_is_refused_at_the_start_and_a_path_is_not(flags: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"\(flag --(name|model)\) has bytes that are no UTF-8"):
        resolve(ServerSettings, flags, {})
    settings, _ = resolve(ServerSettings, {}, {"PACELINE_DOCS_DIR": "caf\udce9"})
    assert "caf\udce9" in settings.docs_dir.parts
