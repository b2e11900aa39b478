"""Where cgroups can be made: found, made ready where they are ours alone, else refused with the remedy."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from stockade.host import CGROUP_PROBES, Host, cgroup_probe, probe
from stockade.host.advice import explain
from stockade.linux import cgroups
from stockade.linux.cgroups import CgroupParent, CgroupParents, own_cgroups, places
from stockade.runs.cgroup import GroupLimits, SandboxCgroups, remove
from support.means import applies, need
from support.pretend_cgroups import Tree

V1 = """\
4:memory:/jobs/one
3:cpu,cpuacct:/
0::/
"""
V1_MOUNTS = """\
30 25 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 /jobs /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct
33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
"""
UNIFIED = "/sys/fs/cgroup/unified"
OURS = 60000 + os.getpid() % 5000


def test_our_own_cgroups_are_found_in_every_hierarchy() -> None:
    assert own_cgroups(V1, V1_MOUNTS) == {
        ("memory",): "/sys/fs/cgroup/memory/one",
        ("cpu", "cpuacct"): "/sys/fs/cgroup/cpu,cpuacct",
        (): "/sys/fs/cgroup/unified",
    }


def test_a_cgroup_outside_of_what_is_mounted_is_nowhere() -> None:
    assert own_cgroups("4:memory:/other\n", V1_MOUNTS) == {}
    assert own_cgroups("4:memory:/jobsite\n", V1_MOUNTS) == {}
    assert own_cgroups(V1, "") == {}


def test_the_leaf_that_we_moved_into_does_not_count_as_another_place(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("4:memory:/a\n0::/b\n")
    before = cgroups.membership(str(tmp_path))
    (tmp_path / "self/cgroup").write_text("4:memory:/a\n0::/b/stockade-supervisor-12\n")
    assert cgroups.membership(str(tmp_path)) == before == "4:memory:/a 0::/b"


def test_every_limit_is_tried_here_and_a_failure_has_its_remedy() -> None:
    found = probe(CGROUP_PROBES)
    assert tuple(found) == CGROUP_PROBES
    for name, answer in found.items():
        assert answer.ok or (answer.errno and answer.reason and answer.fix), name
    assert answer.detail


def test_root_can_use_the_version_1_controllers_of_this_machine() -> None:
    applies(os.geteuid() == 0, "for root only")
    need(os.path.isdir("/sys/fs/cgroup/pids"), "version 1 is not mounted")
    assert [name for name, answer in probe(CGROUP_PROBES).items() if not answer.ok] == []


def as_user(uid: int, work: Callable[[], str]) -> str:
    """What `work` says as another user, in a child of this process."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            said = work()
        except BaseException:
            said = traceback.format_exc()
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with open(read) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


@pytest.fixture
def delegated() -> Iterator[list[str]]:
    """What the advice tells an administrator to make."""
    applies(os.geteuid() == 0, "for root only: it plays the administrator")
    need(os.path.isdir("/sys/fs/cgroup/pids"), "version 1 is not mounted")
    fix = as_user(OURS, lambda: probe(["cgroup.memory"])["cgroup.memory"].fix)
    commands = fix.partition(": ")[2].replace("sudo ", "")
    assert f"chown {OURS} " in commands, fix
    subprocess.run(["sh", "-ec", commands], check=True)
    made = commands.partition(";")[0].split()[1:]
    yield made
    for path in made:
        remove(entry.path for entry in os.scandir(path) if entry.is_dir())
        os.rmdir(path)


def test_an_ordinary_user_is_refused_and_told_what_to_type() -> None:
    applies(os.geteuid() == 0, "for root only: it becomes another user")
    need(os.path.isdir("/sys/fs/cgroup/pids"), "version 1 is not mounted")
    said = as_user(OURS, lambda: repr([*probe(CGROUP_PROBES).values()]))
    assert said.count("this user may not make cgroups here (mkdir: EACCES, Permission denied)") == 4
    for directory in {place.directory for place in places().found.values()}:
        assert f"{directory}/stockade-{OURS}" in said


def test_what_an_administrator_delegates_is_found_and_used(delegated: list[str]) -> None:
    def work() -> str:
        answers = probe(CGROUP_PROBES)
        assert all(answer.ok for answer in answers.values()), answers
        found = places()
        assert {place.directory for place in found.found.values()} <= set(delegated)
        group = SandboxCgroups(uuid4().hex, GroupLimits(memory=1 << 26, tasks=3, cpu=1, cpu_time=True), found)
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
            for path in group.paths:
                Path(path, "cgroup.procs").write_text(str(process.pid))
            group.confirm(process.pid)
            assert group.oom_descriptor() is not None and group.cpu_used() >= 0
            remove(group.paths)
            assert process.wait(10) == -9
        group.close()
        assert group.paths == ()
        return "used"

    assert as_user(OURS, work) == "used"


def test_a_delegation_gives_neither_what_holds_for_all_of_it_nor_others_processes(
    delegated: list[str],
) -> None:
    def work() -> str:
        for path in delegated:
            for name in ("pids.max", "memory.limit_in_bytes", "cgroup.procs"):
                assert not os.access(f"{path}/{name}", os.W_OK), path
        group = SandboxCgroups(uuid4().hex, GroupLimits(tasks=3), places())
        try:
            with open(f"{group.paths[0]}/cgroup.procs", "w", buffering=1) as file:
                print(os.getppid(), file=file)
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        finally:
            group.close()
        return "could"

    assert as_user(OURS, work) == "EACCES"


@pytest.fixture
def alone() -> Iterator[str]:
    """A real version 2 cgroup, delegated and empty."""
    applies(os.geteuid() == 0, "for root only")
    need(os.path.exists(f"{UNIFIED}/cgroup.procs"), "version 2 is not mounted beside version 1")
    path = f"{UNIFIED}/stockade-test-{uuid4().hex}"
    os.mkdir(path)
    yield path
    for directory, _, _ in os.walk(path, topdown=False):
        os.rmdir(directory)


def test_a_leaf_of_a_real_version_2_cgroup_is_entered_by_us_and_our_children(alone: str) -> None:
    script = (
        "import os, subprocess, sys; from stockade.linux import cgroups\n"
        f"open('{alone}/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE)\n"
        f"cgroups._check_delegated('{alone}', os.getpid(), '/proc')\n"
        f"cgroups._step_aside('{alone}', os.getpid(), [])\n"
        f"leaf = '{alone}/stockade-supervisor-' + str(os.getpid())\n"
        "inside = open(leaf + '/cgroup.procs').read().split()\n"
        "assert sorted(inside) == sorted(map(str, (os.getpid(), child.pid))), inside\n"
        f"assert open('{alone}/cgroup.procs').read() == ''\n"
        "assert cgroups.membership().endswith('/' + os.path.basename(os.path.dirname(leaf)))\n"
        "assert cgroups.places().at('cpuacct')\n"
        "child.kill()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_cgroup_with_other_processes_in_it_is_not_rearranged(alone: str) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as stranger:
        Path(alone, "cgroup.procs").write_text(str(stranger.pid))
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as ours:
            with pytest.raises(OSError, match="other processes are in our cgroup"):
                cgroups._check_delegated(alone, ours.pid, "/proc")
            ours.kill()
        stranger.kill()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tree]:
    monkeypatch.setattr(os.path, "exists", _without_systemd(os.path.exists))
    return lambda controllers="cpu memory pids", own="/user/scope": _grown(
        tmp_path, monkeypatch, controllers, own
    )


def _without_systemd(exists: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda path: path != "/run/systemd/system" and exists(path)


def _grown(tmp_path: Path, patch: pytest.MonkeyPatch, controllers: str, own: str) -> Tree:
    made = Tree(tmp_path, patch, controllers, "/" if own == "/" else "/user")
    if own.count("/") == 2:
        made.enter(os.getpid(), made.root)
        made.write(str(made.root / "user/cgroup.subtree_control"), f"+{controllers.replace(' ', ' +')}")
        made.make(str(made.root) + own)
        made.enter(os.getpid(), made.root / own.lstrip("/"))
    return made


def test_pretend_version_2_delegated_to_us_alone_is_made_ready(tree: Callable[..., Tree]) -> None:
    made = tree()
    own = made.root / "user/scope"
    found = places(proc=str(made.proc))
    assert found == CgroupParents(
        found=dict.fromkeys(cgroups.CONTROLLERS, CgroupParent(str(own), 2)), refused={}, proc=str(made.proc)
    )
    assert (own / "cgroup.procs").read_text() == ""
    assert (own / f"stockade-supervisor-{os.getpid()}/cgroup.procs").read_text() == f"{os.getpid()}\n"
    assert sorted((own / "cgroup.subtree_control").read_text().split()) == ["cpu", "memory", "pids"]
    assert places(proc=str(made.proc)) == found
    group = SandboxCgroups("one", GroupLimits(memory=1 << 26, tasks=3), found)
    assert group.paths == (str(own / "stockade-run-one"),)
    group.close()


def test_pretend_version_2_with_somebody_else_in_it_is_left_alone(tree: Callable[..., Tree]) -> None:
    made = tree()
    own = made.root / "user/scope"
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as stranger:
        made.enter(stranger.pid, own)
        (made.proc / f"{stranger.pid}/stat").write_text("9 (cat) S 1 0\n")
        found = places(proc=str(made.proc))
        stranger.kill()
    assert found.refused["memory"] == (errno.EBUSY, "other processes are in our cgroup")
    assert sorted(entry.name for entry in own.iterdir() if entry.is_dir()) == []
    reason, fix = explain("cgroup.memory", *found.refused["memory"], Host.pretend(), "", found)
    assert "not to it alone" in reason
    assert "systemd-run --user --scope -p Delegate=yes" in fix


def test_pretend_version_2_whose_controllers_are_refused_is_as_before(
    tree: Callable[..., Tree], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tree()
    own = made.root / "user/scope"

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOENT, "no")

    monkeypatch.setattr(made, "_switch", refuse)
    found = places(proc=str(made.proc))
    assert set(found.refused) == {"memory", "pids", "cpu"}
    assert (own / "cgroup.procs").read_text() == f"{os.getpid()}\n"
    assert [entry for entry in own.iterdir() if entry.is_dir()] == []


def test_pretend_version_2_root_is_used_as_it_is_and_not_changed(tree: Callable[..., Tree]) -> None:
    made = tree(own="/")
    refused = places(proc=str(made.proc)).refused
    assert refused == dict.fromkeys(("memory", "pids", "cpu"), (errno.EPERM, "the root of the machine"))
    _, fix = explain("cgroup.cpu", *refused["cpu"], Host.pretend(uid=0), "")
    assert "echo '+memory +pids +cpu' > /sys/fs/cgroup/cgroup.subtree_control" in fix
    assert (made.root / "cgroup.subtree_control").read_text() == ""
    made.write(str(made.root / "cgroup.subtree_control"), "+memory")
    found = places(proc=str(made.proc))
    assert set(found.refused) == {"pids", "cpu"}
    assert found.at("memory") == CgroupParent(str(made.root), 2)
    assert (made.root / "cgroup.procs").read_text() == f"{os.getpid()}\n"


def test_pretend_version_2_of_a_user_without_delegation_names_the_scope(
    tree: Callable[..., Tree], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tree()
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    found = places(proc=str(made.proc))
    assert found.refused["pids"] == (errno.EACCES, "not delegated")
    _, fix = explain("cgroup.pids", *found.refused["pids"], Host.pretend(), "", found)
    assert "systemd-run --user --scope -p Delegate=yes" in fix
    _, fix = explain("cgroup.pids", *found.refused["pids"], Host.pretend(uid=0), "", found)
    assert "systemd-run --scope -p Delegate=yes" in fix


def test_pretend_systemd_starts_a_process_in_a_scope_whose_cgroup_is_then_made_ready(
    tree: Callable[..., Tree], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tree(own="/user")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (tmp_path / "bin").mkdir()
    (tmp_path / "run/systemd").mkdir(parents=True)
    environ = {"PATH": str(tmp_path / "bin"), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    assert cgroups.scope(environ) == ()
    stand_in = tmp_path / "bin/systemd-run"
    stand_in.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do echo "$1"; shift; done; shift; exec "$@"\n')
    stand_in.chmod(0o755)
    assert cgroups.scope(environ) == ()
    (tmp_path / "run/systemd/private").touch()
    prefix = cgroups.scope(environ)
    command = [*prefix, "/bin/sh", "-c", "echo $$; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        options = [process.stdout.readline().strip() for _ in range(5)]
        assert options == ["--user", "--scope", "--quiet", "--collect", "--property=Delegate=yes"]
        assert int(process.stdout.readline()) == process.pid
        made.enter(os.getpid(), made.root)
        made.write(str(made.root / "user/cgroup.subtree_control"), "+memory +pids +cpu")
        made.make(str(made.root / "user/run-1.scope"))
        made.enter(process.pid, made.root / "user/run-1.scope")
        found = places(process.pid, proc=str(made.proc))
        process.kill()
    scope = made.root / "user/run-1.scope"
    assert found.at("memory") == CgroupParent(str(scope), 2) and found.refused == {}
    assert (scope / f"stockade-supervisor-{process.pid}/cgroup.procs").read_text() == f"{process.pid}\n"


def test_without_cgroups_every_limit_has_its_reason_and_its_remedy(tmp_path: Path) -> None:
    found = places(proc=str(tmp_path))
    assert found.found == {}
    for name, (ok, number, detail) in cgroup_probe.probe(CGROUP_PROBES, found).items():
        assert not ok
        reason, fix = explain(name, number, detail, Host.pretend(), "", found)
        assert f"no cgroup hierarchy here has the {name.removeprefix('cgroup.')} controller" in reason
        assert "mount" in fix


def test_a_read_only_file_system_is_told_apart() -> None:
    found = CgroupParents(found={"pids": CgroupParent("/sys/fs/cgroup/pids", 1)})
    reason, fix = explain("cgroup.pids", errno.EROFS, "mkdir", Host.pretend(), "", found)
    assert "read-only" in reason and "/sys/fs/cgroup:rw" in fix


def test_a_probe_that_fails_half_way_leaves_no_cgroup() -> None:
    applies(os.geteuid() == 0, "for root only")
    need(os.path.isdir("/sys/fs/cgroup/freezer"), "version 1 is not mounted")
    wrong = CgroupParents(found={"memory": CgroupParent("/sys/fs/cgroup/freezer", 1)})
    assert cgroup_probe.probe(["cgroup.memory"], wrong)["cgroup.memory"] == (
        False,
        errno.ENOENT,
        "set a limit",
    )


def test_pretend_systemd_that_refuses_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (tmp_path / "systemd").mkdir()
    (tmp_path / "systemd/private").touch()
    (tmp_path / "systemd-run").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "systemd-run").chmod(0o755)
    environ = {"PATH": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    assert cgroup_probe.probe_in_scope(["cgroup.pids"], environ) == {
        "cgroup.pids": (False, 0, "systemd-run --scope")
    }
    assert cgroup_probe.probe_in_scope(["cgroup.pids"], {"PATH": str(tmp_path)}) == {}
