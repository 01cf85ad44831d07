"""Sampling parameters and the order of operations, the same for every strategy:

logits → grammar mask (`apply_mask`) → repetition penalty, bias, penalties, temperature, softmax (`process_logits`) →
mixture over documents, then sides (`aggregation`) → top-k, top-p, min-p (`filter_top`) → noise → token (`sample`).

The temperature applies before the mixture. At temperature 0 the target is the argmax of the temperature-1 mixture, so
`process_logits` ignores the temperature and `sample` adds no noise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final, Literal, NamedTuple, Protocol, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling.dist import (
    Dist,
    IdArray,
    IndexArray,
    ProbArray,
    best_indices,
    contenders,
    gumbel,
    gumbel_of,
)

T = TypeVar("T")

LEAST_TEMPERATURE: Final = 1e-6
"""Below, its inverse magnifies rounding until scores are no numbers."""
MAX_TEMPERATURE: Final = 100.0  # where all tokens are as good as equal
MAX_BIASES: Final = 1024  # of a request: each row's cost grows with them


def usable_temperature(temperature: float) -> float:
    """0, whose tokens are the same, for one below `LEAST_TEMPERATURE`."""
    return 0.0 if temperature < LEAST_TEMPERATURE else temperature


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of the sampler. Names and ranges are OpenAI's; `top_k`, `min_p` and `repetition_penalty`, which it
    does not have, are Hugging Face's.

    The API and the codec check the ranges; machines rely on them.
    """

    temperature: float = 1.0  # 0 is greedy; none between 0 and `LEAST_TEMPERATURE`
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    presence_penalty: float = 0.0  # subtracted once from the logit of a token that was generated before
    frequency_penalty: float = 0.0  # subtracted once per earlier occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    # Divides a logit above 0 and multiplies one below 0, once for each token that occurs in the prompt or the output
    # (CTRL, Keskar et al. 2019). 1: off.
    repetition_penalty: float = 1.0

    @property
    def looks_back(self) -> bool:
        """True if a token's logit depends on the tokens before it."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def filters(self) -> bool:
        """True if top-k, top-p or min-p may drop tokens, at a temperature above 0."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def nth(self, index: int) -> SamplingParams:
        """Those of one of several texts: of the first these, of others with a hash for a seed, so that texts of
        neighbouring seeds are not each other's."""
        if index == 0:
            return self
        digest = hashlib.sha256(f"{self.seed}/{index}".encode()).digest()
        return replace(self, seed=int.from_bytes(digest[:8], "little", signed=True))


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults for parameters that a request leaves out. None: the next defaults apply, finally `SamplingParams`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def over(self, other: SamplingDefaults) -> SamplingDefaults:
        """These values, and those of `other` where these are None."""
        return replace(other, **{name: value for name, value in asdict(self).items() if value is not None})


NO_DEFAULTS = SamplingDefaults()


def process_logits(
    dist: Dist, params: SamplingParams, counts: Mapping[int, int], prompt: IdArray | None = None
) -> Dist:
    """Apply repetition penalty, bias, penalties and temperature, as if to logits: softmax cancels the difference
    between logits and log-probabilities.

    counts: how often each token occurs in the output (not in the prompt, as in OpenAI's API).
    prompt: (any,) ids that the repetition penalty applies to as well, as in Hugging Face's and vLLM's.
    Returns `dist` itself if nothing changes. Ids outside the distribution are ignored. The tail of a sparse
    distribution is treated like one token without bias: exact at temperatures 0 and 1, otherwise an estimate.
    """
    places, shifts = _shifts(dist, params, counts)
    if params.repetition_penalty != 1.0:
        places, shifts = _with_repetition(dist, params.repetition_penalty, counts, prompt, places, shifts)
    exponent = 1.0 if params.temperature == 0.0 else 1.0 / params.temperature
    if exponent == 1.0:
        if len(places) == 0:
            return dist
        if float(np.abs(shifts).max()) <= _SAFE_SHIFT:
            probs = dist.probs.copy()
            probs[places] *= np.exp(shifts)
            total = float(probs.sum()) + dist.tail
            if total > 0.0:
                probs /= total
                return Dist(dist.ids, probs, dist.tail / total)
    return _process_in_logs(dist, places, shifts, exponent)


def apply_mask(dist: Dist, allowed: NDArray[np.bool_] | None) -> Dist:
    """Restrict to the allowed tokens and renormalise; uniform over them if all have probability 0.

    Applied before `process_logits`: bias and penalties change each token alone, so the order matters only in that no
    allowed token underflows beside a forbidden one that is far more probable.
    dist: dense, (vocab_size,). allowed: (vocab_size,) or longer; None: all. Raises ValueError if none of the ids is
    allowed.
    """
    if allowed is None:
        return dist
    which = allowed[: len(dist.ids)]
    probs = np.where(which, dist.probs, 0.0)
    best = float(probs.max(initial=0.0))
    log_norm = dist.log_norm
    if best > 0.0:
        probs /= best  # avoids underflow where every allowed token is very unlikely
        log_norm += float(np.log(best) + np.log(probs.sum()))
    elif which.any():
        probs[which] = 1.0
    else:
        raise ValueError("no token is allowed")
    probs /= probs.sum()
    return Dist(dist.ids, probs, log_norm=log_norm)


_SAFE_SHIFT = 300.0  # nats: its exp times a probability is far from float64's limits


def _process_in_logs(dist: Dist, places: IndexArray, shifts: ProbArray, exponent: float) -> Dist:
    with np.errstate(divide="ignore"):  # log 0 is -inf, which stays probability 0
        scores = np.log(dist.probs)
        tail = float(np.log(np.float64(dist.tail)))
    scores[places] += shifts
    best = max(float(scores.max(initial=-np.inf)), tail)
    if best == -np.inf:
        return dist  # no mass at all
    scores -= best
    scores *= exponent
    np.exp(scores, out=scores)
    tail = float(np.exp((tail - best) * exponent))
    total = float(scores.sum()) + tail
    scores /= total
    return Dist(dist.ids, scores, tail / total)


def logit_shifts(params: SamplingParams, counts: Mapping[int, int]) -> dict[int, float]:
    """Changes of tokens' logits, by token: OpenAI's formula, bias - count * frequency - (count > 0) * presence."""
    by_token = dict(params.logit_bias)
    if params.presence_penalty or params.frequency_penalty:
        for token, count in counts.items():
            if count > 0:
                penalty = count * params.frequency_penalty + params.presence_penalty
                by_token[token] = by_token.get(token, 0.0) - penalty
    return by_token


def _shifts(dist: Dist, params: SamplingParams, counts: Mapping[int, int]) -> tuple[IndexArray, ProbArray]:
    """(indices, changes of the logits)"""
    if not (shifts := logit_shifts(params, counts)):
        return _NOWHERE, _NO_SHIFTS
    found = [(at, shift) for token, shift in shifts.items() if shift and (at := dist.index(token)) is not None]
    places = np.array([at for at, _ in found], dtype=np.intp)
    return places, np.array([shift for _, shift in found], dtype=np.float64)


def repeated_ids(counts: Mapping[int, int], prompt: IdArray | None) -> IdArray:
    """Ids that the repetition penalty applies to: those of the output, and of the prompt if it is given."""
    output = np.fromiter((token for token, count in counts.items() if count > 0), dtype=np.int32)
    return np.unique(output if prompt is None else np.concatenate((output, prompt)))


def _with_repetition(
    dist: Dist,
    penalty: float,
    counts: Mapping[int, int],
    prompt: IdArray | None,
    places: IndexArray,
    shifts: ProbArray,
) -> tuple[IndexArray, ProbArray]:
    """The changes of `_shifts` added to those of the repetition penalty, which applies first."""
    ids = repeated_ids(counts, prompt)
    repeated = ids[ids < len(dist.ids)].astype(np.intp) if dist.leading else np.flatnonzero(np.isin(dist.ids, ids))
    repeated = repeated[dist.probs[repeated] > 0.0]
    scores = np.log(dist.probs[repeated]) + dist.log_norm
    moved = np.zeros(len(dist.ids))
    moved[repeated] = np.where(scores > 0.0, scores / penalty, scores * penalty) - scores
    moved[places] += shifts
    where = np.flatnonzero(moved)
    return where, moved[where]


_NOWHERE: IndexArray = np.empty(0, dtype=np.intp)
_NO_SHIFTS: ProbArray = np.empty(0, dtype=np.float64)
_MAX_SCORED = 512  # up to this many ids, noise for all costs less than finding those that need it


def filter_top(dist: Dist, params: SamplingParams) -> Dist:
    """Apply top-k, then top-p to the remaining tokens, then min-p relative to the maximum; of equals lower ids are
    kept.

    Top-p keeps the smallest set whose share is at least `top_p`, the crossing token included. At least one token is
    kept. Not renormalised: dropped mass moves to the tail. Returns `dist` itself if nothing is dropped. At temperature
    0 nothing is dropped, because the argmax passes all three filters.
    """
    if params.temperature == 0.0 or len(dist.ids) == 0:
        return dist
    key = "filter_top", params.top_k, params.top_p, params.min_p
    known = dist.memo.get(key)
    if known is None:
        known = _filter_top(dist, params)
        if known is not dist:  # a reference cycle would keep the distribution alive after its last user
            dist.memo[key] = known
    return cast(Dist, known)


def _filter_top(dist: Dist, params: SamplingParams) -> Dist:
    probs = dist.probs
    best = float(probs.max())
    if not best > 0.0:
        return dist  # no mass, or not numbers: `sample` refuses it
    cut_k, cut_p = 0 < params.top_k < len(probs), params.top_p < 1.0
    floor = params.min_p * best if params.min_p > 0.0 else 0.0
    if not cut_k and not cut_p:
        return dist.kept(probs >= floor) if floor else dist
    if cut_k:
        falling = probs[best_indices(probs, params.top_k)]
        total = float(falling.sum())
    else:
        total = float(probs.sum()) + dist.tail
        falling = _top_probs(probs, params.top_p, total)
    keep = len(falling)
    if cut_p:
        reached = np.cumsum(falling) >= params.top_p * total
        keep = int(np.argmax(reached)) + 1 if reached.any() else keep
    if floor:
        keep = min(keep, int(np.count_nonzero(falling >= floor)))
    return dist.kept(_largest(probs, keep, float(falling[keep - 1])))


def _top_probs(probs: ProbArray, top_p: float, total: float) -> ProbArray:
    """The largest probabilities, falling, certainly enough for `top_p` of the total, without sorting the vocabulary.

    For most rows a few hundred are enough. Otherwise those below a floor are left out, whose sum is less than the mass
    that top-p may drop.
    """
    first = probs[best_indices(probs, _MAX_SCORED)]
    if float(first.sum()) >= top_p * total * (1.0 + 1e-9):
        return first
    floor = (1.0 - top_p) * total / (len(probs) + 1)
    return np.sort(probs[probs >= min(floor, float(probs.max()))])[::-1]


def _largest(probs: ProbArray, keep: int, edge: float) -> NDArray[np.bool_]:
    """Mask of the `keep` largest; `edge` is the smallest of them, and of those equal to it the lowest ids are kept."""
    mask = probs > edge
    ties = np.flatnonzero(probs == edge)
    mask[ties[: keep - int(np.count_nonzero(mask))]] = True
    return mask


def sample(dist: Dist, params: SamplingParams, position: int) -> int:
    """Sample a token: argmax(log p + G) over `ids` with G = `noise.gumbel(seed, position, ids)`; at temperature 0, G =
    0.

    Of equals the lowest id. Never a token of probability 0, nor one in the tail: apply `filter_top` or check
    `exactness` first. Raises ValueError if no id has a probability above 0. position: absolute output position.
    """
    first = int(dist.probs.argmax()) if len(dist.probs) else 0
    if len(dist.probs) == 0 or not dist.probs[first] > 0.0:
        raise ValueError("no token has a probability above 0")
    if params.temperature == 0.0:
        return int(dist.ids[first])
    if len(dist.ids) <= _MAX_SCORED:
        places = np.flatnonzero(dist.probs)
    else:
        # Exact scores only for ids that can beat the most probable one: for most rows a handful.
        (start,) = scores_at(dist, params, position, np.array([first]))
        places = contenders(params.seed, position, dist.ids, dist.probs, float(start))
    scores = scores_at(dist, params, position, places)
    return int(dist.ids[places[int(np.argmax(scores))]])


# Structured output: the constraint of a request, and the interface of its masks over the vocabulary.
#
# A mask depends on the tokens of a path alone, so both sides can compute it for every draft, and rolling back a path
# needs no undo. Grammars are compiled in `engine.grammar.compiler`; here is only the interface of the result, `Mask`.


ConstraintKind = Literal["text", "json_object", "json_schema", "loose_schema", "tools", "regex", "choice", "grammar"]
MAX_TEXT = 262_144  # characters of a constraint's text
MAX_STOP_IDS = 1024


@dataclass(frozen=True, slots=True)
class Thinking:
    """Thinking at an answer's beginning: text between two marks, for which a constraint does not hold."""

    begin: str  # mark
    end: str  # mark
    begun: bool = False  # the prompt ends within it, so that the answer has the second mark alone
    budget: int | None = None  # tokens of it, after which its end is written; None: no bound


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint on the whole answer, or on what follows its thinking.

    text: empty for `json_object`; a schema as JSON for `json_schema` (enforced exactly or refused) and `loose_schema`
    (what cannot be enforced is ignored); a pattern for `regex`, which the whole answer matches; a JSON list of strings
    for `choice`; a grammar in Lark or GBNF for `grammar`; empty for `text`, which has no form. For `tools` a JSON
    object `{"tools": [{"name", "parameters", "strict": bool}], "required": bool, "parallel": bool}`. With `tools` the
    answer may contain, or must be (`required`), calls `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`:
    one, or several if `parallel`. With another constraint under the key `content`, `{"kind", "text"}`, an answer
    without calls keeps to that, and no text precedes calls.
    """

    kind: ConstraintKind
    text: str = ""
    min_tokens: int = 0  # before which the answer does not end, unless its form lets nothing else follow
    ignore_eos: bool = False  # likewise it never ends by an end-of-text token
    stop_ids: tuple[int, ...] = ()  # that end it as well; needed with `min_tokens` only
    thinking: Thinking | None = None  # that comes before the answer, or may come; None: none
    param: str = field(default="", compare=False)  # the request's field that asks for the form; empty: as `kind` says


class Mask(Protocol):
    """The compiled constraint of one answer."""

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """(vocab_size,) mask of the tokens that may follow these output tokens, end-of-text ids included; None: all.

        For a path that breaks the constraint itself no token is allowed. Must not raise.
        """

    def complete(self, path: Sequence[int]) -> bool:
        """True if the answer may end after `path`."""

    def at_once(self, work: Callable[[], T]) -> T:
        """Do this, which asks for several masks and changes nothing that others see: where masks are computed on a
        thread, all of it is done there."""
        return work()


# One row's token: what an engine is asked for in place of a distribution, and the reference for its answer.
#
# `sample_row` is the definition. An engine that has a vocabulary's logits on its device samples many rows in one pass
# (`engine.sampling`) and must return the same tokens.


# Ids of a row in the order in which `sample` prefers them.


_PROBE = 128  # the most probable ids that are scored first, for a lower bound of the k-th best score
_NUM_CACHED = 32  # first ids of a ranking that are cached in its distribution: enough for heads, the sample and drafts


def top_by_score(dist: Dist, params: SamplingParams, position: int, k: int) -> IndexArray:
    """(min(k, n),) indices of the ids with the largest log p + G, falling: the order in which `sample` prefers them.

    At temperature 0, where G is 0, the most probable. Equals by rising index; ids of probability 0 come last.
    """
    if k > _NUM_CACHED:
        return _ranked(dist, params, position, k)
    key = _key(params, position)
    if key not in dist.memo:
        dist.memo[key] = _ranked(dist, params, position, _NUM_CACHED)
    return cast(IndexArray, dist.memo[key])[:k]


def best_margin(dist: Dist, params: SamplingParams, position: int, tokens: Sequence[int]) -> float:
    """Score of the first of these tokens less that of the second, nats; infinite for a single one."""
    if len(tokens) < 2:
        return math.inf
    first, second = (max(dist.prob(token), 1e-300) for token in tokens[:2])
    margin = math.log(first) - math.log(second)
    if params.temperature > 0.0:
        noise, next_noise = gumbel_of(params.seed, position, tokens[:2])
        margin += noise - next_noise
    return margin


def set_ranking(dist: Dist, params: SamplingParams, position: int, best: IndexArray) -> None:
    """Set what `top_by_score` returns, where it is known. best: as many as are cached, or all of `dist`."""
    if len(best) >= min(_NUM_CACHED, len(dist.ids)):
        dist.memo[_key(params, position)] = best


def _key(params: SamplingParams, position: int) -> tuple[str, tuple[int, int] | None]:
    return "ranked", None if params.temperature == 0.0 else (params.seed, position)


def _ranked(dist: Dist, params: SamplingParams, position: int, k: int) -> IndexArray:
    probs = dist.probs
    if params.temperature == 0.0:
        return best_indices(probs, k)
    if 0 < k <= _PROBE // 4 and len(probs) > _PROBE * 64:
        # At least k ids reach the k-th best score of the most probable ones, and few others can: only those are scored.
        probe = best_indices(probs, _PROBE)
        probed = scores_at(dist, params, position, probe[probs[probe] > 0.0])
        if len(probed) >= k:
            lowest = float(np.partition(probed, len(probed) - k)[len(probed) - k])
            places = contenders(params.seed, position, dist.ids, probs, lowest)
            return places[best_indices(scores_at(dist, params, position, places), k)]
    places = np.flatnonzero(probs > 0.0)
    best = places[best_indices(scores_at(dist, params, position, places), k)]
    if len(best) < min(k, len(probs)):
        best = np.concatenate([best, np.flatnonzero(probs <= 0.0)[: k - len(best)]])
    return best


def scores_at(dist: Dist, params: SamplingParams, position: int, places: IndexArray) -> ProbArray:
    """log p + G at these indices; -inf where p is 0. At temperature 0, G = 0."""
    with np.errstate(divide="ignore"):
        scores: ProbArray = np.log(dist.probs[places])
    return scores + gumbel(params.seed, position, dist.ids[places]) if params.temperature > 0.0 else scores


# The head of a row: the ids that a choice most likely falls on, and bounds for all others.
#
# An engine hands it over in place of a distribution. `core.aggregation.exactness` tests whether two sides' heads
# determine the token of their mixture.


HEAD_BY_SCORE = 32  # ids with the best log p + G
HEAD_BY_PROB = 128  # most probable ids
HEAD_ERROR = 1e-4  # relative error of probabilities that an engine has computed in float32, and of their sums


@dataclass(frozen=True, slots=True, eq=False)
class RowHead:
    """Some ids of a row with their probabilities, exact up to `HEAD_ERROR`."""

    dist: Dist
    best: IndexArray  # indices of its ids with the best log p + G (log p at temperature 0), falling
    scores: ProbArray  # of those
    max_score: float  # no other id has a larger score than this; -inf: there are no others
    max_prob: float  # no other id is more probable; 0: there are no others

    @property
    def whole(self) -> bool:
        """True if no other id has a probability above 0."""
        return self.max_prob == 0.0


def row_head(dist: Dist, params: SamplingParams, position: int) -> RowHead:
    """The definition. dist: dense, after processing, before top-k, top-p and min-p."""
    best = top_by_score(dist, params, position, HEAD_BY_SCORE)
    scores = scores_at(dist, params, position, best)
    if len(dist.ids) <= HEAD_BY_PROB:
        return RowHead(dist, best, scores, -math.inf, 0.0)
    likely = best_indices(dist.probs, HEAD_BY_PROB)
    max_prob = float(dist.probs[likely[-1]])
    max_score = float(scores[-1]) if params.temperature > 0.0 else math.log(max_prob) if max_prob else -math.inf
    kept = np.union1d(likely, best)
    return RowHead(dist.kept_at(kept), np.searchsorted(kept, best), scores, max_score, max_prob)


class RowSampling(msgspec.Struct, frozen=True, eq=False):
    """How to sample the token after one row."""

    params: SamplingParams
    position: int  # absolute output position: that of the noise
    vocab_size: int  # of the tokenizer; an engine's logits beyond it are padding
    counts: Mapping[int, int] = msgspec.field(default_factory=dict)  # of tokens in the output before this row
    prompt: IdArray | None = None  # distinct ids of the prompt, where the repetition penalty needs them
    allowed: NDArray[np.bool_] | None = None  # (vocab_size or more,) with at least one id; None: all
    num_top: int = 0  # ids of the row's head to return as well

    @property
    def changes_logits(self) -> bool:
        """True if ids get other logits than the model's, apart from the temperature."""
        return self.allowed is not None or bool(self.params.logit_bias) or self.params.looks_back


class SampledRow(msgspec.Struct, frozen=True, eq=False):
    token: int
    top: Dist | None = None  # the `num_top` most probable ids at temperature 1, without penalties; None: not wanted
    branch_probs: tuple[float, ...] = ()  # of several branches: the token's probability in each, without penalties
    head: RowHead | None = None  # of the mixture, processed; None: not wanted, or `dists` must be read
    branch_heads: tuple[Dist, ...] = ()  # where heads are wanted: what `decayed_evidence` needs of each branch
    dists: Callable[[], tuple[Dist, ...]] | None = None  # likewise: each branch's distribution, read when called


def sample_row(dist: Dist, row: RowSampling) -> SampledRow:
    """The reference. dist: dense, at temperature 1, before any processing."""
    plain = dist.within(row.vocab_size)
    processed = process_logits(apply_mask(plain, row.allowed), row.params, row.counts, row.prompt)
    token = sample(filter_top(processed, row.params), row.params, row.position)
    return SampledRow(token, head(plain, row.num_top) if row.num_top else None)


def head(dist: Dist, k: int) -> Dist:
    """The k most probable ids; of equals the lowest. Those of probability 0 are left out."""
    places = best_indices(dist.probs, k)
    places = places[dist.probs[places] > 0.0]
    return Dist.head(dist.ids[places], dist.probs[places])


# Rows of a draft tree of which only those are sampled that the tokens lead to.
#
# Verification reads one path: the token after a row leads to the child that holds it. No token is needed of the rows
# beside that path, and of eight rows they are most.


NOT_SAMPLED: Final = SampledRow(-1)  # in place of a row to which no token leads


class RowTree(NamedTuple):
    """Children of one row hold distinct tokens."""

    parents: tuple[int, ...]  # (rows,) parents[i] < i, -1: none, so the row is sampled in any case
    tokens: tuple[int, ...]  # (rows,) that each row holds

    @property
    def roots(self) -> list[int]:
        return [row for row, parent in enumerate(self.parents) if parent < 0]

    def child(self, row: int, token: int) -> int | None:
        """The row to which the token sampled after `row` leads."""
        for at in range(row + 1, len(self.parents)):
            if self.parents[at] == row and self.tokens[at] == token:
                return at
        return None
