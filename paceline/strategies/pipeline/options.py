"""Options of `pipeline`. Other settings than the defaults are baselines and ablations of FlowSpec's evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from paceline.strategies.base import MachineConfig
from paceline.wire.options import Options

Expansion = Literal["tree", "layers", "none"]


class PipelineOptions(Options, frozen=True):
    """drafting: `rows` are those of a segment at most (L_max); with `ahead` 0 nothing is drafted."""

    tree: Annotated[int, msgspec.Meta(ge=1, le=512)] = 80  # L: nodes of a tree that is drafted
    segments: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0  # under way at once; 0: as the engine's depth suggests
    by_score: bool = True  # segments in order of score; else in layers
    prune: bool = True  # verify and prune at every segment; else once all of a tree have come (naive)
    # What is added to a tree under way: a new tree's nodes, one layer below the deepest (PipeDec), or nothing.
    expand: Expansion = "tree"
    least_gain: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1  # expected tokens of a segment that is worth sending
    drafter: Literal["auto", "tables"] = "auto"  # auto: the draft model where there is one, else look-up tables


NAIVE = PipelineOptions(rescoring=False, prune=False, by_score=False, expand="none", least_gain=0.0)
PRUNED = PipelineOptions(rescoring=False, by_score=False, expand="none", least_gain=0.0)
PIPEDEC = PipelineOptions(rescoring=False, expand="layers", least_gain=0.0)
UNSORTED = PipelineOptions(rescoring=False, by_score=False)


def options_of(config: MachineConfig) -> PipelineOptions:
    """The machine's options; the defaults where it was given another strategy's."""
    if isinstance(config.options, PipelineOptions):
        return config.options
    return PipelineOptions(config.options.rescoring, config.options.drafting)
