"""Plans for systems that are not here, checked as values: macOS, OpenBSD and Windows are pretended.

Nothing of this has run on its own system. What is tested is that a plan says what the policy says, that no
name gets out of its quotes, and that a run is refused.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import stockade
from stockade import Policy, PolicyError, UnsupportedError, backends, cli
from stockade.backends.other_systems import apple_container, job_object, pledge, seatbelt
from stockade.backends.other_systems import draft as drafts
from stockade.backends.other_systems.draft import DraftPlan
from stockade.backends.selection import select
from stockade.controls import Control
from stockade.host import Host
from stockade.host.capabilities import ELSEWHERE
from support import sbpl
from support.paths import ROOT

GOLDEN = ROOT / "tests" / "fixtures" / "golden"
PROJECT = "/Users/ann/project"
MAC = seatbelt.SeatbeltInputs(
    command=("make", "check"),
    cwd="/Users/ann/.local/state/stockade/scratch/1",
    environ=(("HOME", "/Users/ann/.local/state/stockade/scratch/1"), ("PATH", "/usr/bin:/bin")),
    tag="a1b2",
    scratch="/Users/ann/.local/state/stockade/scratch/1",
    files=1024,
    own_network=True,
)
GRANTS = (
    ("/opt/data", "read", True, 'read = "/opt/data"'),
    ("/srv/one.txt", "write", False, 'write = "/srv/one.txt"'),
    (PROJECT, "write", True, 'workspace = "."'),
)
MACHINE = apple_container.AppleContainerInputs(
    image="debian:12",
    command=("make", "check"),
    cwd=PROJECT,
    environ=(("PATH", "/usr/bin:/bin"), ("CI", "a=b,c")),
    tag="a1b2",
    uid=501,
    gid=20,
    files=1024,
    own_network=True,
    grants=(GRANTS[0], GRANTS[2]),
    memory=512 << 20,
    cpu=2,
)
BSD = pledge.PledgeInputs(
    command=("make", "check"),
    cwd=PROJECT,
    environ=(("HOME", "/home/ann/s"), ("PATH", "/usr/bin:/bin")),
    scratch="/home/ann/s",
    files=1024,
    own_network=True,
)
changed = msgspec.structs.replace
PLANS: dict[str, DraftPlan] = {
    "seatbelt": seatbelt.compile_plan(MAC),
    "seatbelt-grants": seatbelt.compile_plan(
        changed(MAC, cwd=PROJECT, own_network=False, grants=GRANTS, cpu_time=10)
    ),
    "apple-container": apple_container.compile_plan(MACHINE),
    "pledge": pledge.compile_plan(BSD),
    "pledge-grants": pledge.compile_plan(
        changed(
            BSD, own_network=False, grants=GRANTS, denied=("/opt/data/key",), memory=64 << 20, cpu_time=10
        )
    ),
    "jobobject": job_object.compile_plan(job_object.JobObjectInputs(processors=4)),
    "jobobject-limits": job_object.compile_plan(
        job_object.JobObjectInputs(processors=4, memory=64 << 20, tasks=8, cpu=1.5, cpu_time=10)
    ),
}
#: What each backend has in part, or a policy must do without.
ACCEPT = ("files", "processes", "syscalls", "privileges", "devices", "limits.wall", "cleanup")
HEAD = '(version 1)(deny default (with message "x"))'
HOSTILE = [
    'a"quote',
    "a\\",
    'a\\"b',
    "two\nlines",
    ")(allow default)(",
    '") (allow file-write*) (literal "',
    "; a comment",
    "#| another |# 'x `y ,z",
    "@READ@ @TAG@ @NETWORK@",
    "\\x22\\n\\0",
    "$(touch x) `id` ${HOME}",
    "ünï 😀 \u202e",
    " leading and trailing ",
    "*?[a-z]^$",
]


def described(plan: DraftPlan) -> str:
    lines = [f"backend {plan.backend}"]
    lines += [f"{number:3} {op.describe()}  [{op.clause}]" for number, op in enumerate(plan.ops)]
    lines += [f"{name}:\n{text}" for name, text in plan.texts]
    lines += [f"argument {word}" for word in plan.argv if word not in dict(plan.texts).values()]
    return "\n".join((*lines, f"hash {plan.hash}")) + "\n"


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Host]:
    """Makes Stockade believe that it runs on another system."""

    def pretend(system: str, *without: str) -> Host:
        machine = Host.pretend(without, system=system)
        monkeypatch.setattr("stockade.host.host", lambda **_: machine)
        monkeypatch.setattr("stockade.runs.prepare.host", lambda **_: machine)
        return machine

    return pretend


class TestEveryDraft:
    @pytest.mark.parametrize("name", PLANS)
    def test_the_plan_is_as_written_down(self, name: str) -> None:
        file = GOLDEN / f"draft-{name}.txt"
        if os.environ.get("STOCKADE_REGENERATE"):
            file.write_text(described(PLANS[name]))
        assert described(PLANS[name]) == file.read_text()

    def test_there_is_no_file_for_a_plan_that_is_not_compiled(self) -> None:
        assert {file.stem for file in GOLDEN.glob("draft-*.txt")} == {f"draft-{name}" for name in PLANS}
        drawn = {plan.backend for plan in PLANS.values()}
        assert drawn == {name for names in backends.DRAFTS.values() for name in names}

    @pytest.mark.parametrize("system", backends.DRAFTS)
    def test_every_control_has_a_mechanism_or_a_reason_and_no_run_gets_any(self, system: str) -> None:
        machine = Host.pretend(system=system)
        for name in backends.DRAFTS[system]:
            draft = backends.table(name)
            assert issubclass(draft, drafts.DraftBackend) and draft.system == system
            assert set(draft.foundation) <= set(ELSEWHERE[system])
            planned, offered = draft.planned(machine), draft.offers(machine)
            assert set(planned) == set(offered) == set(Control)
            assert not any(offer.available or offer.waivable for offer in offered.values())
            for control, offer in planned.items():
                assert offer.mechanism if offer.available else offer.reason, control
                if offer.available or offer.weaker:
                    assert "has never been run on" in offered[control].reason
            # Nobody is asked to rely on what the mechanism cannot do.
            for never in (Control.WORKSPACE_OVERLAY, Control.EXEC, Control.LIMITS_DISK):
                assert not planned[never].available and not planned[never].weaker

    @pytest.mark.parametrize("name", [name for names in backends.DRAFTS.values() for name in names])
    def test_on_linux_a_run_and_a_plan_of_it_say_which_system_it_needs(
        self, name: str, workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(workspace)
        needs = {"darwin": "macOS", "openbsd": "OpenBSD", "win32": "Windows"}[backends.table(name).system]
        with pytest.raises(UnsupportedError, match=f"the {name} backend needs {needs}, this is Linux"):
            stockade.run(["true"], Policy(backend=name, accept=list(Control)))
        for command in ("run", "plan"):
            assert cli.main([command, "--backend", name, "--", "true"]) == 125
            assert f"needs {needs}, this is Linux" in " ".join(capsys.readouterr().err.split())

    @pytest.mark.parametrize("system", backends.DRAFTS)
    def test_there_a_run_is_refused_whatever_it_accepts(
        self, system: str, on: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, workspace: Path
    ) -> None:
        on(system)
        for start in ("stockade.gate.client.launch", "subprocess.Popen"):
            monkeypatch.setattr(start, lambda *_, **__: pytest.fail("something was started"))
        for name in ("auto", *backends.DRAFTS[system]):
            with pytest.raises(UnsupportedError) as refused:
                stockade.run(["true"], Policy(backend=name, accept=list(Control)))
            assert "has never been run on" in refused.value.message
            assert "use a Linux machine" in refused.value.hint and "waive" not in refused.value.hint

    def test_equal_inputs_have_equal_plans_and_others_have_others(self) -> None:
        # Another run of the same has another mark, and another private directory.
        other = f"{MAC.scratch[:-1]}2"
        twin = changed(MAC, scratch=other, cwd=other, environ=(("HOME", other), MAC.environ[1]), tag="b2")
        assert seatbelt.compile_plan(twin).hash == PLANS["seatbelt"].hash
        assert len({plan.hash for plan in PLANS.values()}) == len(PLANS)


class TestSeatbelt:
    def profile(self, **given: Any) -> sbpl.Profile:
        return sbpl.read(seatbelt.profile(changed(MAC, **given)))

    def test_nothing_is_allowed_by_default_and_nothing_everywhere(self) -> None:
        for plan in ("seatbelt", "seatbelt-grants"):
            profile = sbpl.read(dict(PLANS[plan].texts)["profile"])
            assert profile.message == "stockade-a1b2"
            for path in ("/", "/Users/ann/.ssh/id", "/private/etc/passwd", "/private/tmp/x", "/dev/disk0"):
                assert not profile.allows("file-write-data", path)
                assert not profile.allows("file-write-create", path)
                assert path == "/" or not profile.allows("file-read-data", path)

    def test_what_is_granted_is_allowed_and_no_more(self) -> None:
        profile = self.profile(grants=GRANTS)
        read, write, make = "file-read-data", "file-write-data", "file-write-create"
        allowed = {
            read: ("/opt/data", "/opt/data/x", "/srv/one.txt", "/dev/urandom", "/usr/bin/env"),
            "process-exec": ("/usr/bin/env", "/opt/data/x"),
            write: ("/srv/one.txt", f"{PROJECT}/n", "/dev/null"),
            make: (f"{PROJECT}/n",),
            "file-read-metadata": ("/srv", "/opt", "/Users"),
        }
        refused = {
            read: ("/opt/database", "/srv", "/srv/one.txt/x", "/dev/tty", "/Users"),
            write: ("/opt/data/x", "/srv/one.txt/x", "/dev/tty", "/usr/bin/env"),
            make: ("/opt/data/x", "/srv/two.txt", "/dev/null"),
            "process-exec": ("/Applications/Mail.app/x", "/usr/local/bin/x", "/private/tmp/x"),
        }
        for verdict, table in ((True, allowed), (False, refused)):
            for operation, paths in table.items():
                for path in paths:
                    assert profile.allows(operation, path) is verdict, (operation, path)

    def test_devices_are_refused_after_every_grant(self) -> None:
        rules = self.profile(grants=GRANTS).rules
        kinds = (("vnode-type", "CHARACTER-DEVICE"), ("vnode-type", "BLOCK-DEVICE"))
        at = rules.index(sbpl.Rule(False, ("file-read*", "file-write*"), kinds))
        after = [rule for rule in rules[at + 1 :] if rule.operations[0].startswith("file")]
        allowed = {path for rule in after for _, path in rule.filters}
        assert allowed == {*seatbelt.DEVICES, *seatbelt.OWN_DESCRIPTORS}

    def test_the_network_is_the_policys(self) -> None:
        def operations(profile: sbpl.Profile) -> set[str]:
            return {name for rule in profile.rules if rule.allow for name in rule.operations}

        none, host = self.profile(), self.profile(own_network=False)
        assert not [name for name in operations(none) if name.startswith(("network", "system", "mach"))]
        assert operations(host) - operations(none) == {
            "network-outbound", "network-bind", "network-inbound", "system-socket"
        }  # fmt: skip
        # The host's sockets in directories stay closed: they are ways to its services.
        (out,) = [rule.filters for rule in host.rules if "network-outbound" in rule.operations]
        assert list(out) == [("remote", "ip", "*:*"), ("literal", "/private/var/run/mDNSResponder")]

    @pytest.mark.parametrize("name", HOSTILE)
    @pytest.mark.parametrize("access", ["read", "write"])
    def test_no_name_gets_out_of_its_quotes(self, name: str, access: str) -> None:
        path = f"/Users/ann/{name}"
        plain, found = (
            self.profile(grants=((place, access, True, "c"), (f"{place}/f", access, False, "c")))
            for place in ("/Users/ann/@", path)
        )
        # The same rules, with the name exactly as it is in the place of a plain one.
        swapped = [
            rule._replace(
                filters=tuple(
                    tuple(word.replace("/Users/ann/@", path, 1) for word in one) for one in rule.filters
                )
            )
            for rule in plain.rules
        ]
        assert [(r.allow, r.operations, set(r.filters)) for r in found.rules] == [
            (r.allow, r.operations, set(r.filters)) for r in swapped
        ]
        assert found.message == plain.message == "stockade-a1b2"

    def test_a_hostile_name_on_disk_comes_through_the_whole_way(
        self, on: Callable[..., Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        on("darwin")
        monkeypatch.chdir(tmp_path)
        place = tmp_path / '@READ@") (allow default) \\ "\nx'
        place.mkdir()
        policy = Policy(backend="seatbelt", read=[str(place)], accept=[*ACCEPT, "limits.tasks"])
        plan = drafts.draw(policy, command=("true",))
        assert plan is not None
        profile = sbpl.read(dict(plan.texts)["profile"])
        assert profile.allows("file-read-data", f"{os.path.realpath(place)}/file")
        assert not profile.allows("file-read-data", str(tmp_path / "other"))

    def test_a_name_that_is_not_text_is_refused(self) -> None:
        for path in ("/Users/ann/\udcff", "/a\0b", "relative"):
            with pytest.raises(PolicyError, match="is not"):
                seatbelt.compile_plan(changed(MAC, grants=((path, "read", True, "c"),)))

    @pytest.mark.parametrize("path", ["/System/Library/x", "/Library", "/private", "/usr/local"])
    def test_the_system_is_never_writable(self, path: str) -> None:
        with pytest.raises(PolicyError, match="belongs to the system"):
            seatbelt.compile_plan(changed(MAC, grants=((path, "write", True, "c"),)))

    def test_every_token_is_in_the_template_once(self) -> None:
        assert seatbelt.fill("a @X@ @Y@", {"X": "@Y@", "Y": "@X@"}) == "a @Y@ @X@"
        for template in ("a @X@", "@X@ @Y@ @X@", "@X@ @Y@ @Z@"):
            with pytest.raises(ValueError, match="once"):
                seatbelt.fill(template, {"X": "", "Y": ""})
        assert len(seatbelt.TOKEN.findall(seatbelt.TEMPLATE)) == 7

    @pytest.mark.parametrize(
        "text",
        [
            "(version 1)",
            "(version 1)(allow default)",
            f"{HEAD}(allow file-write*)",
            f'{HEAD}(allow file-read* (subpath "/a)',
            f'{HEAD}(allow file-read* (subpath "/a\\n"))',
            f"{HEAD})",
            f"{HEAD} allow",
            f'{HEAD}(allow file-frob (literal "/a"))',
        ],
    )
    def test_the_checker_itself_refuses_what_is_no_profile(self, text: str) -> None:
        with pytest.raises(ValueError):
            sbpl.read(text)

    def test_denials_are_looked_for_where_only_the_kernel_writes(self) -> None:
        found = seatbelt.predicate("a1b2")
        assert found.startswith('process == "kernel" AND ') and found.endswith('CONTAINS "stockade-a1b2"')
        assert seatbelt.denials("a1b2")[-2:] == ("--predicate", found)
        for tag in ('x" OR "1" == "1', "", "a b", "-a", "a" * 41, "ä", "a\n"):
            with pytest.raises(PolicyError):
                seatbelt.predicate(tag)
            with pytest.raises(PolicyError):
                self.profile(tag=tag)


class TestAppleContainer:
    def argv(self, **given: Any) -> list[str]:
        return list(apple_container.compile_plan(changed(MACHINE, **given)).argv)

    def test_less_memory_than_a_machine_has_is_refused_or_loudly_more(self) -> None:
        with pytest.raises(PolicyError, match="a virtual machine has at least 200M"):
            apple_container.compile_plan(changed(MACHINE, memory=64 << 20))
        plan = apple_container.compile_plan(changed(MACHINE, memory=64 << 20, accept=("limits.memory",)))
        assert plan.warnings == (
            "limits.memory = 64M is NOT enforced: the virtual machine has 200M, the minimum",
        )
        assert "200M" in plan.argv
        exact = apple_container.compile_plan(changed(MACHINE, memory=200 << 20))
        assert exact.warnings == () and "200M" in exact.argv
        # Never more than was asked for where it can be kept.
        assert "300M" in self.argv(memory=(301 << 20) - 1)
        assert "--memory" not in self.argv(memory=0)

    def test_the_network_is_the_policys(self) -> None:
        argv = self.argv()
        assert argv[argv.index("--network") + 1] == "none" and "--no-dns" in argv
        assert "--network" not in self.argv(own_network=False)

    @pytest.mark.parametrize("name", ["a,readonly", "a:b", "a=b", "a\nb", "a\udcff"])
    def test_a_name_that_an_option_would_split_is_refused(self, name: str) -> None:
        with pytest.raises(PolicyError, match="cannot be written in an option"):
            self.argv(grants=((f"/Users/ann/{name}", "read", True, "c"),))

    def test_what_is_readable_is_shared_read_only_and_files_are_not_shared(self) -> None:
        mounts = [word for word in self.argv() if word.startswith("type=bind")]
        assert mounts == [
            "type=bind,source=/opt/data,target=/opt/data,readonly",
            f"type=bind,source={PROJECT},target={PROJECT}",
        ]
        with pytest.raises(PolicyError, match="only directories"):
            self.argv(grants=(GRANTS[1],))

    def test_part_of_a_processor_and_no_image_are_refused(self) -> None:
        with pytest.raises(PolicyError, match="whole processors"):
            self.argv(cpu=1.5)
        for image in ("host", "", "--privileged"):
            with pytest.raises(PolicyError, match="needs an image"):
                self.argv(image=image)


class TestPledge:
    def test_promises_are_those_of_the_policy(self) -> None:
        none, host = pledge.promises(True).split(), pledge.promises(False).split()
        assert set(host) - set(none) == {"inet", "dns"}
        never = {
            "unix",
            "id",
            "tty",
            "ps",
            "settime",
            "sendfd",
            "recvfd",
            "unveil",
            "mcast",
            "route",
            "vminfo",
        }
        assert never.isdisjoint(host)

    def test_writing_is_only_where_it_is_granted(self) -> None:
        given = changed(BSD, grants=GRANTS, denied=("/opt/data/key", "/elsewhere"))
        found = {path: rights for path, rights, _ in pledge.unveiled(given)}
        writable = {path for path, rights in found.items() if set(rights) & set("wc")}
        assert writable == {"/srv/one.txt", PROJECT, BSD.scratch, "/dev/null"}
        assert found["/opt/data"] == "rx" and found["/srv/one.txt"] == "rwx" and found[PROJECT] == "rwxc"
        assert found["/opt/data/key"] == "" and "/elsewhere" not in found
        assert all(set(rights) <= set("rwxc") for rights in found.values())

    def test_names_are_passed_as_they_are_whatever_is_in_them(self) -> None:
        for name in (*HOSTILE, "\udcff"):
            path = f"/home/ann/{name}"
            plan = pledge.compile_plan(changed(BSD, grants=((path, "read", True, "c"),)))
            assert ("unveil", path, "rx") in [op.given for op in plan.ops]
            assert len(plan.hash) == 64

    def test_unveiling_ends_before_the_command_is_promised_anything(self) -> None:
        given = [op.given for op in PLANS["pledge-grants"].ops]
        assert given[-2] == ("unveil",)
        assert given[-1] == ("pledge", "stdio exec", pledge.promises(False))

    def test_the_system_is_never_writable_and_calls_have_no_names(self, on: Callable[..., Host]) -> None:
        with pytest.raises(PolicyError, match="belongs to the system"):
            pledge.compile_plan(changed(BSD, grants=(("/etc/x", "write", True, "c"),)))
        on("openbsd")
        policy = Policy(backend="pledge", syscalls={"deny": ["ptrace"]}, accept=[*ACCEPT, "limits.tasks"])
        with pytest.raises(PolicyError, match="no names of system calls"):
            drafts.draw(policy, command=("true",))


class TestJobObject:
    class Basic(ctypes.Structure):
        _fields_ = (
            ("PerProcessUserTimeLimit", ctypes.c_int64), ("PerJobUserTimeLimit", ctypes.c_int64),
            ("LimitFlags", ctypes.c_uint32), ("MinimumWorkingSetSize", ctypes.c_uint64),
            ("MaximumWorkingSetSize", ctypes.c_uint64), ("ActiveProcessLimit", ctypes.c_uint32),
            ("Affinity", ctypes.c_uint64), ("PriorityClass", ctypes.c_uint32),
            ("SchedulingClass", ctypes.c_uint32),
        )  # fmt: skip

    def test_the_numbers_are_where_windows_reads_them(self) -> None:
        class Extended(ctypes.Structure):
            _fields_ = (
                ("Basic", TestJobObject.Basic), ("IoInfo", ctypes.c_uint64 * 6),
                ("ProcessMemoryLimit", ctypes.c_uint64), ("JobMemoryLimit", ctypes.c_uint64),
                ("PeakProcessMemoryUsed", ctypes.c_uint64), ("PeakJobMemoryUsed", ctypes.c_uint64),
            )  # fmt: skip

        given = job_object.JobObjectInputs(processors=4, memory=64 << 20, tasks=8, cpu=1.5, cpu_time=2.5)
        found = job_object.limits(given)
        packed = Extended.from_buffer_copy(found.extended())
        assert len(found.extended()) == ctypes.sizeof(Extended) == 144
        assert packed.Basic.LimitFlags == found.LimitFlags == 0x4 | 0x8 | 0x200 | 0x400 | 0x2000
        assert (packed.Basic.PerJobUserTimeLimit, packed.Basic.ActiveProcessLimit) == (25_000_000, 8)
        assert (packed.JobMemoryLimit, packed.ProcessMemoryLimit, packed.Basic.Affinity) == (64 << 20, 0, 0)
        assert (found.ControlFlags, found.CpuRate) == (0x5, 3750)

    @pytest.mark.parametrize(
        "limit", [{}, {"memory": 1 << 30}, {"tasks": 1}, {"cpu": 64.0}, {"cpu_time": 1e-8}]
    )
    def test_everything_ends_with_the_job_and_nothing_leaves_it(self, limit: dict[str, Any]) -> None:
        found = job_object.limits(job_object.JobObjectInputs(processors=2, **limit))
        assert found.LimitFlags & job_object.KILL_ON_JOB_CLOSE
        assert not found.LimitFlags & (job_object.BREAKAWAY_OK | job_object.SILENT_BREAKAWAY_OK)
        assert found.UIRestrictionsClass == 0xFF and found.CpuRate <= 10_000
        # A limit that was asked for is never rounded to none.
        assert found.PerJobUserTimeLimit > 0 if "cpu_time" in limit else not found.PerJobUserTimeLimit

    def test_a_share_too_small_to_tell_is_refused(self) -> None:
        with pytest.raises(PolicyError, match=r"limits\.cpu = 0\.01"):
            job_object.limits(job_object.JobObjectInputs(processors=128, cpu=0.01))

    def test_no_policy_is_met_by_limits_alone(self) -> None:
        with pytest.raises(UnsupportedError, match="it hides and refuses nothing"):
            select(Policy(accept=list(Control)), Host.pretend(system="win32"), reading=True)


class TestThePlanCommand:
    @pytest.mark.parametrize(("system", "name"), [("darwin", "seatbelt"), ("openbsd", "pledge")])
    def test_it_shows_what_would_be_done_and_that_nothing_is(
        self, system: str, name: str, on: Callable[..., Host], workspace: Path,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        on(system)
        monkeypatch.chdir(workspace)
        accept = json.dumps([*ACCEPT, "limits.tasks"])
        rest = 'protect = []\n[workspace]\npath = "."\nmode = "ro"\n'
        (workspace / "policy.toml").write_text(f"accept = {accept}\n{rest}")
        assert cli.main(["plan", "-p", "policy.toml", "--backend", name, "--", "make", "it"]) == 0
        told = capsys.readouterr().out
        assert str(workspace) in told and "then execute: make it" in told and f"backend {name}," in told
        assert "is untested on this system, and `stockade run` starts nothing here" in told
        assert cli.main(["plan", "--json", "-p", "policy.toml", "--", "make"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["backend"] == name and plan["starts"] is False
        assert all(op["does"] and op["clause"] for op in plan["operations"])
        assert cli.main(["run", "-p", "policy.toml", "--", "make"]) == 125
        assert "has never been run on" in " ".join(capsys.readouterr().err.split())

    def test_what_is_not_offered_there_is_refused_in_a_plan_too(self, on: Callable[..., Host]) -> None:
        on("darwin")
        everything = [*ACCEPT, "limits.tasks"]
        with pytest.raises(UnsupportedError, match="macOS has no overlay"):
            drafts.draw(Policy(backend="seatbelt", accept=everything, workspace="."))
        with pytest.raises(UnsupportedError, match="memory of no group of processes"):
            drafts.draw(Policy(backend="seatbelt", accept=everything, limits={"memory": "64M"}))
        with pytest.raises(UnsupportedError, match="seatbelt misses files"):
            drafts.draw(Policy(backend="seatbelt"))
        with pytest.raises(UnsupportedError, match="needs an image, and a policy can name none"):
            drafts.draw(Policy(backend="apple-container", accept=list(Control)))
        on("darwin", "sandbox-exec")
        with pytest.raises(UnsupportedError, match="no sandbox-exec"):
            drafts.draw(Policy(backend="seatbelt", accept=everything))


class TestDoctor:
    #: Runs commands as on another system: what Python lacks there is taken away first.
    PROGRAM = """
import os, sys
import argparse, ctypes, platform, shutil, subprocess, textwrap  # Python's own may use what is taken away
sys.platform = sys.argv[1]
if sys.platform == "win32":
    for name in ("uname", "getuid", "geteuid", "getgid", "fork", "killpg", "O_NOFOLLOW", "O_CLOEXEC"):
        if hasattr(os, name):
            delattr(os, name)
    for name in ("fcntl", "pwd", "grp", "resource", "termios", "pty", "tty"):
        sys.modules[name] = None
from stockade.cli import main
sys.exit(max([main(words.split()) for words in sys.argv[2:]]))
"""

    def stockade(self, system: str, *commands: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", self.PROGRAM, system, *commands]
        environ = {**os.environ, "COLUMNS": "100", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)

    def test_with_what_it_needs_it_shows_plans_and_the_reason(
        self, on: Callable[..., Host], capsys: pytest.CaptureFixture[str]
    ) -> None:
        on("darwin")
        assert cli.main(["doctor"]) == 1
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        at = lines.index(["CONTROL", "SEATBELT", "APPLE-CONTAINER"])
        marks = {line[0]: line[1:] for line in lines[at + 1 : at + 1 + len(Control)]}
        assert marks["network.none"] == ["plan", "plan"] and marks["limits.memory"] == ["no", "plan"]
        assert marks["workspace.overlay"] == ["no", "no"]
        assert not any("yes" in row for row in marks.values())
