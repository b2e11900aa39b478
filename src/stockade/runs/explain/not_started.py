"""Explain to a person why a command was not started: what happened, why, and what to type next.

The kernel's answer to execve says little: one errno stands for a missing file, a missing interpreter and a
missing loader. The explanation comes from that errno and from the file on the host, and claims only what is
certain. It tells which files the host has, so no program and no model may read it: they get `seen_inside`.
"""

from __future__ import annotations

import errno
import os
import platform
import shlex
import stat

from stockade.errors import PolicyError
from stockade.gate import client, wire
from stockade.linux.path_lookup import covers
from stockade.policy.values import show
from stockade.resolve.paths.hidden_paths import directories_of
from stockade.resolve.resolved import ResolvedPolicy
from stockade.resolve.toolchain import installs, shims
from stockade.resolve.toolchain.needs import shown_by, which
from stockade.result import Outcome, Verdict
from stockade.runs.explain import seen_inside
from stockade.runs.explain.seen_inside import NO_COMMAND

#: By `e_machine` of an ELF header.
MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
HEAD = 4096
#: What runs a script that has no #! line, by the end of its name.
RUNNERS = {".py": "python3", ".js": "node", ".mjs": "node", ".rb": "ruby", ".pl": "perl"}
ELSEWHERE = "start in another directory: --cwd DIRECTORY, or cwd="


def explain(reply: wire.Reply, program: client.Program, resolved: ResolvedPolicy) -> Verdict:
    """Return the verdict on a command that never ran, with what a look at the host adds to it."""
    if reply.text == "cwd":
        return _no_directory(reply.error, os.path.normpath(program.cwd), resolved)
    if reply.text != "command":
        return seen_inside.explain(reply, program)
    name = program.argv[0]
    found = _on_host(name, program, resolved)
    if reply.error == errno.ENOENT:
        return _not_found(name, found, program, resolved)
    reason, hint = f"{name}: cannot be executed inside: {os.strerror(reply.error)}", ""
    if reply.error in (errno.EACCES, errno.EPERM):
        cause, hint = _refused(name, found, resolved)
        reason = f"{reason}: {cause}" if cause else reason
        return Verdict(Outcome.DENIED, 126, reason, hint)
    if reply.error == errno.ENOEXEC:
        cause, hint = _not_a_program(found)
        return Verdict(Outcome.DENIED, 126, f"{reason}: {cause}", hint)
    if reply.error == errno.ENOTDIR:
        hint = "one of the names before the last / is a file: check the path"
    elif reply.error == errno.E2BIG:
        hint = seen_inside.TOO_LONG
    return Verdict(
        Outcome.SETUP_FAILED, 125, reason, hint or "`stockade doctor` shows what this machine can do"
    )


def _no_directory(error: int, cwd: str, resolved: ResolvedPolicy) -> Verdict:
    why = os.strerror(error)
    if error == errno.EACCES:
        reason = f"the directory {cwd} cannot be entered: {why}"
        hint = (
            "no process inside has the privileges of root: "
            f"`chmod +rx {shlex.quote(cwd)}`, or run as its owner"
        )
        return Verdict(Outcome.SETUP_FAILED, 125, reason, hint)
    reason, hint = f"the sandbox has no directory {cwd}: {why}", "name a directory that exists"
    real, workspace = os.path.realpath(cwd), resolved.workspace
    if os.path.isdir(cwd) and not is_secret(real, resolved):
        if clause := denied_by(cwd, real, resolved):
            reason, hint = f"the directory {cwd} is hidden by {clause}", ELSEWHERE
        elif workspace is not None and covers(workspace.path, cwd):
            reason = f"the workspace has no directory {cwd}: an earlier run in it removed or renamed it"
            hint = ELSEWHERE
        else:
            hint = f'show it: read = ["{cwd}"], or `--read {shlex.quote(cwd)}`'
    return Verdict(Outcome.SETUP_FAILED, 125, reason, hint)


def _not_found(name: str, found: str, program: client.Program, resolved: ResolvedPolicy) -> Verdict:
    def verdict(reason: str, hint: str) -> Verdict:
        return Verdict(Outcome.SETUP_FAILED, 127, f"{name}: {reason}", hint)

    if not found:
        return verdict(*_nowhere(name, program))
    if not is_shown(found, resolved):
        return verdict(*_hidden(name, found, resolved))
    if "/" not in name and not which(name, path := program.env.get("PATH", ""), program.cwd)[0]:
        return verdict(*_not_in_path(found, path))
    line = _first_line(found)
    if line.endswith("\r"):
        return verdict(
            f"the first line of {found} ends in a carriage return, which the kernel takes for a part of the "
            "interpreter's name",
            f"convert its line ends: `sed -i 's/\\r$//' {shlex.quote(found)}`",
        )
    words = line.split()
    if words:
        return verdict(*_no_interpreter(found, words[0], resolved))
    if loader := _loader(found):
        if os.path.exists(loader):
            hint = f"show it: `--read {shlex.quote(os.path.dirname(os.path.realpath(loader)))}`"
            return verdict(f"its loader, {loader}, is hidden by the policy", hint)
        hint = "it was built for another system (musl or glibc, 32 or 64 bits): use a build for this one"
        return verdict(f"{found} needs the loader {loader}, which this machine does not have", hint)
    real = os.path.realpath(found)
    if real != found and not is_shown(real, resolved):
        return verdict(*_hidden(name, real, resolved))
    return verdict(f"{found} does not exist inside", f"inside, PATH is {program.env.get('PATH', '')}")


def _nowhere(name: str, program: client.Program) -> tuple[str, str]:
    """Explain a command that the host does not have either: the reason and a hint."""
    if found := seen_inside.mistake(name):
        return found
    if "/" in name:
        path = os.path.normpath(os.path.join(program.cwd, name))
        above = os.path.dirname(path)
        while not os.path.isdir(above):
            above = os.path.dirname(above)
        return (
            f"there is no such file inside: {path}",
            f"{above} exists, what follows does not: check the path",
        )
    here = os.path.normpath(program.cwd)
    if os.path.exists(os.path.join(here, name)):
        return (
            f"{NO_COMMAND}; there is a file of that name in {here}",
            f"the current directory is not searched: write ./{name}",
        )
    return (
        NO_COMMAND,
        f"check its name, or install it; inside, PATH is {program.env.get('PATH', '')}",
    )


def _not_in_path(found: str, path: str) -> tuple[str, str]:
    """Explain a command that the policy shows, but not in a directory that is searched inside."""
    longer = shlex.quote(f"{path}:{os.path.dirname(found)}".lstrip(":"))
    return (
        f"no directory of PATH has it: PATH inside is {path or 'empty'}",
        f"name it in full: -- {shlex.quote(found)}; or add its directory: --env PATH={longer}",
    )


def _hidden(name: str, found: str, resolved: ResolvedPolicy) -> tuple[str, str]:
    """Explain a command that the host has and the policy hides: the reason and a hint."""
    real = os.path.realpath(found)
    where = f"{found} ({real})" if real != found else found
    if is_secret(real, resolved):
        return f"the policy hides {where}, which is in a place for secrets", "copy the program elsewhere"
    if clause := denied_by(found, real, resolved):
        return f"{where} is hidden by {clause}", "leave the `deny` clause out"
    try:
        behind = shims.through(found, program_cwd(resolved), resolved.caller.environ, resolved.caller.home)
    except PolicyError:
        behind = None
    program = os.path.realpath(behind or found)
    tree = next((one for one in installs.above(program) if installs.is_install(one)), program)
    if covers(tree, os.path.realpath(resolved.caller.home)):
        tree = program
    hint = f'show it: read = ["{tree}"], or `--read {shlex.quote(tree)}`'
    if "/" not in name or found != program:
        hint += f" -- {shlex.quote(program)}"
    if resolved.policy.toolchain is False:
        hint += "; or leave --no-toolchain (toolchain = false) out, which does it for you"
    return f"{where} is hidden by the policy", hint


def program_cwd(resolved: ResolvedPolicy) -> str:
    """Return the directory in which a shim looks up the version that a project asks for."""
    return resolved.caller.cwd if resolved.workspace is None else resolved.workspace.path


def _no_interpreter(script: str, interpreter: str, resolved: ResolvedPolicy) -> tuple[str, str]:
    if not os.path.exists(interpreter):
        name = os.path.basename(interpreter)
        return (
            f"the first line of {script} names {interpreter}, which this machine does not have",
            f"install it, or change the line, to #!/usr/bin/env {name} for example",
        )
    real = os.path.realpath(interpreter)
    if is_shown(interpreter, resolved) and is_shown(real, resolved):
        return (
            f"the first line of {script} names {interpreter}, which cannot be started inside",
            f"try it alone: stockade run -- {interpreter}",
        )
    reason, hint = _hidden(interpreter, real, resolved)
    return f"the first line of {script} names {interpreter}; {reason}", hint


def _refused(name: str, found: str, resolved: ResolvedPolicy) -> tuple[str, str]:
    """Explain why the kernel refused to execute a file: the reason and a hint."""
    path = found or os.path.join(program_cwd(resolved), name)
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return "", "is it executable, and in a tree that may be executed? `ls -l` inside shows it"
    if stat.S_ISDIR(mode):
        return "it is a directory", "name a program in it"
    if not mode & 0o111:
        runner = _first_line(path).split() or [RUNNERS.get(os.path.splitext(path)[1], "sh")]
        return (
            "the file is not executable",
            f"`chmod +x {shlex.quote(path)}`, or name its interpreter: stockade run -- "
            f"{os.path.basename(runner[-1])} {shlex.quote(name)}",
        )
    if resolved.policy.exec is not None:
        return (
            "the policy's `exec` does not list it",
            f'add it: exec = [..., "{os.path.realpath(path)}"], or leave `exec` out',
        )
    return (
        "its mode, or that of a directory on the way, does not allow you to execute it",
        f"`namei -l {shlex.quote(path)}` shows the modes; no process inside has the privileges of root",
    )


def _not_a_program(found: str) -> tuple[str, str]:
    """Explain why the kernel does not recognise a file as a program: the reason and a hint."""
    head = shims.first_bytes(found, HEAD) if found else b""
    if head.startswith(b"\x7fELF") and len(head) >= 20:
        built = MACHINES.get(int.from_bytes(head[18:20], "little"), "another machine")
        if built != platform.machine():
            return (
                f"it is built for {built}, and this machine is {platform.machine()}",
                "use a build for this machine",
            )
        return "it is damaged, or not a program", "get or build it again"
    if found and not head:
        return "the file is empty", "write a program into it"
    return "it is not a program and has no #! line", "a script needs a first line such as #!/bin/sh"


def _on_host(name: str, program: client.Program, resolved: ResolvedPolicy) -> str:
    """Return the path of the command on the host, from the PATH inside or the caller's; empty if none."""
    if "/" in name:
        path = os.path.join(program.cwd, name.removeprefix("./"))
        return path if os.path.exists(path) else ""
    for path in (program.env.get("PATH", ""), resolved.caller.environ.get("PATH", os.defpath)):
        if found := which(name, path, resolved.caller.cwd or "/")[0]:
            return found
    return ""


def is_shown(path: str, resolved: ResolvedPolicy) -> bool:
    """Whether the policy shows a path of the host."""
    trees = [*shown_by(resolved.profile), *(grant.path for grant in resolved.grants), *resolved.links]
    trees += [] if resolved.workspace is None else [resolved.workspace.path]
    hidden = any(covers(tree, path) for tree in resolved.denied)
    return not hidden and any(covers(tree, path) for tree in trees)


def denied_by(path: str, real: str, resolved: ResolvedPolicy) -> str:
    """Return the clause that hides a path or its real name; empty if none does."""
    written = resolved.hidden.written
    above = (place for one in (path, real) for place in (one, *directories_of(one)))
    name = next((place for place in above if place in written), None)
    return "" if name is None else f"deny = {show(written[name])}"


def is_secret(path: str, resolved: ResolvedPolicy) -> bool:
    """Whether a path may hold secrets, so that no hint may advise to show it."""
    home = os.path.realpath(resolved.caller.home)
    return covers("/etc", path) or any(covers(f"{home}/{name}", path) for name in installs.SECRETS)


def _first_line(path: str) -> str:
    """Return the rest of a script's first line after #!; empty if it has none."""
    head = shims.first_bytes(path, 256)
    return head[2:].partition(b"\n")[0].decode("utf-8", "replace") if head.startswith(b"#!") else ""


def _loader(path: str) -> str:
    """Return the dynamic loader that a 64-bit program names; empty if it names none."""
    head = shims.first_bytes(path, HEAD)
    if not head.startswith(b"\x7fELF\x02\x01") or len(head) < 64:
        return ""
    offset, size, count = (int.from_bytes(head[a:b], "little") for a, b in ((32, 40), (54, 56), (56, 58)))
    for entry in (head[offset + size * number :][:56] for number in range(min(count, 64))):
        if int.from_bytes(entry[:4], "little") == 3:  # PT_INTERP
            begin, length = (int.from_bytes(entry[a : a + 8], "little") for a in (8, 32))
            return head[begin : begin + length].rstrip(b"\0").decode("utf-8", "replace")
    return ""
