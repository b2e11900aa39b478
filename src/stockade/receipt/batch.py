"""Receipts that are signed together, under a policy with `receipts = "batched"`.

Such a receipt is appended to the log with its place and its link, but without a signature. A head follows: a
signed event of the same chain that lists the hashes of all receipts since the last signature. So the head
proves each of them, and tells nothing else about the others. A process signs a head

- before the receipt after `MOST`, and before anything that is signed on its own;
- `LONGEST` seconds after the first receipt of a batch;
- when it ends, and when it reads the log.

If a process is killed before that, the next one that opens the log signs the head. It cannot know whether
anything has changed the receipts meanwhile, so a head lists those of other processes apart, as found.

A receipt without a head is not signed, and never verifies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from stockade.errors import ReceiptError
from stockade.receipt.statement import Receipt, digest
from stockade.receipt.tail import NewReceipt

#: The most receipts that one head signs.
MOST = 64
#: Seconds after which the receipts of an idle process are signed.
LONGEST = 1.0


def unsigned_end(receipts: Sequence[NewReceipt]) -> list[NewReceipt]:
    """Return the receipts after the last one that is signed."""
    found: list[NewReceipt] = []
    for one in receipts:
        found = [] if one.signatures else [*found, one]
    return found


def hashes(
    chain: str, waiting: Sequence[NewReceipt], own: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the hashes for a head: of this process's own receipts, and of those that it found.

    A receipt that it found must be one of the chain, at its place.
    """
    signed, found = [], []
    for one in waiting:
        hash = digest(one.payload)
        if hash in own:
            signed.append(hash)
            continue
        link = Receipt(one.payload, ()).predicate
        if (link.chain, link.sequence, link.previous, hash) != (
            chain,
            one.row.sequence,
            one.previous,
            one.row.hash,
        ):
            raise ReceiptError(
                f"receipt {one.row.sequence}, which is not signed yet, is not what was appended",
                failure="damaged",
                hint="move the files of the log aside together, and keep them: they may be evidence",
            )
        found.append(hash)
    return tuple(signed), tuple(found)


def check_head(receipt: Receipt, head: Receipt) -> None:
    """Refuse a head that does not list a receipt. The caller checks the head's own signatures."""
    said, listed = receipt.predicate, head.predicate.event
    if head.predicate.chain != said.chain or head.predicate.sequence <= said.sequence:
        raise ReceiptError(
            f"head {head.predicate.sequence} is not of the chain after the receipt", failure="swapped"
        )
    # A process that finds receipts may have another key: the one before was lost.
    own = listed is not None and head.predicate.key == said.key and receipt.hash in listed.signed
    if listed is None or not (own or receipt.hash in listed.found):
        raise ReceiptError(
            f"record {head.id} does not list the receipt: it was changed, or has another head",
            failure="signature",
        )


class HeadTimer:
    """Calls `sign` in a thread of its own, `LONGEST` seconds after it was started."""

    def __init__(self, sign: Callable[[], object]) -> None:
        self._sign = sign
        self._is_running = False

    def start(self) -> None:
        """Start it, unless it runs. The caller holds the lock of the log, which `sign` takes."""
        if not self._is_running:
            self._is_running = True
            timer = threading.Timer(LONGEST, self._fire)
            timer.daemon = True
            timer.start()

    def _fire(self) -> None:
        self._is_running = False  # first: a receipt that comes now is signed below, or starts it again
        self._sign()
