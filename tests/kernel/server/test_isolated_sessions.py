"""Isolated sessions: what a client can ask for, what a session sees, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from support.isolated import SESSIONS, SessionUnderTest, create, isolated, until, warm_sandbox
from support.means import applies
from support.server import ServedSandbox, ServerUnderTest, module_server

#: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID.
SEVEN = 0xFB
#: Prints the errors of calls that mount, with wrong arguments: who may mount gets others than EPERM.
MOUNT_CALLS = (
    "import ctypes; libc = ctypes.CDLL(None, use_errno=True); call = libc.syscall; "
    "print([call(number, -1, b'/', 0, 0, 0) < 0 and ctypes.get_errno() "
    "for number in (442, 428, 429, 430, 432, 165, 155)])"
)
DISK = 8 << 20
CONFIG = f"upper_max_bytes = {DISK}\ndiff_max_bytes = {1 << 20}\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    yield from module_server(tmp_path_factory, CONFIG)


@pytest.fixture(scope="module")
def sandbox(server: ServerUnderTest) -> Iterator[ServedSandbox]:
    with warm_sandbox(server) as found:
        yield found


@pytest.fixture(scope="module")
def rw(sandbox: ServedSandbox) -> Iterator[SessionUnderTest]:
    """A session that writes to the sandbox's own directories, to prepare what other sessions see."""
    overlays = [{"path": path, "mode": "rw"} for path in ("/workspace", "/data", "/tmp", "/mnt")]
    with isolated(sandbox, overlays=overlays) as found:
        yield found


def layers(server: ServerUnderTest) -> list[str]:
    place = server.home / "workspaces"
    return sorted(os.listdir(place)) if place.exists() else []


def several_ids(sandbox: ServedSandbox) -> bool:
    return "message" not in sandbox.execd.get("/v1/isolated/capabilities").json()


class TestCapabilities:
    def test_defect_13_diff_and_commit_are_supported(self, sandbox: ServedSandbox) -> None:
        found = sandbox.execd.get("/v1/isolated/capabilities").json()
        assert found["available"] and found["diff_supported"] and found["commit_supported"]
        assert found["setpriv_available"] and found["userns_available"]

    def test_defect_15_the_probe_uses_the_walls_that_sessions_have(self, sandbox: ServedSandbox) -> None:
        hardening = sandbox.execd.get("/v1/isolated/capabilities").json()["hardening"]
        assert (hardening["init_mode"], hardening["signal_shield"]) == ("pid1", True)
        assert hardening["cap_drop"]["state"] == hardening["seccomp"]["state"] == "active"
        with isolated(sandbox) as session:
            assert session.text("grep -c '^Seccomp:.2' /proc/self/status; cat /proc/1/comm >&2") == "1\n"


class TestCreate:
    def test_a_session_can_have_narrower_limits(self, sandbox: ServedSandbox) -> None:
        with isolated(sandbox, policy={"limits": {"files": 48}}) as session:
            assert session.text("ulimit -n") == "48\n"
        answer = create(sandbox, policy={"limits": {"files": 1 << 19}})
        assert answer.status_code == 400 and "limits.files" in answer.json()["message"]

    def test_defect_13_when_the_answer_arrives_the_shell_runs(self, sandbox: ServedSandbox) -> None:
        answer = create(sandbox)
        assert answer.status_code == 201
        assert re.fullmatch(r"[0-9a-f-]{36}", answer.json()["session_id"])
        session = SessionUnderTest(sandbox, answer.json()["session_id"])
        state = session.state()
        assert state["status"] == "active"
        assert state["created_at"] == answer.json()["created_at"] <= state["last_run_at"]
        session.delete()

    def test_the_request_in_effect_is_echoed(self, sandbox: ServedSandbox) -> None:
        with isolated(sandbox, workspace={"path": "/workspace"}, share_net=False) as session:
            found = session.state()
            assert found["workspace"] == {"path": "/workspace", "mode": "overlay"}
            assert found["overlays"] == [{"path": "/workspace", "mode": "overlay", "persist": True}]
            assert (found["profile"], found["share_net"], found["uid_mode"]) == ("strict", False, "setpriv")
            assert found["idle_timeout_seconds"] == 1800
            assert 1790 <= found["idle_remaining_seconds"] <= 1800
            assert None not in found.values()

    def test_several_overlays_are_echoed_without_a_workspace(self, sandbox: ServedSandbox) -> None:
        wanted = [{"path": "/workspace"}, {"path": "/data", "mode": "ro"}]
        with isolated(sandbox, overlays=wanted, uid_mode="userns", profile="balanced") as session:
            found = session.state()
            assert "workspace" not in found
            assert [one["mode"] for one in found["overlays"]] == ["overlay", "ro"]
            assert (found["uid_mode"], found["profile"]) == ("userns", "balanced")

    def test_sessions_are_listed(self, sandbox: ServedSandbox) -> None:
        with isolated(sandbox) as one, isolated(sandbox, idle_timeout_seconds=0) as other:
            found = sandbox.execd.get("/v1/isolated/sessions").json()["sessions"]
            ids = [each["session_id"] for each in found]
            assert ids.index(one.id) < ids.index(other.id)
            last = found[-1]
            assert {"session_id", "status", "created_at", "last_run_at"} == set(last)

    @pytest.mark.parametrize(
        ("field", "body"),
        [
            ("workspace.path", {"workspace": {"path": "relative"}}),
            ("workspace.mode", {"workspace": {"path": "/workspace", "mode": "other"}}),
            ("workspace.path", {"workspace": {"path": "/opt/x"}}),
            ("workspace.path", {"workspace": {"path": "/usr"}}),
            ("workspace.path", {"workspace": {"path": "/etc"}}),
            ("workspace", {"workspace": None, "overlays": []}),
            ("overlays[1].path", {"overlays": [{"path": "/data"}] * 2}),
            ("overlays[1].path", {"overlays": [{"path": "/data"}, {"path": "/opt/x"}]}),
            ("overlays[1].path", {"workspace": None, "overlays": [{"path": "/data"}, {"path": "/opt/x"}]}),
            ("overlays", {"overlays": [{"path": f"/workspace/{n}"} for n in range(17)]}),
            ("overlays[0].persist", {"overlays": [{"path": "/data", "mode": "rw", "persist": True}]}),
            ("binds[0].source", {"binds": [{"source": "/etc"}]}),
            ("binds[0].source", {"binds": [{"source": "/tmp"}]}),
            ("binds[0].source", {"binds": [{"source": "/data/none"}]}),
            ("extra_writable[0]", {"extra_writable": ["/usr/lib"]}),
            ("profile", {"profile": "loose"}),
            ("uid", {"uid": 4294967295}),
            ("there is no field `unknown`", {"unknown": 1}),
        ],
    )
    def test_defect_15_a_wrong_request_is_a_400_and_leaves_nothing(
        self, server: ServerUnderTest, sandbox: ServedSandbox, field: str, body: dict[str, Any]
    ) -> None:
        before = layers(server)
        answer = create(sandbox, **body)
        assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_REQUEST_BODY"), answer.text
        assert answer.json()["message"].partition(":")[0] == field
        assert str(server.home) not in answer.text
        assert layers(server) == before

    @pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"{", b"null", b'{"workspace": null}'])
    def test_defect_15_an_empty_create_is_a_400(self, sandbox: ServedSandbox, content: bytes) -> None:
        headers = {"content-type": "application/json"}
        answer = sandbox.execd.post(SESSIONS, content=content, headers=headers)
        assert answer.status_code == 400, answer.text

    def test_an_unknown_session_is_a_404(self, sandbox: ServedSandbox) -> None:
        for call in (sandbox.execd.get, sandbox.execd.delete):
            answer = call(f"{SESSIONS}/none")
            assert (answer.status_code, answer.json()["code"]) == (404, "SESSION_NOT_FOUND")

    def test_delete_answers_once(self, sandbox: ServedSandbox) -> None:
        with isolated(sandbox) as session:
            first, second = (sandbox.execd.delete(session.path) for _ in range(2))
            assert (first.status_code, first.content, first.headers["content-length"]) == (200, b"", "0")
            assert second.status_code == 404


class TestView:
    def test_an_overlay_keeps_its_changes_to_itself(
        self, sandbox: ServedSandbox, rw: SessionUnderTest
    ) -> None:
        rw.text("echo lower > /workspace/lower; mkdir -p /workspace/gone; touch /workspace/gone/x")
        with isolated(sandbox) as session:
            session.text("cd /workspace; echo changed > lower; rm -r gone; echo new > upper")
            assert session.text("cat lower upper; ls") == "changed\nnew\nlower\nupper\n"
        assert rw.text("cat /workspace/lower; ls /workspace") == "lower\ngone\nlower\n"

    def test_rw_writes_to_the_sandbox_and_ro_to_nothing(
        self, sandbox: ServedSandbox, rw: SessionUnderTest
    ) -> None:
        rw.text("echo seen > /data/seen")
        with isolated(sandbox, workspace={"path": "/data", "mode": "ro"}) as session:
            found = session.run("cat seen; pwd; touch new")
            assert found.stdout == "seen\n/data\n"
            assert "Read-only" in found.stderr

    def test_the_rest_of_the_sandbox_is_read_only(self, sandbox: ServedSandbox) -> None:
        with isolated(sandbox) as session:
            for path in ("/data/x", "/mnt/x", "/root/x", "/var/x", "/usr/x", "/etc/x"):
                assert session.run(f"touch {path}").exit_code == 1, path

    def test_strict_has_a_tmp_of_its_own_and_balanced_the_sandboxs(
        self, sandbox: ServedSandbox, rw: SessionUnderTest
    ) -> None:
        rw.text("echo shared > /tmp/shared")
        with isolated(sandbox) as session:
            assert session.text("ls /tmp; touch /tmp/private") == ""
        with isolated(sandbox, profile="balanced") as session:
            assert session.text("cat /tmp/shared; touch /tmp/balanced") == "shared\n"
        assert rw.text("ls /tmp/private /tmp/balanced 2>/dev/null || true") == "/tmp/balanced\n"

    def test_a_strict_session_whose_workspace_is_tmp_has_the_sandboxs(
        self, sandbox: ServedSandbox, rw: SessionUnderTest
    ) -> None:
        rw.text("echo shared > /tmp/shared")
        with isolated(sandbox, workspace={"path": "/tmp", "mode": "rw"}) as session:
            assert session.text("cat shared; echo back > /tmp/back") == "shared\n"
        assert rw.text("cat /tmp/back") == "back\n"

    def test_defect_15_a_missing_workspace_is_made(self, sandbox: ServedSandbox) -> None:
        with isolated(sandbox, workspace={"path": "/workspace/new/deep"}) as session:
            assert session.text("pwd; touch x; ls") == "/workspace/new/deep\nx\n"

    def test_nested_mounts_shadow_what_is_above(self, sandbox: ServedSandbox, rw: SessionUnderTest) -> None:
        rw.text("mkdir -p /workspace/outer/inner")
        overlays = [{"path": "/workspace/outer"}, {"path": "/workspace/outer/inner", "mode": "rw"}]
        with isolated(sandbox, overlays=overlays) as session:
            session.text("touch /workspace/outer/a /workspace/outer/inner/b")
        assert rw.text("cd /workspace/outer; find . | sort") == ".\n./inner\n./inner/b\n"

    def test_sixteen_overlays_work(self, sandbox: ServedSandbox) -> None:
        overlays = [{"path": f"/workspace/many/{n}"} for n in range(16)]
        with isolated(sandbox, overlays=overlays) as session:
            session.text("for n in $(seq 0 15); do echo $n > /workspace/many/$n/file; done")
            assert len(session.archive()) == 16

    def test_extra_writable_and_binds(self, sandbox: ServedSandbox, rw: SessionUnderTest) -> None:
        rw.text("mkdir -p /data/in /data/out; echo given > /data/in/file; echo one > /data/one")
        body = {
            "extra_writable": ["/data/out"],
            "binds": [
                {"source": "/data/in", "dest": "/workspace/in", "readonly": True},
                {"source": "/data/one", "dest": "/input/one"},
            ],
        }
        with isolated(sandbox, **body) as session:
            found = session.run(
                "cat in/file; echo two >> /input/one; echo back > /data/out/back; touch in/new"
            )
            assert (found.stdout, found.exit_code) == ("given\n", 1)
            assert "Read-only" in found.stderr
        assert rw.text("cat /data/out/back /data/one; ls /data/in") == "back\none\ntwo\nfile\n"

    def test_defect_15_one_mount_that_fails_fails_the_create(
        self, sandbox: ServedSandbox, rw: SessionUnderTest
    ) -> None:
        rw.text("mkdir -p /data/in")
        binds = [{"source": "/data/in"}, {"source": "/data/missing", "readonly": True}]
        assert create(sandbox, binds=binds).status_code == 400

    def test_defect_9_a_link_does_not_lead_a_mount_astray(
        self, sandbox: ServedSandbox, rw: SessionUnderTest
    ) -> None:
        rw.text("ln -sfn /etc /data/etc; ln -sfn /usr /workspace/usr; ln -sfn ../tmp /data/tmp")
        for body in (
            {"binds": [{"source": "/data/etc"}]},
            {"binds": [{"source": "/data/tmp"}]},
            {"extra_writable": ["/workspace/usr/lib"]},
            {"workspace": {"path": "/workspace/usr", "mode": "rw"}},
            {"binds": [{"source": "/mnt", "dest": "/data/etc/x"}]},
        ):
            answer = create(sandbox, **body)
            assert answer.status_code == 400, body
            assert "link" in answer.json()["message"]
        rw.text("rm /data/etc /workspace/usr /data/tmp")

    def test_defect_8_layers_of_one_session_are_out_of_reach_of_another(
        self, server: ServerUnderTest, sandbox: ServedSandbox
    ) -> None:
        with isolated(sandbox) as one, isolated(sandbox) as other:
            one.text("echo secret > /workspace/of-one")
            seen = other.text("ls -a /workspace; find / -xdev -name of-one 2>/dev/null || true")
            assert "of-one" not in seen
            assert other.run(f"ls {server.home}").exit_code == 2

    @pytest.mark.parametrize("path", ["/proc/1/root", "/proc/2/root"])
    def test_nothing_is_above_the_root(self, sandbox: ServedSandbox, path: str) -> None:
        with isolated(sandbox) as session:
            assert session.text(f"ls {path}/.. 2>/dev/null | sort || true") in (
                "",
                session.text("ls / | sort"),
            )


class TestWalls:
    def test_defect_11_a_root_session_has_seven_capabilities_and_cannot_mount(
        self, sandbox: ServedSandbox
    ) -> None:
        with isolated(sandbox) as session:
            sets = dict(line.split(":\t") for line in session.text("grep Cap /proc/self/status").splitlines())
            assert all(int(value, 16) & ~SEVEN == 0 for value in sets.values())
            # mount_setattr and its family: refused before the kernel looks at their arguments.
            assert session.text(f'python3 -c "{MOUNT_CALLS}"') == f"{[errno.EPERM] * 7}\n"
            assert session.run("mount -o remount,rw /usr").exit_code != 0
            assert session.run("touch /usr/new").exit_code == 1

    def test_defect_12_a_session_does_not_reach_the_servers_port(
        self, server: ServerUnderTest, sandbox: ServedSandbox
    ) -> None:
        for share in (True, False):
            with isolated(sandbox, share_net=share) as session:
                found = session.run(f"exec 3<>/dev/tcp/127.0.0.1/{server.port}")
                assert found.exit_code != 0

    def test_a_session_shares_the_sandboxs_network_unless_it_says_otherwise(
        self, sandbox: ServedSandbox
    ) -> None:
        namespace = "readlink /proc/self/ns/net"
        with isolated(sandbox) as one, isolated(sandbox) as two, isolated(sandbox, share_net=False) as own:
            assert one.text(namespace) == two.text(namespace) != own.text(namespace)

    def test_defect_7_the_disk_limit_holds_while_a_session_writes_and_blocks_no_other(
        self, sandbox: ServedSandbox
    ) -> None:
        with isolated(sandbox) as session:
            found = session.run("head -c 64M /dev/zero > big")
            assert found.exit_code != 0
            assert "No space left" in found.stderr
            assert int(session.text("stat -c %s big")) <= DISK
            with isolated(sandbox) as other:
                other.text("head -c 1M /dev/zero > small")
            session.text("rm big; echo room > small")

    def test_sessions_share_the_memory_of_their_sandbox_and_outlive_its_end(
        self, server: ServerUnderTest
    ) -> None:
        answer = server.create(resourceLimits={"memory": "160Mi"})
        applies(answer.status_code == 202, "limits of memory need a cgroup of this user")
        take = 'python3 -c "import time; x = bytes([1]) * (%d << 20); print(1, flush=1); time.sleep(%d)"'
        with (
            contextlib.closing(ServedSandbox(server, answer.json())) as sandbox,
            isolated(sandbox) as one,
            isolated(sandbox) as two,
        ):
            run = one.background(take % (50, 60))
            until(lambda: one.http.get(f"{run}/logs").content == b"1\n", "the memory is not taken")
            assert two.run(take % (120, 0)).exit_code == 137
            one.http.delete(run)
            until(lambda: not one.http.get(run).json()["running"], "the run does not end")
            assert two.text(take % (120, 0)) == "1\n"
            assert one.text("echo on") == "on\n"

    def test_defect_15_a_numeric_uid_without_a_passwd_entry_works(
        self, sandbox: ServedSandbox, rw: SessionUnderTest
    ) -> None:
        applies(several_ids(sandbox), "this user has no subordinate ids")
        rw.text("mkdir -p /workspace/of; chmod 777 /workspace/of")
        with isolated(sandbox, workspace={"path": "/workspace/of"}, uid=12345, gid=23456) as session:
            assert session.text("id -u; id -g; id -G") == "12345\n23456\n23456\n"
            assert session.text("touch x; stat -c %u:%g x") == "12345:23456\n"
            assert session.run("touch /workspace/x").exit_code == 1
            assert session.state()["uid"] == 12345


class TestWhatIsLeft:
    def test_defect_15_cycles_leave_no_layer_descriptor_or_process(
        self, server: ServerUnderTest, sandbox: ServedSandbox
    ) -> None:
        record = json.loads((server.home / "sandboxes" / sandbox.id / "record.json").read_text())
        supervisor = record["supervisor"]

        def cycle() -> None:
            with isolated(sandbox) as session:
                session.text("echo x > file; sleep 60 &")
                session.background("sleep 60")
                session.archive()

        def open_files() -> int:
            return len(os.listdir(f"/proc/{supervisor}/fd"))

        for _ in range(3):
            cycle()
        before = open_files()
        for _ in range(20):
            cycle()
        assert open_files() <= before + 2
        assert layers(server) == []
