"""Runs every client of this folder against one server with the demo model and a document, and prints a table.

A client is a script and a list of packages: NAME.py with NAME.txt, or NAME.mjs with NAME.json. Each gets an environment
of its own in `.venv-nightly/`, installed anew when its list has changed. A script prints JSON: its version, and each
check with null or what went wrong. Ends with 1 if anything did. Not part of `make test`: environments take gigabytes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline.commands.demo import Children, clean_environment, command
from paceline.models import DEVICE
from tests.e2e.pair import started

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[3] / ".venv-nightly"
DOCUMENT = "The harbour library of Tarnwick opens at 8:30 on weekdays. Its lighthouse is blue.\n"
LIMIT_S = 1800.0  # for one client: coding agents send prompts of 30,000 tokens

LONG = 65_536  # tokens, the context of the model `agents`

Row = tuple[str, str, str, str]


def main(names: list[str]) -> int:
    known = sorted(file.stem for file in HERE.glob("*.txt")) + sorted(file.stem for file in HERE.glob("*.json"))
    for name in names:
        if name not in known:
            sys.stderr.write(f"There is no client {name!r}. Known: {', '.join(known)}.\n")
            return 2
    with tempfile.TemporaryDirectory() as folder, Children(Path(folder)) as children:
        url, key = serve(children, Path(folder))
        rows = [tried(name, url, key) for name in names or known]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip())  # noqa: T201
    return int(any(row[3] for row in rows))


def serve(children: Children, folder: Path) -> tuple[str, str]:
    """(URL, key) of a server."""
    state = ("--state-dir", str(folder / "state"))
    document = folder / "harbour.md"
    document.write_text(DOCUMENT, encoding="utf-8")
    children.run(command("docs", "add", str(document), "--side", "cloud", *state))
    key = json.loads(children.run(command("keys", "create", "nightly", "--json", *state)))["key"]
    models = ("--model", "demo", "--model", str(long_model(folder)))
    return started(children, "cloud", "serve", *models, state=folder / "state").url, key


def long_model(folder: Path) -> Path:
    """A copy of a bundled model whose context is as long as coding agents need; what it writes makes no sense there."""
    made = folder / "agents"
    shutil.copytree(DEVICE, made)
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}), encoding="utf-8")
    return made


def tried(name: str, url: str, key: str) -> Row:
    """(client, version, passed of run, what failed)."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*installed(name), url, key],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=clean_environment({}),
            check=False,
        )
        said = json.loads(done.stdout.splitlines()[-1]) if done.stdout and done.returncode == 0 else None
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        return name, "", "", f"could not be tried: {error}"
    if said is None:
        return name, "", "", f"ended with {done.returncode}: {done.stderr.strip()[-300:]}"
    failed = {check: fault for check, fault in said["checks"].items() if fault is not None}
    passed = f"{len(said['checks']) - len(failed)}/{len(said['checks'])} in {time.monotonic() - began:.0f} s"
    return name, said["version"], passed, "; ".join(f"{check}: {fault}" for check, fault in failed.items())


def installed(name: str) -> list[str]:
    """The command that runs a client, in its environment."""
    place = ENVIRONMENTS / name
    wanted = next(HERE / f"{name}{kind}" for kind in (".txt", ".json") if (HERE / f"{name}{kind}").exists())
    mark = place / ".installed"
    python = place / "bin" / "python"
    if not mark.exists() or mark.read_bytes() != wanted.read_bytes():
        sys.stderr.write(f"installing {name}\n")
        place.mkdir(parents=True, exist_ok=True)
        if wanted.suffix == ".txt":
            if not python.exists():
                subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
            pip = (str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
            subprocess.run([*pip, "--requirement", str(wanted)], check=True)
        else:
            shutil.copy(wanted, place / "package.json")
            npm = ("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error")
            subprocess.run([*npm, "--prefix", str(place)], check=True)
        mark.write_bytes(wanted.read_bytes())
    if wanted.suffix == ".txt":
        return [str(python), str(HERE / f"{name}.py")]
    script = place / f"{name}.mjs"  # beside its packages, where Node looks for them
    shutil.copy(HERE / script.name, script)
    return ["node", str(script)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
