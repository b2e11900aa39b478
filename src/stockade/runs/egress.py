"""The network of a sandbox with rules, from its launch to its end.

While the walls of the sandbox come up, so do those of its egress process: both gates work at the same time.
As soon as the sandbox has its network namespace, the resident is asked for the listeners in it. When both are
up, the supervisor checks the listeners by itself, hands them to the egress process and closes its own copies.
So if the egress process ends, the kernel refuses every connection, because nothing listens any more.

What the egress process decides, it writes to memory that the supervisor reads when it wants to.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from stockade._version import __version__
from stockade.egress.records import RawRecord, RecordReader, Totals, create_records
from stockade.errors import SetupError
from stockade.gate import client
from stockade.gate.network import DNS_PORT, NetworkListeners, NetworkRequest
from stockade.gate.operations import Plan
from stockade.policy.net_rules import parse_rule, ports_of
from stockade.receipt.statement import EgressWalls, NetworkCounts, ResolverWalls
from stockade.result import Decision
from stockade.runs.egress_process import EgressProcess, egress_plan, launch_egress
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.launch import LaunchedSandbox, launch_with_retry
from stockade.runs.network import NetworkUse, decisions, denials
from stockade.runs.network_evidence import NetworkEvidence, observe_network
from stockade.runs.prepare import RunPreparation
from stockade.runs.process_names import ProcessNames
from stockade.runs.resolver_process import connect_resolver

#: How many connections an egress process relays at once, and how long one may be silent, in seconds.
MOST_CONNECTIONS, IDLE_SECONDS = 1024, 3600
#: How long the resident may take to open the listeners.
LISTEN_SECONDS = 10.0
#: Between two looks at the records: seconds at least, and times as long as the last look took.
LOOK_SECONDS, LOOK_SHARE = 0.05, 10
NO_TOTALS = Totals(0, 0, 0, 0, 0, 0, 0, 0)


class NetworkMark(NamedTuple):
    """How much an egress process had recorded at some moment."""

    cursor: int
    totals: Totals
    #: How often each shared record had been used, by its slot.
    times: dict[int, int]


class EgressHandle:
    """The egress process of one sandbox, and what it has recorded."""

    def __init__(
        self,
        process: EgressProcess,
        records: int,
        nudge: int,
        rules: tuple[str, ...],
        observed: NetworkEvidence,
        resolver: ResolverWalls,
        names: ProcessNames,
    ) -> None:
        self.process = process
        self.resolver = resolver
        self._names = names
        #: The routes, addresses and listeners inside, as the kernel showed them.
        self.observed = observed
        #: In the order in which the egress process counts them.
        self.rules = list(rules)
        self.walls = _walls(process)
        self._descriptor, self._nudge = records, nudge
        self._reader = RecordReader(records)
        #: What the memory held last, once it is closed.
        self._last: tuple[list[tuple[int, RawRecord]], Totals] | None = None
        #: How many changes the last mark saw, and how often each record had been used then, by its slot.
        self._seen: tuple[int, dict[int, int]] = (0, {})
        self._closing = False
        self._ended: tuple[float, str] | None = None

    def mark(self) -> NetworkMark:
        """Return how much is recorded now, for a later `since`."""
        changes = self._reader.changes() if self._last is None else self._seen[0]
        if self._seen[0] != changes:
            self._seen = changes, {one.slot: one.times for _, one in self._records(0)}
        return NetworkMark(changes, self._totals(), self._seen[1])

    def since(self, mark: NetworkMark | None) -> NetworkUse:
        """Return what was decided since a mark; without one, since the sandbox began."""
        mark = mark or NetworkMark(0, NO_TOTALS, {})
        fresh = [_later(one, mark.times.get(one.slot, 0)) for _, one in self._records(mark.cursor)]
        before, after = mark.totals, self._totals()
        counted = [max(0, now - then) for now, then in zip(after, before, strict=True)]
        found = decisions(fresh, self.rules, self._names.of)
        return NetworkUse(
            decisions=found,
            cut=_cut(counted[7]),
            denials=denials(found),
            counts=NetworkCounts(*counted[:4]),
            sent=counted[4],
            received=counted[5],
            warnings=self._warnings(),
        )

    def follow(self, tell: Callable[[Decision], object] | None, events: Events) -> DecisionFollower:
        """Look at each decision as it is recorded, from now on, and tell of it."""
        self._names.renew()
        cursor = self._seen[0] if tell is None else 0
        return DecisionFollower(self._nudge, self._reader, self.rules, self._names, tell, events, cursor)

    def closed(self, events: Events) -> Steps[None]:
        """End the egress process, wait until it is gone, and keep what it has recorded."""
        if self._last is not None:
            return
        self._warnings()  # whether it had ended by itself is known only now
        self._closing = True
        try:
            yield from self.process.drained(events)
            yield from self.process.closed(events)
        finally:
            self._last = self._reader.changed_since(0), self._reader.totals()
            os.close(self._descriptor)
            os.close(self._nudge)
            self._names.close()

    def _records(self, cursor: int) -> list[tuple[int, RawRecord]]:
        if self._last is None:
            return self._reader.changed_since(cursor)
        return [one for one in self._last[0] if one[0] > cursor]

    def _totals(self) -> Totals:
        return self._reader.totals() if self._last is None else self._last[1]

    def _warnings(self) -> tuple[str, ...]:
        """Say when the egress process ended, if it ended before its sandbox."""
        if self._ended is None and not self._closing:
            self._ended = self.process.ending()
        if self._ended is None:
            return ()
        at, how = self._ended
        when = time.strftime("%H:%M:%S", time.localtime(at))
        return (f"the egress process ended at {when} ({how}): every connection was refused from then on",)


class DecisionFollower:
    """Looks at each decision as it is recorded: finds its process, and tells of it.

    It tells of a decision once when it is made, and again if it is revised.
    """

    def __init__(
        self,
        nudge: int,
        reader: RecordReader,
        rules: list[str],
        names: ProcessNames,
        tell: Callable[[Decision], object] | None,
        events: Events,
        cursor: int,
    ) -> None:
        #: Readable when there is something new.
        self.descriptor = nudge
        self._reader, self._rules, self._names, self._tell = reader, rules, names, tell
        self._events, self._cursor = events, cursor
        self._told: dict[int, tuple[str, str]] = {}
        #: When to look again; until then a nudge has to wait. A program, or an egress process that one has
        #: taken over, could keep the supervisor busy otherwise.
        self._due: float | None = None
        events.watch(nudge)

    def move(self) -> None:
        """Look at what is new, because the descriptor is readable."""
        if self._due is None:
            self._events.forget(self.descriptor)
            began = time.monotonic()
            self.read()
            now = time.monotonic()
            self._due = now + max(LOOK_SECONDS, LOOK_SHARE * (now - began))

    def patience(self) -> float | None:
        """Return how many seconds to wait at most before the next call of `look`."""
        return None if self._due is None else max(0.0, self._due - time.monotonic())

    def look(self) -> None:
        """Wait for the descriptor again, once it is time."""
        if self._due is not None and time.monotonic() >= self._due:
            self._due = None
            self._events.watch(self.descriptor)

    def read(self) -> None:
        """Look at what is new."""
        _take_nudge(self.descriptor)
        records, self._cursor = self._reader.since(self._cursor)
        self._names.look_up(records)
        if self._tell is not None:
            self._tell_of(records, self._tell)

    def _tell_of(self, records: list[RawRecord], tell: Callable[[Decision], object]) -> None:
        for one in records:
            said = one.verdict, one.reason
            if self._told.get(one.slot) != said and not (one.slot in self._told and one.verdict == "allowed"):
                self._told[one.slot] = said
                tell(decisions([one], self._rules, self._names.of)[0])

    def close(self) -> None:
        """Look no more, and tell no more."""
        if self._due is None:
            self._events.forget(self.descriptor)
        self._tell = None


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


def planned_egress(rules: Sequence[str], home: str) -> tuple[Plan, tuple[int, ...]]:
    """Return the plan of the egress process for these rules, and the ports of the listeners inside."""
    ports = ports_of([parse_rule(rule) for rule in rules])
    return egress_plan(ports, home), tuple(sorted({*ports, DNS_PORT}))


class NetworkSetup:
    """Opens the network of one sandbox while its walls come up."""

    def __init__(self, rules: tuple[str, ...], home: str) -> None:
        self.rules = rules
        self.ports = ports_of([parse_rule(rule) for rule in rules])
        self._home = home
        self._request: NetworkRequest | None = None
        #: The sandbox's first process.
        self._pid = 0

    def begin(self, resident: client.Resident, pid: int, namespace: int) -> None:
        """Ask for listeners in the network namespace of a sandbox that was just born."""
        self._drop_request()
        self._pid = pid
        self._request = resident.open_network(namespace, self.ports)

    def egress(self, events: Events) -> Steps[EgressProcess]:
        """Start the egress process."""
        return (yield from launch_egress(self.ports, events, home=self._home))

    def finish(self, process: EgressProcess, namespace: int, events: Events) -> Steps[EgressHandle]:
        """Check the listeners, and hand them to the egress process. A failure ends it.

        `namespace` is a descriptor of the sandbox's network namespace.
        """
        records = nudge = resolver = questions = -1
        opened: NetworkListeners | None = None
        try:
            opened = yield from self._listeners(events)
            observed = observe_network(opened, self.ports, self._pid, os.fstat(namespace).st_ino)
            records = create_records()
            nudge = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            resolver, asked = yield from connect_resolver(events, self._home)
            yield from process.configure(
                {
                    "rules": list(self.rules),
                    "tcp": [[port, family] for port, family, _ in opened.tcp],
                    "udp": [family for family, _ in opened.udp],
                    "ipv6": opened.ipv6,
                    "connections": MOST_CONNECTIONS,
                    "idle": IDLE_SECONDS,
                },
                (
                    records,
                    nudge,
                    resolver,
                    *(descriptor for _, _, descriptor in opened.tcp),
                    *(descriptor for _, descriptor in opened.udp),
                ),
                events,
            )
            walls = ResolverWalls(asked.plan, asked.filter, asked.uid)
            questions = os.dup(opened.questions)
            names = ProcessNames(questions, self._pid)
            return EgressHandle(process, records, nudge, self.rules, observed, walls, names)
        except BaseException:
            for descriptor in (records, nudge, questions):
                if descriptor >= 0:
                    os.close(descriptor)
            yield from process.closed(events)
            raise
        finally:
            if resolver >= 0:
                os.close(resolver)
            # Nothing else may listen: once the egress process has ended, the kernel refuses connections.
            if opened is not None:
                opened.close()
            self.close()

    def _listeners(self, events: Events) -> Steps[NetworkListeners]:
        request = self._request
        if request is None:
            raise SetupError("the sandbox has no network namespace of its own", stage="network")
        late = time.monotonic() + LISTEN_SECONDS
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
        self._request = None
        return request.receive_listeners()

    def close(self) -> None:
        """Drop a request whose answer is not needed any more."""
        self._drop_request()

    def _drop_request(self) -> None:
        if self._request is not None:
            self._request.close()
            self._request = None


def launch_with_rules(
    prepared: RunPreparation, events: Events, meanwhile: Callable[[], object]
) -> Steps[LaunchedSandbox]:
    """Launch a sandbox and its egress process; a failure of either leaves nothing behind."""
    setup = NetworkSetup(tuple(prepared.resolved.policy.net), prepared.state)
    try:
        box, process, failure = yield from together(
            launch_with_retry(prepared, events, meanwhile, setup.begin), setup.egress(events)
        )
        if failure is None:
            try:
                box.egress = yield from setup.finish(process, box.network_fd, events)
                if prepared.resolved.policy.on_egress_end == "end":
                    box.egress_needed = process.pidfd
                return box  # type: ignore[no-any-return]
            except BaseException as error:
                process, failure = None, error
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
