"""What a receipt says, and its bytes.

An in-toto Statement (version 1) in a DSSE envelope. The payload is JSON in
one form only: keys sorted, no spaces, whole numbers, UTF-8. The signature is
over exactly those bytes, so nobody has to bring anything to a form to verify
it. The envelope has one form as well: a receipt in which any byte differs is
another receipt, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import msgspec

from stockade.digest import sha256
from stockade.errors import PolicyError, ReceiptError

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:stockade:receipt:1"
#: Of a record that is of no run: something was decided that later runs depend on.
EVENT_TYPE = "urn:stockade:event:1"
#: The outcome of such a record.
RECORDED = "recorded"
#: What the record of a new key is called.
ROTATED = "key-rotated"
#: What the record is called that such a run begins.
BEGUN = "agent-unwalled"
#: The backend of a run that had no walls, because its agent's sandbox is switched off.
UNWALLED = "none"
#: What the first receipt of a chain has before it.
NOTHING = "0" * 64
#: The error in a receipt that was made for a run whose supervisor was killed.
ORPHANED = "SupervisorDied"
#: The most that a caller may say about a run, in characters.
MOST_WORDS = 1000
#: A receipt is a few kilobytes.
LARGEST = 1 << 20

_encoder = msgspec.json.Encoder(order="sorted")


class Who(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who asked for a run, in the caller's own words. Nothing in it is checked or enforced."""

    agent: str = ""
    category: str = ""
    action: str = ""
    words: str = ""


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which program was asked for; its arguments may hold secrets, so they are digested."""

    program: str
    #: SHA-256 of all words of the command, each followed by a NUL byte.
    words: str


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One control: the clause that asked for it, how it was enforced, how that was seen, and how well."""

    requested: str
    mechanism: str
    observed: str
    grade: str


class Ending(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a run ended. `error`, `stage` and `errno` are those of a run that was refused."""

    outcome: str
    exit_code: int
    signal: int | None = None
    truncated: bool = False
    error: str = ""
    stage: str = ""
    errno: int = 0


class Used(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run used: times in microseconds, memory in bytes, and who counted it."""

    cpu_user: int
    cpu_system: int
    peak_memory: int
    peak_tasks: int | None
    bytes_written: int | None
    source: dict[str, str]


class HostFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where it ran, and what ran it."""

    kernel: str
    machine: str
    landlock: int
    stockade: str
    uid: int


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the network was: "none" (a loopback of its own) or "open" (the host's)."""

    mode: str


class Event(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What was decided. Whom it concerns, what it is called and why are in `who`: agent, action and words."""

    #: How the agent stands from now on: its policy file, the SHA-256 of that, whether it is sandboxed.
    policy: str = ""
    hash: str = ""
    enabled: bool = True
    #: The public key that signs from now on, in hexadecimal digits.
    key: str = ""


class Parent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run that asked for this one from inside its sandbox: its sandbox and its plan."""

    sandbox: str
    plan: str


class Predicate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything that is said about one run, or of an event; of that `event` is not None."""

    #: The log it is in, its place there, and the SHA-256 of the payload before it.
    chain: str
    sequence: int
    previous: str
    #: Of the key that signed first.
    key: str
    sandbox: str
    who: Who
    command: Command
    backend: str
    policy: str
    plan: str
    filter: str
    controls: dict[str, Seen]
    #: What was seen before the first program; None where nothing was started.
    evidence: dict[str, Any] | None
    network: Network
    ending: Ending
    usage: Used
    started: str
    #: Microseconds.
    duration: int
    host: HostFacts
    event: Event | None = None
    parent: Parent | None = None
    #: The hashes of the receipts of the runs that the program asked for.
    children: tuple[str, ...] = ()


class Subject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something the receipt is about, by its digest."""

    name: str
    digest: dict[str, str]


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """in-toto's frame around a predicate."""

    subject: tuple[Subject, ...]
    predicate: Predicate
    type: str = msgspec.field(default=STATEMENT_TYPE, name="_type")
    predicate_type: str = msgspec.field(default=PREDICATE_TYPE, name="predicateType")


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One signature of a receipt."""

    keyid: str
    sig: bytes


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    payload: bytes
    signatures: tuple[Signature, ...]
    payload_type: str = msgspec.field(default=PAYLOAD_TYPE, name="payloadType")


@lru_cache(maxsize=1)
def _decoders() -> tuple[msgspec.json.Decoder[Statement], msgspec.json.Decoder[_Envelope]]:
    """Made when they are first needed: whoever makes receipts need not read any."""
    return msgspec.json.Decoder(Statement), msgspec.json.Decoder(_Envelope)


class Receipt(msgspec.Struct, frozen=True, dict=True):
    """A signed record of one run. What it says counts once `stockade.verify` has passed it.

    >>> import stockade
    >>> receipt = stockade.run(["true"]).receipt
    >>> receipt.predicate.ending.outcome, receipt.predicate.controls["files"].grade
    ('exited', 'read from the kernel by the parent')
    """

    payload: bytes
    signatures: tuple[Signature, ...]

    def __repr__(self) -> str:
        return f"<Receipt {self.hash[:12]}>"

    @cached_property
    def statement(self) -> Statement:
        """The payload as a value; ReceiptError if it is none."""
        try:
            found = _decoders()[0].decode(self.payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise malformed(f"its payload is not a statement of Stockade's: {error}") from None
        kind = PREDICATE_TYPE if found.predicate.event is None else EVENT_TYPE
        if (found.type, found.predicate_type) != (STATEMENT_TYPE, kind):
            raise malformed(f"its payload is of another kind: {found.predicate_type!r}")
        return found

    @property
    def predicate(self) -> Predicate:
        """What it says about the run."""
        return self.statement.predicate

    @property
    def subjects(self) -> dict[str, str]:
        """The SHA-256 of stdout, stderr, the changes and the result, of those that were seen."""
        return {one.name: one.digest.get("sha256", "") for one in self.statement.subject}

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of its payload: what the next receipt of the chain names."""
        return digest(self.payload)

    @property
    def id(self) -> str:
        """Its place in its chain, and the beginning of its hash."""
        return f"{self.predicate.sequence}-{self.hash[:12]}"

    def cosigned(self, key: bytes, name: str = "the key") -> Receipt:
        """The receipt with the signature of a second private key, in PEM, beside its maker's."""
        from stockade.receipt import crypto

        def unknown() -> bytes:
            raise ReceiptError(f"{name} is encrypted", failure="not-made", hint="decrypt it first")

        signer = crypto.Signer(crypto.read_private(key, unknown, name))
        first, *others = (one for one in self.signatures if one.keyid != signer.id)
        if len(others) + 1 < len(self.signatures):
            return self  # it has signed already
        others.append(Signature(signer.id, signer.sign(to_sign(self.payload))))
        return Receipt(self.payload, (first, *sorted(others, key=lambda one: one.keyid)))

    def encode(self) -> bytes:
        """The envelope, in its only form: one line of JSON."""
        return _encoder.encode(_Envelope(self.payload, self.signatures))

    @classmethod
    def decode(cls, data: bytes) -> Receipt:
        """The receipt in an envelope. Whether it is true is for `stockade.verify` to say."""
        if len(data) > LARGEST:
            raise malformed("it is too large for a receipt")
        line = data.removesuffix(b"\n")
        try:
            found = _decoders()[1].decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise malformed(f"it is not an envelope: {error}") from None
        if found.payload_type != PAYLOAD_TYPE or not found.signatures:
            raise malformed("its envelope holds something else, or no signature")
        receipt = cls(found.payload, found.signatures)
        if receipt.encode() != line:
            raise malformed("its envelope is not in the form in which Stockade writes it")
        return receipt


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return sha256(data).hexdigest()


def canonical(value: object) -> bytes:
    """A value as JSON in the form that is signed: keys sorted, no spaces."""
    return _encoder.encode(value)


def to_sign(payload: bytes) -> bytes:
    """What a signature is over: DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def who(given: Who | Mapping[str, str] | None, over: Who | None = None) -> Who:
    """Who asks for a run; what is not said is as in `over`."""
    base = over or Who()
    if given is None:
        return base
    if isinstance(given, Who):
        said = {name: value for name in Who.__struct_fields__ if (value := getattr(given, name))}
    else:
        said = dict(given)
    for name, value in said.items():
        if name not in Who.__struct_fields__:
            raise PolicyError(f"who: there is no {name!r}", hint=f"known: {', '.join(Who.__struct_fields__)}")
        if not isinstance(value, str) or len(value) > MOST_WORDS:
            raise PolicyError(f"who: {name} must be text of at most {MOST_WORDS} characters")
        said[name] = text(value)
    return msgspec.structs.replace(base, **said)


def text(words: str) -> str:
    """Text that JSON can hold: what is not UTF-8 in a file name is replaced."""
    if words.isascii():
        return words
    return words.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def malformed(why: str) -> ReceiptError:
    return ReceiptError(f"the receipt is malformed: {why}", failure="malformed")
