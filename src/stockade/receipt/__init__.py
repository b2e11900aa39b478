"""Receipts: a signed record of every run, made by the supervisor, that anyone can verify later.

    run ─► account ─► statement ─► keys ─► chain        made, signed, linked to the one before
                                             │
                          verify ◄───────────┴──► a file

`account` gathers what is known about one run, `statement` defines the content of a receipt, `keys` holds the
signing keys, `chain` is the log of a state directory, and `verify` needs only a receipt and a public key.
"""

from __future__ import annotations

from stockade.lazy import loader

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

if not TYPE_CHECKING:  # otherwise type checkers would believe that every name exists
    __getattr__ = loader(__name__, _LAZY)
