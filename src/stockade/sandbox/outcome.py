"""How a run ended, judged by what the gate and the kernel say and by nothing the program printed."""

from __future__ import annotations

import errno
import os
import signal as signals
import stat

import msgspec

from stockade.gate import client
from stockade.policy import Caller, Limits
from stockade.policy.values import size_text, time_text
from stockade.sandbox.cgroup import Group
from stockade.sandbox.result import Outcome
from stockade.sandbox.supervise import Ended


class Verdict(msgspec.Struct, frozen=True):
    """The outcome, the exit code that stands for it, and what to tell the user."""

    outcome: Outcome
    exit_code: int
    reason: str = ""
    hint: str = ""
    signal: int | None = None


def judge(
    ended: Ended,
    program: client.Program,
    caller: Caller,
    limits: Limits,
    group: Group | None,
    *,
    closed: bool = False,
    killed: bool = False,
) -> Verdict:
    """The verdict on a run that is over.

    `closed` says that its sandbox was closed under it, `killed` that somebody has named that to
    `stockade kill`.
    """
    reply = ended.reply
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
    if reply.kind == client.EXEC_FAILED:
        return _not_started(reply, program, caller)
    if reply.ended == client.BY_TIME:
        return Verdict(Outcome.TIMED_OUT, 124, f"ended after {program.wall:g} s, the time it was given")
    if reply.ended == client.BY_REQUEST:
        return Verdict(Outcome.CANCELLED, 130, "ended because it was cancelled")
    if reply.ended == client.FROM_OUTSIDE:
        return Verdict(Outcome.CANCELLED, 130, "ended from outside")
    if reply.status == 0:
        return Verdict(Outcome.EXITED, 0)
    hint = _task_hint(limits, group)
    if os.WIFEXITED(reply.status):
        code = os.WEXITSTATUS(reply.status)
        return Verdict(Outcome.EXITED, code, f"exited with {code}", hint)
    number = os.WTERMSIG(reply.status)
    cause = f": {CAUSES[number]}" if number in CAUSES else ""
    reason = f"ended by {signal_name(number)}{cause}"
    if number == signals.SIGSYS:
        return Verdict(Outcome.DENIED, 126, reason, signal=number)
    return Verdict(Outcome.SIGNALLED, 128 + number, reason, hint, signal=number)


def _over_limit(ended: Ended, limits: Limits, group: Group | None) -> Verdict | None:
    """The limit that ended the run, with its value and what was observed."""
    reply = ended.reply
    by = reply.ended if reply is not None and reply.kind == client.EXITED else client.ITSELF
    counted = group is not None and (by == client.BY_MEMORY or group.oom_kills() > ended.ooms)
    if counted and group is not None and limits.memory is not None:
        peak = group.peak_memory()
        seen = f" ({size_text(peak)} used)" if peak is not None else ""
        reason = f'memory ran out: limits.memory = "{size_text(limits.memory)}"{seen}'
        return Verdict(Outcome.OUT_OF_MEMORY, 137, reason, "raise limits.memory, or use less")
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


def _not_started(reply: client.Reply, program: client.Program, caller: Caller) -> Verdict:
    why, cwd = os.strerror(reply.error), program.cwd
    if reply.text == "cwd":
        if reply.error == errno.EACCES:
            refused = f"the directory {cwd} cannot be entered: {why}"
            return Verdict(Outcome.SETUP_FAILED, 125, refused, "inside, nobody has the privileges of root")
        hint = f'show it: read = ["{cwd}"]' if os.path.isdir(cwd) else "name a directory that exists"
        return Verdict(Outcome.SETUP_FAILED, 125, f"the sandbox has no directory {cwd}: {why}", hint)
    if reply.text != "command":
        return Verdict(Outcome.SETUP_FAILED, 125, f"the command was not started: {reply.text}: {why}")
    name = program.argv[0]
    if reply.error == errno.ENOENT:
        return _not_found(name, _on_host(name, caller.environ.get("PATH", os.defpath), cwd))
    reason = f"{name}: cannot be executed inside: {why}"
    if reply.error in (errno.EACCES, errno.EPERM):
        return Verdict(Outcome.DENIED, 126, reason, "is it executable, and in a tree that may be executed?")
    if reply.error == errno.ENOEXEC:
        return Verdict(Outcome.DENIED, 126, reason, "a script needs a first line such as #!/bin/sh")
    return Verdict(Outcome.SETUP_FAILED, 125, reason)


def _not_found(name: str, on_host: str) -> Verdict:
    if not on_host:
        return Verdict(
            Outcome.SETUP_FAILED, 127, f"{name}: there is no such command inside", "check its name"
        )
    if interpreter := _interpreter(on_host):
        return Verdict(
            Outcome.SETUP_FAILED,
            127,
            f"{name}: it or {interpreter}, which its first line names, is missing or hidden by the policy",
            f"install it, or show it: `--read {os.path.dirname(interpreter)}`",
        )
    real = os.path.realpath(on_host)
    where = f" ({real})" if real != on_host else ""
    place = os.path.dirname(real)
    return Verdict(
        Outcome.SETUP_FAILED,
        127,
        f"{name}: {on_host}{where} is hidden by the policy, or the interpreter it names is",
        f'show what it needs: read = ["{place}"], or `--read {place}`',
    )


def _interpreter(path: str) -> str:
    """What the first line of a script names, unless that is where every sandbox has it."""
    try:
        # Opening a pipe would otherwise wait for its writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            first = file.readline(256) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except OSError:
        return ""
    words = first[2:].decode("utf-8", "replace").split() if first.startswith(b"#!") else []
    there = words and os.path.exists(words[0]) and os.path.realpath(words[0]).startswith("/usr/")
    return words[0] if words and not there else ""


def _on_host(name: str, path: str, cwd: str) -> str:
    """Where the command is on the host, so that the error can say what the policy hides."""
    places = [cwd] if "/" in name else [place for place in path.split(":") if place]
    candidates = (os.path.join(place, name) for place in places)
    return next((found for found in candidates if os.access(found, os.X_OK) and not os.path.isdir(found)), "")


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
