"""`paceline models`: what there is for `--model`, fetched from the Hugging Face hub into its cache and removed from it,
or converted from GGUF.

The same cache as of every program that uses the hub, wherever HF_HOME says. Nothing is loaded, and nothing is sent but
the names of models.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.commands.options import Json, group_of, show
from paceline.core.printable import printable
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.hub.download import HubName, Pulled

Name = Annotated[str, typer.Argument(metavar="NAME[@REVISION]", help="as Qwen/Qwen2.5-0.5B-Instruct")]


def register(app: typer.Typer) -> None:
    told = "List, fetch and remove the models that can be given as --model."
    group = group_of(app, "models", told, "paceline models pull Qwen/Qwen2.5-0.5B-Instruct")
    group.command("list", epilog="Example: paceline models list --json")(list_)
    group.command("pull", epilog="Example: paceline models pull Qwen/Qwen2.5-0.5B-Instruct@main")(pull)
    group.command("import", epilog="Example: paceline models import model.Q8_0.gguf")(import_)
    group.command("remove", epilog="Example: paceline models remove Qwen/Qwen2.5-0.5B-Instruct")(remove)


def list_(as_json: Json = False) -> None:
    """List what comes with paceline, what lies in the hub's cache, and what Ollama, LM Studio and llama.cpp have."""
    from paceline.hub.cache import cached_models, in_folder, stored_models
    from paceline.models import CAUSAL, CLOUD, DEMO, DEVICE, READER

    bundled = (
        (DEMO, "bundled", READER),
        (CAUSAL, "bundled, of the cloud", CLOUD),
        (CAUSAL, "bundled, of the device", DEVICE),
    )
    models = [*(in_folder(*each) for each in bundled), *cached_models(), *stored_models()]
    lines = []
    width = max(len(model.name) for model in models)
    for model in models:
        context = "" if model.context is None else f"{model.context} tokens"
        template = " no chat template" if model.template is False and model.kind == "chat" else ""
        revision = f" {model.revision[:7]}" if model.revision else ""
        line = f"{model.name:<{width}}  {model.kind:<8} {_bytes(model.size):>9}  {context:<14} {model.where}{revision}"
        lines.append(printable(f"{line}{template}".rstrip()))
    show(models, *lines, as_json=as_json)


def pull(name: Name, as_json: Json = False) -> None:
    """Fetch a model: safetensors, tokenizer and configuration. What is here already is not fetched again; a download
    that was cut goes on."""
    pulled = _pull_with_progress(_of_the_hub(name))
    done = f"{_bytes(pulled.fetched)} fetched" if pulled.fetched else "was here already"
    line = printable(f"{pulled.name}  {pulled.revision[:7]}  {_bytes(pulled.size)}, {done}")
    show(pulled, line, beside=printable(f"Use it with: paceline serve --model {pulled.name}"), as_json=as_json)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf")],
    folder: Annotated[Path | None, typer.Argument(metavar="[FOLDER]", help="default: one of paceline's cache")] = None,
    as_json: Json = False,
) -> None:
    """Convert a GGUF file to a folder of safetensors, which --model then takes; --model FILE.gguf does it as well."""
    from paceline.hub.gguf import converted, import_gguf

    if not file.is_file():
        raise ConfigError(f"{file} is a folder, not a GGUF file." if file.is_dir() else f"There is no file {file}.")
    if folder is None:
        folder = converted(file)
    elif folder.exists():
        raise ConfigError(f"{folder} exists already: name a folder that is to be made.")
    else:
        import_gguf(file, folder)
    show({"directory": folder}, printable(f"Use it with: paceline serve --model {folder}"), as_json=as_json)


def remove(name: Name, as_json: Json = False) -> None:
    """Remove a model from the cache, for every program that uses it; with a revision, that alone."""
    from paceline.hub.cache import remove as remove_cached

    removed = remove_cached(_of_the_hub(name))
    show(removed, printable(f"removed {removed.name}, {_bytes(removed.freed)}"), as_json=as_json)


def _of_the_hub(name: str) -> HubName:
    """Raises ConfigError for what is no name of the hub."""
    from paceline.hub.cache import find_gguf
    from paceline.hub.download import HubName
    from paceline.models import CAUSAL, DEMO

    if name in (DEMO, CAUSAL, "fake"):
        raise ConfigError(
            f"{name} comes with paceline: there is nothing to fetch or remove. Use it with --model {name}."
        )
    if find_gguf(name) is not None:
        raise ConfigError(f"{name} is here, and not the hub's: nothing to fetch or remove. Use it with --model {name}.")
    return HubName.parse(name)


def _pull_with_progress(name: HubName) -> Pulled:
    """With a bar if stderr is a terminal, else a line for every tenth of the whole."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from paceline.hub.download import pull as fetch

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(printable(str(name)), total=None)
        told = -1

        def update(file: str, done: int, size: int) -> None:
            nonlocal told
            bar.update(task, description=printable(file), completed=done, total=size)
            tenth = 10 * done // max(size, 1)
            if not console.is_terminal and tenth > told:
                told = tenth
                typer.echo(printable(f"{10 * tenth:>3} % of {_bytes(size)}, {file}"), err=True)

        return fetch(name, update)


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.1f} GB"
