"""`within`, proven by running both: what the narrower policy lets a program do, the wider one does too.

Policies are made by changing one another a little, every pair of them is
compared, and of the pairs that `within` accepts both policies run the same
program, which tries some seventy things. Changes are looked at on the host,
after the commit where there is an overlay: what lands there is what counts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyseccomp
import pytest

import stockade
from attacks import arena
from stockade import Policy
from stockade.backends.selection import enforcement
from stockade.errors import PolicyError, UnsupportedError
from stockade.host import host
from stockade.policy import Control, Limits
from stockade.policy.compare import RULES, excess
from stockade.policy.profile import profile
from support.means import need

ACCEPTED = tuple(map(Control, ("files", "processes", "devices", "protect")))
#: The host's variables, and their values.
HOST = {"HOST_A": "the host's A", "HOST_B": "the host's B", "TERM": "the host's terminal"}
CALLS = ("io_setup", "inotify_init1", "mlock")
#: How a change came to the host: by a commit, or at once.
COMMITTED, AT_ONCE = 1, 2
#: The most pairs of policies that have much in common.
PAIRS = 16
SEED = int(os.environ.get("STOCKADE_SEED", time.time_ns() % 1_000_000_000))


class Seen(msgspec.Struct, frozen=True):
    """What a program could do under a policy."""

    can: frozenset[str]
    environ: dict[str, str]
    #: By path, what came of changing it.
    landed: dict[str, int]
    #: The controls that were asked for, and those of them that are weaker here.
    asked: frozenset[str]
    weaker: frozenset[str]


class World:
    """Some directories of the host for policies to name, sockets in them, and a program to try them out."""

    def __init__(self, root: Path, backend: str) -> None:
        self.root, self.backend = root, backend
        self.home = root / "home"
        files = {
            "ws": ("a.txt", "secret.env", "sub/b.txt", "sub/deep/c.txt", ".git/config", ".git/hooks/h"),
            "ws/": (".envrc", ".vscode/s", ".claude/s", ".git/HEAD", "hk/inner/j.txt"),
            "ws/.": ("AGENTS.md", "sub/AGENTS.md", "sub/deep/AGENTS.md", ".github/workflows/w.yml"),
            "data": ("f.txt", "hidden.txt", "inner/g.txt"),
            "out": ("h.txt", "keep/i.txt"),
            "side": ("secret",),
            "home": ("go/x", "go/bin/p"),
        }
        for place, names in files.items():
            for name in names:
                path = root / place / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{name}\n")
        # What git runs, also where no name says so.
        (root / "ws/.git/config").write_text("[core]\n\thooksPath = hk\n")
        self.programs = [
            root / name for name in ("tools/prog", "tools/other", "ws/tool", "out/prog", "bin/mine")
        ]
        for path in self.programs:
            path.parent.mkdir(exist_ok=True)
            shutil.copy("/usr/bin/true", path)
        self.sockets = [root / name for name in ("ws/sock", "data/sock", "out/sock", "data/inner/sock")]
        self.kept = self.content()
        self.known: dict[Policy, Seen | None] = {}
        self.what: dict[str, Any] = {}

    def content(self) -> dict[str, bytes | None]:
        """Every file, by its path; sockets are not looked at."""
        return {
            path: Path(path).read_bytes()
            for directory, _, names in os.walk(self.root)
            for path in (f"{directory}/{name}" for name in names)
            if not path.endswith("/sock")
        }

    def restore(self) -> dict[str, bytes | None]:
        """Put everything back; what was changed, added (None) or taken away."""
        found: dict[str, bytes | None] = {}
        now = self.content()
        for path in now.keys() - self.kept.keys():
            found[path] = None
            os.unlink(path)
            if path.endswith("/new/made"):
                os.rmdir(os.path.dirname(path))
        for path, content in self.kept.items():
            if now.get(path) != content:
                assert content is not None
                found[path] = content
                Path(path).write_bytes(content)
                if Path(path) in self.programs:
                    Path(path).chmod(0o755)
        return found

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Somebody behind each socket, one of TCP and an abstract one too."""
        with contextlib.ExitStack() as stack:
            for path in (*map(str, self.sockets), f"\0stockade-{os.getpid()}"):
                end = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                end.bind(path)
            servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
            done = threading.Event()
            for server in servers:
                server.settimeout(0.1)
                thread = threading.Thread(target=_answer, args=(server, done))
                thread.start()
                stack.callback(thread.join)
            stack.callback(done.set)
            self.ports = [server.getsockname()[1] for server in servers]
            self.what = self._what()
            yield

    def _what(self) -> dict[str, Any]:
        programs = [*map(str, self.programs), "/usr/bin/true"]
        files = [path for path in self.kept if path not in programs]
        changed = [path for path in files if "/bin/" not in path] + [f"{self.home}/go/bin/p"]
        number = {name: pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) for name in CALLS}
        places = (
            "ws",
            "ws/sub",
            "ws/.git/hooks",
            "data",
            "data/inner",
            "out",
            "out/keep",
            "side",
            "home/go/bin",
        )
        return {
            "look": [*files, *programs, *(f"{self.root}/{name}" for name in places), "/opt", "/etc/profile"],
            "list": [f"{self.root}/{name}" for name in ("ws", "data", "out", "ws/sub")],
            "execute": programs,
            "made": "/usr/bin/false",
            "connect": [*map(str, self.sockets), f"@stockade-{os.getpid()}"]
            + [["127.0.0.1", port] for port in self.ports],
            "calls": number,
            "write": changed,
            "make": [f"{self.root}/{name}" for name in places],
            "make_directory": [f"{self.root}/out/new"],
            "remove": [f"{self.root}/{name}" for name in ("ws/sub/b.txt", "out/keep/i.txt", "data/f.txt")],
        }

    def seen(self, policy: Policy) -> Seen | None:
        """What a program can do under the policy; None where the policy is refused on this machine."""
        key = self._run(policy)
        if key not in self.known:
            self.known[key] = self._seen(key)
        return self.known[key]

    def _run(self, policy: Policy) -> Policy:
        """The policy without what is compared by value: that changes nothing about the rest."""
        rule = policy.workspace
        return msgspec.structs.replace(
            policy,
            limits=Limits(),
            reuse=None,
            backend=self.backend,
            accept=ACCEPTED
            if self.backend == "landlock"
            else policy.accept
            if Control.IPC in policy.accept
            else (),
            workspace=None if rule is None else msgspec.structs.replace(rule, durable=False),
        )

    def _seen(self, policy: Policy) -> Seen | None:
        command, _ = arena.command_of("abilities", json.dumps(self.what))
        overlay = policy.workspace is not None and policy.workspace.mode == "overlay"
        try:
            result = stockade.run(command, policy, timeout=60, on_exit="commit" if overlay else "discard")
        except (PolicyError, UnsupportedError):
            return None
        changed = self.restore()
        assert result.ok, (policy, result)
        assert not result.commit_error, result.commit_error
        verdict = arena.verdict_of(result.stdout)
        shown = "" if policy.workspace is None else policy.workspace.path
        committed = {f"{shown}/{change.path}" for change in result.changes}
        environ = verdict["environ"]
        passed = {f"the host's {name}" for name, value in HOST.items() if environ.get(name) == value}
        return Seen(
            can=frozenset(verdict["can"]) | passed,
            environ=environ,
            landed={path: COMMITTED if path in committed else AT_ONCE for path in changed},
            asked=frozenset(result.controls),
            weaker=frozenset(name for name, one in result.controls.items() if not one.grade.enforced),
        )


def _answer(server: socket.socket, done: threading.Event) -> None:
    while not done.is_set():
        with contextlib.suppress(TimeoutError):
            end, _ = server.accept()
            with end:
                end.send(b"!")


def more(narrow: Seen, wide: Seen, set_by: Policy) -> list[str]:
    """What a program could do under the one and not under the other."""
    found = sorted(narrow.can - wide.can)
    # Changes to a copy of a repository land by a commit, to which the user agrees; mode rw only reads it.
    real = set_by.workspace is not None and set_by.workspace.mode == "rw"
    landed = {path: how for path, how in narrow.landed.items() if not (real and "/.git/" in path)}
    found += [f"change {path}" for path, how in landed.items() if how > wide.landed.get(path, 0)]
    found += [f"{name} is another" for name in set_by.env if narrow.environ.get(name) != wide.environ[name]]
    # A weaker limit is more only where the other policy has that limit at all.
    return found + [f"weaker {name}" for name in (narrow.weaker & wide.asked) - wide.weaker]


def more_by_value(narrow: Policy, wide: Policy) -> list[str]:
    """What is compared without a run: how much, what is promised, and which walls this machine would have."""
    found = []
    for name in Limits.__struct_fields__:
        values = [
            value
            if (value := getattr(one.limits, name)) is not None
            else getattr(profile(one.profile).limits, name)
            for one in (narrow, wide)
        ]
        mine, other = (math.inf if value is None else value for value in values)
        found += [f"limits.{name}"] if mine > other else []
    if isinstance(narrow.net, tuple) and narrow.net and narrow.on_egress_end < wide.on_egress_end:
        found.append("on_egress_end")
    for name, secret in narrow.secrets.items():
        known = wide.secrets.get(name)
        wider = known is None or {*secret.hosts, *secret.as_} - {*known.hosts, *known.as_}
        found += [f"secrets.{name}"] if wider else []
    found += [f"accept {control}" for control in set(narrow.accept) - set(wide.accept)]
    rules = narrow.workspace, wide.workspace
    if all(rule is not None and rule.mode == "overlay" for rule in rules):
        found += ["durable"] if wide.workspace.durable > narrow.workspace.durable else []  # type: ignore[union-attr]
    weaker = [_weaker(narrow), _weaker(msgspec.structs.replace(narrow, backend=wide.backend))]
    if weaker[0] is not None and (weaker[1] is None or weaker[0] - weaker[1]):
        found.append(f"backend {narrow.backend}")
    if narrow.receipts < wide.receipts:  # "batched" is the wider one
        found.append("receipts")
    if narrow.reuse is not None:
        less = wide.reuse is not None and narrow.reuse.requests <= wide.reuse.requests
        found += [] if less else ["reuse"]
    return found


def _weaker(policy: Policy) -> frozenset[Control] | None:
    try:
        controls = enforcement(policy, host(helpers=True))
    except UnsupportedError:
        return None
    return frozenset(control for control, chosen in controls.items() if chosen.weaker)


class Maker:
    """Makes policies by changing others in one or two clauses."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world, self.chance = world, chance
        root = str(world.root)
        self.lists: dict[str, list[str]] = {
            "read": _in(
                root, "ws", "ws/sub", "data", "data/inner", "data/hidden.txt", "data/inner?", "out", "tools"
            )
            + _in(root, "out/keep", "out/keep?", "out/new?", "home/go", "tools/prog", "/usr/bin"),
            "write": _in(root, "out", "out/keep", "data/inner", "ws/sub", "out/h.txt", "home/go", "out/new?")
            + _in(root, "ws/hk", "ws/hk/inner"),
            "unprotect": ["hk", ".git", f"{root}/ws/hk"],
            "deny": _in(
                root, "ws/secret.env", "data/hidden.txt", "data/inner", "ws/sub", "/usr/bin/true", "tools"
            ),
            "protect": [
                ".git/hooks",
                ".git/config",
                ".envrc",
                ".vscode",
                ".claude",
                "sub",
                "a.txt",
                "sub/deep",
            ],
            "hold_back": ["a.txt", "sub/deep", "deep", "**/c.txt", "c.txt", "sub/*", "f.txt"],
            "allow_commit": ["AGENTS.md", "sub/AGENTS.md", "**/AGENTS.md", ".github", "workflows", "sub"],
            "pass_env": ["HOST_A", "HOST_B", "TERM"],
            "accept": ["ipc", *ACCEPTED, "limits.tasks"],
        }
        self.values: dict[str, list[Any]] = {
            "profile": ["strict", "dev", "net-client", "worker"],
            "exec": [
                None,
                *(
                    ["/usr/bin/python3*", *_in(root, *names)]
                    for names in ((), ("/usr/bin/true",), ("/usr/bin/*",), ("tools/prog",), ("tools/*",))
                ),
            ],
            "net": [[], "open", *rules_of(*world.ports)],
            "backend": ["auto", "native", "bwrap", "landlock", ["landlock", "native"], ["native", "bwrap"]],
            "toolchain": [True, False, ["mine"]],
            "delegate": [False, True],
            "on_egress_end": ["continue", "end"],
            "receipts": ["each", "batched"],
        }
        #: Tables, of which one entry is changed at a time; None: there is no such entry.
        self.tables: dict[str, dict[str, list[Any]]] = {
            "workspace": {
                "path": [None, *_in(root, "ws", "ws", "ws/sub", "ws/sub/deep", "ws/.github", "data")],
                "mode": ["ro", "overlay", "overlay", "rw"],
                "durable": [False, True],
            },
            "env": {
                "HOST_A": [None, "1", "2"],
                "HOST_B": [None, "1"],
                "TERM": [None, "dumb"],
                "OWN": [None, "1"],
            },
            "limits": {
                "tasks": [None, 100, 300],
                "wall": [None, 9, 99],
                "disk": [None, "4M", "8M"],
                "memory": [None, "1G"],
                "files": [None, 512, 2048],
            },
            "syscalls": {
                "allow": [[], ["io_setup"]],
                "deny": [[], ["mlock"], ["mlock", "inotify_init1"]],
            },
            "reuse": {"requests": [None, 5, 9]},
        }

    def some(self, count: int) -> list[Policy]:
        """Policies that have much in common, and differ mostly in a few clauses."""
        shown = [[], _in(str(self.world.root), "data", "tools")]
        table: dict[str, Any] = {"read": self.chance.choice(shown)}
        every = [*self.lists, *self.values, *self.tables, "workspace"]  # of which much depends
        for _ in range(self.chance.randrange(2, 7)):
            table = self._changed(table, every)
        few = self.chance.sample(every, 3)
        found = [table]
        if (rule := table.get("workspace")) is not None:  # the same policy, which counts from elsewhere
            for name in ("sub", "sub/deep", ".github"):
                found.append({**table, "workspace": {**rule, "path": f"{self.world.root}/ws/{name}"}})
        while len(found) < count:
            found.append(self._changed(self.chance.choice(found), [*few, *few, self.chance.choice(every)]))
        return [made for made in map(self._policy, found) if made is not None]

    def _changed(self, table: dict[str, Any], names: list[str]) -> dict[str, Any]:
        table = dict(table)
        for _ in range(self.chance.choice((1, 1, 2))):
            name = self.chance.choice(names)
            if name in self.values:
                table[name] = self.chance.choice(self.values[name])
                continue
            if name in self.tables:
                table[name] = self._entry(name, table.get(name) or {})
                continue
            had = list(table.get(name, Policy().protect if name == "protect" else ()))
            item = self.chance.choice(self.lists[name])
            table[name] = [one for one in had if one != item] if item in had else [*had, item]
        return table

    def _entry(self, name: str, had: dict[str, Any]) -> dict[str, Any] | None:
        entries = self.tables[name]
        if not had and name in ("workspace", "reuse"):  # without its first entry there is none at all
            first = next(iter(entries))
            return {first: self.chance.choice(entries[first][1:])}
        key = self.chance.choice(list(entries))
        value = self.chance.choice(entries[key])
        rest = {inner: kept for inner, kept in had.items() if inner != key}
        if value is None and name in ("workspace", "reuse"):
            return None
        return rest if value is None else {**rest, key: value}

    def _policy(self, table: dict[str, Any]) -> Policy | None:
        fitting = dict(table)
        if self.world.backend != "native":  # what the others lack
            fitting |= {"deny": [], "exec": None}
            rule = fitting.get("workspace")
            if rule is not None and rule.get("mode", "overlay") == "overlay":
                fitting["workspace"] = {**rule, "mode": "rw"}
        if self.world.backend == "landlock":
            fitting["protect"] = []
        try:
            return Policy(**fitting)
        except PolicyError:
            return None


def rules_of(first: int, second: int) -> list[list[str]]:
    """Rules that let a program reach the first port, the second one, both or none."""
    return [
        [f"127.0.0.1:{first}"],
        [f"127.0.0.1:{second}"],
        [f"127.0.0.1:{first},{second}"],
        [f"127.0.0.0/8:{first}", f"127.0.0.1:{second}"],
        [f"127.0.0.1:{first},{second}", f"!127.0.0.1:{second}"],
        [f"127.0.0.2:{first}", f"one.example:{second}"],
        [f"*.example:{first}"],
        ["one.example", "!two.example"],
    ]


def _in(root: str, *names: str) -> list[str]:
    return [name if name.startswith("/") else f"{root}/{name}" for name in names]


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the world for a backend."""
    for name, value in HOST.items():
        monkeypatch.setenv(name, value)

    @contextlib.contextmanager
    def made(backend: str) -> Iterator[World]:
        world = World(tmp_path / "world", backend)
        monkeypatch.setenv("HOME", str(world.home))
        monkeypatch.setenv("PATH", f"{world.root}/bin:{os.environ['PATH']}")
        with world.listening():
            yield world

    return made


def accepted(world: World, chance: random.Random, count: int) -> Iterator[tuple[Policy, Policy]]:
    """Pairs that `within` accepts, the narrower first, of which both can run."""
    maker = Maker(world, chance)
    seen: set[tuple[Policy, Policy]] = set()
    while True:
        left = PAIRS
        for narrow, wide in itertools.permutations(maker.some(10), 2):
            fresh = narrow != wide and (narrow, wide) not in seen and left
            if not fresh or excess(narrow, wide, str(world.home)):
                continue
            if world.seen(narrow) is not None and world.seen(wide) is not None:
                seen.add((narrow, wide))
                left -= 1
                yield narrow, wide
            if len(seen) == count:
                return


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("backend", "count"), [("native", 120), ("bwrap", 30), ("landlock", 60)])
def test_what_within_accepts_can_do_no_more(worlds: Any, backend: str, count: int) -> None:
    """A failure prints the seed: STOCKADE_SEED repeats it."""
    need(_works(backend), f"the {backend} backend")
    chance = random.Random(SEED)
    with worlds(backend) as world:
        for narrow, wide in accepted(world, chance, count):
            mine, other = world.seen(narrow), world.seen(wide)
            assert mine is not None and other is not None
            found = more(mine, other, wide) + more_by_value(narrow, wide)
            assert not found, (
                f"STOCKADE_SEED={SEED}\n{found}\n{narrow.to_toml()}\nis within\n{wide.to_toml()}"
            )
        # Else nothing was tried: the policies differ in what they let a program do.
        assert len({one.can for one in world.known.values() if one is not None}) > count / 20


#: For each clause that lets a program do something: two policies that differ in it, the wider one first.
SEEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "profile": ({"profile": "dev"}, {"read": ["home/go/x"]}),
    "read": ({"read": ["data"]}, {"read": ["data/inner"]}),
    "write": ({"write": ["out"]}, {"read": ["out"]}),
    "deny": ({"read": ["data"]}, {"read": ["data"], "deny": ["data/hidden.txt"]}),
    "protect": ({"workspace": "ws", "protect": []}, {"workspace": "ws", "protect": ["a.txt"]}),
    "unprotect": (
        {"workspace": {"path": "ws", "mode": "rw"}, "protect": ["a.txt"], "unprotect": ["a.txt"]},
        {"workspace": {"path": "ws", "mode": "rw"}, "protect": ["a.txt"]},
    ),
    "hold_back": ({"workspace": "ws"}, {"workspace": "ws", "hold_back": ["a.txt"]}),
    "allow_commit": ({"workspace": "ws", "allow_commit": ["AGENTS.md"]}, {"workspace": "ws"}),
    "exec": ({}, {"exec": ["/usr/bin/*"]}),
    "net": ({"net": "open"}, {}),
    "env": ({"env": {"OWN": "2"}}, {"env": {"OWN": "1"}}),
    "pass_env": ({"pass_env": ["HOST_A"]}, {}),
    "accept": ({"read": ["data"], "accept": ["ipc"]}, {"read": ["data"]}),
    "workspace.path": ({"workspace": "ws", "protect": []}, {"workspace": "ws/sub", "protect": []}),
    "workspace.mode": ({"workspace": {"path": "ws", "mode": "rw"}}, {"workspace": "ws"}),
    "syscalls.allow": ({"syscalls": {"allow": ["io_setup"]}}, {}),
    "syscalls.deny": ({}, {"syscalls": {"deny": ["mlock"]}}),
    "toolchain": ({"toolchain": ["mine"]}, {}),
    "delegate": ({"delegate": True}, {}),
}
#: Pairs of which a commit under the first lands what one under the second holds back, because its workspace
#: is a directory in the other's: the clauses of both, the directory, and what lands.
MOVED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"hold_back": ["sub/deep"]}, {"hold_back": ["sub/deep"]}, "sub", "sub/deep/c.txt"),
    ({"hold_back": ["sub"]}, {"hold_back": ["SUB"]}, "sub", "sub/deep/c.txt"),
    ({"hold_back": ["*/deep/*"]}, {"hold_back": ["*/deep/*"]}, "sub", "sub/deep/c.txt"),
    ({"hold_back": ["**/deep/*.txt"]}, {"hold_back": ["**/deep/*.txt"]}, "sub/deep", "sub/deep/c.txt"),
    ({"allow_commit": ["AGENTS.md"]}, {"allow_commit": ["AGENTS.md"]}, "sub", "sub/AGENTS.md"),
]


@pytest.mark.parametrize(("narrow", "wide", "directory", "path"), MOVED)
def test_a_workspace_in_the_others_commits_no_more(
    worlds: Any, narrow: dict[str, Any], wide: dict[str, Any], directory: str, path: str
) -> None:
    with worlds("native") as world:
        top = f"{world.root}/ws"
        mine, other = Policy(workspace=f"{top}/{directory}", **narrow), Policy(workspace=top, **wide)
        seen = [world.seen(mine), world.seen(other)]
        assert [f"{top}/{path}" in one.landed for one in seen] == [True, False]
        assert excess(mine, other, str(world.home)) != []


def test_a_pattern_that_means_the_same_from_both_directories_is_no_more(worlds: Any) -> None:
    with worlds("native") as world:
        rules = {"hold_back": ["**/c.txt"], "allow_commit": ["**/AGENTS.md"]}
        mine, other = (Policy(workspace=f"{world.root}/{name}", **rules) for name in ("ws/sub", "ws"))
        assert excess(mine, other, str(world.home)) == []
        seen = [world.seen(mine), world.seen(other)]
        assert f"{world.root}/ws/sub/AGENTS.md" in seen[0].landed.keys() & seen[1].landed.keys()
        assert f"{world.root}/ws/sub/deep/c.txt" not in seen[0].landed.keys() | seen[1].landed.keys()


def test_rules_that_allow_more_let_a_program_reach_more(worlds: Any) -> None:
    """The control for rules: each of these pairs differs in what is reached, and `within` says so."""
    with worlds("native") as world:
        first, second = world.ports
        both, denied = [f"127.0.0.1:{first},{second}"], f"!127.0.0.1:{second}"
        for wide, narrow in (
            (both, [f"127.0.0.1:{first}"]),
            (both, [*both, denied]),
            ("open", [f"127.0.0.1:{first}"]),
            ([f"127.0.0.1:{first}"], [f"one.example:{first}"]),
            ([f"127.0.0.1:{first}"], []),
        ):
            seen = [world.seen(Policy(net=net)) for net in (wide, narrow)]
            assert more(seen[0], seen[1], Policy()) != [], (wide, narrow)
            assert excess(Policy(net=wide), Policy(net=narrow), str(world.home)) != [], (wide, narrow)


#: Those that are compared by value, and those that are their own clauses together.
BY_VALUE = {
    "net_roots",
    "proxy",
    "secrets",
    "on_egress_end",
    "image",
    "backend",
    "workspace",
    "workspace.durable",
    "limits",
    "syscalls",
    "reuse",
    "receipts",
}


def test_the_program_sees_every_clause_that_lets_it_do_something(worlds: Any) -> None:
    """The control: what would be found if a rule were missing."""
    inner = ("limits.", "reuse.", "secrets.")
    assert {name for name in RULES if not name.startswith(inner)} == SEEN.keys() | BY_VALUE
    with worlds("native") as world:
        for name, tables in SEEN.items():
            wide, narrow = (Policy(**_rooted(table, world.root)) for table in tables)
            seen = [world.seen(wide), world.seen(narrow)]
            assert seen[0] is not None and seen[1] is not None, name
            assert more(seen[0], seen[1], narrow) != [], name
            assert excess(wide, narrow, str(world.home)) != [], name


def _rooted(table: dict[str, Any], root: Path) -> dict[str, Any]:
    found = dict(table)
    for name in ("read", "write", "deny"):
        found[name] = _in(str(root), *table.get(name, ()))
    rule = table.get("workspace")
    if rule is not None:
        rule = {"path": rule} if isinstance(rule, str) else rule
        found["workspace"] = {**rule, "path": f"{root}/{rule['path']}"}
    return found


def _works(backend: str) -> bool:
    try:
        enforcement(Policy(backend=backend, accept=ACCEPTED), host(helpers=True))
    except UnsupportedError:
        return False
    return True
