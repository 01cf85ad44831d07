from __future__ import annotations

import io
import logging
import os
import stat
from pathlib import Path

import pytest

from paceline import secret_files
from paceline.errors import ConfigError
from paceline.secret_files import given_secret, make_folder, private_folder, read_private, secret_lines, write_private


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_secret_comes_from_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "code").touch(mode=0o600)
    file.write_text("# from the server\n\n in the file \nanother\n")
    assert given_secret("code", None, None) is None
    assert given_secret("code", "on the command line", None) == "on the command line"
    assert given_secret("code", None, file) == "in the file"
    for value, path in (("-", None), (None, Path("-"))):
        monkeypatch.setattr("sys.stdin", io.StringIO("piped\nthe question\n"))
        assert given_secret("code", value, path) == "piped"
        assert secret_files.sys.stdin.read() == "the question\n", "the rest is left for the program"


def test_at_a_terminal_it_is_asked_for_without_an_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("echoed\n"))
    monkeypatch.setattr("getpass.getpass", lambda prompt: f" typed at {prompt}")
    assert given_secret("code", "-", None) == "typed at code:"


def test_a_secret_that_is_not_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty := tmp_path / "empty").touch(mode=0o600)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    monkeypatch.setattr("sys.stdin", io.StringIO("\udcff\n\udcff\n"))  # as `main` has bytes read that are no UTF-8
    with pytest.raises(ConfigError, match="text in UTF-8"):
        given_secret("code", "-", None)
    with pytest.raises(ConfigError, match="not a text file"):
        secret_lines(Path("-"))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for value, file, words in (
        ("-", None, "standard input has no code"),
        (None, empty, "has no code"),
        (None, tmp_path / "nowhere", "cannot be read"),
        (None, tmp_path / "binary", "not a text file"),
        ("both", empty, "leave one out"),
    ):
        with pytest.raises(ConfigError, match=words):
            given_secret("code", value, file)


def test_secrets_in_a_file_that_others_can_read_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file := tmp_path / "keys").write_text("one\ntwo\n")
    file.chmod(0o600)
    assert secret_lines(file) == ["one", "two"] and not caplog.text
    file.chmod(0o644)
    assert secret_lines(file) == ["one", "two"] and "chmod 600" in caplog.text


def test_every_folder_that_is_made_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert {mode(folder) for folder in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c")} == {0o700}
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match=r"Too many levels of symbolic links: '.*loop'"):
        make_folder(tmp_path / "loop")


def test_a_folder_is_closed_to_others_only_if_they_have_nothing_in_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    private_folder(tmp_path)
    assert mode(tmp_path) == 0o700, "it was empty"
    tmp_path.chmod(0o755)
    write_private(tmp_path / "key", b"secret")
    (tmp_path / "docs").mkdir(mode=0o700)
    (tmp_path / "models").symlink_to("/")
    private_folder(tmp_path)
    assert mode(tmp_path) == 0o700, "it had private files alone"
    tmp_path.chmod(0o755)
    (tmp_path / "index.html").touch()
    (tmp_path / "index.html").chmod(0o644)
    with pytest.raises(ConfigError, match=r"Others may enter .* \(mode 0755\) .*chmod 700"):
        private_folder(tmp_path)
    assert mode(tmp_path) == 0o755
    tmp_path.chmod(0o700)
    private_folder(tmp_path)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    os.chown(tmp_path, 1234, -1) if owner == 0 else monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="another user"):
        private_folder(tmp_path)


def test_a_private_file_is_replaced_whole_or_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "key"
    assert read_private(file, otherwise="") is None
    caplog.set_level(logging.INFO)
    assert write_private(file, b"first", replace=False)
    assert not write_private(file, b"second", replace=False)
    assert read_private(file, otherwise="") == b"first"
    assert write_private(file, b"third")
    assert (read_private(file, otherwise=""), mode(file), os.listdir(tmp_path)) == (b"third", 0o600, ["key"])
    file.chmod(0o604)
    with pytest.raises(ConfigError, match="and do this if somebody may have read it"):
        read_private(file, otherwise="do this")


def test_a_private_file_that_the_disk_has_no_room_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*key'"):
        write_private(tmp_path / "key", b"first")
    assert not os.listdir(tmp_path)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
