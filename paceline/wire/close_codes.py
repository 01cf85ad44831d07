"""Close codes of a link, in the range that RFC 6455 leaves to applications, each with advice for the user.

A close frame holds 123 bytes of reason, so only the detail is sent; both sides look the advice up by the code.
"""

from __future__ import annotations

from enum import IntEnum

from paceline.core.printable import printable
from paceline.errors import RemoteProtocolError

MAX_REASON_BYTES = 123  # RFC 6455, 5.5: a control frame's payload is 125 bytes, two of them the code


class CloseCode(IntEnum):
    """4000-4099: ordinary ends; 4100-4199: incompatible sides; 4200-4299: the peer broke the protocol."""

    CLOSING = 4000
    DRAINED = 4001
    HEARTBEAT_LOST = 4002
    DUPLICATE_DEVICE = 4003
    TOO_SLOW = 4004
    INTERNAL_ERROR = 4005
    VERSION_MISMATCH = 4100
    NO_COMMON_STRATEGY = 4102
    BAD_CREDENTIAL = 4103
    REVOKED = 4104
    SERVER_KEY_CHANGED = 4105
    KEY_REPLACED = 4106
    AWAY_TOO_LONG = 4107
    NOT_RENEWED = 4108
    STAGE_REFUSES = 4109
    STAGE_TAKEN = 4110
    BAD_FRAME = 4200
    TOO_LARGE = 4201
    HANDSHAKE_TIMEOUT = 4202
    UNEXPECTED_MESSAGE = 4203
    BAD_SESSION = 4204


ADVICE: dict[int, str] = {
    CloseCode.CLOSING: "One side has ended the link; an agent that goes on connects again by itself.",
    CloseCode.DRAINED: "The other side is going away and its sessions have ended; a device connects again by itself.",
    CloseCode.HEARTBEAT_LOST: "Nothing was heard from the other side for two heartbeats; a device connects again by "
    "itself. If it recurs, look at the network between them or at a machine that sleeps.",
    CloseCode.DUPLICATE_DEVICE: "This device has linked again from elsewhere. If you run two agents with one "
    "state directory, enrol the second with a directory and a code of its own (`paceline devices add`).",
    CloseCode.TOO_SLOW: "The other side did not take messages as fast as they were sent; a device connects again by "
    "itself. If it recurs, the network is too slow for this strategy.",
    CloseCode.INTERNAL_ERROR: "A fault in Paceline on the side that closed; its log says more.",
    CloseCode.VERSION_MISMATCH: "The two sides speak different versions of the link; install the same Paceline "
    "release on both.",
    CloseCode.NO_COMMON_STRATEGY: "The two sides know no strategy in common; install the same Paceline "
    "release on both.",
    CloseCode.BAD_CREDENTIAL: "The server does not know this device's key; enrol the device again with a code from "
    "`paceline devices add`.",
    CloseCode.REVOKED: "The server's owner has revoked this device; ask for a new code from `paceline devices add`.",
    CloseCode.SERVER_KEY_CHANGED: "The server did not prove the key that this device pinned when it enrolled: it has "
    "been set up anew, or somebody is in between. Ask its owner; if it is new, enrol the device again with a code from "
    "`paceline devices add`.",
    CloseCode.KEY_REPLACED: "This device showed a key that has been replaced by a newer one: its state directory comes "
    "from a backup, or another machine uses a copy of it. If it may have been copied, have the device revoked; then "
    "enrol it again with a code from `paceline devices add`.",
    CloseCode.AWAY_TOO_LONG: "This device has not been linked for longer than the server allows (its setting "
    "device_days); enrol the device again with a code from `paceline devices add`.",
    CloseCode.NOT_RENEWED: "The device's key has expired and the device did not renew it; it connects again by itself. "
    "If it recurs, its log says why: its state directory must be writable.",
    CloseCode.STAGE_REFUSES: "This key may not dial this stage; enrol the stage at the server that has it in `stages`.",
    CloseCode.STAGE_TAKEN: "The stage belongs to a pipeline that runs already: its address is given twice, or to two "
    "servers.",
    CloseCode.BAD_FRAME: "A frame could not be understood; if both sides are the same Paceline release, this is a "
    "fault in Paceline.",
    CloseCode.TOO_LARGE: "A frame was larger than the link allows; shorten the conversation or the answer.",
    CloseCode.HANDSHAKE_TIMEOUT: "The other side did not introduce itself in time; check that a Paceline server and a "
    "Paceline agent are at the two ends.",
    CloseCode.UNEXPECTED_MESSAGE: "A message came at a time when the link does not allow it; if both sides are the "
    "same Paceline release, this is a fault in Paceline.",
    CloseCode.BAD_SESSION: "A message named a session that was never opened; if both sides are the same Paceline "
    "release, this is a fault in Paceline.",
}

# Codes of the WebSocket connection itself, RFC 6455, 7.4.1.
_WEBSOCKET: dict[int, str] = {
    1000: ADVICE[CloseCode.CLOSING],
    1001: "The other side is going away; a device connects again by itself.",
    1005: "The connection broke; a device connects again by itself.",
    1006: "The connection broke; a device connects again by itself.",
    1009: ADVICE[CloseCode.TOO_LARGE],
    1012: "The other side restarts; a device connects again by itself.",
}

# Codes after which connecting again is refused until a person has changed something.
FATAL = frozenset(
    {
        CloseCode.DUPLICATE_DEVICE,
        CloseCode.VERSION_MISMATCH,
        CloseCode.NO_COMMON_STRATEGY,
        CloseCode.BAD_CREDENTIAL,
        CloseCode.REVOKED,
        CloseCode.SERVER_KEY_CHANGED,
        CloseCode.KEY_REPLACED,
        CloseCode.AWAY_TOO_LONG,
        CloseCode.STAGE_TAKEN,
    }
)

FIRST_DELAY_S = 0.2  # upper bound of the random wait before a device connects again; doubled at each failure
MAX_DELAY_S = 30.0


def remote_fault(what: str, code: CloseCode = CloseCode.BAD_FRAME) -> RemoteProtocolError:
    """The error of a message that cannot be, by the other end. what: the reason, as a sentence."""
    return RemoteProtocolError(what, close_code=code)


def sentence(code: int, detail: str) -> str:
    """The reason shown to the user: the detail, if any, and the advice for the code."""
    advice = ADVICE.get(code) or _WEBSOCKET.get(code) or f"The link was closed with code {code}."
    cleaned = printable(detail)  # the peer's text goes into a log line
    return f"{cleaned}. {advice}" if cleaned else advice


def clip(detail: str) -> str:
    """Cut the detail to what a close frame holds, at a character boundary."""
    return detail.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
