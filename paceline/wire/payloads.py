"""Payloads inside messages: distributions, drafts, targets and trees in few bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.aggregation.aggregators import LAST_LEVEL
from paceline.core.sampling.dist import Dist
from paceline.core.verification import POINTS, counts_of
from paceline.wire.close_codes import remote_fault

# Numbers packed bit by bit, lowest bit first, for messages whose numbers are smaller than a byte.


_MAX_BITS = 35  # of a number in groups


class BitWriter:
    """Appends numbers. `to_bytes` fills the last byte with zeros."""

    def __init__(self) -> None:
        self._value = self._length = 0

    def bits(self, value: int, width: int) -> None:
        """A number of a width that the reader knows."""
        self._value |= value << self._length
        self._length += width

    def number(self, value: int, group: int) -> None:
        """A number of any size below 2**35: so many bits a group, lowest first, and a bit that says whether another
        group follows."""
        while value >> group:
            self.bits(value & (1 << group) - 1 | 1 << group, group + 1)
            value >>= group
        self.bits(value, group + 1)

    def to_bytes(self) -> bytes:
        return self._value.to_bytes((self._length + 7) // 8, "little")


class BitReader:
    """Reads what `BitWriter` wrote. Raises RemoteProtocolError where bits are missing; not handled: numbers with more
    groups than they need, and what is left at the end, both of which show when the same is written again."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def bits(self, width: int) -> int:
        begin, end = self._at, self._at + width
        if end > 8 * len(self._data):
            raise remote_fault("it ends within a number")
        self._at = end
        around = int.from_bytes(self._data[begin >> 3 : (end + 7) >> 3], "little")
        return around >> (begin & 7) & (1 << width) - 1

    def number(self, group: int) -> int:
        value = 0
        for place in range(0, _MAX_BITS, group):
            read = self.bits(group + 1)
            value |= (read & (1 << group) - 1) << place
            if not read >> group:
                return value
        raise remote_fault("a number is too large")


# Token ids as LEB128 varints: seven bits a byte, lowest first, the high bit set on all but the last byte.


_MAX_BYTES = 5  # of one number
MAX_NUMBER = 1 << 7 * _MAX_BYTES
_FEW = 128  # ids to write, or bytes to read, for which a loop takes less time than numpy's calls
_UNTERMINATED = "token ids end within a number"
_TOO_LONG = "a token id is written in more bytes than it needs"


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids in their order."""
    return to_varints(np.array(tokens, dtype=np.uint64))


def to_varints(values: NDArray[np.uint64]) -> bytes:
    """Values below 2**35."""
    if len(values) <= _FEW:
        return _few_to_bytes(values.tolist())
    sizes = np.ones(len(values), dtype=np.int64)
    for size in range(1, _MAX_BYTES):
        sizes += values >= 1 << 7 * size
    starts = np.cumsum(sizes) - sizes
    out = np.empty(int(sizes.sum()), dtype=np.uint8)
    for place in range(int(sizes.max(initial=0))):
        longer = sizes > place
        more = np.where(sizes[longer] > place + 1, np.uint64(128), np.uint64(0))
        out[starts[longer] + place] = (values[longer] >> np.uint64(7 * place) & np.uint64(127)) | more
    return out.tobytes()


def _few_to_bytes(values: list[int]) -> bytes:
    out = bytearray()
    for value in values:
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        out.append(value)
    return bytes(out)


def from_varints(data: bytes) -> NDArray[np.int64]:
    """Inverse of `to_varints`. Raises RemoteProtocolError for numbers cut off, not shortest, or beyond 2**35."""
    if len(data) <= _FEW:
        return np.array(_few_from_bytes(data), dtype=np.int64)
    raw = np.frombuffer(data, dtype=np.uint8)
    (last_bytes,) = np.nonzero(raw < 128)
    if len(last_bytes) == 0 or last_bytes[-1] != len(raw) - 1:
        raise remote_fault(_UNTERMINATED)
    starts = np.concatenate(([0], last_bytes[:-1] + 1))
    sizes = last_bytes - starts + 1
    if sizes.max() > _MAX_BYTES or np.any((sizes > 1) & (raw[last_bytes] == 0)):
        raise remote_fault(_TOO_LONG)
    places = np.arange(len(raw)) - np.repeat(starts, sizes)
    return np.add.reduceat((raw & 127).astype(np.int64) << 7 * places, starts)


def _few_from_bytes(data: bytes) -> list[int]:
    if data and data[-1] > 127:
        raise remote_fault(_UNTERMINATED)
    values: list[int] = []
    value = size = 0
    for byte in data:
        value |= (byte & 127) << 7 * size
        size += 1
        if byte > 127:
            continue
        if size > _MAX_BYTES or (size > 1 and byte == 0):
            raise remote_fault(_TOO_LONG)
        values.append(value)
        value = size = 0
    return values


def write_number(value: int) -> bytes:
    """One number below `MAX_NUMBER`."""
    return _few_to_bytes([value])


def read_number(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, below `MAX_NUMBER`, and where what follows it begins. Raises RemoteProtocolError as
    `from_varints` does."""
    end = at
    while end < len(data) and data[end] > 127:
        end += 1
    if end >= len(data):
        raise remote_fault(_UNTERMINATED)
    if end - at >= _MAX_BYTES or (end > at and data[end] == 0):
        raise remote_fault(_TOO_LONG)
    value = 0
    for byte in reversed(data[at : end + 1]):
        value = value << 7 | byte & 127
    return value, end + 1


# Short form of a message in place of its MessagePack array, for one that is sent for every few tokens.
#
# A first byte below 0x80, with which no such array begins, then LEB128 numbers in their shortest form, then the last
# field, bytes, to the end of the frame. The first byte holds the message's `compact_code`, doubled twice; bit 0 says
# that the epoch follows the session, bit 1 that the last number follows the others; where they do not, they are 0.


FIRST_OF_ARRAY = 0x80  # least first byte of a frame in MessagePack
_EPOCH, _LAST = 1, 2


def pack(code: int, session: int, epoch: int, numbers: Sequence[int], rest: bytes) -> bytes | None:
    """The short form; None where a number is too large for it."""
    if max(session, epoch, *numbers) >= MAX_NUMBER:
        return None
    others, last = numbers[:-1], numbers[-1] if numbers else 0
    flags = (_EPOCH if epoch else 0) | (_LAST if last else 0)
    present = [session, *([epoch] if epoch else []), *others, *([last] if last else [])]
    return bytes([code << 2 | flags]) + b"".join(map(write_number, present)) + rest


def code_of(data: bytes) -> int | None:
    """Code of a frame in the short form; None for any other frame."""
    return data[0] >> 2 if data and data[0] < FIRST_OF_ARRAY else None


def unpack(data: bytes, num_numbers: int) -> tuple[int, int, list[int], bytes]:
    """Session, epoch, so many numbers, and the last field. Raises RemoteProtocolError for what `pack` does not write;
    ranges of fields are not checked."""
    flags, at = data[0], 1
    if flags & _LAST and not num_numbers:
        raise remote_fault("it has no last number")
    last = [bool(flags & _LAST)] if num_numbers else []
    present = [True, bool(flags & _EPOCH), *[True] * (num_numbers - 1), *last]
    found: list[int] = []
    for is_there in present:
        value = 0
        if is_there:
            value, at = read_number(data, at)
        found.append(value)
    if (flags & _EPOCH and not found[1]) or (flags & _LAST and not found[-1]):
        raise remote_fault("a number that is 0 is written")
    session, epoch, *numbers = found
    return session, epoch, numbers, data[at:]


# Distributions one after another, as the short form of `Drafts` carries them: for each the ids and the probabilities
# of `wire.codec`, before either the number of its bytes.


def pack_dists(dists: Sequence[tuple[bytes, bytes]]) -> bytes:
    """dists: ids and probabilities of each."""
    return b"".join(write_number(len(part)) + part for dist in dists for part in dist)


def unpack_dists(data: bytes) -> list[tuple[bytes, bytes]]:
    """Inverse of `pack_dists`; what the parts hold is not checked. Raises RemoteProtocolError for anything else."""
    parts: list[bytes] = []
    at = 0
    while at < len(data):
        length, at = read_number(data, at)
        parts.append(data[at : at + length])
        at += length
    if at > len(data) or len(parts) % 2 or not parts:
        raise remote_fault("distributions end too early")
    return list(zip(parts[::2], parts[1::2], strict=True))


# What a verifier is sent of the distribution of a draft: its probability, or all of it; both exactly.
#
# Of a distribution on the grid of `core.verification.draft_dist`: a probability is a number of points less 1 in 16
# bits; a distribution is varints, first the steps of its ascending ids, then each one's points less 1.


PROB_BYTES = 2


def encode_prob(prob: float) -> bytes:
    """prob: above 0, of a distribution on the grid."""
    return (int(prob * POINTS) - 1).to_bytes(PROB_BYTES, "little")


def decode_probs(data: bytes) -> list[float]:
    """Inverse, for several. data: a multiple of `PROB_BYTES`."""
    return [(int(code) + 1) / POINTS for code in np.frombuffer(data, dtype="<u2")]


def encode_draft_dist(dist: Dist) -> bytes:
    steps = np.diff(dist.ids.astype(np.int64), prepend=-1) - 1
    return to_varints(np.concatenate((steps, counts_of(dist) - 1)).astype(np.uint64))


def decode_draft_dist(data: bytes, vocab_size: int) -> Dist:
    """Inverse. Raises RemoteProtocolError for anything `encode_draft_dist` cannot have written for this vocabulary."""
    numbers = from_varints(data)
    half = len(numbers) // 2
    steps, counts = numbers[:half], numbers[half:] + 1
    if half == 0 or len(counts) != half or int(counts.max()) > POINTS or int(counts.sum()) != POINTS:
        raise remote_fault("what should be the distribution of a draft is none")
    ids = np.cumsum(steps + 1) - 1  # at most `POINTS` steps, each below 2**35: no overflow
    if int(ids[-1]) >= vocab_size:
        raise remote_fault("the distribution of a draft has a token id outside the vocabulary")
    return Dist(ids.astype(np.int32), counts / POINTS)


# Places of a drafted chain: each a token id, and with some a second guess for the same place.
#
# Varints, each twice an id; plus 1 where the next one is the second guess. A real vocabulary's ids take three bytes
# with that bit or without it. Knows nothing of how ids are chosen.


MAX_PLACE_BYTES = 10  # of one place

Place = tuple[int, int | None]  # the draft, and its second guess


def encode_places(places: Sequence[Place]) -> bytes:
    """Raises nothing: a second guess is another id than its draft."""
    numbers: list[int] = []
    for token, second in places:
        numbers += [2 * token] if second is None else [2 * token + 1, 2 * second]
    return encode_tokens(numbers)


def decode_places(data: bytes) -> list[Place]:
    """Inverse of `encode_places`. Raises RemoteProtocolError for what it does not write."""
    places: list[Place] = []
    numbers = iter(from_varints(data).tolist())
    for number in numbers:
        token, second = number >> 1, None
        if number & 1:
            following = next(numbers, 1)
            second = following >> 1
            if following & 1 or second == token:
                raise remote_fault("a draft has no second guess of its own")
        places.append((token, second))
    return places


# Decided tokens with their lanes, or with who has chosen them, a number each: the short form of `Targets`.


# Where a target comes from: it is named itself, or is the choice that one of the sides has sent after its prefix.
NAMED, RECEIVERS, SENDERS = range(3)
_MARK_BITS = 3
_LAST_LANE = 3  # lanes are marked 1 to 3
_FIRST_SOURCE = _LAST_LANE  # a choice of the receiver's is marked 4, of the sender's 5


def are_sources(sources: bytes, tokens: Sequence[int], lanes: bytes) -> bool:
    """They say of these targets which are named: not all are, and those that are not are 0."""
    if len(sources) != len(tokens) or max(sources, default=0) > SENDERS or lanes:
        return False
    known = [token for token, source in zip(tokens, sources, strict=True) if source != NAMED]
    return bool(known) and not any(known)


def pack_targets(tokens: Sequence[int], lanes: bytes, sources: bytes) -> bytes:
    """A LEB128 number for each token: the token times 8, plus a mark. lanes: one for each token, at most 2, or none.
    sources: likewise, and none with lanes; a token that is not named is 0."""
    values = np.array(tokens, np.uint64) << np.uint64(_MARK_BITS)
    if lanes:
        values += np.frombuffer(lanes, np.uint8).astype(np.uint64) + np.uint64(1)
    elif sources:
        marks = np.frombuffer(sources, np.uint8).astype(np.uint64)
        values += np.where(marks > NAMED, marks + np.uint64(_FIRST_SOURCE), np.uint64(0))
    return to_varints(values)


def unpack_targets(data: bytes) -> tuple[list[int], bytes, bytes]:
    """Tokens, lanes and sources. Raises RemoteProtocolError for what `pack_targets` does not write."""
    values = from_varints(data)
    marks = (values & (1 << _MARK_BITS) - 1).astype(np.uint8)
    tokens = values >> _MARK_BITS
    laned, known = (marks > 0) & (marks <= _LAST_LANE), marks > _LAST_LANE
    if laned.any() and not laned.all():
        raise remote_fault("lanes of some tokens alone")
    if tokens[known].any() or (marks > _FIRST_SOURCE + SENDERS).any():
        raise remote_fault("a target is named in two ways, or in none")
    lanes = (marks - 1).tobytes() if laned.any() else b""
    sources = np.where(known, marks - _FIRST_SOURCE, NAMED).astype(np.uint8).tobytes() if known.any() else b""
    return tokens.tolist(), lanes, sources


# Draft tree nodes of the `aggregate` strategy in few bits: the prefix of each node and the sender's choice after it.
#
# The number of nodes, what is present, the bits of a token and the first id; for an anchor the position; then for each
# node its parent, the edge's token, the choice, and the score, where present. A token that the receiver knows takes a
# bit or two: of an edge, the choice after its parent of either side; of a choice, the receiver's own after that
# prefix.
#
# Stateless. The nodes are sent in `wire.messages.Drafts`, their distributions are encoded by `wire.codec`.


MAX_NODES = 256  # in one message
FOLLOWS = -1  # instead of an edge's token: the sender's choice after the parent, which is not in this message
YOURS = -2  # instead of an edge's token or a choice: what the receiver has sent as its choice after that prefix
_LIMIT = 2**31  # exclusive bound of ids, positions and tokens
_MAX_SCORE = 2**30
# Bits of a group: of the number of nodes, of ids and positions, of the distance to a parent, of a score.
COUNT_GROUP, ID_GROUP, DISTANCE_GROUP, SCORE_GROUP = 2, 6, 3, 8
TOKEN_BITS = 16, 17, 18, 31  # one of these for all tokens of a message: vocabularies have 32 to 262 thousand ids
WIDTH_BITS, LEVEL_BITS = 2, 2


@dataclass(frozen=True, slots=True)
class EncodedNodes:
    """Consecutive nodes `first`, `first + 1`, … of a draft tree, each one prefix of the answer."""

    position: int | None  # output position after the first node, if that is an anchor: the node of decided targets
    level: int  # level of detail of the distributions sent with the nodes
    first: int  # id of the first of these nodes
    parents: tuple[int, ...]  # (n,) ids in this or an earlier message; -1: none, for an anchor
    tokens: tuple[int, ...]  # (n,) the token on the edge from the parent, FOLLOWS or YOURS; 0 for an anchor
    choices: tuple[int, ...] | None  # (n,) the token the sender alone would choose after each, or YOURS
    scores: tuple[int, ...] | None = None  # (n,) log h after each, by `weights.quantize_score`

    def choice(self, node: int) -> int | None:
        """The sender's choice after that node, if this message contains it as a token."""
        inside = self.choices is not None and self.first <= node < self.first + len(self.choices)
        choice = self.choices[node - self.first] if inside and self.choices is not None else YOURS
        return None if choice == YOURS else choice


def pack_nodes(nodes: EncodedNodes) -> bytes:
    """Encode. Raises ValueError for nodes that `unpack_nodes` would refuse."""
    if (fault := _fault(nodes, _LIMIT)) is not None:
        raise ValueError(fault)
    out, choices, scores = BitWriter(), nodes.choices, nodes.scores
    follows = [_follows(nodes, index) for index in range(len(nodes.parents))]
    explicit = [token for token, known in zip(nodes.tokens, follows, strict=True) if not known]
    largest = max(0, *explicit, *(choices or ())).bit_length()
    kind = next(kind for kind, width in enumerate(TOKEN_BITS) if largest <= width)
    width = TOKEN_BITS[kind]
    out.number(len(nodes.parents) - 1, COUNT_GROUP)
    for flag in (nodes.position is not None, choices is not None, scores is not None):
        out.bits(flag, 1)
    if choices is None:
        out.bits(nodes.level, LEVEL_BITS)
    out.bits(kind, WIDTH_BITS)
    out.number(nodes.first, ID_GROUP)
    for index, (parent, token) in enumerate(zip(nodes.parents, nodes.tokens, strict=True)):
        if nodes.position is not None and index == 0:
            out.number(nodes.position, ID_GROUP)
        else:
            _write_distance(out, nodes.first + index - parent)
            if choices is not None:
                out.bits(follows[index], 1)
            if not follows[index]:
                _write_token(out, token, width)
        if choices is not None:
            _write_token(out, choices[index], width)
        if scores is not None:
            out.number(2 * scores[index] if scores[index] >= 0 else -2 * scores[index] - 1, SCORE_GROUP)
    return out.to_bytes()


def unpack_nodes(data: bytes, vocab_size: int | None = None) -> EncodedNodes:
    """Decode. Raises RemoteProtocolError for anything `pack_nodes` cannot have written for that vocabulary size."""
    if not data:
        raise remote_fault("nodes are missing")
    reader = BitReader(data)
    count = reader.number(COUNT_GROUP) + 1
    if count > MAX_NODES:
        raise remote_fault(f"{count} nodes in one message")
    anchored, has_choices, has_scores = (bool(reader.bits(1)) for _ in range(3))
    level = 0 if has_choices else reader.bits(LEVEL_BITS)
    width, first = TOKEN_BITS[reader.bits(WIDTH_BITS)], reader.number(ID_GROUP)
    position: int | None = None
    parents: list[int] = []
    tokens: list[int] = []
    choices: list[int] = []
    scores: list[int] = []
    for index in range(count):
        if anchored and index == 0:
            position = reader.number(ID_GROUP)
            parents.append(-1)
            tokens.append(0)
        else:
            parents.append(first + index - _read_distance(reader))
            if has_choices and reader.bits(1):
                inside = parents[-1] >= first and choices[parents[-1] - first] != YOURS
                tokens.append(choices[parents[-1] - first] if inside else FOLLOWS)
            else:
                tokens.append(_read_token(reader, width))
        if has_choices:
            choices.append(_read_token(reader, width))
        if has_scores:
            code = reader.number(SCORE_GROUP)
            scores.append(code >> 1 if code % 2 == 0 else -(code + 1 >> 1))
    nodes = EncodedNodes(
        position=position,
        level=level,
        first=first,
        parents=tuple(parents),
        tokens=tuple(tokens),
        choices=tuple(choices) if has_choices else None,
        scores=tuple(scores) if has_scores else None,
    )
    if (fault := _fault(nodes, _LIMIT if vocab_size is None else min(vocab_size, _LIMIT))) is not None:
        raise remote_fault(fault)
    if pack_nodes(nodes) != data:  # numbers, tokens or widths not in shortest form, or trailing bits
        raise remote_fault("nodes are not packed as they should be")
    return nodes


def _write_distance(out: BitWriter, distance: int) -> None:
    """A bit for the node just before, else a number."""
    out.bits(distance == 1, 1)
    if distance > 1:
        out.number(distance - 2, DISTANCE_GROUP)


def _read_distance(reader: BitReader) -> int:
    return 1 if reader.bits(1) else reader.number(DISTANCE_GROUP) + 2


def _write_token(out: BitWriter, token: int, width: int) -> None:
    """A bit for what the receiver has chosen itself, else the token."""
    out.bits(token == YOURS, 1)
    if token != YOURS:
        out.bits(token, width)


def _read_token(reader: BitReader, width: int) -> int:
    return YOURS if reader.bits(1) else reader.bits(width)


def _follows(nodes: EncodedNodes, index: int) -> bool:
    """True if the edge's token is the sender's choice after the parent."""
    token = nodes.tokens[index]
    return token == FOLLOWS or token == nodes.choice(nodes.parents[index])


def _fault(nodes: EncodedNodes, vocab_size: int) -> str | None:
    """Description of the first inconsistency; None without one."""
    count = len(nodes.parents)
    if not 1 <= count <= MAX_NODES or len(nodes.tokens) != count or len(nodes.choices or nodes.tokens) != count:
        return f"{count} nodes, {len(nodes.tokens)} tokens, {len(nodes.choices or nodes.tokens)} choices"
    if nodes.scores is not None and len(nodes.scores) != count:
        return f"{len(nodes.scores)} scores for {count} nodes"
    if any(abs(score) > _MAX_SCORE for score in nodes.scores or ()):
        return "a score is out of range"
    if not 0 <= nodes.level <= (LAST_LEVEL if nodes.choices is None else 0):
        return f"there is no level {nodes.level}"
    if not (0 <= (nodes.position or 0) < _LIMIT and 0 <= nodes.first <= _LIMIT - count):
        return "a node's id or position is out of range"
    if not all(choice == YOURS or 0 <= choice < vocab_size for choice in nodes.choices or ()):
        return "a choice is outside the vocabulary"
    for node, (parent, token) in enumerate(zip(nodes.parents, nodes.tokens, strict=True), nodes.first):
        if parent == -1 or (nodes.position is not None and node == nodes.first):
            if nodes.position is None or node != nodes.first or (parent, token) != (-1, 0):
                return "a node without parent is not the anchor"
        elif not 0 <= parent < node:
            return "a node's parent is not an earlier one"
        elif token == FOLLOWS:
            if nodes.choices is None or nodes.choice(parent) is not None:
                return "an edge follows a choice of no earlier message"
        elif not (token == YOURS or 0 <= token < vocab_size):
            return "an edge's token is outside the vocabulary"
    return None
