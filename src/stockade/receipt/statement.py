"""The content of a receipt, and its encoding.

A receipt is an in-toto Statement (version 1) in a DSSE envelope. The payload is canonical JSON: sorted keys,
no spaces, whole numbers, UTF-8. The signature covers exactly those bytes, so a verifier does not have to
normalise anything. The envelope is canonical too: if any byte differs, it is a different receipt or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Annotated, Any

import msgspec

from stockade.controls import Grade
from stockade.errors import PolicyError, ReceiptError
from stockade.linux.sha256 import hexdigest

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:stockade:receipt:1"
#: The type of a record that is about no run, but about a decision that later runs depend on.
EVENT_TYPE = "urn:stockade:event:1"
#: The outcome of such a record.
RECORDED = "recorded"
#: The action of a record that names a new key.
ROTATED = "key-rotated"
#: The action of a checkpoint: a record that older receipts were removed.
PRUNED = "receipts-pruned"
#: The action of a head: a record that signs the receipts before it that have no signature of their own.
SIGNED = "receipts-signed"
#: The action of a record that a run without walls is about to begin.
BEGUN = "agent-unwalled"
#: The backend of a run without walls, because its agent's sandbox is switched off.
UNWALLED = "none"
#: The hash that the first receipt of a chain names as the one before.
NOTHING = "0" * 64
#: The error in the receipt of a run whose supervisor was killed.
ORPHANED = "SupervisorDied"
#: The most characters in a field of `Who`.
MOST_WORDS = 1000
#: A receipt is a few kilobytes.
LARGEST = 1 << 20
#: The maker's signature and those beside it.
MOST_SIGNATURES = 16
KEY_ID_DIGITS, SIGNATURE_BYTES = 64, 64

_encoder = msgspec.json.Encoder(order="sorted")


class Who(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who asked for a run, in the caller's own words. Stockade does not check any of it."""

    agent: str = ""
    category: str = ""
    action: str = ""
    words: str = ""


class CommandDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of the program, and a digest of the command, whose arguments may hold secrets."""

    program: str
    #: SHA-256 of all words of the command, each followed by a NUL byte.
    words: str


class EvidenceSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One control: the clause that asked for it, its mechanism, how that was observed, and how reliably."""

    requested: str
    mechanism: str
    observed: str
    grade: Grade


class RunEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a run ended. `error`, `stage` and `errno` are set if it was refused."""

    outcome: str
    exit_code: int
    signal: int | None = None
    truncated: bool = False
    error: str = ""
    stage: str = ""
    errno: int = 0
    #: Left out unless the list of changes is incomplete.
    changes_cut: bool | msgspec.UnsetType = msgspec.UNSET


class ResourceUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run used: times in microseconds, memory in bytes, and which part of the kernel counted it."""

    cpu_user: int
    cpu_system: int
    peak_memory: int
    peak_tasks: int | None
    bytes_written: int | None
    source: dict[str, str]
    #: Left out without network rules.
    bytes_sent: int | msgspec.UnsetType = msgspec.UNSET
    bytes_received: int | msgspec.UnsetType = msgspec.UNSET


class HostFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine that a run was on, and the version of Stockade."""

    kernel: str
    machine: str
    landlock: int
    stockade: str
    uid: int


class EgressWalls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The walls around the egress process of a sandbox, as the supervisor observed them."""

    plan: str
    #: The SHA-256 of the system call filter that its gate installed, and of the one that it added itself.
    filter: str
    relay_filter: str
    #: The inode number of each of its own namespaces.
    namespaces: dict[str, int]
    #: The ports to which Landlock lets it connect; None where Landlock knows no ports.
    ports: tuple[int, ...] | None
    #: The version of Stockade that its template was loaded from.
    template: str


class ResolverWalls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The walls around the resolver that looks names up for the egress process."""

    plan: str
    filter: str
    #: Its user on the host.
    uid: int


class NetworkCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many connections, names and requests a run asked for, by what became of them."""

    connections_allowed: int = 0
    #: Refused by a rule or a bound, or failed.
    connections_refused: int = 0
    names_answered: int = 0
    names_refused: int = 0
    #: Connections from outside to published ports.
    published: int = 0
    #: Left out without rules for requests.
    requests_allowed: int | msgspec.UnsetType = msgspec.UNSET
    requests_refused: int | msgspec.UnsetType = msgspec.UNSET


class RuleChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change of the network rules while a sandbox lived: a rule came into force, or went out of it."""

    #: Seconds since 1970.
    at: float
    rule: str
    in_force: bool


class Protection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What protected something secret outside the sandbox: each "observed", or "absent".

    The arguments and results of functions are sealed, and in ordinary memory. The values of secrets are in
    locked memory, and pass from one to another through a socket that no other process has.
    """

    #: Encrypted on its way between processes.
    sealed: str = "absent"
    #: In memory that is never swapped out, as the kernel shows it.
    locked: str = "absent"
    #: Overwritten by the supervisor once it has passed it on.
    wiped: str = "absent"


class SecretUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One secret of a sandbox: never its value."""

    name: str
    hosts: tuple[str, ...]
    #: Where in a request it may stand.
    forms: tuple[str, ...]
    #: `from_env`, `from_file` or `from_command`.
    source: str


class Network(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The network of a run: "none" (a loopback of its own), "rules" or "open" (the host's).

    All fields but the mode are left out unless the mode is "rules", or ports are published.
    """

    mode: str
    #: The rules in force when the run before it ended, or when the sandbox began. Left out if they are longer
    #: than a receipt has room for.
    rules: tuple[str, ...] = ()
    counts: NetworkCounts | None = None
    #: The SHA-256 of the decisions in the result, as canonical JSON. Left out if the run has no result.
    decisions: str = ""
    #: Why the result does not list all decisions.
    cut: str = ""
    #: What was read back from the kernel: where every address leads inside, and which sockets listen.
    routes: tuple[str, ...] = ()
    listeners: tuple[str, ...] = ()
    #: None if nothing was started.
    egress: EgressWalls | None = None
    resolver: ResolverWalls | None = None
    #: How the rules changed since then, in order, and how many changes there is no room for.
    changes: tuple[RuleChange, ...] = ()
    more_changes: int = 0
    #: The published ports, each as HOST:PORT:PORT with the host's side first.
    published: tuple[str, ...] = ()
    #: The secrets whose values the egress process had, how often they were read anew, and their protection.
    secrets: tuple[SecretUse, ...] = ()
    secrets_refreshed: int = 0
    secrets_protection: Protection | None = None
    #: What the user was asked about and answered, in order: `HOST:PORT once`, `run`, `policy` or `no`.
    asked: tuple[str, ...] = ()
    #: The proxies of the host through which connections left, as `https HOST:PORT`: then names were resolved
    #: there, and no address was checked.
    proxies: tuple[str, ...] = ()


class Removal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which receipts were removed from the log: all up to `through` but those that were kept."""

    #: The place of the last receipt that was removed, and its hash, which the next one names.
    through: Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
    hash: str
    #: How many were removed now.
    count: int
    #: The SHA-256 of the lines that `kept_line` makes of the records before `through` that stay.
    kept: str


def kept_line(place: int, hash: str) -> bytes:
    """Return the line about one kept record, whose digest a checkpoint has."""
    return f"{place} {hash}\n".encode()


class Event(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What was decided. The agent that it concerns, its name and its reason are in `who`."""

    #: The agent from now on: its policy file, the SHA-256 of that file, and whether it is sandboxed.
    policy: str = ""
    hash: str = ""
    enabled: bool = True
    #: The public key that signs from now on, in hexadecimal digits.
    key: str = ""
    #: The receipts that were removed, in a checkpoint.
    pruned: Removal | None = None
    #: In a head, the hashes of receipts that it signs: those that the signing process made, and those that it
    #: found in the log because another process had not signed them.
    signed: tuple[str, ...] = ()
    found: tuple[str, ...] = ()


class Parent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sandbox and the plan of the run that asked for this one from inside."""

    sandbox: str
    plan: str


class PipelinePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pipeline that a run was a stage of, and its place there."""

    #: The pipeline's name, and an id that the receipts of all its stages have.
    name: str
    id: str
    #: `stage-0`, `source-data`, `consumer` and so on, and how many stages there are.
    place: str
    stages: int
    #: The place of the stage at the other end of each descriptor that led to one. What passed there went
    #: through a pipe of the kernel: the supervisor did not read it, so no receipt has a digest of it.
    not_digested: dict[str, str]


class Predicate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything that a receipt says about one run, or about an event (`event` is not None then)."""

    #: The chain, the place in it, and the SHA-256 of the payload before it.
    chain: str
    sequence: Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
    previous: str
    #: The id of the key that signed first.
    key: str
    sandbox: str
    who: Who
    command: CommandDigest
    backend: str
    policy: str
    plan: str
    filter: str
    controls: dict[str, EvidenceSummary]
    #: What the supervisor observed before the first program; None if nothing was started.
    evidence: dict[str, Any] | None
    network: Network
    ending: RunEnd
    usage: ResourceUse
    started: str
    #: Microseconds.
    duration: int
    host: HostFacts
    event: Event | None = None
    parent: Parent | None = None
    #: The hashes of the receipts of the runs that the program asked for.
    children: tuple[str, ...] = ()
    #: For each pattern of `deny`: how many paths it matched when the sandbox was made. Left out if empty.
    matched: dict[str, Annotated[int, msgspec.Meta(ge=0)]] = {}
    #: The name that the user gave the sandbox. Left out if it has none.
    name: str = ""
    #: For the call of a function: what protected its arguments and its result. Left out for other runs.
    protection: Protection | None = None
    #: Left out unless the run was a stage of a pipeline.
    pipeline: PipelinePlace | None = None
    #: Whether an observer watched the programs. Left out if none did.
    observed: bool = False


class Subject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that the receipt is about, with its digest."""

    name: str
    digest: dict[str, str]


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The in-toto statement around a predicate."""

    subject: tuple[Subject, ...]
    predicate: Predicate
    type: str = msgspec.field(default=STATEMENT_TYPE, name="_type")
    predicate_type: str = msgspec.field(default=PREDICATE_TYPE, name="predicateType")


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One signature of a receipt."""

    keyid: str
    sig: bytes


class _HeadEnvelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    payload: bytes
    signatures: tuple[Signature, ...]
    payload_type: str = msgspec.field(default=PAYLOAD_TYPE, name="payloadType")


class _Envelope(_HeadEnvelope, frozen=True, forbid_unknown_fields=True):
    head: _HeadEnvelope | msgspec.UnsetType = msgspec.UNSET


@lru_cache(maxsize=1)
def _decoders() -> tuple[msgspec.json.Decoder[Statement], msgspec.json.Decoder[_Envelope]]:
    """Return the decoders, made when first needed: a process that makes receipts may never read one."""
    return msgspec.json.Decoder(Statement), msgspec.json.Decoder(_Envelope)


class Receipt(msgspec.Struct, frozen=True, dict=True):
    """A signed record of one run. Trust it only after `stockade.verify` has accepted it.

    >>> import stockade
    >>> receipt = stockade.run(["true"]).receipt
    >>> receipt.predicate.ending.outcome, str(receipt.predicate.controls["files"].grade)
    ('exited', 'read from the kernel by the parent')
    """

    payload: bytes
    #: Empty under `receipts = "batched"`: then the head signs it.
    signatures: tuple[Signature, ...]
    #: The signed record that lists the receipt's hash, if the receipt has no signature of its own.
    head: Receipt | None = None

    def __repr__(self) -> str:
        """Show what the receipt says about its run. It may be forged: only `verify` knows."""
        try:
            said = self.predicate
        except ReceiptError:
            return f"<Receipt {self.hash[:12]}: malformed>"
        return f"<Receipt {self.id}: {said.command.program!r:.100} {said.ending.outcome!r:.40}>"

    @cached_property
    def statement(self) -> Statement:
        """The decoded payload; raises ReceiptError if it is malformed."""
        try:
            statement = _decoders()[0].decode(self.payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise malformed(f"its payload is not a statement of Stockade: {error}") from None
        kind = PREDICATE_TYPE if statement.predicate.event is None else EVENT_TYPE
        if (statement.type, statement.predicate_type) != (STATEMENT_TYPE, kind):
            raise malformed(f"its payload is of another kind: {statement.predicate_type!r}")
        return statement

    @property
    def predicate(self) -> Predicate:
        """What the receipt says about the run."""
        return self.statement.predicate

    @property
    def subjects(self) -> dict[str, str]:
        """The SHA-256 of stdout, stderr, the changes and the result, as far as the supervisor saw them."""
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
        """Return the receipt with the signature of a second private key (PEM) besides the first one."""
        from stockade.receipt import ed25519

        def unknown() -> bytes:
            raise ReceiptError(f"{name} is encrypted", failure="not-made", hint="decrypt it first")

        if not self.signatures:
            raise ReceiptError(
                f'receipt {self.id} was made under receipts = "batched", and has no signature of its own',
                failure="not-made",
                hint="cosign the head that signs it: `stockade verify` names it",
            )
        signer = ed25519.Signer(ed25519.read_private(key, unknown, name))
        if any(one.keyid == signer.id for one in self.signatures):
            return self  # it has signed already
        first, *others = self.signatures
        others.append(Signature(signer.id, signer.sign(to_sign(self.payload))))
        return Receipt(self.payload, (first, *sorted(others, key=lambda one: one.keyid)))

    def with_head(self) -> Receipt:
        """Return the receipt with the head of your own log that signs it, if it has no signature of its own.

        Under `receipts = "batched"` a result has its receipt before the receipt is signed.
        """
        if self.signatures or self.head is not None:
            return self
        from stockade.linux.user import Caller
        from stockade.receipt import chain
        from stockade.state import state_dir

        caller = Caller.current()
        return chain.of(state_dir(caller.environ, caller.home)).find(self.id)

    def encode(self) -> bytes:
        """Return the canonical envelope: one line of JSON."""
        head = self.head
        proof = msgspec.UNSET if head is None else _HeadEnvelope(head.payload, head.signatures)
        return _encoder.encode(_Envelope(self.payload, self.signatures, head=proof))

    @classmethod
    def decode(cls, data: bytes) -> Receipt:
        """Return the receipt in an envelope. Only `stockade.verify` checks its signatures."""
        if len(data) > LARGEST:
            raise malformed("it is too large for a receipt")
        line = data.removesuffix(b"\n")
        try:
            envelope = _decoders()[1].decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise malformed(f"it is not an envelope: {error}") from None
        given = envelope.head
        for one in (envelope,) if given is msgspec.UNSET else (envelope, given):
            if one.payload_type != PAYLOAD_TYPE:
                raise malformed("its envelope has another type of payload")
        head = None
        if given is not msgspec.UNSET:
            if envelope.signatures or not given.signatures:
                raise malformed("it has a signature and a head, or a head without a signature")
            head = cls(given.payload, checked_signatures(given.signatures))
        receipt = cls(envelope.payload, checked_signatures(envelope.signatures), head)
        if receipt.encode() != line:
            raise malformed("its envelope is not in the form in which Stockade writes it")
        return receipt


def checked_signatures(signatures: tuple[Signature, ...]) -> tuple[Signature, ...]:
    """Return the signatures if their form is valid; refuse the receipt otherwise.

    No signature covers this part, so a false key id must not get into a message or onto a terminal.
    """
    if len(signatures) > MOST_SIGNATURES:
        raise malformed(f"it has more than {MOST_SIGNATURES} signatures")
    for one in signatures:
        if not isinstance(one.keyid, str) or not isinstance(one.sig, bytes):
            raise malformed("one of its signatures has the wrong type")
        if len(one.keyid) != KEY_ID_DIGITS or one.keyid.strip("0123456789abcdef"):
            raise malformed("one of its signatures has no valid key id")
        if len(one.sig) != SIGNATURE_BYTES:
            raise malformed("one of its signatures has the wrong length")
    return signatures


def digest(data: bytes) -> str:
    """Return the SHA-256 in hexadecimal digits."""
    return hexdigest(data)


def canonical(value: object) -> bytes:
    """Encode a value as canonical JSON, the form that is signed: sorted keys, no spaces."""
    return _encoder.encode(value)


def to_sign(payload: bytes) -> bytes:
    """Return the bytes that a signature covers: DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def who(given: Who | Mapping[str, str] | None, over: Who | None = None) -> Who:
    """Validate who asks for a run; fields that are not given come from `over`."""
    base = over or Who()
    if given is None:
        return base
    if isinstance(given, Who):
        fields = {name: value for name in Who.__struct_fields__ if (value := getattr(given, name))}
    else:
        fields = dict(given)
    for name, value in fields.items():
        if name not in Who.__struct_fields__:
            known = ", ".join(Who.__struct_fields__)
            raise PolicyError(f"who: there is no field {name!r}", hint=f"write one of: {known}")
        if not isinstance(value, str) or len(value) > MOST_WORDS:
            raise PolicyError(f"who: {name} must be text of at most {MOST_WORDS} characters")
        fields[name] = text(value)
    return msgspec.structs.replace(base, **fields)


def text(words: str) -> str:
    """Return text that JSON can hold: bytes of a file name that are not UTF-8 are replaced."""
    if words.isascii():
        return words
    return words.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def malformed(why: str) -> ReceiptError:
    return ReceiptError(f"the receipt is malformed: {why}", failure="malformed")
