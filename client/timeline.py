"""How an answer was written, as lines of text: the report's timeline with its sums, for the command `/how`.

What a server says may have any shape: what is not as it should be is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .conversation import Json

LEVELS = " ▁▂▃▄▅▆▇█"
BINS = 56  # characters of a course
SIDES = ("device", "cloud")
TOLD = {"lost": "was lost", "refused": "refused", "passed_over": "was passed over", "back": "is back"}
WAYS = {"sent": "up from", "received": "down from"}


class Noted(NamedTuple):
    ms: float
    side: str
    kind: str
    of: str
    number: float
    took_ms: float


def timeline_lines(report: Json) -> Iterator[str]:
    """Sums first, then the course of tokens, drafts and bytes of each side."""
    moments = _moments(report.get("timeline"))
    yield f"{report.get('strategy')}: {report.get('why')}"
    compared = [
        f"{each.of} {each.number:.3g}" if each.number else f"{each.of} (to be measured)"
        for each in moments
        if each.kind == "cost_ms"
    ]
    if compared:
        yield f"compared, ms a token: {', '.join(compared)}"
    if chosen := [each.of for each in moments if each.kind == "strategy"][1:]:
        yield f"then by {', '.join(chosen)}"
    yield from _sums(moments)
    for each in moments:
        if each.kind in TOLD:
            yield f"{each.ms:.0f} ms: the {each.side} {TOLD[each.kind]}"
    yield from _energy(report.get("energy"))
    yield from _courses(moments)


def _sums(moments: Sequence[Noted]) -> Iterator[str]:
    def total(kind: str, side: str = "") -> float:
        return sum(each.number for each in moments if each.kind == kind and side in ("", each.side))

    for each in moments:
        if each.kind == "search":
            yield f"{each.side}: {each.number:.0f} passages found in {each.took_ms:.0f} ms"
        elif each.kind == "prefill":
            yield f"{each.side}: {each.number:.0f} tokens of prompts read in {each.took_ms:.0f} ms"
    times = [each.ms for each in moments if each.kind == "tokens"]
    if times:
        rate = (
            f", {1e3 * (total('tokens') - 1) / (max(times) - times[0]):.3g} a second" if max(times) > times[0] else ""
        )
        sides = ", ".join(f"{side} {total('tokens', side):.0f}" for side in SIDES if total("tokens", side))
        yield f"tokens: {total('tokens'):.0f} ({sides}), the first after {times[0]:.0f} ms{rate}"
    for side in SIDES:
        if drafted := total("drafted", side):
            accepted = total("accepted", side)
            kept = f"{accepted:.0f} of {drafted:.0f} accepted ({100 * accepted / drafted:.0f} %)"
            yield f"drafts of the {side}: {kept}, {drafted - accepted:.0f} rolled back"
    if trips := total("round_trips"):
        took = sum(each.took_ms for each in moments if each.kind == "round_trips")
        yield f"round trips: {trips:.0f}, {took / trips:.3g} ms each"
    for way, name in WAYS.items():
        sizes: dict[str, float] = {}
        for each in moments:
            if each.kind == way:
                sizes[each.of] = sizes.get(each.of, 0.0) + each.number
        if sizes:
            side = next(each.side for each in moments if each.kind == way)
            kinds = ", ".join(f"{kind} {size:.0f}" for kind, size in sorted(sizes.items()))
            yield f"bytes {name} the {side}: {sum(sizes.values()):.0f} ({kinds})"


def _energy(energy: object) -> Iterator[str]:
    for side, use in energy.items() if isinstance(energy, dict) else ():
        joules = use.get("joules") if isinstance(use, dict) else None
        if isinstance(joules, int | float):
            yield f"energy of the {side}: {joules:.3g} J"


def _courses(moments: Sequence[Noted]) -> Iterator[str]:
    until = max((each.ms + each.took_ms for each in moments), default=0.0) or 1.0
    rows: list[tuple[str, Callable[[Noted], bool]]] = []
    for kind in ("tokens", "drafted", "sent", "received"):
        rows += [(f"{side} {kind}", _is(kind, side)) for side in SIDES]
    for name, belongs in rows:
        bins = [0.0] * BINS
        for each in filter(belongs, moments):
            bins[min(BINS - 1, int(BINS * each.ms / until))] += each.number
        if most := max(bins):
            course = "".join(LEVELS[0 if not each else max(1, round(8 * each / most))] for each in bins)
            yield f"{name:<15} {course}"
    if moments:
        yield f"{'':<15} 0{f'{until:.0f} ms':>{BINS - 1}}"


def _is(kind: str, side: str) -> Callable[[Noted], bool]:
    return lambda each: each.kind == kind and each.side == side


def _moments(found: object) -> list[Noted]:
    moments = []
    for each in found if isinstance(found, list) else []:
        numbers = [each.get(name, 0.0) for name in ("ms", "number", "took_ms")] if isinstance(each, dict) else []
        if numbers and all(isinstance(number, int | float) and 0 <= number < 1e15 for number in numbers):
            side, kind, of = (str(each.get(name, "")) for name in ("side", "kind", "of"))
            moments.append(Noted(numbers[0], side, kind, of, numbers[1], numbers[2]))
    return moments
