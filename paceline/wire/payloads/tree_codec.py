"""Draft tree nodes of the `aggregate` strategy in few bytes: the prefix of each node and the sender's choice after it.

One byte holds the number of nodes, the level of detail, and whether choices and scores are present; then, as LEB128
numbers, the position, the first id and the distance back to the anchor; then for each node the distance back to its
parent, doubled, plus 1 if the edge's token follows, that token, the choice, and the score, where present. An edge
whose token is the sender's choice after the parent needs no token, and a chain of such nodes (a trunk) only the
choices.

Stateless. The nodes are sent in `wire.messages.Drafts`, their distributions are encoded by `wire.dist_codec`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.aggregation.registry import LAST_LEVEL
from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode

MAX_NODES = 256  # in one message
FOLLOWS = -1  # instead of an edge's token: the choice sent with the parent, a node of an earlier message
_LIMIT = 2**31  # exclusive bound of ids, positions and tokens
_CHOICES, _TRUNK, _LEVEL_SHIFT, _MANY = 0x80, 0x40, 4, 0x0F  # first byte: two flags, two bits, four bits
_SCORES, _SCORED_CHOICES = 0x40, 0x10  # scores without choices: the second flag; with them: in place of the level
_MAX_SCORE = 2**30


@dataclass(frozen=True, slots=True)
class EncodedNodes:
    """Consecutive nodes `first`, `first + 1`, … of a draft tree, each one prefix of the answer."""

    position: int  # output position of the token that follows the anchor
    anchor: int  # node id of the anchor: the node of the targets decided so far
    level: int  # level of detail of the distributions sent with the nodes
    first: int  # id of the first of these nodes
    parents: tuple[int, ...]  # (n,) ids in this or an earlier message; -1: none, only for the anchor itself
    tokens: tuple[int, ...]  # (n,) the token on the edge from the parent, or FOLLOWS; 0 for an anchor without parent
    choices: tuple[int, ...] | None  # (n,) the token the sender alone would choose after each; only under `coin`
    scores: tuple[int, ...] | None = None  # (n,) log h after each, by `weights.quantize_score`

    def choice(self, node: int) -> int | None:
        """The sender's choice after that node, if this message contains it."""
        inside = self.choices is not None and self.first <= node < self.first + len(self.choices)
        return self.choices[node - self.first] if inside and self.choices is not None else None


def pack_nodes(nodes: EncodedNodes) -> bytes:
    """Encode. Raises ValueError for nodes that `unpack_nodes` would refuse."""
    if (fault := _fault(nodes, _LIMIT)) is not None:
        raise ValueError(fault)
    count, choices = len(nodes.parents), nodes.choices
    implied = [_implied(nodes, index) for index in range(count)]
    trunk = choices is not None and all(
        known and parent == nodes.first + index - 1
        for index, (known, parent) in enumerate(zip(implied, nodes.parents, strict=True))
    )
    flags = (_CHOICES if choices is not None else 0) | (_TRUNK if trunk else 0)
    if nodes.scores is not None:
        flags |= _SCORES if choices is None else _SCORED_CHOICES
    out = bytearray([flags | nodes.level << _LEVEL_SHIFT | min(count - 1, _MANY)])
    if count - 1 >= _MANY:
        _append(out, count - 1 - _MANY)
    back = nodes.first - nodes.anchor
    for number in (nodes.position, nodes.first, 2 * back if back >= 0 else -2 * back - 1):
        _append(out, number)
    for index, (parent, token) in enumerate(zip(nodes.parents, nodes.tokens, strict=True)):
        if not trunk:
            distance = nodes.first + index - parent if parent >= 0 else 0
            _append(out, 2 * distance + (not implied[index]))
            if not implied[index]:
                _append(out, token)
        if choices is not None:
            _append(out, choices[index])
        if nodes.scores is not None:
            score = nodes.scores[index]
            _append(out, 2 * score if score >= 0 else -2 * score - 1)
    return bytes(out)


def unpack_nodes(data: bytes, vocab_size: int | None = None) -> EncodedNodes:
    """Decode. Raises RemoteProtocolError for anything `pack_nodes` cannot have written for that vocabulary size."""
    if not data:
        raise _bad("nodes are missing")
    reader = _Reader(data, 1)
    flags, count = data[0], (data[0] & _MANY) + 1
    if count > _MANY:
        count += reader.number()
    if count > MAX_NODES:
        raise _bad(f"{count} nodes in one message")
    position, first, back = reader.number(), reader.number(), reader.number()
    parents: list[int] = []
    tokens: list[int] = []
    choices: list[int] = []
    scores: list[int] = []
    has_choices = bool(flags & _CHOICES)
    has_scores = bool(flags & (_SCORED_CHOICES if has_choices else _SCORES))
    for index in range(count):
        code = 2 if has_choices and flags & _TRUNK else reader.number()
        distance, explicit = code >> 1, code & 1
        parent = first + index - distance if distance else -1
        if explicit:
            tokens.append(reader.number())
        elif parent < 0:
            tokens.append(0)
        else:
            inside = parent >= first and has_choices
            tokens.append(choices[parent - first] if inside else FOLLOWS)
        parents.append(parent)
        if has_choices:
            choices.append(reader.number())
        if has_scores:
            code = reader.number()
            scores.append(code >> 1 if code % 2 == 0 else -(code + 1 >> 1))
    nodes = EncodedNodes(
        position=position,
        anchor=first - (back >> 1 if back % 2 == 0 else -(back + 1 >> 1)),
        level=0 if has_choices else flags >> _LEVEL_SHIFT & 3,
        first=first,
        parents=tuple(parents),
        tokens=tuple(tokens),
        choices=tuple(choices) if has_choices else None,
        scores=tuple(scores) if has_scores else None,
    )
    if (fault := _fault(nodes, _LIMIT if vocab_size is None else min(vocab_size, _LIMIT))) is not None:
        raise _bad(fault)
    if pack_nodes(nodes) != data:  # numbers or tokens not in shortest form, or trailing bytes
        raise _bad("nodes are not packed as they should be")
    return nodes


def _implied(nodes: EncodedNodes, index: int) -> bool:
    """True if the receiver can derive this edge's token."""
    parent, token = nodes.parents[index], nodes.tokens[index]
    return parent < 0 or token == FOLLOWS or token == nodes.choice(parent)


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
    if not (0 <= nodes.position < _LIMIT and 0 <= nodes.anchor < _LIMIT and 0 <= nodes.first <= _LIMIT - count):
        return "a node's id or position is out of range"
    if not all(0 <= choice < vocab_size for choice in nodes.choices or ()):
        return "a choice is outside the vocabulary"
    for node, (parent, token) in enumerate(zip(nodes.parents, nodes.tokens, strict=True), nodes.first):
        if parent == -1:
            if node != nodes.anchor or token != 0:
                return "a node without parent is not the anchor"
        elif not 0 <= parent < node:
            return "a node's parent is not an earlier one"
        elif token == FOLLOWS:
            if nodes.choices is None or parent >= nodes.first:
                return "an edge follows a choice of no earlier message"
        elif not 0 <= token < vocab_size:
            return "an edge's token is outside the vocabulary"
    return None


def _append(out: bytearray, number: int) -> None:
    """Append in LEB128: seven bits a byte, lowest first, the high bit set on all but the last byte."""
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)


class _Reader:
    """Reads LEB128 numbers in turn. Numbers not in shortest form are detected by encoding again."""

    def __init__(self, data: bytes, offset: int) -> None:
        self._data, self._offset = data, offset

    def number(self) -> int:
        value = 0
        for place in range(0, 35, 7):
            if self._offset >= len(self._data):
                raise _bad("nodes end within a number")
            byte = self._data[self._offset]
            self._offset += 1
            value |= (byte & 127) << place
            if byte < 128:
                return value
        raise _bad("a number among the nodes is too large")


def _bad(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(what, close_code=CloseCode.BAD_FRAME)
