"""Errors as clients see them: a status, a code and one sentence, never a path of the host or a trace.

Every error answer has the body `{"code", "message"}`. The published SDKs read both fields, and one of them
takes an error without a body for a success.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from stockade.errors import (
    ConflictError,
    DeniedError,
    DiskFullError,
    LimitError,
    NotFoundError,
    PolicyError,
    SetupError,
    StockadeError,
    UnsupportedError,
)
from stockade.errors import TimeoutError as RunTimeoutError

if TYPE_CHECKING:
    from litestar import Request, Response
    from litestar.exceptions import HTTPException, ValidationException

INVALID_REQUEST = "INVALID_REQUEST_BODY"
MISSING_QUERY = "MISSING_QUERY"
RUNTIME_ERROR = "RUNTIME_ERROR"
NOT_FOUND = "NOT_FOUND"
FILE_NOT_FOUND = "FILE_NOT_FOUND"
INVALID_FILE = "INVALID_FILE"
CONFLICT = "CONFLICT"
DENIED = "DENIED"
LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
TOO_LARGE = "TOO_LARGE"
NOT_SUPPORTED = "NOT_SUPPORTED"
METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
SERVICE_UNAVAILABLE = "SERVICE_UNAVAILABLE"
UNKNOWN = "UNKNOWN"

#: The status of what can be asked again in a moment.
TOO_MANY = 429

#: The status and the code of each kind of Stockade's errors; the first that matches counts.
KINDS: tuple[tuple[type[StockadeError], int, str], ...] = (
    (PolicyError, 400, INVALID_REQUEST),
    (UnsupportedError, 503, SERVICE_UNAVAILABLE),
    (NotFoundError, 404, FILE_NOT_FOUND),
    (ConflictError, 409, CONFLICT),
    (DiskFullError, 507, LIMIT_EXCEEDED),
    (LimitError, 500, LIMIT_EXCEEDED),
    (RunTimeoutError, 504, RUNTIME_ERROR),
    (DeniedError, 403, DENIED),
)
#: The status and the code of the kernel's errors about files; others are 500.
NUMBERS: dict[int, tuple[int, str]] = {
    errno.ENOENT: (404, FILE_NOT_FOUND),
    errno.ENOTDIR: (400, INVALID_FILE),
    errno.EISDIR: (400, INVALID_FILE),
    errno.EEXIST: (409, INVALID_FILE),
    errno.ENOTEMPTY: (409, INVALID_FILE),
    errno.EINVAL: (400, INVALID_FILE),
    errno.ELOOP: (400, INVALID_FILE),
    errno.ENAMETOOLONG: (400, INVALID_FILE),
    errno.EXDEV: (400, INVALID_FILE),
    errno.EACCES: (403, DENIED),
    errno.EPERM: (403, DENIED),
    errno.EROFS: (403, DENIED),
    errno.ENOSPC: (507, LIMIT_EXCEEDED),
    errno.EDQUOT: (507, LIMIT_EXCEEDED),
    errno.EFBIG: (507, LIMIT_EXCEEDED),
}
#: The codes of statuses that the framework answers with.
STATUSES = {401: "INVALID_API_KEY", 404: NOT_FOUND, 405: METHOD_NOT_ALLOWED, 413: TOO_LARGE}

#: What is said instead of the standard phrases of statuses.
MESSAGES = {
    404: "there is no such call; /openapi.json of the server lists them",
    405: "this path has no such method; /openapi.json of the server lists the calls",
}
#: Names of parameters in handlers that clients know by another one; the body as a whole has none.
NAMES = {"data": "", "page_size": "pageSize", "states": "state", "idempotency_key": "Idempotency-Key"}
CGROUPS = "/sys/fs/cgroup"
NO_BODY = "the request needs a body in JSON"
#: What the decoder calls the kinds of values, and what we call them.
KINDS_OF_JSON = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
}
BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}

_EXPECTED = re.compile(r"Expected `([^`]*)`(?: (>=|<=|>|<) (\S+?))?(?:, got `([^`]*)`)?( - at `.*`)?")
_LACKS = re.compile(r"Object missing required field (`[^`]*`)( - at `.*`)?")
_UNKNOWN = re.compile(r"Object contains unknown field (`[^`]*`)( - at `.*`)?")
_NO_CHOICE = re.compile(r"Invalid enum value (.*?)( - at `.*`)?")
_NO_TIME = "Invalid RFC3339 encoded datetime"
_MALFORMED = re.compile(r"JSON is malformed: (.*)")

_log = logging.getLogger("stockade.server")


class ApiError(Exception):
    """An answer that is an error. The message is for the client: it names no path of the host."""

    def __init__(
        self, status: int, code: str, message: str, *, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        # A name of a file can have bytes that are no text, which JSON cannot carry.
        self.message = message.encode("utf-8", "backslashreplace").decode()
        # The SDKs repeat a call after 429: without a time they choose one, and a long one makes them hang.
        self.headers = ({"Retry-After": "1"} if status == TOO_MANY else {}) | (headers or {})

    @property
    def body(self) -> bytes:
        """The body of the answer."""
        return msgspec.json.encode({"code": self.code, "message": self.message})


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is an error."""

    code: str
    message: str


class ServerPaths:
    """The directories of the host that no message may name: the state directory and what lies there, and
    cgroups.
    """

    roots: tuple[str, ...] = ()

    @classmethod
    def hide(cls, text: str) -> str:
        """Replace each path below one of the directories."""
        for root in (*cls.roots, CGROUPS):
            while (start := text.find(root)) >= 0:
                end = start + len(root)  # which may have a space in it
                while end < len(text) and text[end] not in " \t\n'\",;:)":
                    end += 1
                text = f"{text[:start]}(a file of the server){text[end:]}"
        return text


def api_error(error: BaseException) -> ApiError:
    """Return the answer for an error: of Stockade, of the kernel, of the framework, or of our own making."""
    # Here: `stockade purge` looks at the records of a server also where the framework is not installed.
    from litestar.exceptions import HTTPException

    if isinstance(error, ApiError):
        return error
    if isinstance(error, StockadeError):
        return _of_stockade(error)
    if isinstance(error, HTTPException):
        return _of_framework(error)
    if isinstance(error, msgspec.ValidationError | msgspec.DecodeError):
        return ApiError(400, INVALID_REQUEST, plain_words(str(error)))
    if isinstance(error, RecursionError | UnicodeDecodeError):  # the decoder of bodies lets these through
        return ApiError(400, INVALID_REQUEST, "the body is nested too deeply, or is not UTF-8")
    if isinstance(error, OSError) and error.errno is not None:
        status, code = NUMBERS.get(error.errno, (500, RUNTIME_ERROR))
        if status == 500:
            _log.error("an answer failed", exc_info=error)
        return ApiError(status, code, os.strerror(error.errno))
    _log.error("an answer failed", exc_info=error)
    return ApiError(500, UNKNOWN, "the server could not answer; its log says why")


def _of_stockade(error: StockadeError) -> ApiError:
    words = error.message
    if isinstance(error, UnsupportedError):
        # The fix is the operator's, and names directories of this machine.
        _log.warning("%s\n%s", words, error.hint)
        if error.missing:
            fixes = ["the server's operator can fix this, see `stockade doctor -v`", waiver_of(error)]
            words += f"\n({', or '.join(filter(None, fixes))})"
    elif error.hint:
        words = f"{words} ({error.hint})"
    words = ServerPaths.hide(words)
    for kind, status, code in KINDS:
        if isinstance(error, kind):
            return ApiError(status, code, words)
    if isinstance(error, OSError) and error.errno is not None:
        status, code = NUMBERS.get(error.errno, (500, RUNTIME_ERROR))
        return ApiError(status, code, words)
    _log.error("an answer failed", exc_info=error)
    return ApiError(500, RUNTIME_ERROR, words)


def create_error(error: BaseException) -> ApiError:
    """Return the answer for a sandbox or session that could not be made: 503 if its walls did not come up."""
    found = api_error(error)
    if isinstance(error, SetupError) and found.status == 500:
        return ApiError(503, SERVICE_UNAVAILABLE, found.message)
    return found


def waiver_of(error: UnsupportedError) -> str:
    """Say how the configuration waives the controls that this machine has in part; empty if it cannot.

    The error's own hint has the waiver of a policy, and none if a control is missing altogether.
    """
    _, waives, controls = error.hint.rpartition("accept = ")
    return f"waive it in the server's configuration (--config FILE): accept = {controls}" if waives else ""


def _of_framework(error: HTTPException) -> ApiError:
    from litestar.exceptions import ValidationException

    if isinstance(error, ValidationException):
        return ApiError(400, INVALID_REQUEST, _validation_words(error))
    status = error.status_code
    if status >= 500:
        _log.error("an answer failed", exc_info=error)
        return ApiError(status, UNKNOWN, "the server could not answer; its log says why")
    words = (
        MESSAGES.get(status, error.detail)
        if error.detail == HTTPStatus(status).phrase
        else plain_words(error.detail)
    )
    return ApiError(status, STATUSES.get(status, INVALID_REQUEST), words)


def _validation_words(error: ValidationException) -> str:
    """Name each field that is wrong, and what is wrong with it."""
    found = []
    for one in error.extra if isinstance(error.extra, list) else ():
        if isinstance(one, dict):
            key, words = one.get("key"), plain_words(str(one.get("message", "")))
            key = NAMES.get(str(key or ""), str(key or ""))
            found.append(f"{key}: {words}" if key else words)
    return "; ".join(found) or plain_words(error.detail)


def plain_words(text: str) -> str:
    """Say in plain words what is wrong with a value or a body; `text` is how the decoder puts it.

    >>> plain_words("Expected `int | null`, got `str`")
    'must be a whole number or null, not text'
    """
    if text == "Input data was truncated":
        return "the body is JSON that breaks off"
    if text == "'data'":  # the framework's word for the body
        return NO_BODY
    if text.startswith(_NO_TIME):
        return text.replace(_NO_TIME, "must be a time, such as 2027-01-31T12:00:00Z")
    if found := _MALFORMED.fullmatch(text):
        return f"the body is not JSON: {found[1]}"
    if found := _LACKS.fullmatch(text):
        return f"the field {found[1]} is missing{found[2] or ''}"
    if found := _UNKNOWN.fullmatch(text):
        return f"there is no field {found[1]}{found[2] or ''}"
    if found := _NO_CHOICE.fullmatch(text):
        return f"{found[1]} is none of its values; /openapi.json of the server lists them{found[2] or ''}"
    found = _EXPECTED.fullmatch(text)
    if found is None:
        return text
    kinds, bound, limit, given, where = found.groups()
    words = f"must be {_kinds(kinds)}"
    if limit:
        words += f", {BOUNDS[bound]} {limit}"
    return words + (f", not {_kinds(given)}" if given else "") + (where or "")


def _kinds(text: str) -> str:
    return " or ".join(KINDS_OF_JSON.get(kind, kind) for kind in text.split(" | "))


def error_response(_: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Answer with an error; the exception handler of both applications."""
    from litestar import Response

    found = api_error(error)
    return Response(
        found.body, status_code=found.status, media_type="application/json", headers=found.headers
    )
