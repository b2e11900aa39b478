"""Descriptions of each clause of a policy, for the schema that editors read and for docs/reference/policy.md.

Names, defaults and allowed words come from the model; here is only what the
model does not know.
"""

from __future__ import annotations

from typing import NamedTuple

from stockade.controls import Control

#: How times and sizes may be written.
TIME = 'seconds, or "250ms", "30s", "5m", "1h"'
SIZE = 'bytes, or "64K", "10M", "1G"'
A_TIME, A_SIZE = "a time", "a size"


class Clause(NamedTuple):
    """One clause: what you may write, what it means, and the control that enforces it."""

    form: str
    says: str
    control: Control | None = None


CLAUSES: dict[str, Clause] = {
    "profile": Clause("", "the named starting point", Control.FILES),
    "read": Clause("paths", "visible, read-only; with `?` at the end only if it exists", Control.FILES),
    "write": Clause("paths", "visible, and writable for real", Control.FILES),
    "deny": Clause(
        "paths and patterns, relative to the workspace", "hidden, also inside visible trees", Control.DENY
    ),
    "protect": Clause("relative paths", "paths of the workspace that must not change", Control.PROTECT),
    "unprotect": Clause(
        "paths, relative to the workspace",
        "may change although protected: protected paths, `.git`, `.hg`, `.jj`, `.sl`, and what version "
        "control runs",
        Control.PROTECT,
    ),
    "hold_back": Clause(
        "relative patterns",
        "paths of the workspace that a commit holds back, besides those that tools of the host run or obey",
        Control.WORKSPACE_OVERLAY,
    ),
    "allow_commit": Clause(
        "relative patterns",
        "paths of the workspace that a commit takes although tools of the host run or obey them",
        Control.WORKSPACE_OVERLAY,
    ),
    "exec": Clause("patterns", "the only files that may be executed", Control.EXEC),
    "net": Clause(
        '`"none"`, `"open"`, or rules: `host[:ports]`, `*.host[:ports]`, `*[:ports]`, `address[:ports]`, '
        "`network[:ports]`, `tcp://host:port`, `udp://host:port`, `METHOD[,METHOD] https://host/path/**`, "
        "`!` before a rule that denies, and `ask`: you are asked about names that no rule covers",
        "no network, all of the host's, or only what the rules allow; a rule without ports means 80 and 443",
        Control.NETWORK_RULES,
    ),
    "net_roots": Clause(
        "a path",
        "the file of certificates by which Stockade verifies servers whose requests rules judge; without it, "
        "the file that your `SSL_CERT_FILE` names, or the system's",
        Control.NETWORK_HTTP,
    ),
    "on_egress_end": Clause(
        '`"continue"`, `"end"`',
        "what a run does if the process that relays its connections ends: it goes on and reaches nothing, or "
        "it ends too",
        Control.NETWORK_RULES,
    ),
    "secrets": Clause(
        "a table for each",
        "values that stay outside, by the name of the variable that has a placeholder inside",
        Control.SECRETS,
    ),
    "secrets.NAME.from_env": Clause(
        "a name",
        "the variable of your environment that has the value; with `?` at the end the secret is left out if "
        "there is none",
    ),
    "secrets.NAME.from_file": Clause(
        "a path", "the file that has the value; with `?` at the end only if it exists"
    ),
    "secrets.NAME.from_command": Clause(
        "a list of words", "the command that prints the value, which no shell reads"
    ),
    "secrets.NAME.hosts": Clause(
        "hosts: `api.example.com`, `api.example.com:8443`, `http://intranet.example`",
        "the only hosts that get the value, each with a rule for requests in `net`",
        Control.SECRETS,
    ),
    "secrets.NAME.as": Clause(
        '`"bearer"`, `"basic"`, `"header:X-Api-Key"`, `"query:key"`, `"body"`, or a list of these',
        "where in a request the placeholder is replaced",
        Control.SECRETS,
    ),
    "secrets.NAME.prefix": Clause(
        "text", "what the placeholder begins with, for programs that check how a key looks"
    ),
    "secrets.NAME.inside": Clause(
        '`"env"`, `"file"`, `"both"`',
        "where programs find the placeholder: in a variable with the secret's name, or in the file "
        "`/run/secrets/NAME`",
    ),
    "proxy": Clause(
        "true or false",
        "whether programs find a proxy inside, at `198.18.0.1:3128`, for HTTP CONNECT and SOCKS5, and "
        "`HTTPS_PROXY` names it; it reaches what `net` allows",
        Control.NETWORK_RULES,
    ),
    "env": Clause("a table", "variables to set inside", Control.ENVIRONMENT),
    "pass_env": Clause("names", "variables of your environment to pass on", Control.ENVIRONMENT),
    "image": Clause("", "the root file system", Control.FILES),
    "toolchain": Clause(
        "true, false, or commands",
        "whether Stockade shows the install of the command; or further commands whose installs it shows",
        Control.FILES,
    ),
    "delegate": Clause(
        "true or false",
        "whether the program may ask for further sandboxes, which never get more than it has itself",
        Control.FILES,
    ),
    "backend": Clause(
        '`"auto"`, `"native"`, `"bwrap"`, `"landlock"`, or a list of names; the backends of other '
        "systems start nothing",
        "what raises the walls; Stockade uses the backend that you name, or refuses the run; a list is in "
        "order of preference",
    ),
    "accept": Clause("controls", "controls that may be weaker where the host cannot do better"),
    "workspace": Clause("a path or a table", "the directory that commands work in"),
    "workspace.path": Clause("a path", "appears inside at the same path as outside", Control.FILES),
    "workspace.mode": Clause(
        "",
        "`overlay`: changes go to a layer; `rw`: they are real; `ro`: they are refused",
        Control.WORKSPACE_OVERLAY,
    ),
    "workspace.durable": Clause(
        "true or false",
        "changes survive a killed supervisor even under `limits.disk`, or Stockade refuses the run",
    ),
    "limits": Clause("a table", "how much the sandbox may use"),
    "limits.memory": Clause(A_SIZE, "memory of the whole sandbox", Control.LIMITS_MEMORY),
    "limits.tasks": Clause("a number", "processes and threads at once", Control.LIMITS_TASKS),
    "limits.cpu": Clause("a number", "cores", Control.LIMITS_CPU),
    "limits.cpu_time": Clause(A_TIME, "processor time of the whole sandbox", Control.LIMITS_CPU_TIME),
    "limits.wall": Clause(A_TIME, "time from start to end", Control.LIMITS_WALL),
    "limits.output": Clause(
        A_SIZE, "how much of each stream is kept in memory; the rest goes to a file", Control.LIMITS_OUTPUT
    ),
    "limits.files": Clause("a number", "open descriptors of one process", Control.LIMITS_FILES),
    "limits.disk": Clause(
        A_SIZE,
        "changes, private `/tmp`, `/dev/shm` and home together",
        Control.LIMITS_DISK,
    ),
    "limits.connections": Clause(
        "a number", "connections to the outside, in the life of the sandbox", Control.LIMITS_NETWORK
    ),
    "limits.requests": Clause(
        "a number", "HTTP requests; every rule must let Stockade look into HTTP", Control.LIMITS_NETWORK
    ),
    "limits.upload": Clause(A_SIZE, "bytes to the outside", Control.LIMITS_NETWORK),
    "limits.download": Clause(A_SIZE, "bytes from the outside", Control.LIMITS_NETWORK),
    "limits.host_connections": Clause("a number", "connections to each single host", Control.LIMITS_NETWORK),
    "limits.host_requests": Clause("a number", "HTTP requests to each single host", Control.LIMITS_NETWORK),
    "limits.host_upload": Clause(A_SIZE, "bytes to each single host", Control.LIMITS_NETWORK),
    "limits.host_download": Clause(A_SIZE, "bytes from each single host", Control.LIMITS_NETWORK),
    "syscalls": Clause(
        "a table", "additions to the built-in list of system calls, and removals from it", Control.SYSCALLS
    ),
    "syscalls.allow": Clause(
        "names", "calls and socket options that the built-in list leaves out", Control.SYSCALLS
    ),
    "syscalls.deny": Clause("names", "further calls to refuse", Control.SYSCALLS),
    "reuse": Clause("a table", "a pool may use a sandbox for several runs, one after another"),
    "reuse.requests": Clause("a number", "how many runs one sandbox serves"),
    "reuse.age": Clause(A_TIME, "age from which a sandbox takes no more runs"),
    "reuse.idle": Clause(A_TIME, "how long a sandbox waits for the next run before the pool ends it"),
    "receipts": Clause(
        '`"each"`, `"batched"`',
        "whether each receipt is signed before its run returns, or many together soon after",
    ),
}

CONTROLS: dict[Control, str] = {
    Control.FILES: "programs see only the files of the profile, the grants, and private memory",
    Control.DENY: "the named paths do not exist inside",
    Control.PROTECT: "the named paths of the workspace do not change on the host",
    Control.EXEC: "only the listed files can be executed",
    Control.WORKSPACE_OVERLAY: "changes go to a layer beside the workspace",
    Control.NETWORK_NONE: "no network but a private loopback",
    Control.NETWORK_RULES: "connections and datagrams only to hosts, addresses and ports of the rules",
    Control.NETWORK_HTTP: "of hosts with rules for requests, only requests that the rules allow",
    Control.SECRETS: "values stay outside, and reach only the hosts that they are bound to",
    Control.PROCESSES: "programs see, signal and trace only processes of their sandbox",
    Control.IPC: "no shared memory, queues or sockets of the host",
    Control.SYSCALLS: "only the calls of an allowlist",
    Control.PRIVILEGES: "no capability, and no way to gain one",
    Control.ENVIRONMENT: "only variables of your environment that the policy or its profile passes",
    Control.DEVICES: "only null, zero, full, random, urandom, tty and private terminals",
    Control.TERMINAL: "no access to your terminal, and no way to type into it",
    Control.LIMITS_MEMORY: "memory of all processes together",
    Control.LIMITS_TASKS: "number of processes and threads",
    Control.LIMITS_CPU: "number of cores",
    Control.LIMITS_CPU_TIME: "processor time of all processes together",
    Control.LIMITS_WALL: "time from start to end; then the gate ends the run",
    Control.LIMITS_OUTPUT: "output kept in memory",
    Control.LIMITS_FILES: "open descriptors of each process",
    Control.LIMITS_DISK: "bytes and files written",
    Control.LIMITS_NETWORK: "connections, requests and bytes to the outside, in all and for each host",
    Control.CLEANUP: "everything inside ends with the run and with its supervisor",
}


def description(name: str) -> str:
    """Return the description of a clause for an editor, with the form of a time or a size."""
    clause = CLAUSES[name]
    form = {A_TIME: f": {TIME}", A_SIZE: f": {SIZE}"}.get(clause.form, "")
    return clause.says.replace("`", "") + form
