"""The egress of a living sandbox: its processes, the rules in force, and what was decided since a moment."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from stockade._version import __version__
from stockade.egress.records import RawRecord, Totals
from stockade.policy.net_rules import PROXY_PORT, parse_rule, ports_of
from stockade.receipt.statement import EgressWalls, NetworkCounts, ResolverWalls, RuleChange
from stockade.result import Decision
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.network.decision_follower import DecisionFollower
from stockade.runs.network.decisions import NetworkUse, change_decision, decisions, denials
from stockade.runs.network.egress_generation import NOTHING, EgressGeneration, EndWatch, GenerationMark
from stockade.runs.network.egress_process import EgressProcess
from stockade.runs.network.network_evidence import NetworkEvidence
from stockade.runs.network.process_names import ProcessNames
from stockade.runs.network.published_ports import PublishedPort

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.runs.network.secret_values import SecretSources
    from stockade.runs.network.user_questions import UserQuestions


class NetworkMark(NamedTuple):
    """How much all egress processes of a sandbox had recorded at some moment."""

    generations: tuple[GenerationMark, ...]
    #: How many changes of the rules there had been, and how many answers of the user.
    changes: int
    answers: int = 0


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
        parsed = [parse_rule(rule) for rule in rules]
        #: The ports inside that have listeners, besides that of DNS: for connections, and for datagrams.
        self.ports, self.datagram_ports = ports_of(parsed), ports_of(parsed, udp=True)
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
