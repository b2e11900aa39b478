"""Learn in rounds: run the command, allow what it missed and may have, until it misses nothing.

A program that does not get one file often ends before it asks for the next, so one run rarely shows all. The
alternative, to show the program everything and see what it takes, would give it the user's files before the
user has agreed. In rounds it never sees more than the policy that is written in the end: what looks like a
secret stays hidden in all of them and becomes a question, and so does whatever would write for real.

The last run is under the policy itself, with its programs and limits, and with a rule that allows nothing and
makes the egress record. It must miss nothing, and pass or end as before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec

from stockade.controls import Control
from stockade.observe.access import Access, Action
from stockade.observe.answer_values import Answer
from stockade.observe.learning.environment import learn_environment
from stockade.observe.learning.hosts import RECORDING, HostLearner
from stockade.observe.learning.learned_policy import LearnedPolicy
from stockade.observe.learning.lesson import Consent, LearnedEntry, LearnQuestion, refuse
from stockade.observe.learning.limits import disk_advice, learn_limits
from stockade.observe.learning.paths import LearnedPaths, PathLearner
from stockade.observe.learning.programs import LearnedPrograms, learn_programs, missing_commands
from stockade.observe.learning.secret_paths import SecretPlaces
from stockade.policy.merging import merge
from stockade.policy.model import Policy
from stockade.policy.values import quote
from stockade.result import Outcome, Result, Usage

#: How often a command runs at most.
MOST_RUNS = 12
#: Limits that no program reaches: with them the kernel counts what a run uses.
MEASURING = {Control.LIMITS_MEMORY: ("memory", 1 << 42), Control.LIMITS_CPU_TIME: ("cpu_time", 86400.0)}
#: How many refused calls and sockets are listed.
MOST_OTHERS = 16


class LearningRun(msgspec.Struct, frozen=True):
    """What one run of the command showed."""

    result: Result
    #: What walls refused.
    refused: tuple[Answer, ...] = ()
    #: The connections that the egress does not see: see `HostLearner.add`.
    connects: tuple[Access, ...] = ()
    #: The programs that were executed, and those that were tried in vain.
    executed: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    #: Why the observation is incomplete; empty if it is not.
    cut: str = ""


class LearningPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The user and the machine that a policy is learned for."""

    places: SecretPlaces
    environ: Mapping[str, str]
    #: The workspace, and the trees that the profile shows.
    workspace: str = ""
    system: tuple[str, ...] = ()
    #: Says why no policy can show a path; empty if one can.
    ungrantable: Callable[[str], str] = lambda path: ""
    #: Asks the user about a file or a variable that may be a secret.
    consent: Consent = refuse
    #: The limits that this host can enforce.
    enforceable: frozenset[Control] = frozenset()
    #: Whether hosts are learned; otherwise they are questions.
    reach: bool = True
    #: Whether the result may forbid what the start allows: other programs, and more than the limits.
    narrow: bool = True


class Learner:
    """Knows what the runs of a command showed so far."""

    def __init__(self, start: Policy, place: LearningPlace) -> None:
        self._start = start
        self._place = place
        self._paths = PathLearner(
            place.places, place.workspace, place.system, place.ungrantable, place.consent
        )
        self._hosts = HostLearner(() if start.net == "open" else start.net)
        self._executed: dict[str, None] = {}
        self._commands: dict[str, None] = {}
        self._others: dict[str, LearnQuestion] = {}
        self._last: LearningRun | None = None
        self._usage: Usage | None = None
        self._without_programs = ""
        self._cut = ""
        self.runs = 0

    def add(self, run: LearningRun, *, measured: bool = True) -> None:
        """Take in what one run showed; `measured` says that no limit of ours could end it."""
        self.runs += 1
        self._last = run
        if measured:
            self._usage = run.result.usage
        self._cut = run.cut or self._cut
        self._paths.add(run.refused)
        self._hosts.add(run.result.network, run.connects)
        self._executed |= dict.fromkeys(run.executed)
        shown = (*self._place.system, *filter(None, (self._place.workspace,)))
        search = self._place.environ.get("PATH", "")
        printed = run.result.stderr + b"\n" + run.result.stdout[-4096:] if run.result.exit_code else b""
        for name, path in missing_commands(run.tried, run.executed, printed, search, shown).items():
            if why := self._paths.secret(path):
                wanted, allow = f"start {name}, which is {path}", f"toolchain = [{quote(name)}]"
                self._others.setdefault(path, LearnQuestion(wanted, why, allow))
            else:
                self._commands[name] = None
        for answer in run.refused:
            self._take_other(answer)

    def _take_other(self, answer: Answer) -> None:
        """Take in a refused call, or a refused socket with a name."""
        access, change = answer.access, answer.change
        named = access.target.startswith("unix:")
        if access.action not in (Action.CALL, Action.MOUNT) and not named:
            return
        if change is not None and len(self._others) < MOST_OTHERS:
            wanted = f"{'connect to' if named else 'call'} {access.target}"
            why = "; ".join(filter(None, (answer.reason, change.danger)))
            self._others.setdefault(access.target, LearnQuestion(wanted, why, change.toml))

    def give_up_programs(self, why: str) -> None:
        """Let the policy restrict no programs, because the command does not work with that."""
        self._without_programs = why

    @property
    def knows_ports(self) -> bool:
        """Whether every host that is known was connected to, so that its rule can name the port."""
        return self._hosts.knows_ports or not self._place.reach

    def trial(self, learned: LearnedPolicy, *, measured: bool) -> Policy:
        """Return the policy for the next run: what was learned, with a rule that makes the egress record.

        A `measured` run is not restricted to the programs and limits that are known so far.
        """
        policy = learned.policy(narrowed=not measured)
        flags: dict[str, object] = {}
        if policy.net != "open":
            flags["net"] = [RECORDING]
        limits = {
            name: value
            for control, (name, value) in MEASURING.items()
            if measured and control in self._place.enforceable and getattr(policy.limits, name) is None
        }
        if limits:
            flags["limits"] = limits
        return merge(policy, flags)

    def learned(self, *, settled: bool = True) -> LearnedPolicy:
        """Return the policy as far as it is known; a `settled` one allows only the ports in use."""
        place, start, last = self._place, self._start, self._last
        paths = self._paths.learned()
        rules = self._hosts.rules(settled=settled)
        questions = [*paths.questions]
        if not place.reach:
            questions += [
                LearnQuestion(
                    f"connect to {one.text}", "you gave the command no network", f"net = [{quote(one.text)}]"
                )
                for one in rules
            ]
            rules = ()
        known = {*start.env, *start.pass_env}
        names, asked = learn_environment(self._executed, place.environ, known, place.consent)
        programs = self._programs(paths.programs)
        limits = (
            learn_limits(self._usage, place.enforceable) if self._usage is not None and place.narrow else {}
        )
        result = None if last is None else last.result
        return LearnedPolicy(
            start=start,
            read=paths.read,
            net=() if start.net == "open" else rules,
            pass_env=names,
            toolchain=() if start.toolchain is False else _commands(self._commands),
            exec=programs.patterns,
            limits=limits,
            questions=(*questions, *self._hosts.questions, *asked, *self._others.values()),
            notes=self._notes(paths, programs),
            runs=self.runs,
            exit_code=0 if result is None else result.exit_code,
            ended="" if result is None or result.ok else result.reason,
        )

    def _programs(self, refused: Collection[str]) -> LearnedPrograms:
        if self._start.exec is not None:
            return LearnedPrograms(tuple(LearnedEntry(path) for path in sorted(refused)))
        if self._without_programs or not self._place.narrow:
            return LearnedPrograms(why_not=self._without_programs)
        if self._commands or not self._executed:
            return LearnedPrograms(why_not="it executes programs outside the system's directories")
        return learn_programs(self._executed, self._place.system)

    def _notes(self, paths: LearnedPaths, programs: LearnedPrograms) -> tuple[str, ...]:
        notes = []
        if programs.why_not:
            notes.append(f"Every program may be executed: {programs.why_not}.")
        if paths.caches:
            notes.append(f"Empty at first, and filled by the command itself: {', '.join(paths.caches)}.")
        if paths.impossible:
            more = f" and {len(paths.impossible) - 1} more" if len(paths.impossible) > 1 else ""
            notes.append(
                f"The sandbox has its own /proc and /dev and no /sys, so no {paths.impossible[0]}{more}."
            )
        if self._usage is not None and self._place.narrow and (disk := disk_advice(self._usage)):
            notes.append(
                f"A limit to think about: {disk} keeps changes in memory until the command has ended."
            )
        if self._cut:
            notes.append(f"Not everything was observed: {self._cut}.")
        return tuple(notes)


def learn(
    start: Policy,
    place: LearningPlace,
    run: Callable[[Policy], LearningRun],
    on_round: Callable[[int, LearnedPolicy], object] = lambda number, learned: None,
) -> LearnedPolicy:
    """Run a command under wider and wider policies until it misses nothing more, and return the last one.

    `run` runs the command once under a policy, with its changes discarded.
    """
    learner = Learner(start, place)
    wide: Result | None = None
    ready = False
    while learner.runs < MOST_RUNS:
        before = learner.learned() if ready else learner.learned(settled=False)
        trial = learner.trial(before, measured=not ready)
        one = run(trial)
        if one.result.outcome is Outcome.SETUP_FAILED and not (ready and before.exec):
            one.result.check()
        learner.add(one, measured=not ready)
        now = learner.learned()
        on_round(learner.runs, now)
        if not ready:
            wide = one.result
            ready = learner.trial(learner.learned(settled=False), measured=True) == trial or (
                one.result.ok and learner.knows_ports
            )
            continue
        good = one.result.ok or (wide is not None and wide.exit_code == one.result.exit_code)
        if good and before.policy() == now.policy():
            return msgspec.structs.replace(now, settled=True)
        if not good and before.exec and start.exec is None:
            learner.give_up_programs("the command ends in another way if its programs are listed")
        elif not good:
            ready = False
    return learner.learned()


def _commands(names: Collection[str]) -> tuple[LearnedEntry, ...]:
    return tuple(LearnedEntry(name, "not found inside") for name in names)
