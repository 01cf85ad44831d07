"""Values for the fields of the link's messages, as an attacker would choose them, by type and by name.

Types and limits are read with msgspec, so a field that is added to the protocol is drawn without a word here. Token ids
in varints, drafts and distributions are in `mutated_drafts`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import msgspec
import msgspec.inspect as schema

from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import (
    SEARCH,
    VERSION,
    WRITE,
    ChatMessage,
    Drafts,
    Frame,
    OpenSession,
    Options,
    RetrievedPassages,
    Sampling,
    SentConstraint,
    SessionFrame,
    Targets,
    WrittenText,
)
from paceline.wire.payloads import encode_places, encode_tokens
from paceline.wire.verify_messages import MAX_CHAIN, DraftChain
from tests.reliability.mutated_drafts import Aim, DraftValues

JOINT: Final = tuple(name for name, strategy in STRATEGIES.items() if strategy.needs_peer)
# What answers an opening that no strategy's machine takes part in, by what it names as its strategy.
ANSWERED_BY: Final[Mapping[str, type[SessionFrame]]] = {SEARCH: RetrievedPassages, WRITE: WrittenText}
FORGED: Final = "2026-01-01 00:00:00,000 CRITICAL paceline: forged"  # a line of a log, as text of a message
LEVELS = ("open", "document-private", "answer-private", "local-only", "", "OPEN", "private")
AGGREGATORS = ("", "mixture", "coin", "paper", "dictator")
REPLACED: Final = (
    None, True, -1, 2**31, 2**63, -(2**63), 2**64 - 1, 0.5, math.nan, "", "x", b"", b"\xff", [], [[]], {},
)  # fmt: skip
CONSTRAINTS = (
    ("json_object", ""),
    ("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
    ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
    ("json_schema", "[" * 5000),
    ("json_schema", '{"type": "string", "pattern": "(a+)+$"}'),
    ("loose_schema", "null"),
    ("tools", '{"tools": [], "required": true, "parallel": false}'),
    ("tools", "{}"),
)
_encode = msgspec.msgpack.Encoder().encode


@cache
def described_struct(kind: type[msgspec.Struct]) -> schema.StructType:
    described = schema.type_info(kind)
    assert isinstance(described, schema.StructType)
    return described


class FieldValues:
    """Draws messages as arrays of their fields. Most can be decoded. Everything random comes from `rng`."""

    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        self._rng = rng
        self._drafts = DraftValues(rng, vocab_size)
        self._strategy = ""  # of the opening that is being drawn
        self._aimed: dict[str, Callable[[Aim], object]] = {
            "session": self._session,
            "epoch": lambda aim: self._drafts.near(aim.epoch),
            "start": lambda aim: self._drafts.near(aim.position),
            "base": lambda aim: self._drafts.near(aim.position),
            "node": lambda aim: self._drafts.near(aim.node - 1),
            "nodes": self._drafts.nodes,
        }
        self._drawn: dict[str, Callable[[], object]] = {
            "turn": lambda: self._drafts.near(rng.randrange(3)),
            "offset": lambda: rng.choice((0, 0, 0, 1, 3, 30, MAX_CHAIN)),
            "lanes": lambda: bytes(rng.randrange(4) for _ in range(rng.choice((0, 1, 3)))),
            "log_weight": lambda: rng.choice((None, 0.0, 0.5, -700.0, 700.0, 1e308, -1e308, 5e-324)),
            "strategy": self._draw_strategy,
            "privacy": lambda: rng.choice(LEVELS),
            "aggregator": lambda: rng.choice(AGGREGATORS),
            "options": self._options,
            "version": lambda: self._drafts.near(VERSION),
        }

    def message(self, kind: type[Frame], aim: Aim) -> list[Any]:
        """The array of a message: its tag and its fields."""
        described = described_struct(kind)
        message = [described.tag, *(self._field(field, aim) for field in described.fields)]
        if kind is Drafts:  # as many distributions as nodes, at times
            message[3:] = [message[3], [self._drafts.dist() for _ in range(self._drafts.num_dists(message[3]))]]
        elif kind is Targets and self._rng.random() < 0.7:
            self._drafts.fit_targets(message)
        elif kind is DraftChain and self._rng.random() < 0.6:  # as many of either as drafts
            self._drafts.fit_drafts(message)
        elif kind is OpenSession and self._strategy in ANSWERED_BY and self._rng.random() < 0.6:
            self._ask_plainly(message)
        return message

    def _ask_plainly(self, message: list[Any]) -> None:
        """Make an opening one that asks for passages or a text, as a device's does that is served."""
        asked: dict[str, object] = {
            "query": "Where is my boat?",
            "max_tokens": self._rng.choice((1, 16, 512)),
            "top_k_documents": 2 if self._strategy == SEARCH else 0,
            "privacy": self._rng.choice(LEVELS[:3]),
            "options": msgspec.Raw(_encode(Options())),
            "targets": [],
            "constraint": None,
        }
        for name, value in asked.items():
            message[OpenSession.__struct_fields__.index(name) + 1] = value

    def _field(self, field: schema.Field, aim: Aim) -> object:
        if (aimed := self._aimed.get(field.name)) is not None:
            return aimed(aim)
        if field.name == "places":
            return encode_places([(token, self._second(token)) for token in self._drafts.tokens()])
        if field.name == "tokens" and not isinstance(field.type, schema.IntType):
            return (
                encode_tokens(self._drafts.tokens())
                if isinstance(field.type, schema.BytesType)
                else self._drafts.tokens()
            )
        drawn = self._drawn.get(field.name)
        return self._value(field.type, aim) if drawn is None else drawn()

    def _second(self, token: int) -> int | None:
        """A second guess beside a draft, or none."""
        return self._rng.choice((None, None, token + 1))

    def _value(self, kind: schema.Type, aim: Aim) -> object:  # one line a type
        rng = self._rng
        match kind:
            case schema.BoolType():
                return rng.random() < 0.5
            case schema.NoneType():
                return None
            case schema.IntType():
                low = -(2**63) if kind.ge is None else int(kind.ge)
                high = int(kind.lt) - 1 if kind.lt is not None else 2**63 - 1 if kind.le is None else int(kind.le)
                return rng.choice((low, low + 1, min(7, high), high - 1, high))
            case schema.FloatType():
                low_float = kind.gt if kind.gt is not None else kind.ge if kind.ge is not None else -1e308
                high_float = kind.le if kind.le is not None else 1e308
                return float(rng.choice((high_float, low_float, 0.5, 5e-324, 1.0)))
            case schema.StrType():
                most = 4000 if kind.max_length is None else kind.max_length
                texts = (
                    "",
                    "user",
                    f"evil\n{FORGED}\x1b[31m\0",
                    "\u202e\U0001f600",
                    "x" * min(most, 300),
                    "x" * min(most, 4000),
                )
                return rng.choice(texts)[:most]
            case schema.BytesType():
                low, most = kind.min_length or 0, 64 if kind.max_length is None else kind.max_length
                return rng.randbytes(rng.choice((low, min(low + 3, most), min(most, 300))))
            case schema.LiteralType():
                return rng.choice(kind.values)
            case schema.UnionType():
                return self._value(rng.choice(kind.types), aim)
            case schema.TupleType():
                return [self._value(each, aim) for each in kind.item_types]
            case schema.ListType():
                low, most = kind.min_length or 0, 40 if kind.max_length is None else kind.max_length
                count = rng.choice((low, low, min(low + 2, most), min(30, most)))
                return [self._value(kind.item_type, aim) for _ in range(count)]
            case schema.StructType():
                return self._part(kind, aim)
            case _:
                return msgspec.Raw(_encode(rng.choice(REPLACED)))

    def _part(self, kind: schema.StructType, aim: Aim) -> object:
        rng = self._rng
        if kind.cls is ChatMessage and rng.random() < 0.8:
            return [
                rng.choice(("user", "system", "assistant")),
                rng.choice(("", "Hi", "Where is my boat?", "x" * 2000)),
            ]
        if kind.cls is Sampling and rng.random() < 0.7:
            bias = [[self._drafts.token(), rng.choice((-100.0, 100.0, 0.0))] for _ in range(rng.randrange(4))]
            return [rng.choice((0.0, 1.0, 2.0)), 1.0, rng.choice((0, 1)), 0.0, 0.0, 0.0, bias, rng.randrange(9), 1.0]
        if kind.cls is SentConstraint:
            return list(rng.choice(CONSTRAINTS))
        return [self._field(field, aim) for field in kind.fields]

    # ---- fields -----------------------------------------------------------------------------------------------------
    def _session(self, aim: Aim) -> int:
        if self._rng.random() < 0.93:
            return aim.session
        return self._rng.choice((0, 1, max(0, aim.session - 2), aim.session + 1, aim.session + 2, 2**53 - 1))

    def _draw_strategy(self) -> str:
        self._strategy = self._rng.choice((*STRATEGIES, *JOINT, *ANSWERED_BY, *ANSWERED_BY, "none", ""))
        return self._strategy

    def _options(self) -> msgspec.Raw:
        """Options of the opening's strategy, of another, or none at all."""
        rng = self._rng
        if rng.random() < 0.1:
            return msgspec.Raw(_encode(rng.choice(REPLACED)))
        name = self._strategy if self._strategy in STRATEGIES and rng.random() < 0.9 else rng.choice([*STRATEGIES])
        kind = STRATEGIES[name].options
        drawn = self._part(described_struct(kind), Aim(0))
        return msgspec.Raw(_encode(kind() if rng.random() < 0.3 else drawn))
