"""`paceline bench draft_verify`: drafts of a device, verified in the cloud, against other ways to write an answer.

The bench's parts, each of which can be run alone with `python -m bench.draft_verify --only PART`:

- `radio`: GELATO's figure 5 on a fading radio channel, against its baselines and drafting in the cloud; virtual time.
- `grid`: round trips and speeds on a link without limit of rate; virtual time.
- `parents`: the served machine against drafts of the device alone, and against the cloud's own look-up tables; virtual
  time.
- `capacity`: answers that a saturated cloud writes at an equal pace; virtual time.
- `processes`: server and agent as processes over an emulated link.

`ways` names what is compared, `paired_engines` are the models of `radio` and `capacity`, `answers` plays a way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ..bootstrap import INSIDE
from ..findings import Findings
from ..report import Options, Report
from . import capacity, grid, parents, processes, radio
from .answers import COMPUTE_W, DRAFT_S, RECEIVE_W, SEND_W

NAME = "draft_verify"
SUMMARY = "tokens/s and J a token of drafts verified in the cloud: radio channel, round trips, full cloud, processes"
PARTS: Final = ("radio", "grid", "parents", "capacity", "processes")


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of all parts."""

    parts: Sequence[str] = PARTS
    radio: radio.Load = field(default_factory=radio.Load)
    grid: grid.Load = field(default_factory=grid.Load)
    parents: parents.Load = field(default_factory=parents.Load)
    capacity: capacity.Load = field(default_factory=capacity.Load)
    processes: processes.Load = field(default_factory=processes.Load)


QUICK: Final = Workload(
    radio=radio.QUICK, grid=grid.QUICK, parents=parents.QUICK, capacity=capacity.QUICK, processes=processes.QUICK
)


def run(options: Options, workload: Workload | None = None) -> Report:
    load = workload or (QUICK if options.quick else Workload())
    found = Findings()
    for part in load.parts:
        found.add(_part(part, load, options))
    conditions = {
        "clock": "virtual, but for the rows of `processes`, which is emulated",
        "machines": "those that serve, both sides",
        "draft_ms": 1e3 * DRAFT_S,
        "watts": {"computing": COMPUTE_W, "sending": SEND_W, "receiving, DSSD alone": RECEIVE_W},
        "joules": "of the device, modelled",
        "bytes": "ours: as the session counts them; of the paper's ways: its eq. 2",
        "claims": "the worst setting, where there are several",
        "quick": options.quick,
        f"interval_{100 * INSIDE:.0f}": found.intervals,
    }
    return Report(NAME, conditions, found.rows, found.claims)


def _part(part: str, load: Workload, options: Options) -> Findings:
    match part:
        case "radio":
            return radio.measure(load.radio)
        case "grid":
            return grid.measure(load.grid)
        case "parents":
            return parents.measure(load.parents)
        case "capacity":
            return capacity.measure(load.capacity)
        case _:
            return processes.measure(load.processes, options.data)
