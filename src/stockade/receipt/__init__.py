"""Receipts: a signed record of every run, made by the supervisor, that anyone can verify later.

    run ─► account ─► statement ─► keys ─► chain        made, signed, linked to the one before
                                             │
                          verify ◄───────────┴──► a file

`account` gathers what is known about one run, `statement` defines the content of a receipt, `keys` holds the
signing keys, `chain` is the log of a state directory, and `verify` needs only a receipt and a public key.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.receipt.keys import public_key
    from stockade.receipt.statement import Receipt, Who
    from stockade.receipt.verify import verify

__all__ = [
    "Receipt",
    "Who",
    "public_key",
    "verify",
]

#: Public names and their modules, which load on first use.
_LAZY = {
    "Receipt": "stockade.receipt.statement",
    "Who": "stockade.receipt.statement",
    "public_key": "stockade.receipt.keys",
    "verify": "stockade.receipt.verify",
}


def _load(name: str) -> object:
    import importlib

    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # otherwise type checkers would believe that every name exists
    __getattr__ = _load
