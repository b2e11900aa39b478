"""The variables of commands and sessions: of the sandbox, of the `EXECD_ENVS` file, and of the request."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping

from stockade.errors import StockadeError
from stockade.server.execd.env_file import MOST_BYTES, expand, parse_env_file

#: The variable that names the file.
NAME = "EXECD_ENVS"
#: Opens a file inside for reading, without blocking, and returns a descriptor that the caller owns.
OpenFile = Callable[[str], Awaitable[int]]


class SandboxVariables:
    """The variables that programs of one sandbox start with."""

    def __init__(self, base: Mapping[str, str], open_file: OpenFile) -> None:
        """Take the sandbox's own variables and a way to open files inside."""
        self._base = dict(base)
        self._open_file = open_file

    async def added(self, envs: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables that a program has besides the sandbox's own; those of the request win."""
        path = (envs or {}).get(NAME) or self._base.get(NAME, "")
        content = await self._content(path) if path else b""
        return {**parse_env_file(content, self._base), **(envs or {})}

    def directory(self, cwd: str | None, added: Mapping[str, str]) -> str | None:
        """Return where a program starts: `~` and `$NAME` mean what they mean inside."""
        return expand(cwd, {**self._base, **added}) if cwd else None

    async def _content(self, path: str) -> bytes:
        """Read the file; one that is missing or that cannot be read sets nothing."""
        try:
            file = await self._open_file(path)
        except (StockadeError, OSError):
            return b""
        try:
            return os.read(file, MOST_BYTES)
        except OSError:
            return b""
        finally:
            os.close(file)
