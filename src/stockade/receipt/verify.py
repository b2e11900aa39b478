"""Whether a receipt is true: needs the receipt and a public key, and nothing of the host that made it.

Each way to fail has a name (`ReceiptError.failure`), so that a program can
tell a forged receipt from one that proves less than was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from stockade.controls import Control, Grade
from stockade.errors import PolicyError, ReceiptError
from stockade.receipt import crypto
from stockade.receipt.statement import NOTHING, ORPHANED, Receipt, to_sign

if TYPE_CHECKING:
    from stockade.policy import Policy
    from stockade.receipt.chain import Chain
    from stockade.sandbox.result import Result

#: A public key: PEM, or the 32 bytes themselves.
PublicKey = bytes | str


def verify(
    receipt: Receipt | bytes | str,
    public_key: PublicKey | Sequence[PublicKey],
    *,
    policy: Policy | None = None,
    require: Iterable[Control | str] = (),
    result: Result | None = None,
) -> Receipt:
    """Return the receipt if it is true, or raise a `ReceiptError` that names what is wrong.

    Every given key must have signed it. `policy` must be the one that was in force, every control of
    `require` must have been enforced in full, and `result` must be the one the receipt was made for.

    >>> import stockade
    >>> from stockade.receipt import keys
    >>> from stockade import state
    >>> result = stockade.run(["echo", "hello"])
    >>> import os
    >>> home = state.state_dir(os.environ, os.path.expanduser("~"))
    >>> key = keys.find(home, "").public
    >>> stockade.verify(result.receipt, key, require=["network.none"], result=result).id.partition("-")[0]
    '1'
    """
    if not isinstance(receipt, Receipt):
        receipt = Receipt.decode(receipt.encode() if isinstance(receipt, str) else receipt)
    given = [public_key] if isinstance(public_key, bytes | str) else list(public_key)
    raw = [_raw(key) for key in given]
    if not raw:
        raise PolicyError("there is no key to verify with", hint="name at least one public key")
    signed_by(receipt, {crypto.key_id(key): key for key in raw}, every=True)
    if policy is not None:
        check_policy(receipt, policy)
    check_controls(receipt, require)
    if result is not None:
        check_result(receipt, result)
    return receipt


def signed_by(receipt: Receipt, known: Mapping[str, bytes], *, every: bool) -> set[str]:
    """The ids of the keys whose signatures were checked and are right; a wrong one, or none, is refused.

    `known` are the keys that are trusted, by their ids; with `every` each of them must have signed.
    A signature of any other key, be it the maker's, is not looked at and not among what is returned.
    """
    data = to_sign(receipt.payload)
    right: set[str] = set()
    for signature in receipt.signatures:
        if signature.keyid in right:
            raise ReceiptError(
                f"the receipt has two signatures of key {signature.keyid[:16]}", failure="malformed"
            )
        key = known.get(signature.keyid)
        if key is None:
            continue
        if not crypto.verifies(key, signature.sig, data):
            raise ReceiptError(
                f"the signature of key {signature.keyid[:16]} is not over this: something was changed",
                failure="signature",
            )
        right.add(signature.keyid)
    missing = known.keys() - right if every else set()
    if not right or missing:
        by = ", ".join(signature.keyid[:16] for signature in receipt.signatures)
        wanted = f", and not by {', '.join(sorted(id[:16] for id in missing))}" if missing and right else ""
        raise ReceiptError(
            f"the receipt is signed by a key that was not given: {by}{wanted}",
            failure="unknown-key",
            hint="get the public key from whoever made it: `stockade keys export`",
        )
    if receipt.signatures[0].keyid != receipt.predicate.key:
        raise ReceiptError(
            f"the receipt names key {receipt.predicate.key[:16]} as its maker's, and another signed first",
            failure="unknown-key",
        )
    return right


def check_policy(receipt: Receipt, policy: Policy) -> None:
    """Refuse a receipt of a run under another policy."""
    if receipt.predicate.policy != policy.hash:
        raise ReceiptError(
            f"the run was under policy {receipt.predicate.policy[:16]}, not {policy.hash[:16]}",
            failure="policy",
            hint="flags and a default workspace are part of a policy: `stockade plan` prints its hash",
        )


def nothing_seen(receipt: Receipt) -> str:
    """Why a receipt claims no control at all; empty where it does claim some."""
    if receipt.predicate.controls:
        return ""
    if receipt.predicate.event is not None:
        return f"it is of no run: {receipt.predicate.who.action} was recorded"
    if receipt.predicate.ending.error == ORPHANED:
        return "the supervisor was killed: the program may have run, and nobody saw behind which walls"
    return "nothing was started"


def check_controls(receipt: Receipt, required: Iterable[Control | str]) -> None:
    """Refuse a receipt of a run in which a control was not enforced in full."""
    seen = receipt.predicate.controls
    for name in required:
        try:
            control = Control(name)
        except ValueError:
            known = ", ".join(one.value for one in Control)
            raise PolicyError(f"{name!r} is not a control", hint=f"known: {known}") from None
        if control not in seen:
            why = nothing_seen(receipt) or "the policy did not ask for it"
            raise ReceiptError(f"{control} is not known to have been enforced: {why}", failure="weaker")
        if seen[control].grade in (Grade.WEAKER, Grade.ABSENT):
            raise ReceiptError(
                f"{control} was not enforced in full: {seen[control].grade}, by {seen[control].mechanism}",
                failure="weaker",
            )


def check_result(receipt: Receipt, result: Result) -> None:
    """Refuse a result that is not the one the receipt was made for.

    A receipt that says nothing of it was not made for it. Only a stream may be missing of which the
    result has nothing either.
    """
    from stockade.receipt.making import changes_digest, result_digest
    from stockade.receipt.statement import digest

    found = {"changes": changes_digest(result.changes), "result": result_digest(result)}
    if not result.truncated:  # else the rest is in a file, or was passed through
        found |= {"stdout": digest(result.stdout), "stderr": digest(result.stderr)}
    said = receipt.subjects
    for name, digested in found.items():
        if name not in said and name in ("stdout", "stderr") and not getattr(result, name):
            continue  # it went past us
        if name not in said:
            raise ReceiptError(f"the receipt says nothing of the {name} of a run", failure="result")
        if said[name] != digested:
            raise ReceiptError(f"the receipt was made for another {name}", failure="result")


class Walk:
    """Follows a chain, and says where it is not one. It begins with the first receipt that it is shown.

    With `every`, each key must have made receipts of the chain, or have signed all of them beside their
    makers: keys are rotated, so no maker's key is on all of them. A key that is known vouches for the one
    that takes its place, so that the first key of a chain is enough to follow it; once that has made a
    receipt, the one before makes no more.
    """

    def __init__(self, known: Mapping[str, bytes], *, whole: bool, every: bool = False) -> None:
        self._known = dict(known)
        self._given = frozenset(known)
        self._every = every
        #: The keys that have made receipts, and for each key the first place that it has not signed.
        self._makers: set[str] = set()
        self._unsigned: dict[str, int] = {}
        #: For each key that another has vouched for, which one; and those whose successor has signed.
        self._before: dict[str, str] = {}
        self._replaced: set[str] = set()
        #: Which chain; the place that comes next, 0 for any; and the hash that the next must name.
        self._chain = ""
        self._next, self._previous = (1, NOTHING) if whole else (0, "")
        self.count = 0

    def step(self, receipt: Receipt, place: int | None = None) -> None:
        """The next receipt, at its place in the log; ReceiptError where the chain breaks."""
        right = signed_by(receipt, self._known, every=False)
        said = receipt.predicate
        if said.key in self._replaced:
            raise ReceiptError(
                f"receipt {said.sequence} is of key {said.key[:16]}, in whose place is another by now",
                failure="unknown-key",
            )
        self._makers |= right & {said.key}
        if said.key in right and said.key in self._before:
            self._replaced.add(self._before[said.key])
        if said.event is not None and said.event.key and said.key in right:
            self._introduce(receipt, said.event.key)
        for key in self._given - right:
            self._unsigned.setdefault(key, said.sequence)
        here = self._next or said.sequence
        if place is not None and place != said.sequence:
            raise ReceiptError(f"in place {place} is receipt {said.sequence}", failure="swapped")
        if self._chain not in ("", said.chain):
            raise ReceiptError(f"receipt {said.sequence} is from another chain", failure="swapped")
        if said.sequence > here:
            raise ReceiptError(
                f"receipt {here} is missing: {said.sequence} comes after {here - 1}", failure="missing-link"
            )
        if said.sequence < here:
            raise ReceiptError(f"receipt {said.sequence} comes again", failure="swapped")
        if self._previous not in ("", said.previous):
            raise ReceiptError(
                f"receipt {here} follows another one than that in place {here - 1}", failure="broken-link"
            )
        self._chain, self._next, self._previous = said.chain, here + 1, receipt.hash
        self.count += 1

    def _introduce(self, receipt: Receipt, public: str) -> None:
        """Know the key that takes its maker's place, if that has signed the record too."""
        try:
            key = bytes.fromhex(public)
        except ValueError:
            key = b""
        id = crypto.key_id(key)
        signed = next((one.sig for one in receipt.signatures if one.keyid == id), b"")
        if len(key) != crypto.KEY_BYTES or not crypto.verifies(key, signed, to_sign(receipt.payload)):
            raise ReceiptError(
                f"receipt {receipt.predicate.sequence} names a new key that has not signed it",
                failure="signature",
            )
        self._known[id] = key
        self._before[id] = receipt.predicate.key

    def end(self) -> int:
        """How many receipts there were; ReceiptError where a key is missing that must have signed."""
        missing = sorted(self._unsigned.keys() - self._makers) if self._every else []
        for key in missing:
            raise ReceiptError(
                f"receipt {self._unsigned[key]} is not signed by key {key[:16]}",
                failure="unknown-key",
                hint="name the keys of their makers, and besides only such as signed each of them",
            )
        return self.count


def check_log(log: Chain, known: Mapping[str, bytes], *, every: bool = False) -> int:
    """Follow the whole log of a state directory, and return how many receipts it has."""
    from stockade.receipt.chain import row_of

    walk = Walk(known, whole=True, every=every)
    for entry in log.all():
        walk.step(entry.receipt, entry.place)
        if entry.receipt.predicate.chain != log.id:
            raise ReceiptError(f"receipt {entry.place} is from another chain", failure="swapped")
        if entry.row != row_of(entry.receipt.predicate, entry.receipt.hash):
            raise ReceiptError(
                f"what the log notes of receipt {entry.place} is not what that says", failure="damaged"
            )
    last = log.rows(newest=1)
    if last and last[0].sequence != walk.count:
        raise ReceiptError(f"receipt {walk.count + 1} is missing from the log", failure="missing-link")
    return walk.end()


def _raw(key: PublicKey) -> bytes:
    data = key.encode() if isinstance(key, str) else key
    return data if len(data) == crypto.KEY_BYTES else crypto.read_public(data, "the key")
