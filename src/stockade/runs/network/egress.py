"""The network of a sandbox with rules, from its launch to its end.

While the walls of the sandbox come up, so do those of its egress process: both gates work at the same time.
As soon as the sandbox has its network namespace, the resident is asked for the listeners in it. When both are
up, the supervisor checks the listeners by itself, hands them to the egress process and closes its own copies.
So if the egress process ends, the kernel refuses every connection, because nothing listens any more.

What the egress process decides, it writes to memory that the supervisor reads when it wants to.
"""

from __future__ import annotations

import _socket as socket
import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from stockade._version import __version__
from stockade.egress.records import NO_TOTALS, RawRecord, RecordReader, Totals, create_records
from stockade.errors import SetupError
from stockade.gate import client
from stockade.gate.network import DNS_PORT, NetworkListeners, NetworkRequest
from stockade.gate.operations import Plan
from stockade.linux.root_certificates import system_bundle
from stockade.policy.model import NETWORK_LIMITS
from stockade.policy.net_rules import ASK, PROXY_PORT, parse_rule, ports_of
from stockade.receipt.statement import EgressWalls, NetworkCounts, ResolverWalls, RuleChange
from stockade.result import Decision
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.launch import LaunchedSandbox, launch_with_retry
from stockade.runs.network.decisions import NetworkUse, change_decision, decisions, denials
from stockade.runs.network.egress_process import EgressProcess, egress_plan, launch_egress
from stockade.runs.network.network_evidence import NetworkEvidence, observe_network
from stockade.runs.network.process_names import ProcessNames
from stockade.runs.network.published_ports import PublishedListeners, PublishedPort
from stockade.runs.network.resolver_process import connect_resolver
from stockade.runs.network.trust_files import TrustFiles, read_roots
from stockade.runs.network.upstream_proxy import proxies_of
from stockade.runs.prepare import RunPreparation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.runs.network.secret_values import SecretSources, SecretValues
    from stockade.runs.network.user_questions import UserQuestions

#: How many connections an egress process relays at once, and how long one may be silent, in seconds.
MOST_CONNECTIONS, IDLE_SECONDS = 1024, 3600
#: How long the resident may take to open the listeners.
LISTEN_SECONDS = 10.0
#: Between two looks at the records: seconds at least, and times as long as the last look took.
LOOK_SECONDS, LOOK_SHARE = 0.05, 10


class GenerationMark(NamedTuple):
    """How much one egress process had recorded at some moment."""

    cursor: int
    totals: Totals
    #: How often each shared record had been used, by its slot.
    times: dict[int, int]


class NetworkMark(NamedTuple):
    """How much all egress processes of a sandbox had recorded at some moment."""

    generations: tuple[GenerationMark, ...]
    #: How many changes of the rules there had been, and how many answers of the user.
    changes: int
    answers: int = 0


#: How an egress process ends that has handed over and has no connection left.
DONE = "with exit code 0"
NOTHING = GenerationMark(0, NO_TOTALS, {})


class EgressGeneration:
    """One egress process of a sandbox, and what it has recorded.

    A sandbox has another one each time its rules get a port. The last one accepts connections, and those
    before it relay what was under way when they handed over.
    """

    def __init__(self, process: EgressProcess, records: int) -> None:
        self.process = process
        self._descriptor = records
        self._reader = RecordReader(records)
        #: What the memory held last, once it is closed.
        self._last: tuple[list[tuple[int, RawRecord]], Totals] | None = None
        #: How many changes the last mark saw, and how often each record had been used then, by its slot.
        self._seen: tuple[int, dict[int, int]] = (0, {})
        self._crash: tuple[float, str] | None = None

    def crash(self) -> tuple[float, str] | None:
        """Return when and how it ended, if that was not after its last connection; None otherwise."""
        if self._crash is None and (found := self.process.ending()) is not None and found[1] != DONE:
            self._crash = found
        return self._crash

    def mark(self) -> GenerationMark:
        """Return how much is recorded now."""
        changes = self._reader.changes() if self._last is None else self._seen[0]
        if self._seen[0] != changes:
            self._seen = changes, {one.slot: one.times for _, one in self.changed_since(0)}
        return GenerationMark(changes, self.totals(), self._seen[1])

    def since(self, mark: GenerationMark) -> list[RawRecord]:
        """Return what was recorded since a mark."""
        return [_later(one, mark.times.get(one.slot, 0)) for _, one in self.changed_since(mark.cursor)]

    def changed_since(self, cursor: int) -> list[tuple[int, RawRecord]]:
        """Return the records that are new or changed since a cursor, each with that of its change."""
        if self._last is None:
            return self._reader.changed_since(cursor)
        return [one for one in self._last[0] if one[0] > cursor]

    def totals(self) -> Totals:
        """Return what it has counted."""
        return self._reader.totals() if self._last is None else self._last[1]

    def closed(self, events: Events) -> Steps[None]:
        """End the process, wait until it is gone, and keep what it has recorded."""
        if self._last is not None:
            return
        self.crash()
        try:
            try:
                yield from self.process.drained(events)
            finally:
                yield from self.process.closed(events)
        finally:
            self._last = self._reader.changed_since(0), self._reader.totals()
            os.close(self._descriptor)


class EndWatch:
    """A descriptor that becomes readable when nothing accepts connections any more.

    It stays the same when another egress process takes over.
    """

    def __init__(self) -> None:
        self._all = select.epoll()
        self._failed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._all.register(self._failed, select.EPOLLIN)
        self.descriptor = self._all.fileno()

    def add(self, process: EgressProcess) -> None:
        """Count the end of a process."""
        self._all.register(process.pidfd, select.EPOLLIN)

    def remove(self, process: EgressProcess) -> None:
        """Count its end no more."""
        if not process.is_closed:
            self._all.unregister(process.pidfd)

    def fail(self) -> None:
        """Become readable."""
        os.eventfd_write(self._failed, 1)

    def close(self) -> None:
        """Close it."""
        self._all.close()
        os.close(self._failed)


class EgressHandle:
    """The egress of one sandbox: its processes, what they have recorded, and the rules in force."""

    def __init__(
        self,
        process: EgressProcess,
        records: int,
        nudge: int,
        rules: tuple[str, ...],
        observed: NetworkEvidence | None,
        pid: int,
        resolver: ResolverWalls | None,
        published: tuple[PublishedPort, ...] = (),
        questions: int = -1,
        settings: Mapping[str, object] | None = None,
        user_questions: UserQuestions | None = None,
        secrets: SecretSources | None = None,
    ) -> None:
        #: Puts questions about names that no rule covers to the user; None if nobody is asked.
        self.questions = user_questions
        #: What every egress process of the sandbox is told besides the rules.
        self.settings = settings or {}
        #: None without secrets.
        self.secrets = secrets
        #: None without rules.
        self.resolver = resolver
        self.generations = [EgressGeneration(process, records)]
        #: The routes, addresses and listeners inside, as the kernel showed them; None without rules.
        self.observed = observed
        #: The sandbox's first process, which is not the gate if another program has made the namespaces.
        self.pid = pid
        #: All that were ever in force, in the order in which the egress processes count them.
        self.rules = list(rules)
        #: The places of those that are in force.
        self.active = list(range(len(rules)))
        #: The ports inside that have listeners, besides that of DNS.
        self.ports = ports_of([parse_rule(rule) for rule in rules])
        #: A port inside of Stockade's own, which has listeners too.
        self.proxy_port = (PROXY_PORT,) if self.settings.get("proxy") else ()
        self.published = published
        #: Whether the egress process can judge requests, because it has an authority that programs trust.
        self.judges = False
        self.changes: list[RuleChange] = []
        #: Held while the rules change.
        self.changing = threading.Lock()
        self.nudge = nudge
        self.names = ProcessNames(questions, pid)
        self._end_watch: EndWatch | None = None
        #: What the last result has told of.
        self._reported: NetworkMark | None = None
        self._closing = False
        self._ended: tuple[float, str] | None = None
        #: Whether the process that accepts connections is handing over, and may end.
        self._handing_over = False

    @property
    def process(self) -> EgressProcess:
        """The one that accepts connections."""
        return self.generations[-1].process

    @property
    def walls(self) -> EgressWalls:
        """The walls of the process that accepts connections."""
        return _walls(self.process)

    @property
    def proxies(self) -> tuple[str, ...]:
        """The proxies of the host through which connections leave, each as `KIND HOST:PORT`."""
        upstream = self.settings.get("upstream")
        found = upstream["proxies"].items() if isinstance(upstream, dict) else ()
        return tuple(f"{kind} {f'[{one[1]}]' if ':' in one[1] else one[1]}:{one[2]}" for kind, one in found)

    @property
    def in_force(self) -> tuple[str, ...]:
        """The rules that hold now."""
        return tuple(self.rules[place] for place in self.active)

    def rules_at(self, mark: NetworkMark | None) -> tuple[str, ...]:
        """Return the rules that were in force at a mark; without one, when the sandbox began."""
        found = dict.fromkeys(self.in_force)
        for change in reversed(self.changes[0 if mark is None else mark.changes :]):
            if change.in_force:
                found.pop(change.rule, None)
            else:
                found[change.rule] = None
        return tuple(found)

    def mark(self) -> NetworkMark | None:
        """Return where the last result ended, for a later `since`; None if there was none.

        What was decided between two runs, for a program in the background, belongs to the second: otherwise
        no result would have it.
        """
        return self._reported

    def _mark_now(self) -> NetworkMark:
        answers = 0 if self.questions is None else len(self.questions.answered)
        return NetworkMark(tuple(one.mark() for one in self.generations), len(self.changes), answers)

    def since(self, mark: NetworkMark | None) -> NetworkUse:
        """Return what was decided since a mark; without one, since the sandbox began."""
        mark = mark or NetworkMark((), 0)
        # Before the records are read: what comes meanwhile is in two results rather than in none.
        self._reported = self._mark_now()
        # Another thread may be changing the rules.
        generations, changes = tuple(self.generations), tuple(self.changes[mark.changes :])
        marks = (*mark.generations, *[NOTHING] * (len(generations) - len(mark.generations)))
        fresh = [
            (number, record)
            for number, (one, begin) in enumerate(zip(generations, marks, strict=True))
            for record in one.since(begin)
        ]
        counted = [0] * len(Totals._fields)
        for one, begin in zip(generations, marks, strict=True):
            counted = [
                number + max(0, now - then)
                for number, now, then in zip(counted, one.totals(), begin.totals, strict=True)
            ]
        total = Totals(*counted)
        found = self.decisions(fresh)
        answers = () if self.questions is None else tuple(self.questions.answered[mark.answers :])
        if changes or answers or len(generations) > 1:
            more = [*map(change_decision, changes), *(one.decision() for one in answers)]
            found = sorted([*found, *more], key=lambda one: one.time)
        return NetworkUse(
            decisions=found,
            cut=_cut(total.dropped),
            denials=denials(found),
            counts=NetworkCounts(
                *total[:4],
                published=total.published,
                requests_allowed=total.requests_allowed or msgspec.UNSET,
                requests_refused=total.requests_refused or msgspec.UNSET,
            ),
            sent=total.bytes_sent,
            received=total.bytes_received,
            warnings=self._warnings(),
            changes=changes,
            answers=tuple(f"{one.question.target} {one.answer}" for one in answers),
        )

    def changed_decisions(self, cursors: dict[int, int]) -> list[Decision]:
        """Return the decisions that are new or changed since the cursors, and advance these.

        Unlike `since`, it takes nothing away from the result of the run.
        """
        fresh = []
        for number, one in enumerate(tuple(self.generations)):
            for cursor, record in one.changed_since(cursors.get(number, 0)):
                cursors[number] = max(cursors.get(number, 0), cursor)
                fresh.append((number, record))
        return self.decisions(fresh)

    def decisions(self, records: Sequence[tuple[int, RawRecord]]) -> list[Decision]:
        """Return records as decisions; each comes after the number of the egress process that wrote it."""
        processes = [self.names.of(number, one) for number, one in records]
        return decisions([one for _, one in records], self.rules, processes)

    def follow(self, tell: Callable[[Decision], object] | None, events: Events) -> DecisionFollower:
        """Look at each decision as it is recorded, from now on, and tell of it."""
        self.names.renew()
        known = self._reported if tell is None else None
        cursors = {} if known is None else {i: one.cursor for i, one in enumerate(known.generations)}
        return DecisionFollower(self, tell, events, cursors)

    def watch_end(self) -> int:
        """Return a descriptor that becomes readable when nothing accepts connections any more."""
        if self._end_watch is None:
            self._end_watch = EndWatch()
            self._end_watch.add(self.process)
        return self._end_watch.descriptor

    def succeed(self, generation: EgressGeneration) -> None:
        """Let another process accept connections, to which the one before it has handed its listeners."""
        if self._end_watch is not None:
            self._end_watch.add(generation.process)
        self.generations.append(generation)
        self._handing_over = False

    def expect_end(self, expected: bool) -> None:
        """Say whether the end of the process that accepts connections is expected, because it hands over."""
        self._handing_over = expected
        if self._end_watch is not None:
            (self._end_watch.remove if expected else self._end_watch.add)(self.process)

    def cannot_accept(self, why: str) -> None:
        """Remember that nothing accepts connections any more."""
        self._ended = self._ended or (time.time(), why)
        if self._end_watch is not None:
            self._end_watch.fail()

    @property
    def has_ended(self) -> bool:
        """Whether nothing accepts connections any more."""
        if self._ended is None and not self._closing:
            process = self.process
            ended = process.ending()
            # One that hands over to another may end. Checked in this order, because threads change the rules.
            if ended is not None and not self._handing_over and process is self.process:
                self._ended = ended
        return self._ended is not None

    @property
    def is_closing(self) -> bool:
        """Whether the sandbox is being closed, so that descriptors are not to be used any more."""
        return self._closing

    def closed(self, events: Events) -> Steps[None]:
        """End the egress processes, wait until they are gone, and keep what they have recorded."""
        if self._closing:
            return
        self._warnings()  # whether one had ended by itself is known only now
        self._closing = True
        for one in self.generations:
            one.process.hang_up()
        interruption: BaseException | None = None
        for one in self.generations:
            try:
                yield from one.closed(events)
            except BaseException as error:  # raised once all have ended
                interruption = interruption or error
        os.close(self.nudge)
        if self.questions is not None:
            self.questions.close()
        self.names.close()
        if self._end_watch is not None:
            self._end_watch.close()
        if interruption is not None:
            raise interruption

    def _warnings(self) -> tuple[str, ...]:
        """Say when an egress process ended, if it ended before its sandbox."""
        found = [
            f"an earlier egress process ended at {_clock(crash[0])} ({crash[1]}): its connections ended"
            for one in self.generations[:-1]
            if (crash := one.crash()) is not None
        ]
        if self.has_ended and self._ended is not None:
            at, how = self._ended
            found.append(
                f"the egress process ended at {_clock(at)} ({how}): every connection was refused from then on"
            )
        return (*found, *(() if self.questions is None else self.questions.warnings))


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


class DecisionFollower:
    """Looks at each decision as it is recorded: finds its process, and tells of it.

    It tells of a decision once when it is made, and again if it is revised.
    """

    def __init__(
        self,
        handle: EgressHandle,
        tell: Callable[[Decision], object] | None,
        events: Events,
        cursors: dict[int, int],
    ) -> None:
        #: Readable when there is something new.
        self.descriptor = handle.nudge
        self._handle, self._tell, self._events = handle, tell, events
        #: For each egress process, how far its records were read.
        self._cursors = cursors
        self._told: dict[tuple[int, int], tuple[str, str]] = {}
        #: When to look again; until then a nudge has to wait. A program, or an egress process that one has
        #: taken over, could keep the supervisor busy otherwise.
        self._due: float | None = None
        events.watch(self.descriptor)

    def move(self) -> None:
        """Look at what is new, because the descriptor is readable."""
        if self._due is None:
            self._forget()
            began = time.monotonic()
            self.read()
            now = time.monotonic()
            self._due = now + max(LOOK_SECONDS, LOOK_SHARE * (now - began))

    def patience(self) -> float | None:
        """Return how many seconds to wait at most before the next call of `look`."""
        if self._due is None or self._handle.is_closing:
            return None
        return max(0.0, self._due - time.monotonic())

    def look(self) -> None:
        """Wait for the descriptor again, once it is time."""
        if self._due is not None and time.monotonic() >= self._due and not self._handle.is_closing:
            self._due = None
            self._events.watch(self.descriptor)

    def read(self) -> None:
        """Look at what is new."""
        if not self._handle.is_closing:
            _take_nudge(self.descriptor)
        fresh: list[tuple[int, RawRecord]] = []
        for number, generation in enumerate(self._handle.generations):
            for cursor, one in generation.changed_since(self._cursors.get(number, 0)):
                self._cursors[number] = cursor
                fresh.append((number, one))
        self._handle.names.look_up(fresh)
        if self._tell is not None:
            self._tell_of(fresh, self._tell)

    def _tell_of(self, fresh: list[tuple[int, RawRecord]], tell: Callable[[Decision], object]) -> None:
        for number, one in fresh:
            said, key = (one.verdict, one.reason), (number, one.slot)
            if self._told.get(key) != said and not (key in self._told and one.verdict == "allowed"):
                self._told[key] = said
                tell(self._handle.decisions([(number, one)])[0])

    def close(self) -> None:
        """Look no more, and tell no more."""
        if self._due is None:
            self._forget()
            self._due = math.inf
        self._tell = None

    def _forget(self) -> None:
        # Another thread that closes the sandbox may have closed it.
        with contextlib.suppress(OSError):
            self._events.forget(self.descriptor)


def _take_nudge(descriptor: int) -> None:
    """Empty an eventfd without waiting: the egress process shares it, and could have made it blocking."""
    try:
        with contextlib.suppress(BlockingIOError):
            os.preadv(descriptor, [bytearray(8)], -1, os.RWF_NOWAIT)
    except (AttributeError, OSError):  # a C library without the call, or a kernel before 5.8
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(descriptor)


def _later(one: RawRecord, before: int) -> RawRecord:
    """Return a record without what it had counted before; one connection counts in each run that it spans."""
    return one._replace(times=max(1, one.times - before))


def _cut(dropped: int) -> str:
    return f"{dropped} more were not listed: an egress process lists a few thousand" if dropped else ""


def _walls(process: EgressProcess) -> EgressWalls:
    seen = process.evidence
    return EgressWalls(
        plan=seen.plan,
        filter=seen.walls.filter,
        relay_filter=seen.relay_filter,
        namespaces={name: number for name, number in seen.walls.namespaces.items() if name != "net"},
        ports=seen.ports,
        template=__version__,
    )


def planned_egress(prepared: RunPreparation) -> tuple[Plan, tuple[int, ...]]:
    """Return the plan of the egress process, and the ports of the listeners inside."""
    ports = ports_of([parse_rule(rule) for rule in prepared.resolved.policy.net])
    settings = egress_settings(prepared)
    own = (PROXY_PORT,) if settings.get("proxy") else ()
    plan = egress_plan(dialled_ports(ports, settings), prepared.state)
    return plan, tuple(sorted({*ports, *own, DNS_PORT}))


class NetworkSetup:
    """Opens the network of one sandbox while its walls come up."""

    def __init__(
        self,
        rules: tuple[str, ...],
        home: str,
        published: PublishedListeners | None = None,
        settings: Mapping[str, object] | None = None,
        questions: UserQuestions | None = None,
        trust: TrustFiles | None = None,
        roots: str = "",
        secrets: SecretSources | None = None,
    ) -> None:
        self._secrets = secrets
        self._values: SecretValues | None = None
        self.rules = rules
        self._settings, self._questions = settings or {}, questions
        #: With rules for requests: where programs find the authority's certificate, and by which file
        #: servers are verified, if it is not the system's.
        self._trust, self._roots = trust, roots
        self.ports = ports_of([parse_rule(rule) for rule in rules])
        self._listening = (*self.ports, *((PROXY_PORT,) if self._settings.get("proxy") else ()))
        self._home = home
        self._published = published
        self._request: NetworkRequest | None = None
        #: The sandbox's first process.
        self._pid = 0

    def begin(self, resident: client.Resident, pid: int, namespace: int) -> None:
        """Ask for listeners in the network namespace of a sandbox that was just born."""
        self._drop_request()
        self._pid = pid
        if self.rules:
            self._request = resident.open_network(namespace, self._listening)

    def egress(self, events: Events) -> Steps[EgressProcess]:
        """Start the egress process."""
        ports, judges = dialled_ports(self.ports, self._settings), self._trust is not None
        return (yield from launch_egress(ports, events, home=self._home, judges=judges))

    def finish(self, process: EgressProcess, box: LaunchedSandbox, events: Events) -> Steps[EgressHandle]:
        """Check the listeners, and hand them to the egress process. A failure ends it."""
        nudge = questions = -1
        opened: NetworkListeners | None = None
        observed: NetworkEvidence | None = None
        try:
            if self.rules:
                request, self._request = self._request, None
                opened = yield from await_listeners(request, events)
                inode = os.fstat(box.network_fd).st_ino
                observed = observe_network(opened, self._listening, self._pid, inode)
            if opened is not None:
                questions = os.dup(opened.questions)
            nudge = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            settings = {**self._settings, "rules": list(self.rules)}
            records, resolver = yield from configure(
                process, box, self._home, nudge, settings, opened, self._published, events,
                questions=self._questions, trust=self._trust, roots=self._roots, secrets=self._values,
            )  # fmt: skip
            ports = () if self._published is None else self._published.ports
            handle = EgressHandle(
                process, records, nudge, self.rules, observed, self._pid, resolver, ports, questions,
                self._settings, self._questions, self._secrets,
            )  # fmt: skip
            handle.judges = self._trust is not None
            return handle
        except BaseException:
            for descriptor in (nudge, questions):
                if descriptor >= 0:
                    os.close(descriptor)
            yield from process.closed(events)
            raise
        finally:
            # Nothing else may listen: once the egress process has ended, the kernel refuses connections.
            if opened is not None:
                opened.close()
            if self._published is not None:
                self._published.close()
            self.close()

    def read_secrets(self, events: Events) -> Steps[None]:
        """Read the values of secrets, before anything is launched: a source may fail."""
        if self._secrets is not None:
            self._values = yield from self._secrets.read(events)

    def close(self) -> None:
        """Drop a request whose answer is not needed any more, and wipe what is secret."""
        self._drop_request()
        if self._values is not None:
            self._values.memory.close()

    def _drop_request(self) -> None:
        if self._request is not None:
            self._request.close()
            self._request = None


def configure(
    process: EgressProcess,
    box: LaunchedSandbox,
    home: str,
    nudge: int,
    settings: Mapping[str, object],
    opened: NetworkListeners | None,
    published: PublishedListeners | None,
    events: Events,
    names: tuple[int, ...] = (),
    questions: UserQuestions | None = None,
    trust: TrustFiles | None = None,
    roots: str = "",
    secrets: SecretValues | None = None,
) -> Steps[tuple[int, ResolverWalls | None]]:
    """Hand an egress process its listeners and the rest, and wait until it relays.

    Returns its records, and the walls of the resolver that it asks, if it has one.

    `names` is a file with the names of the process before it, if there is one; `settings` have the rules.
    The memory of `secrets` is wiped.
    """
    records = create_records()
    held: list[int] = []
    walls: ResolverWalls | None = None
    try:
        message: dict[str, object] = {
            "tcp": [], "udp": [], "resolver": opened is not None, "publish": [],
            "connections": MOST_CONNECTIONS, "idle": IDLE_SECONDS, **settings,
        }  # fmt: skip
        passed = [records, nudge]
        if opened is not None:
            resolver, asked = yield from connect_resolver(events, home)
            walls = ResolverWalls(asked.plan, asked.filter, asked.uid)
            held.append(resolver)
            message["tcp"] = [[port, family] for port, family, _ in opened.tcp]
            message["udp"] = [family for family, _ in opened.udp]
            message["ipv6"] = opened.ipv6
            passed += [resolver, *opened.sockets]
        if published is not None:
            message["publish"] = [one.port for one in published.ports]
            channel = _serve_connections(box)
            held.append(channel)
            passed += [*published.descriptors, channel]
        if questions is not None:
            held.append(asked_on := questions.connect())
            message["ask"] = True
            passed.append(asked_on)
        own_roots = read_roots(roots) if trust is not None and roots else b""
        if trust is not None:
            message["http"] = len(own_roots)
            if own_roots:
                held.append(_in_memory(own_roots))
                passed.append(held[-1])
        values = None
        if secrets is not None:
            message["secrets"], values = secrets.described, secrets.view
        authority = yield from process.configure(message, (*passed, *names), events, values)
        if secrets is not None:
            secrets.observe(process.pid)
        if trust is not None:
            trust.fill(authority, own_roots or read_roots(system_bundle()))
        return records, walls
    except BaseException:
        os.close(records)
        raise
    finally:
        if secrets is not None:
            secrets.memory.close()
        for descriptor in held:
            os.close(descriptor)


def _in_memory(content: bytes) -> int:
    """Return a descriptor from which an egress process, which has no files, reads content."""
    descriptor = os.memfd_create("roots", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    return descriptor


def _serve_connections(box: LaunchedSandbox) -> int:
    """Let the sandbox's init serve connections to its ports; return the end on which to ask for them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        box.connection.serve_publisher(theirs.fileno())
        return ours.detach()
    finally:
        theirs.close()
        ours.close()


def await_listeners(request: NetworkRequest | None, events: Events) -> Steps[NetworkListeners]:
    """Wait until the resident has opened the listeners that it was asked for."""
    if request is None:
        raise SetupError("the sandbox has no network namespace of its own", stage="network")
    late = time.monotonic() + LISTEN_SECONDS
    try:
        events.watch(request.fileno())
        try:
            while True:
                yield max(0.0, late - time.monotonic())
                if request.fileno() in events.ready:
                    break
                if time.monotonic() >= late:
                    raise SetupError(
                        f"the resident gate had not opened the network after {LISTEN_SECONDS:g} s",
                        stage="network",
                    )
        finally:
            events.forget(request.fileno())
    except BaseException:
        request.close()
        raise
    return request.receive_listeners()


def egress_settings(prepared: RunPreparation) -> dict[str, object]:
    """Return what the policy says to every egress process of a sandbox besides the rules."""
    policy, found = prepared.resolved.policy, dict[str, object]()
    limits = {name: getattr(prepared.resolved.limits, name) for name in NETWORK_LIMITS}
    if written := {name: value for name, value in limits.items() if value is not None}:
        found["limits"] = written
    if not policy.net or policy.net == "open":
        return found
    if policy.proxy:
        found["proxy"] = True
    if proxies := proxies_of(prepared.resolved.caller.environ):
        found["upstream"] = proxies.settings()
    return found


def dialled_ports(ports: Sequence[int], settings: Mapping[str, object]) -> tuple[int, ...]:
    """Return the ports that the egress process may dial: those of the rules and of the host's proxies."""
    upstream = settings.get("upstream")
    proxies = upstream["proxies"].values() if isinstance(upstream, dict) else ()
    return tuple(sorted({*ports, *(one[2] for one in proxies)}))


def launch_with_egress(
    prepared: RunPreparation, events: Events, meanwhile: Callable[[], object]
) -> Steps[LaunchedSandbox]:
    """Launch a sandbox and its egress process; a failure of either leaves nothing behind."""
    secrets = None
    if prepared.placeholders:
        from stockade.runs.network.secret_values import SecretSources

        secrets = SecretSources(prepared.resolved.policy, prepared.placeholders, prepared.resolved.caller)
    questions: UserQuestions | None = None
    if ASK in prepared.resolved.policy.net and prepared.made.on_ask is not None:
        from stockade.runs.network.user_questions import UserQuestions

        questions = UserQuestions(prepared, prepared.made.on_ask)
    network = prepared.resolved.network
    setup = NetworkSetup(
        tuple(prepared.resolved.policy.net),
        prepared.state,
        prepared.made.published,
        egress_settings(prepared),
        questions,
        prepared.made.trust,
        "" if network is None else network.roots,
        secrets,
    )
    try:
        yield from setup.read_secrets(events)
        box, process, failure = yield from together(
            launch_with_retry(prepared, events, meanwhile, setup.begin), setup.egress(events)
        )
        if failure is None:
            try:
                box.egress = yield from setup.finish(process, box, events)
                if questions is not None:
                    questions.start(box, box.egress)
                if prepared.resolved.policy.on_egress_end == "end":
                    box.egress_needed = box.egress.watch_end()
                return box  # type: ignore[no-any-return]
            except BaseException as error:
                process, failure = None, error
        if questions is not None:
            questions.close()
        if process is not None:
            yield from process.closed(events)
        if box is not None:
            events.forget(box.connection.fileno())
            yield from box.closed(events)
        raise failure
    finally:
        setup.close()


class BothResults(NamedTuple):
    """What two activities returned: None for one that failed, and the first failure."""

    first: Any
    second: Any
    failure: BaseException | None


def together(first: Steps[Any], second: Steps[Any]) -> Steps[BothResults]:
    """Take the steps of two activities in turn until both have ended.

    If one fails, or an exception arrives from outside, the other gets it too and is taken to its end.
    """
    activities = [first, second]
    results: list[Any] = [None, None]
    waiting: dict[int, float | None] = {0: 0.0, 1: 0.0}
    failure: BaseException | None = None

    def step(number: int, error: BaseException | None) -> BaseException | None:
        """Take one step of an activity; return the exception that ended it, if one did."""
        try:
            activity = activities[number]
            waiting[number] = next(activity) if error is None else activity.throw(error)
        except StopIteration as done:
            del waiting[number]
            results[number] = done.value
        except BaseException as problem:
            del waiting[number]
            return problem
        return None

    for number in (0, 1):
        if failure is None:
            failure = step(number, None)
        else:
            activities[number].close()  # it has not begun
            del waiting[number]
    news = failure
    while waiting:
        if news is None:
            try:
                yield min((wait for wait in waiting.values() if wait is not None), default=None)
            except BaseException as interruption:
                news = interruption
        error, news = news, None
        failure = failure or error
        for number in tuple(waiting):
            problem = step(number, error)
            if problem is not None and failure is None:
                failure = news = problem
    return BothResults(results[0], results[1], failure)
