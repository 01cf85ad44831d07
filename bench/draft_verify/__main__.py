"""`python -m bench.draft_verify [--quick] [--only PART]... [--data DIR] [--json FILE]`: the bench, or single parts."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from ..report import Options
from . import PARTS, QUICK, SUMMARY, Workload, run


def main() -> None:
    parser = argparse.ArgumentParser(description=SUMMARY)
    parser.add_argument("--quick", action="store_true", help="few settings and short answers")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be given several times")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with the evaluation sets")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    arguments = parser.parse_args()
    load = QUICK if arguments.quick else Workload()
    options = Options(quick=arguments.quick, data=arguments.data)
    report = run(options, replace(load, parts=tuple(arguments.only or PARTS)))
    if arguments.json:
        report.write(arguments.json)
    sys.stdout.write(json.dumps(report.to_json(), indent=2) + "\n")


if __name__ == "__main__":
    main()
