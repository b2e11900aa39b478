"""Attacks from a private environment, where programs are root of ids of their own."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from stockade import Policy, Sandbox
from stockade.errors import PolicyError, SetupError
from stockade.resolve.environment import EnvironmentMount
from stockade.sandbox.private_tree import PrivateTree
from stockade.server.isolated.session_mounts import open_in_trees
from support import leaks
from support.environments import POLICY, environment, need_several_ids, private_tree, sh

SWAP = """
import os, sys
os.makedirs("/workspace/real", exist_ok=True)
os.symlink("/etc", "/workspace/link")
os.makedirs("/workspace/place", exist_ok=True)
for _ in range(20000):
    os.rename("/workspace/place", "/workspace/away"); os.rename("/workspace/link", "/workspace/place")
    os.rename("/workspace/place", "/workspace/link"); os.rename("/workspace/away", "/workspace/place")
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateTree]:
    state = tmp_path_factory.mktemp("attacks") / "state"
    with pytest.MonkeyPatch.context() as patch, private_tree(state) as made:
        patch.setenv("STOCKADE_HOME", str(state))
        yield made
    leaks.let_go_of_register()


@pytest.fixture(scope="module")
def box(tree: PrivateTree) -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOCKADE_HOME", str(Path(tree.path).parents[2]))
        with Sandbox(POLICY, _environment=environment(tree)) as made:
            yield made


@pytest.mark.parametrize(
    "path", ["/workspace/out", "/workspace/out/deeper", "/workspace/up/x", "/workspace/proc/1/root"]
)
@pytest.mark.parametrize("create", [False, True])
def test_no_link_of_a_program_leads_out_of_its_tree(
    box: Sandbox, tree: PrivateTree, path: str, create: bool
) -> None:
    sh(box, "ln -sfn /etc out; ln -sfn ../../.. up; ln -sfn /proc proc")
    with pytest.raises(PolicyError):
        os.close(open_in_trees("workspace", path, tree.descriptors, make=create, directory=True))


@pytest.mark.parametrize(
    "path", ["/etc", "/", "/workspace/../../etc", "workspace", "/workspacex", "/usr/bin", ""]
)
def test_only_paths_of_the_tree_are_opened(tree: PrivateTree, path: str) -> None:
    with pytest.raises(PolicyError):
        os.close(open_in_trees("workspace", path, tree.descriptors, make=True))


def test_a_program_that_swaps_a_directory_for_a_link_gains_nothing(box: Sandbox, tree: PrivateTree) -> None:
    with box.start(["/usr/bin/python3", "-c", SWAP], stdout=None, stderr=None) as program:
        opened = 0
        for _ in range(500):
            try:
                found = open_in_trees("workspace", "/workspace/place", tree.descriptors, make=True)
            except PolicyError:
                continue
            where = os.readlink(f"/proc/self/fd/{found}")
            os.close(found)
            opened += 1
            assert where.startswith(f"{tree.path}/workspace/")
        program.kill()
    assert opened
    assert not os.path.exists("/etc/place")


def test_directories_that_are_made_belong_to_root_inside(box: Sandbox, tree: PrivateTree) -> None:
    os.close(open_in_trees("workspace", "/data/made/deep", tree.descriptors, make=True))
    assert sh(box, "stat -c %u:%g /data/made/deep") == "0:0\n"


def test_the_tree_of_another_sandbox_cannot_be_seen(box: Sandbox, tree: PrivateTree) -> None:
    state = Path(tree.path).parents[2]
    with private_tree(state, "another") as other, Sandbox(POLICY, _environment=environment(other)) as second:
        sh(second, "touch /workspace/another-sandboxs-mark /root/another-sandboxs-mark")
        sh(box, "touch /workspace/own-mark")
        seen = sh(box, "find /workspace /root /data /tmp /var /mnt /dev -name '*-mark'; ls / /proc")
        assert "another" not in seen and "own-mark" in seen
        assert not box.run(["ls", other.path]).ok and not box.run(["ls", tree.path]).ok


def test_the_changes_of_another_session_cannot_be_seen(tree: PrivateTree) -> None:
    state = Path(tree.path).parents[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOCKADE_HOME", str(state))
        first = environment(tree, ("/workspace",), access="read")
        with (
            Sandbox(POLICY, _environment=first, on_exit="discard") as one,
            Sandbox(POLICY, _environment=first, on_exit="discard") as two,
        ):
            sh(one, "echo secret > /workspace/uppers-mark")
            assert "uppers-mark" not in sh(two, "find /workspace /tmp /root -name 'uppers-mark'; ls / /proc")
            layers = os.listdir(state / "workspaces")
            assert layers and not two.run(["ls", f"{state}/workspaces/{layers[0]}"]).ok


def test_a_read_only_mount_cannot_be_written_by_root_inside(tree: PrivateTree) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOCKADE_HOME", str(Path(tree.path).parents[2]))
        with Sandbox(POLICY, _environment=environment(tree, access="read")) as box:
            for attempt in (
                "touch /workspace/x",
                "chmod 777 /workspace",
                "chown 1 /workspace",
                "mount -o remount,rw /workspace",
            ):
                assert not box.run(["sh", "-c", attempt]).ok, attempt


@pytest.mark.parametrize(
    "attempt",
    [
        "mknod /workspace/disk b 8 0",
        "mknod /workspace/mem c 1 1",
        "mount -t tmpfs none /mnt",
        "chroot /workspace /bin/true",
        "unshare -U true",
        "hostname elsewhere",
        "echo 1 > /proc/sys/vm/drop_caches",
        "setpriv --inh-caps +sys_admin true",
        "cat /etc/shadow",
        "date -s 2001-01-01",
        "nice -n -5 sh -c '[ $(nice) -lt 0 ]'",
    ],
)
def test_root_inside_has_no_other_capability(box: Sandbox, attempt: str) -> None:
    assert not box.run(["sh", "-c", attempt]).ok


def test_a_setuid_program_gains_nothing(box: Sandbox) -> None:
    need_several_ids()
    sh(box, "cp /usr/bin/id /workspace/id && chown 1000 /workspace/id && chmod 6755 /workspace/id")
    assert sh(box, "/workspace/id -u") == "0\n"


def test_what_a_setuid_bit_is_on_lies_behind_a_closed_directory(box: Sandbox, tree: PrivateTree) -> None:
    assert stat.S_IMODE(os.stat(tree.path).st_mode) == 0o700


def test_ids_outside_the_maps_cannot_be_taken(box: Sandbox) -> None:
    script = (
        "import os\nfor n in (70000, 100000, 1879048193, 4294967294):\n"
        "    try: os.setresuid(n, n, n)\n    except OSError: continue\n    raise SystemExit(f'became {n}')"
    )
    assert box.run(["/usr/bin/python3", "-c", script]).ok


def test_a_denied_path_of_the_system_stays_denied(tree: PrivateTree) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOCKADE_HOME", str(Path(tree.path).parents[2]))
        policy = Policy(toolchain=False, deny=["/usr/share"])
        with Sandbox(policy, _environment=environment(tree)) as box:
            assert not box.run(["ls", "/usr/share"]).ok and box.run(["ls", "/usr/bin"]).ok


def test_a_mount_through_a_link_of_a_program_is_refused(box: Sandbox, tree: PrivateTree) -> None:
    sh(box, "mkdir -p aim; ln -sfn /usr aim/bin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOCKADE_HOME", str(Path(tree.path).parents[2]))
        mount = EnvironmentMount("/workspace/aim/bin", tree.descriptors["/data"], "write", "test")
        with pytest.raises(SetupError):
            Sandbox(POLICY, _environment=environment(tree, more=(mount,))).open()
