"""The types of plain ASGI, loosely."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

AsgiScope: TypeAlias = Any
AsgiReceive: TypeAlias = Callable[[], Awaitable[Any]]
AsgiSend: TypeAlias = Callable[[Any], Awaitable[None]]
