"""`paceline demo --check`: the shipped pair answers its three questions, and no process is left running."""

from __future__ import annotations

import subprocess

import pytest

from paceline.commands.demo import command


@pytest.mark.usefixtures("demo_ports")
def test_the_demonstration_answers_its_questions_and_ends() -> None:
    done = subprocess.run(command("demo", "--check"), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 6 and "FAIL" not in done.stdout
