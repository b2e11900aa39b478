"""How a run ended, judged by what the gate and the kernel say and by nothing the program printed."""

from __future__ import annotations

import errno
import os
import signal as signals

from stockade.gate import client
from stockade.policy import Resolved
from stockade.policy.model import Limits
from stockade.policy.values import size_text, time_text
from stockade.sandbox.cgroup import Group
from stockade.sandbox.result import Outcome
from stockade.sandbox.supervise import Ended
from stockade.sandbox.verdict import Verdict


def judge(
    ended: Ended,
    program: client.Program,
    resolved: Resolved,
    group: Group | None,
    *,
    closed: bool = False,
    killed: bool = False,
    full: bool = False,
    asked_inside: bool = False,
) -> Verdict:
    """The verdict on a run that is over.

    `closed` says that its sandbox was closed under it, `killed` that somebody has named that to
    `stockade kill`, `full` that limits.disk is used up, `asked_inside` that a sandboxed program has
    chosen the command: then no file that it names is looked at on the host.
    """
    reply, limits = ended.reply, resolved.limits
    if killed:
        return Verdict(Outcome.CANCELLED, 130, "ended by `stockade kill`")
    if (verdict := _over_limit(ended, limits, group)) is not None:
        return verdict
    if reply is None:
        if closed:
            return Verdict(Outcome.CANCELLED, 130, "the sandbox was closed")
        if ended.gate_died:
            return Verdict(Outcome.SETUP_FAILED, 125, "the gate died before the command ended")
        return Verdict(Outcome.SIGNALLED, 137, f"ended by SIGKILL: {ALL_KILLED}", signal=signals.SIGKILL)
    if reply.kind == client.FAILED:
        reason = f"{reply.text} was replaced on the host, and so came uncovered inside: everything was ended"
        return Verdict(Outcome.DENIED, 126, reason, 'use workspace.mode = "overlay"')
    if reply.kind == client.EXEC_FAILED and asked_inside:
        return _unstarted(reply)
    if reply.kind == client.EXEC_FAILED:
        from stockade.sandbox.unstarted import explain

        return explain(reply, program, resolved)
    if reply.ended == client.BY_TIME:
        reason = f"ended after {program.wall:g} s, the time it was given"
        return Verdict(Outcome.TIMED_OUT, 124, reason, "give it more: --timeout, timeout= or limits.wall")
    if reply.ended == client.BY_REQUEST:
        return Verdict(Outcome.CANCELLED, 130, "ended because it was cancelled")
    if reply.ended == client.FROM_OUTSIDE:
        return Verdict(Outcome.CANCELLED, 130, "ended from outside")
    if reply.status == 0:
        return Verdict(Outcome.EXITED, 0)
    hint = _task_hint(limits, group)
    if os.WIFEXITED(reply.status):
        code = os.WEXITSTATUS(reply.status)
        if asked_inside:
            return Verdict(Outcome.EXITED, code, f"exited with {code}", hint)
        from stockade.sandbox.hints import hints

        hint = "; ".join(filter(None, (hint, hints(code, reply, program, resolved, full))))
        return Verdict(Outcome.EXITED, code, f"exited with {code}", hint)
    number = os.WTERMSIG(reply.status)
    cause = f": {CAUSES[number]}" if number in CAUSES else ""
    reason = f"ended by {signal_name(number)}{cause}"
    if number == signals.SIGSYS:
        return Verdict(Outcome.DENIED, 126, reason, signal=number)
    return Verdict(Outcome.SIGNALLED, 128 + number, reason, hint, signal=number)


def _unstarted(reply: client.Reply) -> Verdict:
    """The verdict on a command that never ran, from the kernel's answer alone."""
    reason = f"the command was not started: {reply.text}: {os.strerror(reply.error)}"
    if reply.text == "command" and reply.error == errno.ENOENT:
        return Verdict(Outcome.SETUP_FAILED, 127, reason)
    if reply.text == "command" and reply.error in (errno.EACCES, errno.EPERM, errno.ENOEXEC):
        return Verdict(Outcome.DENIED, 126, reason)
    return Verdict(Outcome.SETUP_FAILED, 125, reason)


def _over_limit(ended: Ended, limits: Limits, group: Group | None) -> Verdict | None:
    """The limit that ended the run, with its value and what was observed."""
    reply = ended.reply
    by = reply.ended if reply is not None and reply.kind == client.EXITED else client.ITSELF
    counted = group is not None and (by == client.BY_MEMORY or group.oom_kills() > ended.ooms)
    if counted and group is not None and limits.memory is not None:
        peak = group.peak_memory()
        seen = f" ({size_text(peak)} used)" if peak is not None else ""
        reason = f'memory ran out: limits.memory = "{size_text(limits.memory)}"{seen}'
        more = f"raise limits.memory, or use less: --limit memory={size_text(2 * limits.memory)}"
        return Verdict(Outcome.OUT_OF_MEMORY, 137, reason, more)
    if limits.cpu_time is not None and reply is not None:
        used = group.cpu_used() if by == client.BY_CPU and group is not None else reply.user + reply.system
        if by == client.BY_CPU or (_killed(reply) and used >= limits.cpu_time):
            allowed = time_text(limits.cpu_time)
            reason = f'processor time ran out: limits.cpu_time = "{allowed}" ({used:.2f} s used)'
            return Verdict(Outcome.LIMIT_EXCEEDED, 137, reason, "raise limits.cpu_time, or compute less")
    return None


def _killed(reply: client.Reply) -> bool:
    return reply.kind == client.EXITED and reply.status in (signals.SIGKILL, signals.SIGXCPU)


def _task_hint(limits: Limits, group: Group | None) -> str:
    if group is None or not (refused := group.task_refusals()):
        return ""
    return f"the limit of {limits.tasks} tasks was reached and {refused} more were refused: limits.tasks"


ALL_KILLED = "a program killed everything in the sandbox"


def signal_name(number: int) -> str:
    """SIGSEGV for 11."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


#: What usually lies behind a death by signal, in words.
CAUSES: dict[int, str] = {
    signals.SIGSEGV: "it touched memory that it does not have: a bug in the program",
    signals.SIGBUS: "it touched a mapped file beyond its end, or memory ran out",
    signals.SIGFPE: "it divided by zero",
    signals.SIGILL: "it executed an instruction that this processor does not have",
    signals.SIGABRT: "it gave up by itself, as after a failed assertion",
    signals.SIGKILL: "it was killed: by itself, or by the kernel when memory ran out",
    signals.SIGPIPE: "it wrote to a pipe that nobody reads",
    signals.SIGXFSZ: "it wrote a file beyond its size limit",
    signals.SIGSYS: "the system call filter ended it: it made a call of a foreign architecture",
}
