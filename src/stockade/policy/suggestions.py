"""What to write instead of a name that does not exist. Imported only for an error.

`OTHER_TOOLS` has the words that people bring from docker, bubblewrap, firejail and sandlock, each with
what it is called here, in a policy and on the command line. Any other unknown name is compared with those
that exist, and a hint suggests only a name of which it is a likely typing error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Equivalent(NamedTuple):
    """What to write for a word of another tool."""

    #: In a policy.
    clause: str
    #: On the command line.
    option: str


def _same(words: str) -> Equivalent:
    return Equivalent(words, words)


def _limit(name: str, value: str, option: str = "") -> Equivalent:
    written = value if value.isdigit() else f'"{value}"'
    return Equivalent(f"write limits.{name} = {written}", option or f"write --limit {name}={value}")


_TERMINAL = _same("leave it out: at a terminal the command gets a terminal of its own automatically")
_ALWAYS = _same("leave it out: every sandbox has it")
_PRIVILEGES = _same("leave it out: the program runs as you, has no capability and can gain no privilege")
_TEMPORARY = _same(
    "leave it out: nothing but the changes is kept when a run ends, and --discard deletes them"
)
_READ = Equivalent(
    'write read = ["/path"]: a path has the same name inside',
    "write --read /path: a path has the same name inside",
)
_READ_ONLY = Equivalent(
    'write workspace.mode = "ro", or read = ["/path"]', "write --mode ro, or --read /path for another path"
)
_WRITE = Equivalent(
    'write write = ["/path"]: a path has the same name inside',
    "write --write /path: a path has the same name inside",
)
_VOLUME = Equivalent(
    'write read = ["/path"], or write = ["/path"]: a path has the same name inside',
    "write --read /path, or --write /path: a path has the same name inside",
)
_HIDE = Equivalent('write deny = ["path"]', "write --deny PATH")
_NETWORK = Equivalent(
    'write net = "open" for the host\'s network, ["api.example.com"] for one host, "none" for no network',
    "write --net open for the host's network, --net HOST for one host, --net none for no network",
)
_NO_NETWORK = Equivalent(
    "leave it out: without net there is no network",
    "leave it out: without --net there is no network",
)
_HOSTS = Equivalent(
    'write net = ["api.example.com:443"]; without ports a rule allows 80 and 443',
    "write --net HOST:PORT, once for each host; without ports a rule allows 80 and 443",
)
_DENIED_HOSTS = Equivalent(
    'write net = ["*.example.com", "!ads.example.com"]: a rule with ! denies',
    "write --net '!HOST': a rule with ! denies",
)
_PORTS = Equivalent(
    'a policy cannot publish ports: write --publish 8080:80, or publish=["8080:80"] in the call',
    "write --publish 8080:80 for port 80 inside",
)
_SET = Equivalent('write env = { NAME = "value" }', "write --env NAME=VALUE")
_PASS = Equivalent('write pass_env = ["NAME"]', "write --pass-env NAME")
_PLACE = Equivalent('write workspace.path = "DIRECTORY"', "write --cwd DIRECTORY")
_FILTER = _same('write syscalls.deny = ["NAME"] or syscalls.allow = ["NAME"] in a policy')
_ALL_LIMITS = Equivalent('write limits = { memory = "512M", tasks = 64 }', "write --limit NAME=VALUE")

_ROWS: tuple[tuple[str, Equivalent], ...] = (
    ("timeout time_limit max_time wall wall_time walltime", _limit("wall", "30s", "write --timeout 30s")),
    ("memory mem max_memory memory_limit max_mem m rlimit_as", _limit("memory", "512M")),
    ("cpu cpus cpu_limit max_cpu num_cpus cpuset_cpus", _limit("cpu", "2")),
    ("cpu_time cpu_seconds max_cpu_time rlimit_cpu", _limit("cpu_time", "10s")),
    ("tasks pids pids_limit max_pids processes max_processes nproc rlimit_nproc", _limit("tasks", "64")),
    ("disk storage storage_opt max_disk disk_quota", _limit("disk", "1G")),
    ("files nofile max_open_files rlimit_nofile", _limit("files", "1024")),
    ("output max_output output_limit", _limit("output", "10M")),
    ("ulimit rlimit rlimits resources", _ALL_LIMITS),
    ("volume volumes mounts binds fs filesystem", _VOLUME),
    ("readonly read_only ro", _READ_ONLY),
    ("ro_bind ro_bind_try fs_read allow_read whitelist_ro", _READ),
    ("bind bind_try dev_bind rw fs_write allow_write writable whitelist", _WRITE),
    ("blacklist hide mask exclude fs_deny", _HIDE),
    ("network networking allow_net share_net internet", _NETWORK),
    ("no_network unshare_net disable_network deny_net net_none", _NO_NETWORK),
    (
        "allow_host allow_hosts allowed_hosts allow_domain allow_domains allowed_domains domains "
        "net_allow net_allow_host",
        _HOSTS,
    ),
    (
        "deny_host deny_hosts denied_hosts block_host block_hosts blocked_hosts deny_domain deny_domains "
        "denied_domains blocked_domains net_deny net_deny_host",
        _DENIED_HOSTS,
    ),
    ("publish ports expose", _PORTS),
    ("environment setenv e envs", _SET),
    ("clearenv clean_env inherit_env keep_env preserve_env env_passthrough", _PASS),
    ("workdir working_dir working_directory chdir", _PLACE),
    ("it ti i t tty interactive pty stdin", _TERMINAL),
    ("rm ephemeral", _TEMPORARY),
    ("user u uid gid group_add userns privileged cap_add cap_drop caps capabilities no_new_privs "
     "no_new_privileges noroot nonewprivs", _PRIVILEGES),
    ("security_opt seccomp", _FILTER),
    ("tmpfs private_tmp private_dev dev proc unshare_all unshare_pid unshare_ipc unshare_uts unshare_user "
     "die_with_parent new_session init", _ALWAYS),
    ("overlay tmp_overlay cow", Equivalent('write workspace.mode = "overlay"', "write --mode overlay")),
    ("d detach background", _same("`stockade shell --keep` starts a shell that outlives its terminal")),
    ("dry_run", _same("`stockade plan` shows what a run would do")),
    ("entrypoint cmd command c", _same("write the command after --: stockade run -- COMMAND")),
)  # fmt: skip

#: By word, in lower case and with _ for -.
OTHER_TOOLS = {word: equivalent for words, equivalent in _ROWS for word in words.split()}

#: Commands of other tools, and the one of `stockade` that does the same.
OTHER_COMMANDS = {
    "exec": "run",
    "start": "run",
    "enter": "shell",
    "stop": "kill",
    "list": "ps",
    "status": "ps",
    "log": "logs",
    "history": "logs",
    "apply": "commit",
    "revert": "discard",
    "undo": "discard",
    "reset": "discard",
    "prune": "workspaces",
    "config": "policy",
    "check": "doctor",
    "info": "doctor",
}


def for_option(word: str) -> str:
    """Return what to write for an option of another tool; empty if it is not known."""
    found = OTHER_TOOLS.get(_plain(word))
    return found.option if found is not None else ""


def for_clause(word: str) -> str:
    """Return what to write for a key that other tools have; empty if it is not known."""
    found = OTHER_TOOLS.get(_plain(word))
    return found.clause if found is not None else ""


def for_file(path: str) -> str:
    """What to write for a policy file that has the name of a published port; empty for other names."""
    ports = path.partition("/")[0].replace(".", "").split(":")
    return f"-p names a policy file; for ports, {_PORTS.option}" if all(map(str.isdigit, ports)) else ""


def closest(word: str, known: Iterable[str]) -> str:
    """Return the one known name that `word` mistypes or abbreviates; empty if there is none.

    A third of the letters may differ, so that a name of one or two letters is never taken for another.
    """
    names = list(dict.fromkeys(known))
    wanted = _plain(word)
    if not wanted:
        return ""
    edits = {name: _edits(wanted, _plain(name)) for name in names}
    best = min(edits.values(), default=len(wanted))
    if best <= len(wanted) // 3:
        return next(name for name in names if edits[name] == best)
    begun = [name for name in names if _plain(name).startswith(wanted)]
    return begun[0] if len(begun) == 1 else ""


def _plain(word: str) -> str:
    return word.lstrip("-").replace("-", "_").lower()


def _edits(one: str, other: str) -> int:
    """Count the letters to insert, remove, replace or swap with the next to turn one word into the other."""
    one, other = one[:64], other[:64]
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        above, before, row = before, row, [i]
        for j, wanted in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1]
