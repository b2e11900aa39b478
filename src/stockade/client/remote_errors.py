"""The errors of the client: what the server refused, as the library's own errors.

`except stockade.NotFoundError:` catches a file that is missing inside, wherever the sandbox is.
"""

from __future__ import annotations

import builtins

import msgspec

from stockade.errors import (
    ConflictError,
    DeniedError,
    LimitError,
    NotFoundError,
    PolicyError,
    StockadeError,
    UnsupportedError,
)

#: How many characters of an answer that is no error of ours the message quotes.
QUOTED = 200


class ServerError(StockadeError):
    """The server refused a call, or failed.

    `code` is the server's name for the reason, `status` the HTTP status, and `request_id` what the server's
    log calls the request.
    """

    def __init__(
        self, message: str, *, code: str = "", status: int = 0, request_id: str = "", hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.status = status
        self.request_id = request_id


class RemotePolicyError(ServerError, PolicyError):
    """The request is malformed, or asks for something that the server always refuses."""


class RemoteDeniedError(ServerError, DeniedError):
    """The key is missing or wrong, or a wall refused a file."""


class RemoteNotFoundError(ServerError, NotFoundError):
    """There is no such sandbox, session, run or file."""


class RemoteConflictError(ServerError, ConflictError):
    """The state of the sandbox does not allow the call, or a commit found conflicts."""


class RemoteLimitError(ServerError, LimitError):
    """The request or its answer is larger than the server allows."""


class RemoteUnsupportedError(ServerError, UnsupportedError):
    """The server does not have the call, or its machine cannot enforce what the call needs."""


class UnreachableError(StockadeError, builtins.ConnectionError):
    """The server did not answer."""


_KINDS: dict[int, type[ServerError]] = {
    400: RemotePolicyError,
    401: RemoteDeniedError,
    403: RemoteDeniedError,
    404: RemoteNotFoundError,
    409: RemoteConflictError,
    413: RemoteLimitError,
    416: RemotePolicyError,
    429: RemoteLimitError,
    501: RemoteUnsupportedError,
    503: RemoteUnsupportedError,
}


class _Refusal(msgspec.Struct):
    """The body of every error."""

    code: str = ""
    message: str = ""
    hint: str = ""


def error_of(status: int, body: bytes, request_id: str) -> ServerError:
    """Return the error that an answer stands for."""
    try:
        refusal = msgspec.json.decode(body, type=_Refusal)
    except msgspec.DecodeError:
        refusal = _Refusal(message=body.decode("utf-8", "replace")[:QUOTED])
    message = refusal.message or f"the server answered with status {status}"
    kind = _KINDS.get(status, ServerError)
    return kind(message, code=refusal.code, status=status, request_id=request_id, hint=refusal.hint)
