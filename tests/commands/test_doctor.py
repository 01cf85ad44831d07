"""`paceline doctor`: its checks, and that one failure hides no other."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from paceline.commands import diagnosis
from paceline.commands.main import build
from paceline.commands.options import Found
from paceline.errors import ConfigError
from paceline.hub.download import HubName, Unreachable
from paceline.models import DEVICE, READER
from paceline.settings import SCHEMAS, AgentSettings, NodeSettings, ServerSettings
from paceline.settings_sources import resolve
from tests.api.scripted import WAIT, ScriptedService, serving
from tests.engine.checkpoints import ARCHITECTURES, save
from tests.hub.test_gguf import write_gguf

EXPECTED = {
    *("python", "packages", "torch", "processor", "memory", "embedder"),
    *("demo model", "demo cloud model", "demo device model"),
}


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_whole_installation_passes_every_subject_is_reported_and_nothing_is_left_behind(
    tmp_path: Path, own_state_directory: Path
) -> None:
    result = CliRunner().invoke(build(()), ["doctor", "--json"])
    report = json.loads(result.stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert set(found) >= EXPECTED | {
        f"{side} {what}" for side in ("cloud", "device") for what in ("state", "model", "program")
    }
    failed = [check for check in found.values() if check["status"] == "fail"]
    assert (report["ok"], result.exit_code, failed) == (True, 0, [])
    assert "fingerprint" in found["demo cloud model"]["text"]
    assert [*tmp_path.iterdir(), *own_state_directory.iterdir()] == []


def test_a_missing_model_fails_with_what_to_do_on_a_line_among_those_of_all_subjects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.models.CLOUD", tmp_path / "gone")
    result = CliRunner().invoke(build(()), ["doctor"])
    lines = result.stdout.splitlines()
    assert result.exit_code == 1 and len(lines) >= len(EXPECTED)
    assert all(line.split()[0] in ("ok", "warn", "fail") for line in lines)
    (failed,) = (line for line in lines if line.startswith("fail"))
    assert "demo cloud model" in failed and "install paceline again" in failed


def test_who_may_ask_a_device_is_told() -> None:
    agent = AgentSettings(cloud_may_ask="off")
    assert diagnosis.cloud_may_ask(agent)[0] == "ok"
    for who, word in (("on", "whoever runs the cloud"), ("notebook,phone", "notebook,phone (as set)")):
        status, text = diagnosis.cloud_may_ask(AgentSettings(cloud_may_ask=who))
        assert status == "warn" and word in text and "60 a minute and 1200 an hour" in text
    free = AgentSettings(cloud_may_ask="on", cloud_asks_per_minute=0, cloud_asks_per_hour=0)
    assert diagnosis.cloud_may_ask(free)[1].endswith("as often as it likes")


def test_a_state_directory_that_others_can_read_is_a_warning(tmp_path: Path) -> None:
    private, public = tmp_path / "private", tmp_path / "public"
    private.mkdir(mode=0o700)
    public.mkdir()
    public.chmod(0o755)
    assert diagnosis.state_directory(private) == ("ok", f"{private}, mode 700")
    assert diagnosis.state_directory(public)[0] == "warn"
    assert diagnosis.state_directory(tmp_path / "not" / "yet") == ("ok", f"{tmp_path}/not/yet will be made")


def test_a_state_directory_that_cannot_be_made_or_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigError, match=f"{tmp_path}/not/yet cannot be made: you may not write to {tmp_path}:"):
        diagnosis.state_directory(tmp_path / "not" / "yet")
    with pytest.raises(ConfigError, match=f"^you may not write to {tmp_path}:"):
        diagnosis.state_directory(tmp_path)


def test_what_raises_has_failed_with_its_sentence_and_a_program_adds_checks_of_its_own_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> Found:
        raise ConfigError("no memory at all")

    def of_a_device(settings: NodeSettings) -> Found | None:
        return ("warn", settings.side) if settings.side == "device" else None

    monkeypatch.setattr(diagnosis, "memory", broken)
    nodes = tuple(resolve(schema, {}, {})[0] for schema in SCHEMAS)
    found = {check.name: check for check in diagnosis.run(nodes, {"own": of_a_device})}
    assert found["memory"] == diagnosis.Check("memory", "fail", "no memory at all")
    assert found["own"] == diagnosis.Check("own", "warn", "device") and "device program" in found


def test_packages_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "requires", lambda _: ["typer>=99", "nothing-like-it>=1", "pytest; extra == 'test'"])
    status, text = diagnosis.packages()
    assert status == "fail"
    assert "is not >=99" in text
    assert "nothing-like-it>=1 is missing" in text
    assert "pytest" not in text


def test_settings_that_cannot_be_used_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_PORT", "eighty")
    result = CliRunner().invoke(build(()), ["doctor"])
    assert isinstance(result.exception, ConfigError)


# ---- extras: those that work, are absent or broken -------------------------------------------------------------------
@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of others, by what importing them does."""
    texts: Mapping[str, str] = {
        "extra_whole": "",
        "extra_broken": "raise OSError('libcuda.so.1: cannot open shared object file')",
        "extra_bereft": "import extra_that_is_gone",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_an_extra_that_is_installed_and_cannot_be_imported_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        diagnosis,
        "EXTRAS",
        {"a": ("extra_whole",), "b": ("extra_whole", "extra_broken"), "c": ("extra_bereft",), "d": ("extra.absent",)},
    )
    status, text = diagnosis.extras()
    assert status == "warn"
    assert "b does not work (extra_broken: OSError: libcuda.so.1: cannot open" in text
    assert "c does not work (extra_bereft: No module named 'extra_that_is_gone')" in text
    assert "pip install 'paceline[c]'; a works; not installed: d" in text
    monkeypatch.setattr(diagnosis, "EXTRAS", {"a": ("extra_whole",), "d": ("extra_absent",)})
    assert diagnosis.extras() == ("ok", "a works; not installed: d")


def test_a_release_that_does_not_fit_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "EXTRAS", {"own": ("typer",)})
    monkeypatch.setattr(diagnosis, "requires", lambda _: ["typer>=99; extra == 'own'", "pytest>=99; extra == 'other'"])
    status, text = diagnosis.extras()
    assert status == "warn" and "own does not work (typer" in text and "is not >=99" in text


def test_all_extras_of_the_package_are_looked_at() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(diagnosis.EXTRAS) == set(project["optional-dependencies"]) - {"test", "lint"}


# ---- a model of the settings, without loading it ---------------------------------------------------------------------
SETTINGS = ServerSettings()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that can be loaded."""
    return Path(shutil.copytree(DEVICE, tmp_path / "model"))


def test_a_model_that_can_be_loaded_is_fine() -> None:
    for wanted in ("demo", "demo-causal", "fake:3", str(DEVICE)):
        status, text = diagnosis.model(SETTINGS, wanted)
        assert status == "ok" and text.startswith(f"{wanted}: ")
        assert wanted.startswith("fake") or ("million weights" in text and "GiB free" in text)


def test_a_cut_file_a_missing_part_and_a_missing_configuration_are_named(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match=rf"{weights.name} is damaged or was cut"):
        diagnosis.model(SETTINGS, str(folder))
    weights.write_bytes(whole)
    (folder / diagnosis.INDEX).write_text(json.dumps({"weight_map": {"a": weights.name, "b": "model-2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"lacks 1 of 2 files of its weights, among them model-2\.safetensors"):
        diagnosis.model(SETTINGS, str(folder))
    (folder / diagnosis.INDEX).unlink()
    save_file({}, weights)
    with pytest.raises(ConfigError, match="has no weights"):
        diagnosis.model(SETTINGS, str(folder))
    (folder / diagnosis.INDEX).write_text("[]")
    with pytest.raises(ConfigError, match=r"index\.json cannot be read"):
        diagnosis.model(SETTINGS, str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        diagnosis.model(SETTINGS, str(folder))


def test_a_model_without_a_template_is_a_warning(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    status, text = diagnosis.model(SETTINGS, str(folder))
    assert status == "warn" and "ChatML" in text


@pytest.mark.parametrize(("free", "total", "status"), [(1 << 20, 1 << 40, "warn"), (1 << 20, 1 << 20, "fail")])
def test_memory_that_is_short_is_said(monkeypatch: pytest.MonkeyPatch, free: int, total: int, status: str) -> None:
    monkeypatch.setattr("paceline.model_opening.memory_of", lambda _: (free, total))
    found, text = diagnosis.model(SETTINGS, str(READER))
    assert found == status and "choose a smaller model" in text


def test_a_gguf_file_is_told_with_its_numbers_or_that_it_is_damaged(tmp_path: Path) -> None:
    save(ARCHITECTURES["llama"](), tmp_path)
    write_gguf(tmp_path, file := tmp_path / "model.gguf")
    status, text = diagnosis.model(SETTINGS, str(file))
    assert status == "ok" and text.startswith(f"{file}: weights as f32, ") and "GiB free" in text
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"damaged|cut"):
        diagnosis.model(SETTINGS, str(file))


def test_a_model_of_the_hub_that_is_not_here_is_told_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.hub.download.remote_size", lambda _: 988_000_000)
    status, text = diagnosis.model(SETTINGS, "nobody/nothing")
    assert status == "warn" and "1.0 GB" in text and "paceline models pull nobody/nothing" in text


def test_without_network_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: HubName) -> int:
        raise Unreachable(f"{name} cannot be fetched")

    monkeypatch.setattr("paceline.hub.download.remote_size", unreachable)
    status, text = diagnosis.model(SETTINGS, "nobody/nothing")
    assert status == "warn" and "the hub cannot be asked" in text


# ---- a port: free, held by this side's program, by the other's, or by somebody else ----------------------------------


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def test_a_running_program_is_told_with_its_models_and_whether_it_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "ANSWER_S", WAIT)
    service = ScriptedService()
    with serving(service) as url:
        status, text = diagnosis.program(AgentSettings(port=port_of(url)))
        assert status == "warn" and "of the cloud" in text and "choose another port" in text
        status, text = diagnosis.program(ServerSettings(port=port_of(url)))
        assert status == "ok" and "model scripted, 0 documents, 0 linked" in text
        assert text.endswith("models scripted (loaded), org/second (unloaded)")
        service.is_ready = False
        status, text = diagnosis.program(ServerSettings(port=port_of(url)))
        assert status == "fail" and "cannot be asked now" in text


def test_models_are_not_told_where_they_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "ANSWER_S", WAIT)
    with serving(ScriptedService(), {"secret": None}) as url:
        status, text = diagnosis.program(ServerSettings(port=port_of(url)))
    assert status == "ok" and "listed for keys alone" in text


def test_a_port_that_is_free_is_fine_and_one_that_something_else_holds_is_a_warning_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status, text = diagnosis.program(ServerSettings(port=0))
    assert status == "ok" and "nothing runs" in text
    monkeypatch.setattr(diagnosis, "ANSWER_S", 0.05)  # nobody will answer
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, text = diagnosis.program(ServerSettings(port=port))
    assert status == "warn" and f"127.0.0.1:{port}" in text and "choose another" in text
