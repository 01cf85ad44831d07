"""Every error Paceline raises on purpose.

PacelineError
├── ConfigError                 names the option and the accepted values
│   ├── StorageError            a file of the program's own cannot be read or written
│   └── DocumentError           a file cannot be read as a document; carries OpenAI's `code`
├── ParserLost                  the process that reads a document was killed from outside: try again
├── WebError                    a page may not or cannot be fetched, or a web search failed
├── EndpointError               a stranger's endpoint refuses, is lost, or sends what is no answer
├── RequestError                carries the HTTP status and OpenAI's `type`, `code` and `param`
├── LinkError
│   ├── LocalProtocolError      this side broke the protocol: a bug here
│   ├── RemoteProtocolError     the peer did: the link is closed with a code, nothing else suffers
│   └── LinkClosed              gone: the driver turns it into the event `LinkLost`
└── EngineError                 out of memory, bad weights, a segment that does not fit
    ├── EngineRefusal           a RequestError too: servers that run the model refuse, are busy or are not there
    └── EngineLost              the device is unusable: the program ends

Asserts are for mistakes of this code; a user's input never reaches one.
"""

from __future__ import annotations

import errno
from typing import Literal


class PacelineError(Exception):
    """Base of all errors raised on purpose. Its text is a sentence for the user."""


class ConfigError(PacelineError):
    """A setting, a path or a model name cannot be used. The text says which and what would be accepted."""


class StorageError(ConfigError):
    """A file of the program's own cannot be read or written. The text names it for the operator; clients hear less.

    full: the disk has no room. away: the database cannot be reached, and may come back.
    """

    def __init__(self, message: str, *, full: bool = False, away: bool = False) -> None:
        super().__init__(message)
        self.full = full
        self.away = away


def other_format(file: object, found: object, read: int, advice: str) -> ConfigError:
    """What to raise for a file of a format that is not read here. advice: what to do without the program that wrote it,
    as an imperative."""
    return ConfigError(
        f"{file} was written by another version of Paceline (format {found}, this one reads {read}): use that version, "
        f"or {advice}."
    )


def is_full(error: OSError) -> bool:
    """True if it says that there is no room: of the disk, of a quota, or of a limit on the size of files."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


AT_LIMITS = (
    "No thread or process can be started, or no memory had: raise the limit on tasks (pids.max of a container, "
    "TasksMax of a service, ulimit -u) or on address space (ulimit -v)."
)


def is_exhausted(error: BaseException) -> bool:
    """True if it says that the system gives no thread, process or memory now; it may later (`AT_LIMITS`)."""
    match error:
        case RuntimeError():
            return "can't start new thread" in str(error)
        case OSError():
            is_write = hasattr(error, "characters_written")  # to what others have set to refuse rather than wait
            return error.errno in (errno.EAGAIN, errno.ENOMEM) and not is_write
    return isinstance(error, MemoryError)


class DocumentError(ConfigError):
    """A file cannot be read as a document. The text says why and what to do; `code`: of OpenAI's `last_error`; `empty`:
    it holds nothing, or blanks alone."""

    def __init__(
        self, message: str, *, code: Literal["unsupported_file", "invalid_file"] = "invalid_file", empty: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.empty = empty


class ParserLost(PacelineError):
    """The process that read a document was killed, and not by its limits. Reading it again may succeed."""


class WebError(PacelineError):
    """A page may not or cannot be fetched, or a web search failed. The text says why, and names no private address."""


class EndpointError(PacelineError):
    """An endpoint of a stranger refuses, is lost, or sends what is no answer. status: of a refusal; 0: of none."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class RequestError(PacelineError):
    """A request cannot be served. Becomes an HTTP answer in OpenAI's error shape. retry_after: s; None: soon."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.retry_after = retry_after


class LinkError(PacelineError):
    """Base of errors of the link between a device and a cloud."""


class LocalProtocolError(LinkError):
    """This side tried to send what the link protocol does not allow."""


class RemoteProtocolError(LinkError):
    """The peer sent what the link protocol does not allow. `close_code`: the code to close the link with."""

    def __init__(self, message: str, *, close_code: int) -> None:
        super().__init__(message)
        self.close_code = close_code


class LinkClosed(LinkError):
    """The link is gone."""


class EngineError(PacelineError):
    """The engine cannot do what was asked: out of blocks, bad weights, a row that was never written."""


class EngineRefusal(EngineError, RequestError):
    """The servers that run the model refuse what was asked (400), are busy (429), or none answers (503)."""


class EngineLost(EngineError):
    """The device that runs the model cannot be used any more, nor repaired from this process."""
