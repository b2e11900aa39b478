"""Everything that runs behind the walls, as the untrusted program or beside it.

Nothing here is trusted, and no code outside this package runs inside. Its
modules use only Python's standard library, so that one file can be copied into
any sandbox.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.inside.delegate_request import DelegatedResult, delegate

__all__ = ["DelegatedResult", "delegate"]


def _load(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'stockade.inside' has no attribute {name!r}")
    from stockade.inside import delegate_request

    value = globals()[name] = getattr(delegate_request, name)
    return value


if not TYPE_CHECKING:  # otherwise type checkers would believe that every name exists
    __getattr__ = _load
