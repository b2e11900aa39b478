"""Files and directories as the wire contract has them: bodies, modes, and names in queries.

A mode is its octal digits written as a decimal number: 644 means 0644. A name
that is not UTF-8 cannot be text in JSON: answers show its bytes as `\\xNN`, and
a query can name it by its percent-encoded bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import parse_qsl

import msgspec
from litestar import Request, Response

from stockade.errors import DiskFullError, LimitError
from stockade.sandbox.file_worker_calls import FileFacts
from stockade.server.wire.errors import INVALID_REQUEST, MISSING_QUERY, TOO_LARGE, ApiError
from stockade.workspace.files.identity_files import Permission

FileType = Literal["file", "directory", "symlink", "other"]
_TYPES: dict[str, FileType] = {"file": "file", "directory": "directory", "link": "symlink"}
#: The moments that a date can show; a program can set any time on a file.
_EARLIEST, _LATEST = datetime(1, 1, 1, tzinfo=UTC).timestamp(), datetime(9999, 12, 31, tzinfo=UTC).timestamp()
#: How many parameters a query may have.
MOST_PARAMETERS = 4096


class FileInfoBody(msgspec.Struct, frozen=True):
    """One file, directory or link."""

    path: str
    type: FileType
    size: int
    modified_at: datetime
    created_at: datetime
    owner: str
    group: str
    mode: int

    @classmethod
    def of(cls, facts: FileFacts) -> FileInfoBody:
        """Describe a file; where nothing records when it was made, the last change stands for it."""
        return cls(
            path=facts.path.decode("utf-8", "backslashreplace"),
            type=_TYPES.get(facts.kind, "other"),
            size=facts.size,
            modified_at=_moment(facts.modified),
            created_at=_moment(facts.modified if facts.created is None else facts.created),
            owner=facts.owner,
            group=facts.group,
            mode=int(f"{facts.mode:o}"),
        )


class PermissionBody(msgspec.Struct, frozen=True):
    """A mode, an owner and a group; what is absent or null stays as it is, and so does mode 0."""

    mode: int | None = None
    owner: str | None = None
    group: str | None = None

    def permission(self) -> Permission:
        """Return it as file workers take it."""
        return Permission(mode_of(self.mode), self.owner or "", self.group or "")


class MoveBody(msgspec.Struct, frozen=True):
    """What to move, and where to."""

    src: str
    dest: str


class ReplaceBody(msgspec.Struct, frozen=True):
    """A text and what replaces it."""

    old: str
    new: str = ""


class ReplacedBody(msgspec.Struct, frozen=True, rename="camel"):
    """How often a text was replaced."""

    replaced_count: int


def mode_of(digits: int | None) -> int | None:
    """Return the mode that octal digits mean: 644 is 0o644; None for none."""
    if not digits:
        return None
    try:
        mode = int(str(digits), 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o7777:
        raise ApiError(
            400, INVALID_REQUEST, f"mode: {digits} is not a mode; write its octal digits, such as 644"
        )
    return mode


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(min(max(seconds, _EARLIEST), _LATEST), UTC)


class Query:
    """The parameters of a request, whose values may be any bytes."""

    def __init__(self, request: Request[Any, Any, Any]) -> None:
        text = request.scope["query_string"].decode("latin-1")
        try:
            pairs = parse_qsl(
                text, keep_blank_values=True, errors="surrogateescape", max_num_fields=MOST_PARAMETERS
            )
        except ValueError:
            raise ApiError(
                400, INVALID_REQUEST, f"the query has more than {MOST_PARAMETERS} parameters"
            ) from None
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name, []).append(value)

    def one(self, name: str, default: str | None = None) -> str:
        """Return the only or last value of a parameter; without a default it is required."""
        values = [value for value in self._values.get(name, ()) if value]
        if values:
            return values[-1]
        if default is None:
            raise ApiError(400, MISSING_QUERY, f"{name}: the query must have this parameter")
        return default

    def many(self, name: str) -> list[str]:
        """Return all values of a parameter, of which there must be one."""
        self.one(name)
        return [value for value in self._values[name] if value]

    def number(self, name: str, least: int) -> int | None:
        """Return a whole number, or None if the query has none."""
        text = self.one(name, "")
        if not text:
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) >= least):
            raise ApiError(400, INVALID_REQUEST, f"{name}: must be a whole number, at least {least}")
        return int(text)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Answer 413 where a program has made more files, or larger ones, than a call looks at."""
    try:
        yield
    except DiskFullError:
        raise
    except LimitError as error:
        raise ApiError(413, TOO_LARGE, f"{error.message} ({error.hint})") from None


def nothing() -> Response[bytes]:
    """Return the answer of a call that has nothing to say."""
    return Response(b"", status_code=200, media_type="text/plain")
