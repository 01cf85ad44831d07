"""Draft tree nodes of the `aggregate` strategy in few bits: the prefix of each node and the sender's choice after it.

The number of nodes, what is present, the bits of a token and the first id; for an anchor the position; then for each
node its parent, the edge's token, the choice, and the score, where present. A token that the receiver knows takes a bit
or two: of an edge, the choice after its parent of either side; of a choice, the receiver's own after that prefix.

Stateless. The nodes are sent in `wire.messages.Drafts`, their distributions are encoded by `wire.dist_codec`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.aggregation.aggregators import LAST_LEVEL
from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.payloads.bits import BitReader, BitWriter

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
        raise _bad("nodes are missing")
    reader = BitReader(data)
    count = reader.number(COUNT_GROUP) + 1
    if count > MAX_NODES:
        raise _bad(f"{count} nodes in one message")
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
        raise _bad(fault)
    if pack_nodes(nodes) != data:  # numbers, tokens or widths not in shortest form, or trailing bits
        raise _bad("nodes are not packed as they should be")
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


def _bad(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(what, close_code=CloseCode.BAD_FRAME)
