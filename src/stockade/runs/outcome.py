"""Judge how a run ended from what the gate and the kernel report, never from what the program printed.

Only a hint may quote what the program printed.
"""

from __future__ import annotations

import os
import signal as signals

from stockade.gate import client, wire
from stockade.policy.model import Limits
from stockade.policy.values import size_text, time_text
from stockade.resolve.resolved import ResolvedPolicy
from stockade.result import Outcome, Verdict
from stockade.runs.cgroup import SandboxCgroups
from stockade.runs.supervise import RunEnding


def judge(
    ended: RunEnding,
    program: client.Program,
    resolved: ResolvedPolicy,
    group: SandboxCgroups | None,
    *,
    closed: bool = False,
    killed: bool = False,
    full: bool = False,
    advise: bool = False,
    uncounted: bool = False,
) -> Verdict:
    """Return the verdict on a run that is over.

    `closed` says that the sandbox was closed during the run, `killed` that `stockade kill` ended it, `full`
    that limits.disk is used up, `uncounted` that the kernel limits the tasks without counting those that it
    refuses. Only with `advise` do the words come from a look at the host's files: they reveal which exist,
    and a program or a model may read the words otherwise.
    """
    reply, limits = ended.reply, resolved.limits
    if killed:
        return Verdict(Outcome.CANCELLED, 130, "ended by `stockade kill`")
    if (verdict := _over_limit(ended, limits, group)) is not None:
        return verdict
    if ended.egress_ended:
        return Verdict(Outcome.CANCELLED, 130, EGRESS_ENDED, "see the warnings of the result")
    if ended.gate_died and (verdict := _ended_by(ended.ended_late, program)) is not None:
        return verdict
    if reply is None:
        if closed:
            return Verdict(Outcome.CANCELLED, 130, "the sandbox was closed while the command ran")
        if ended.gate_died:
            return Verdict(Outcome.SETUP_FAILED, 125, "the gate died before the command ended")
        return Verdict(Outcome.SIGNALLED, 137, f"ended by SIGKILL: {ALL_KILLED}", signal=signals.SIGKILL)
    if reply.kind == wire.REPLY_FAILED:
        reason = (
            f"{reply.text} was replaced on the host, which removed its protection inside, so the gate ended "
            "the sandbox"
        )
        return Verdict(Outcome.DENIED, 126, reason, 'use `--mode overlay` (workspace.mode = "overlay")')
    if reply.kind == wire.REPLY_EXEC_FAILED:
        return _not_started(reply, program, resolved, advise=advise)
    if (verdict := _ended_by(reply.ended, program)) is not None:
        return verdict
    if reply.status == 0:
        return Verdict(Outcome.EXITED, 0)
    hint = _task_hint(ended, limits, group)
    if uncounted and not hint:
        from stockade.runs.explain.ran_and_failed import no_more_tasks

        hint = no_more_tasks(ended.tail, limits.tasks)
    if os.WIFEXITED(reply.status):
        code = os.WEXITSTATUS(reply.status)
        from stockade.runs.explain.ran_and_failed import hints

        others = hints(code, reply, program, resolved, full, ended.tail, advise=advise)
        hint = "; ".join(filter(None, (hint, others)))
        return Verdict(Outcome.EXITED, code, f"exited with {code}", hint)
    number = os.WTERMSIG(reply.status)
    cause = f": {CAUSES[number]}" if number in CAUSES else ""
    reason = f"ended by {signal_name(number)}{cause}"
    if number == signals.SIGSYS:
        return Verdict(Outcome.DENIED, 126, reason, signal=number)
    return Verdict(Outcome.SIGNALLED, 128 + number, reason, hint, signal=number)


def _ended_by(by: int, program: client.Program) -> Verdict | None:
    """Return the verdict on a run that its time or a request ended; None if neither did."""
    if by == wire.ENDED_BY_TIME:
        reason = f"ended after {program.wall:g} s, its time limit"
        return Verdict(Outcome.TIMED_OUT, 124, reason, "allow more time: --timeout, timeout= or limits.wall")
    if by == wire.ENDED_BY_REQUEST:
        return Verdict(Outcome.CANCELLED, 130, "ended because the caller cancelled it")
    if by == wire.ENDED_FROM_OUTSIDE:
        return Verdict(Outcome.CANCELLED, 130, "ended by a process outside the sandbox")
    return None


def _not_started(
    reply: wire.Reply, program: client.Program, resolved: ResolvedPolicy, *, advise: bool
) -> Verdict:
    # The files of a private environment are not the host's: a look there would find nothing.
    if advise and resolved.environment is None:
        from stockade.runs.explain import not_started

        return not_started.explain(reply, program, resolved)
    from stockade.runs.explain import seen_inside

    return seen_inside.explain(reply, program)


def _over_limit(ended: RunEnding, limits: Limits, group: SandboxCgroups | None) -> Verdict | None:
    """Return the verdict on a run that a limit ended, with the limit and the usage; None if none did."""
    reply = ended.reply
    by = reply.ended if reply is not None and reply.kind == wire.REPLY_EXITED else wire.ENDED_ITSELF
    counted = group is not None and (by == wire.ENDED_BY_MEMORY or group.oom_kills() > ended.before.oom_kills)
    if counted and group is not None and limits.memory is not None:
        peak = group.peak_memory(ended.before)
        seen = f" ({size_text(peak)} used)" if peak is not None else ""
        reason = f'memory ran out: limits.memory = "{size_text(limits.memory)}"{seen}'
        more = f"raise limits.memory, or use less: --limit memory={size_text(2 * limits.memory)}"
        return Verdict(Outcome.OUT_OF_MEMORY, 137, reason, more)
    if limits.cpu_time is not None and reply is not None:
        used = (
            group.cpu_used() if by == wire.ENDED_BY_CPU and group is not None else reply.user + reply.system
        )
        # RLIMIT_CPU, instead of a cgroup, counts ticks, which run ahead of the usage on a busy machine.
        least = limits.cpu_time if group is not None else limits.cpu_time / 2
        if by == wire.ENDED_BY_CPU or (_killed(reply) and used >= least):
            allowed = time_text(limits.cpu_time)
            reason = f'processor time ran out: limits.cpu_time = "{allowed}" ({used:.2f} s used)'
            return Verdict(Outcome.LIMIT_EXCEEDED, 137, reason, "raise limits.cpu_time, or compute less")
    return None


def _killed(reply: wire.Reply) -> bool:
    return reply.kind == wire.REPLY_EXITED and reply.status in (signals.SIGKILL, signals.SIGXCPU)


def _task_hint(ended: RunEnding, limits: Limits, group: SandboxCgroups | None) -> str:
    if group is None or not (refused := group.task_refusals() - ended.before.task_refusals):
        return ""
    words = f"the limit of {limits.tasks} tasks was reached and {refused} more were refused"
    return f"{words}: --limit tasks={2 * (limits.tasks or 1)} (limits.tasks) allows more"


EGRESS_ENDED = 'ended because its egress process had ended: on_egress_end = "end"'
ALL_KILLED = "a program killed everything in the sandbox"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGSEGV for 11."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


#: The usual cause of a death by each signal.
CAUSES: dict[int, str] = {
    signals.SIGSEGV: "it accessed memory that it does not have: a bug in the program",
    signals.SIGBUS: "it accessed a mapped file beyond its end, or memory ran out",
    signals.SIGFPE: "it divided by zero",
    signals.SIGILL: "it executed an instruction that this processor does not have",
    signals.SIGABRT: "it aborted itself, for example after a failed assertion",
    signals.SIGKILL: "it was killed: by itself, or by the kernel when memory ran out",
    signals.SIGPIPE: "it wrote to a pipe whose reader is gone",
    signals.SIGXFSZ: "it wrote a file beyond its size limit",
    signals.SIGSYS: "the system call filter ended it for a 32-bit or x32 call, or a program sent it that "
    "signal",
}
