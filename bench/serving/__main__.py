"""`python -m bench.serving [--quick] [--only PART]... [--json FILE]`: the bench, or single parts of it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from paceline.commands.main import prefer_huge_pages

from ..report import Options
from . import PARTS, QUICK, SUMMARY, Workload, run


def main() -> None:
    prefer_huge_pages()
    parser = argparse.ArgumentParser(description=SUMMARY)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few clients")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be given several times")
    parser.add_argument("--layers", type=int, metavar="N", help="of the model; fewer for a slow machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    arguments = parser.parse_args()
    load = QUICK if arguments.quick else Workload()
    if arguments.layers is not None:
        load = replace(load, shape=replace(load.shape, layers=arguments.layers))
    report = run(Options(quick=arguments.quick), replace(load, parts=tuple(arguments.only or PARTS)))
    if arguments.json:
        report.write(arguments.json)
    sys.stdout.write(json.dumps(report.to_json(), indent=2) + "\n")


if __name__ == "__main__":
    main()
