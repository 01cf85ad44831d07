"""GELATO's figure 5 on Table I's radio channel, and what decides it.

The machines that serve, in virtual time: figure 5 sweeps the band at a verify time of 100 ms and the verify time at 5
MHz, without propagation delay, as in the paper. What ways of the paper send is sized by its eq. 2; ours sends ids, in
the session's own messages. Where the paper leaves a quantity open, it is frozen here and swept below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from lab.simulation import RadioParameters

from ..bootstrap import Estimate, estimate, ratio_of
from ..findings import Findings
from ..report import Claim
from .answers import Setting, Taken, play, total
from .paired_engines import WHOLE_BITS, PairedEngine, Payload
from .ways import (
    CLOUD_DECODING,
    DEVICE_DECODING,
    LOOKUP_IN_CLOUD,
    Way,
    at_most,
    co_located,
    dssd,
    gelato,
    static,
    within,
)

OURS: Final = Way("ours")
COMPRESSED_DSSD: Final = "DSSD, top-p down"
THRIFTY: Final = at_most(1)
STATIC_7_UPLINK_S: Final = 0.25  # s a step at 1 MHz in the mean: what payloads are scaled to (of 0.2 to 0.3)
CLOUD_DRAFT: Final = 0.065  # of a verify forward: the weights of Qwen2.5-0.5B ÷ those of 7B
FIGURE_BANDS: Final = (1e6, 2e6, 3e6, 5e6, 10e6)  # Hz, at 100 ms
FIGURE_VERIFY: Final = (0.06, 0.1, 0.14)  # s, at 5 MHz


@dataclass(frozen=True, slots=True)
class Load:
    bands: Sequence[float] = FIGURE_BANDS
    verify: Sequence[float] = FIGURE_VERIFY
    uplinks: Sequence[float] = (0.1, 0.25, 0.5, 1.0)  # s, of static 7 in a step at 1 MHz
    slopes: Sequence[float] = (0.0, 3.0, 6.0)  # of payloads over entropy, 1/nat
    frontier: Sequence[int] = (1, 2, 3, 4, 5)  # drafts in a step
    budgets: Sequence[float] = (0.1, 0.2)  # J a token
    tokens: int = 120
    answers: int = 3
    longer: int = 18  # answers where the joules of a speed are compared, so that the interval is that of a mean


QUICK: Final = Load((1e6,), (0.1,), (0.25,), (3.0,), (1, 3), (0.1,), 80, 2, 2)


def payload_for(uplink_s: float, slope: float = 3.0) -> Payload:
    """Payloads with which seven drafts take so many seconds of airtime at 1 MHz, in the mean over the fading."""
    radio = RadioParameters(1e6)
    gains = [-math.log1p(-(i + 0.5) / 2000) for i in range(2000)]
    per_byte = sum(1.0 / radio.rate(gain) for gain in gains) / len(gains)
    return Payload.with_mean_bits(8.0 * uplink_s / 7.0 / per_byte, slope)


PUBLISHED: Final = tuple(static(drafts, f"top-p {p}") for p in ("0.99995", "0.99998") for drafts in (5, 7, 9))  # type: ignore[arg-type]


def ways_of_figure(payload: Payload) -> tuple[Way, ...]:
    return (
        OURS,
        THRIFTY,
        gelato(),
        gelato("ids"),
        *PUBLISHED,
        *(static(drafts) for drafts in (5, 7, 9)),
        dssd(WHOLE_BITS),
        dssd(payload.mean_bits(0.99995), COMPRESSED_DSSD),
        CLOUD_DECODING,
        DEVICE_DECODING,
        LOOKUP_IN_CLOUD,
        *(co_located(drafts) for drafts in (5, 9)),
    )


def measure(load: Load) -> Findings:
    engines = {"cloud": PairedEngine(target=True), "device": PairedEngine(target=False)}
    payload = payload_for(STATIC_7_UPLINK_S)
    base = Setting(payload, tokens=load.tokens, answers=load.answers)
    settings = [replace(base, radio_hz=band) for band in load.bands]
    settings += [replace(base, radio_hz=5e6, verify=verify) for verify in load.verify if verify != 0.1]
    findings = Findings()
    ahead: list[float] = []
    for setting in settings:
        setting = replace(setting, cloud_draft=CLOUD_DRAFT * setting.verify)
        played = {way.name: play(way, setting, engines) for way in ways_of_figure(payload)}
        findings.rows += rows("figure 5", setting, played)
        best = _best(played, [*(way.name for way in PUBLISHED), "DSSD"])
        ahead.append(_speed(played["ours"]) / _speed(played[best]))
        if setting.radio_hz == 1e6:
            for claim, estimate in _claims_at_1_mhz(played):
                findings.claim(claim, estimate)
    findings.claims.append(Claim("draft_verify.figure_5_worst", min(ahead), 1.0, "higher"))
    narrow = replace(base, radio_hz=1e6)
    for uplink in load.uplinks:
        for slope in load.slopes if uplink == STATIC_7_UPLINK_S else (3.0,):
            setting = replace(narrow, payload=payload_for(uplink, slope))
            ways = (static(5, "top-p 0.99995"), static(7, "top-p 0.99995"), gelato())
            played = {way.name: play(way, setting, engines) for way in ways}
            findings.rows += rows(f"static 7 sends {uplink:g} s, slope {slope:g}", setting, played)
    longer = replace(narrow, answers=load.longer)
    ours = {way.name: play(way, longer, engines) for drafts in load.frontier for way in _sized(drafts)}
    ours |= {way.name: play(way, longer, engines) for way in map(within, load.budgets)}
    static_ways = {way.name: play(way, longer, engines) for way in (*PUBLISHED, dssd(WHOLE_BITS))}
    findings.rows += rows("joules for speed", longer, ours | static_ways)
    speed, joules = _frontier(list(ours.values()), static_ways[_best(static_ways, static_ways)])
    findings.claim(Claim("draft_verify.speed_at_equal_energy", speed.value, 1.65, "higher", "1.65"), speed)
    findings.claim(Claim("draft_verify.energy_at_equal_speed", joules.value, 0.6, "lower", "0.525"), joules)
    return findings


def _sized(drafts: int) -> tuple[Way, ...]:
    return at_most(drafts), at_most(drafts, overlap=True)


def _frontier(ours: Sequence[Sequence[Taken]], best: Sequence[Taken]) -> tuple[Estimate, Estimate]:
    """Speed of ours at the joules a token of the other way, and joules a token at its speed, each as a multiple of that
    way's: between those ways of ours that none other beats in both, along a straight line."""

    def point(answers: Sequence[Taken], among: Sequence[int]) -> tuple[float, float]:
        taken = total([answers[i] for i in among])
        return taken.joules / taken.tokens, taken.tokens_per_s

    def ratios(among: Sequence[int]) -> tuple[float, float]:
        points = sorted(point(answers, among) for answers in ours)
        unbeaten = [at for i, at in enumerate(points) if all(at[1] > before[1] for before in points[:i])]
        joules, speeds = zip(*unbeaten, strict=True)
        at_joules, at_speed = point(best, among)
        speed, least = np.interp(at_joules, joules, speeds), np.interp(at_speed, speeds, joules)
        return float(speed) / at_speed, float(least) / at_joules

    count = len(best)
    return estimate(count, lambda among: ratios(among)[0]), estimate(count, lambda among: ratios(among)[1])


def rows(part: str, setting: Setting, played: Mapping[str, Sequence[Taken]]) -> Iterable[dict[str, object]]:
    for name, answers in played.items():
        mhz = None if setting.radio_hz is None else setting.radio_hz / 1e6
        yield {"part": part, "way": name, "mhz": mhz, "verify_ms": 1e3 * setting.verify} | total(answers).row()


def _speed(answers: Sequence[Taken]) -> float:
    return total(answers).tokens_per_s


def _best(played: Mapping[str, Sequence[Taken]], names: Iterable[str]) -> str:
    return max(names, key=lambda name: _speed(played[name]))


def _claims_at_1_mhz(played: Mapping[str, Sequence[Taken]]) -> Iterable[tuple[Claim, Estimate]]:
    """Speed and joules of ours against the fastest of the static schemes and DSSD, both of one way; beside it the least
    energy, of one draft a step, and what stronger baselines leave of the gain."""
    best = _best(played, [*(way.name for way in PUBLISHED), "DSSD"])

    def speeds(name: str) -> list[float]:
        return [answer.tokens_per_s for answer in played[name]]

    def joules(name: str) -> list[float]:
        return [answer.joules / answer.tokens for answer in played[name]]

    narrow, least = "draft_verify.throughput_1mhz", "draft_verify.energy_1mhz"
    against = speeds(best), joules(best)
    for claim, found in (
        (partial(Claim, narrow, target=1.65, better="higher", paper="1.65"), ratio_of(speeds("ours"), against[0])),
        (
            partial(Claim, f"{narrow}_vs_compressed_dssd", target=1.65, better="higher"),
            ratio_of(speeds("ours"), speeds(COMPRESSED_DSSD)),
        ),
        (partial(Claim, least, target=0.525, better="lower", paper="0.525"), ratio_of(joules("ours"), against[1])),
        (
            partial(Claim, f"{least}_one_draft", target=0.525, better="lower"),
            ratio_of(joules(THRIFTY.name), against[1]),
        ),
        (
            partial(Claim, f"{narrow}_one_draft", target=1.0, better="higher"),
            ratio_of(speeds(THRIFTY.name), against[0]),
        ),
        (
            partial(Claim, f"{narrow}_vs_co_located", target=1.0, better="higher"),
            ratio_of(speeds("ours"), speeds("co-located 9")),
        ),
    ):
        yield claim(value=found.value), found
