"""Verify receipts: needs a receipt and a public key, and nothing from the host that made it.

Each kind of failure has a name (`ReceiptError.failure`), so that a program can tell a forged receipt from one
that proves less than it requires.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from stockade.controls import Control, Grade
from stockade.errors import PolicyError, ReceiptError
from stockade.linux.sha256 import Sha256Stream
from stockade.policy import Policy
from stockade.receipt import ed25519
from stockade.receipt.batch import MOST, check_head
from stockade.receipt.statement import NOTHING, ORPHANED, PRUNED, RECORDED, Receipt, kept_line, to_sign
from stockade.result import Result

if TYPE_CHECKING:
    from stockade.receipt.chain import Chain

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
    """Return the receipt if it is valid, or raise a `ReceiptError` that names what is wrong.

    Every given key must have signed it. `policy` must be the one that was in force, every control of
    `require` must have been enforced in full, and `result` must be the one the receipt was made for.

    >>> import stockade
    >>> result = stockade.run(["echo", "hello"])
    >>> key = stockade.receipt.public_key()
    >>> stockade.verify(result.receipt, key, require=["network.none"], result=result).id.partition("-")[0]
    '1'
    """
    if not isinstance(receipt, Receipt):
        receipt = Receipt.decode(_bytes(receipt))
    given = [public_key] if isinstance(public_key, bytes | str) else list(public_key)
    raw = [_raw(key) for key in given]
    if not raw:
        raise PolicyError("there is no key to verify with", hint="name at least one public key")
    signed_by(receipt, {ed25519.key_id(key): key for key in raw}, every=True)
    if policy is not None:
        check_policy(receipt, policy)
    check_controls(receipt, require)
    if result is not None:
        check_result(receipt, result)
    return receipt


def signed_by(receipt: Receipt, known: Mapping[str, bytes], *, every: bool) -> set[str]:
    """Check the signatures of trusted keys and return the ids of these keys; refuse a wrong one, or none.

    `known` are the trusted keys by their ids; with `every` each of them must have signed. A signature of any
    other key, even the first one, is neither checked nor returned. A receipt without a signature of its own
    is as good as its head.
    """
    if not receipt.signatures:
        return signed_by(_head_of(receipt), known, every=every)
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
        if not ed25519.verifies(key, signature.sig, data):
            raise ReceiptError(
                f"the signature of key {signature.keyid[:16]} does not match: the receipt was changed",
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
            hint="get the public key from the host that made it: `stockade keys export` prints it there",
        )
    if receipt.signatures[0].keyid != receipt.predicate.key:
        raise ReceiptError(
            f"the receipt says that key {receipt.predicate.key[:16]} signed first, but another key did",
            failure="unknown-key",
        )
    return right


def _head_of(receipt: Receipt) -> Receipt:
    head = receipt.head
    if head is None or not head.signatures:
        raise ReceiptError(
            f"receipt {receipt.predicate.sequence} is not signed yet, or its head is missing",
            failure="unsigned",
            hint=f"where it was made, `stockade receipts export {receipt.id}` prints it with its head",
        )
    check_head(receipt, head)
    return head


def check_policy(receipt: Receipt, policy: Policy) -> None:
    """Refuse a receipt of a run under another policy."""
    if receipt.predicate.policy != policy.hash:
        raise ReceiptError(
            f"the run was under policy {receipt.predicate.policy[:16]}, not under {policy.hash[:16]}",
            failure="policy",
            hint="flags and a default workspace are part of a policy: `stockade plan` prints its hash",
        )


def nothing_seen(receipt: Receipt) -> str:
    """Return why a receipt has no controls; empty if it has some."""
    if receipt.predicate.controls:
        return ""
    if receipt.predicate.event is not None:
        return f"the receipt records {receipt.predicate.who.action}, and no run"
    if receipt.predicate.ending.error == ORPHANED:
        return "the supervisor was killed: the program may have run, and its walls are not known"
    return "nothing was started"


def check_controls(receipt: Receipt, required: Iterable[Control | str]) -> None:
    """Refuse a receipt of a run in which a control was not enforced in full."""
    seen = receipt.predicate.controls
    for name in required:
        try:
            control = Control(name)
        except ValueError:
            known = ", ".join(one.value for one in Control)
            raise PolicyError(f"{name!r} is not a control", hint=f"write one of: {known}") from None
        if control not in seen:
            why = nothing_seen(receipt) or "the policy did not ask for it"
            raise ReceiptError(
                f"the receipt does not show that {control} was enforced: {why}", failure="weaker"
            )
        if seen[control].grade in (Grade.WEAKER, Grade.ABSENT):
            raise ReceiptError(
                f"{control} was not enforced in full: {seen[control].grade}, by {seen[control].mechanism}",
                failure="weaker",
            )


def check_result(receipt: Receipt, result: Result) -> None:
    """Refuse a result that is not the one the receipt was made for.

    The receipt must have a digest of each part. Only a stream may be missing, if the result has none of it.
    """
    from stockade.receipt.builder import changes_digest, decisions_digest, result_digest
    from stockade.receipt.statement import digest

    digests = {"changes": changes_digest(result), "result": result_digest(result)}
    if not result.truncated:  # otherwise the rest is in a spill file, or was only passed on
        digests |= {"stdout": digest(result.stdout), "stderr": digest(result.stderr)}
    subjects = receipt.subjects
    for name, expected in digests.items():
        if name not in subjects and name in ("stdout", "stderr") and not getattr(result, name):
            continue  # the supervisor did not read this stream
        if name not in subjects:
            raise ReceiptError(f"the receipt has no digest of the {name}", failure="result")
        if subjects[name] != expected:
            raise ReceiptError(f"the receipt was made for a different {name}", failure="result")
    network = receipt.predicate.network
    if network.mode == "rules" and network.decisions != decisions_digest(result):
        raise ReceiptError("the receipt was made for other network decisions", failure="result")


class Gap(NamedTuple):
    """Receipts that are missing before a place, and what a checkpoint must say to explain that."""

    #: The first one that is missing, and the last.
    first: int
    through: int
    #: The hash of the last one, and the digest of all receipts before it that are there.
    hash: str
    kept: str


class ChainCheck:
    """Follows a chain receipt by receipt, and raises where it breaks. It may begin anywhere in the chain.

    Receipts may be missing if the last checkpoint that follows explains exactly those: `checkpoint` is that
    record afterwards. A receipt without a signature must be listed by the head that follows.

    With `every`, each key must have signed some receipts of the chain first, or have cosigned all of them:
    keys are rotated, so no first signer is on all of them. A known key vouches for its successor, so the
    first key of a chain is enough to follow it. Once the successor has signed a receipt, the old key signs
    no more.
    """

    def __init__(self, known: Mapping[str, bytes], *, whole: bool, every: bool = False) -> None:
        self._known = dict(known)
        self._given = frozenset(known)
        self._every = every
        #: The keys that signed a receipt first, and for each key the first place that it did not sign.
        self._makers: set[str] = set()
        self._unsigned: dict[str, int] = {}
        #: For each key that another one vouched for, the other one; and the keys whose successor has signed.
        self._before: dict[str, str] = {}
        self._replaced: set[str] = set()
        #: The id of the chain; the next place, 0 for any; and the hash that the next receipt must name.
        self._chain = ""
        self._next, self._previous = (1, NOTHING) if whole else (0, "")
        #: Digests the receipts so far, for the next gap; the last gap, and the last checkpoint.
        self._so_far = Sha256Stream()
        self._gap: Gap | None = None
        self._checkpoint: Receipt | None = None
        #: The last receipts so far that no head has signed.
        self._waiting: list[Receipt] = []
        self.count = 0
        #: How many of them are records from before the gap.
        self.kept = 0

    def step(self, receipt: Receipt, place: int | None = None) -> None:
        """Check the next receipt, and its place in the log; raise ReceiptError if the chain breaks."""
        waits = not receipt.signatures and receipt.head is None
        right = set[str]() if waits else signed_by(receipt, self._known, every=False)
        predicate = receipt.predicate
        if receipt.signatures:
            for one in self._waiting:
                check_head(one, receipt)
            self._waiting.clear()
        elif waits:
            self._waiting.append(receipt)
            if len(self._waiting) > MOST:
                _head_of(self._waiting[0])
        if predicate.key in self._replaced:
            raise ReceiptError(
                f"receipt {predicate.sequence} is signed by key {predicate.key[:16]}, "
                "which another key has replaced",
                failure="unknown-key",
            )
        self._makers |= right & {predicate.key}
        if predicate.key in right and predicate.key in self._before:
            self._replaced.add(self._before[predicate.key])
        if predicate.event is not None and predicate.event.key and predicate.key in right:
            self._introduce(receipt, predicate.event.key)
        for key in set[str]() if waits else self._given - right:
            self._unsigned.setdefault(key, predicate.sequence)
        here = self._next or predicate.sequence
        if place is not None and place != predicate.sequence:
            raise ReceiptError(
                f"place {place} of the log has receipt {predicate.sequence}", failure="swapped"
            )
        if self._chain not in ("", predicate.chain):
            raise ReceiptError(f"receipt {predicate.sequence} is from another chain", failure="swapped")
        if predicate.sequence < here:
            raise ReceiptError(f"receipt {predicate.sequence} comes a second time", failure="swapped")
        if predicate.sequence > here:
            last = predicate.sequence - 1
            self._gap = Gap(here, last, predicate.previous, self._so_far.hexdigest())
            self.kept = self.count
        elif self._previous not in ("", predicate.previous):
            raise ReceiptError(
                f"receipt {here} does not name the hash of receipt {here - 1}", failure="broken-link"
            )
        if predicate.event is not None and predicate.event.pruned is not None:
            self._checkpoint = receipt
        self._chain, self._next, self._previous = predicate.chain, predicate.sequence + 1, receipt.hash
        self._so_far.update(kept_line(predicate.sequence, receipt.hash))
        self.count += 1

    def _introduce(self, receipt: Receipt, public: str) -> None:
        """Trust the successor of a key, if it has signed the record of the rotation too."""
        try:
            key = bytes.fromhex(public)
        except ValueError:
            key = b""
        id = ed25519.key_id(key)
        signed = next((one.sig for one in receipt.signatures if one.keyid == id), b"")
        if len(key) != ed25519.KEY_BYTES or not ed25519.verifies(key, signed, to_sign(receipt.payload)):
            raise ReceiptError(
                f"receipt {receipt.predicate.sequence} names a new key that has not signed it",
                failure="signature",
            )
        self._known[id] = key
        self._before[id] = receipt.predicate.key

    @property
    def last(self) -> int:
        """The place of the last receipt so far."""
        return max(0, self._next - 1)

    @property
    def checkpoint(self) -> Receipt | None:
        """The checkpoint that explains why the beginning of the chain is missing, if it is."""
        return None if self._gap is None else self._checkpoint

    @property
    def removed_through(self) -> int:
        """The place of the last receipt that is missing; 0 if none is."""
        return 0 if self._gap is None else self._gap.through

    def _explain_gap(self, gap: Gap) -> None:
        """Refuse missing receipts unless the last checkpoint says that exactly those were removed."""
        said = self._checkpoint.predicate.event if self._checkpoint is not None else None
        removal = None if said is None else said.pruned
        if removal is not None and (removal.through, removal.hash, removal.kept) == gap[1:]:
            return
        why = (
            "" if self._checkpoint is None else f", and checkpoint {self._checkpoint.id} does not explain it"
        )
        raise ReceiptError(
            f"receipt {gap.first} is missing: {gap.through + 1} follows {gap.first - 1}{why}",
            failure="missing-link",
        )

    def end(self) -> int:
        """Return the number of receipts; ReceiptError if one is missing, or if a key has not signed."""
        if self._waiting:
            _head_of(self._waiting[0])
        if self._gap is not None:
            self._explain_gap(self._gap)
        missing = sorted(self._unsigned.keys() - self._makers) if self._every else []
        for key in missing:
            raise ReceiptError(
                f"receipt {self._unsigned[key]} is not signed by key {key[:16]}",
                failure="unknown-key",
                hint="name the keys that signed first, and of the others only keys that signed every receipt",
            )
        return self.count


def check_log(log: Chain, known: Mapping[str, bytes], *, every: bool = False) -> int:
    """Follow the whole log of a state directory, and return how many receipts it has."""
    return walk_log(log, known, every=every).count


def walk_log(log: Chain, known: Mapping[str, bytes], *, every: bool = False) -> ChainCheck:
    """Follow the whole log of a state directory, and return what was found on the way."""
    while True:
        before = _checkpoints(log)
        try:
            return _walk_log(log, known, every=every)
        except ReceiptError:
            if _checkpoints(log) == before:  # otherwise another process pruned the log meanwhile
                raise


def _checkpoints(log: Chain) -> list[tuple[object, ...]]:
    where = "action = ? AND outcome = ?"
    return log.look(f"SELECT MAX(sequence) FROM receipts WHERE {where}", (PRUNED, RECORDED))


def _walk_log(log: Chain, known: Mapping[str, bytes], *, every: bool) -> ChainCheck:
    from stockade.receipt.tail import row_of

    walk = ChainCheck(known, whole=True, every=every)
    for entry in log.all():
        walk.step(entry.receipt, entry.place)
        if entry.receipt.predicate.chain != log.id:
            raise ReceiptError(f"receipt {entry.place} is from another chain", failure="swapped")
        if entry.row != row_of(entry.receipt.predicate, entry.receipt.hash):
            raise ReceiptError(
                f"the log's columns about receipt {entry.place} do not match the receipt", failure="damaged"
            )
    last = log.rows(newest=1)
    if last and last[0].sequence != walk.last:
        raise ReceiptError(f"receipt {walk.last + 1} is missing from the log", failure="missing-link")
    walk.end()
    return walk


def _raw(key: PublicKey) -> bytes:
    data = _bytes(key)
    return data if len(data) == ed25519.KEY_BYTES else ed25519.read_public(data, "the key")


def _bytes(given: bytes | str) -> bytes:
    """Return text as bytes; a lone surrogate becomes invalid UTF-8, which the decoder refuses."""
    return given.encode("utf-8", "surrogatepass") if isinstance(given, str) else given
