"""Private environments: root of ids of its own, over directories that only this sandbox has."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Sandbox
from stockade.errors import PolicyError, SetupError, UnsupportedError
from stockade.resolve.environment import KEPT, Environment, EnvironmentMount, IdMaps
from stockade.runs.prepare import prepare
from stockade.sandbox.private_tree import PrivateTree
from support import leaks
from support.environments import POLICY, environment, need_several_ids, open_beneath, private_tree, sh


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateTree]:
    state = tmp_path_factory.mktemp("environment") / "state"
    with pytest.MonkeyPatch.context() as patch, private_tree(state) as made:
        patch.setenv("STOCKADE_HOME", str(state))
        yield made
    leaks.let_go_of_register()


@pytest.fixture(scope="module")
def box(tree: PrivateTree) -> Iterator[Sandbox]:
    """One sandbox with an environment, for all that only looks or writes files of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOCKADE_HOME", str(Path(tree.path).parents[2]))
        with Sandbox(POLICY, _environment=environment(tree)) as made:
            yield made


def test_programs_are_root_with_the_home_root(box: Sandbox) -> None:
    assert sh(box, 'id -u; id -g; id -un; id -gn; echo "$HOME $USER $LOGNAME"').split("\n")[:-1] == [
        "0", "0", "root", "root", "/root root root",
    ]  # fmt: skip


def test_commands_start_in_the_workspace(box: Sandbox) -> None:
    assert sh(box, "pwd") == "/workspace\n"


def test_a_relative_cwd_counts_from_the_workspace(box: Sandbox) -> None:
    sh(box, "mkdir -p /workspace/sub")
    assert box.run(["pwd"], cwd="sub").check().text == "/workspace/sub\n"


def test_commands_start_at_home_without_a_workspace(tree: PrivateTree, stockade_home: Path) -> None:
    home = tuple(mount for mount in tree.mounts() if mount.path == "/root")
    with Sandbox(POLICY, _environment=Environment(home, IdMaps.of_caller())) as box:
        assert sh(box, "pwd; ls -d /workspace || :") == "/root\n"


def test_what_is_written_is_in_the_tree(box: Sandbox, tree: PrivateTree) -> None:
    for name, inside in (
        ("workspace", "/workspace"),
        ("home", "/root"),
        ("var", "/var/tmp"),
        ("tmp", "/tmp"),
    ):
        sh(box, f"echo {name} > {inside}/mark")
        below = inside.removeprefix("/var") if name == "var" else ""
        assert Path(f"{tree.path}/{name}{below}/mark").read_text() == f"{name}\n"


def test_the_system_is_read_only(box: Sandbox) -> None:
    for path in ("/usr/mark", "/etc/mark", "/mark", "/bin/mark"):
        assert not box.run(["touch", path]).ok


def test_passwd_names_root_and_nobody_only(box: Sandbox) -> None:
    assert [line.split(":")[0] for line in sh(box, "cat /etc/passwd").splitlines()] == ["root", "nobody"]
    assert [line.split(":")[0] for line in sh(box, "cat /etc/group").splitlines()] == ["root", "nogroup"]


def test_programs_keep_exactly_seven_capabilities(box: Sandbox) -> None:
    sets = dict(line.split(":\t") for line in sh(box, "grep ^Cap /proc/self/status").splitlines())
    kept = f"{KEPT:016x}"
    assert sets == {"CapInh": "0" * 16, "CapPrm": kept, "CapEff": kept, "CapBnd": kept, "CapAmb": "0" * 16}


def test_chown_to_a_mapped_id_works(box: Sandbox, tree: PrivateTree) -> None:
    maps = need_several_ids()
    sh(box, "touch /workspace/owned && chown 1000:2000 /workspace/owned")
    assert sh(box, "stat -c %u:%g /workspace/owned") == "1000:2000\n"
    found = os.stat(f"{tree.path}/workspace/owned")
    assert (found.st_uid, found.st_gid) == (maps.uid_outside(1000), maps.gid_outside(2000))


def test_chown_to_an_id_that_is_not_mapped_is_an_error(box: Sandbox) -> None:
    assert b"Invalid argument" in box.run(["chown", "70000", "/workspace"]).stderr


def test_root_reads_what_another_user_has_closed(box: Sandbox) -> None:
    need_several_ids()
    sh(box, "echo x > /workspace/closed && chmod 0 /workspace/closed && chown 1000 /workspace/closed")
    assert sh(box, "cat /workspace/closed") == "x\n"


def test_a_file_that_another_user_has_in_its_closed_directory_can_be_removed_with_the_tree(
    stockade_home: Path,
) -> None:
    need_several_ids()
    with private_tree(stockade_home) as tree:
        with Sandbox(POLICY, _environment=environment(tree)) as box:
            sh(box, "mkdir -p /workspace/a/b /data/c && touch /workspace/a/b/x /data/c/y")
            sh(box, "chown -R 1000:1000 /workspace/a /data/c && chmod 0 /workspace/a/b /workspace/a /data/c")
        tree.remove()
        assert not os.path.exists(tree.path)


def test_the_result_says_what_is_mounted_and_which_capabilities_are_kept(box: Sandbox) -> None:
    controls = box.run(["true"]).check().controls
    assert "/workspace writable" in controls["files"].mechanism
    assert "CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID" in controls["privileges"].mechanism
    assert "no capabilities" not in controls["privileges"].mechanism


def test_the_receipt_has_the_maps_and_the_capabilities(box: Sandbox) -> None:
    receipt = box.run(["true"]).check().receipt
    assert receipt is not None
    evidence = receipt.predicate.evidence
    assert evidence is not None
    assert evidence["uid_map"].startswith(f"0 {os.geteuid()} 1")
    assert evidence["capabilities"]["CapEff"] == f"{KEPT:016x}"
    assert "CHOWN" in str(receipt.predicate.controls["privileges"])


def test_the_plan_is_the_same_for_two_trees(stockade_home: Path) -> None:
    hashes = []
    for name in ("one", "two"):
        with (
            private_tree(stockade_home, name) as tree,
            Sandbox(POLICY, _environment=environment(tree, ("/workspace",))) as box,
        ):
            hashes.append(box.run(["true"]).plan)
    assert hashes[0] == hashes[1]


def test_a_plan_can_be_shown_without_making_anything(tree: PrivateTree, stockade_home: Path) -> None:
    prepared = prepare(POLICY, dry=True, environment=environment(tree, ("/workspace",)))
    said = [op.describe() for op in prepared.plan.ops]
    prepared.close(discard=True)
    assert "show /data writable, a directory of the sandbox's own" in said
    assert any(line.startswith("show /workspace copy-on-write") for line in said)
    assert any("CHOWN" in line for line in said) and not (stockade_home / "workspaces").exists()


def test_a_mount_can_lie_in_another_one(tree: PrivateTree, stockade_home: Path) -> None:
    descriptor = open_beneath(tree, "/workspace/outer/inner", create=True)
    other = open_beneath(tree, "/data/shown", create=True)
    os.close(descriptor)
    try:
        more = (EnvironmentMount("/workspace/outer/inner", other, "read", "test"),)
        with Sandbox(POLICY, _environment=environment(tree, more=more)) as box:
            sh(box, "touch /data/shown/file; ls /workspace/outer/inner/file")
            assert not box.run(["touch", "/workspace/outer/inner/mark"]).ok
            # A program that could rename the directory above would uncover what is below the mount.
            assert not box.run(["mv", "/workspace/outer", "/workspace/other"]).ok
    finally:
        os.close(other)


def test_a_file_can_be_mounted(tree: PrivateTree, stockade_home: Path) -> None:
    path = stockade_home.parent / "file"
    path.write_text("content\n")
    descriptor = os.open(path, os.O_PATH)
    try:
        more = (EnvironmentMount("/srv/file", descriptor, "read", "test"),)
        with Sandbox(POLICY, _environment=environment(tree, more=more)) as box:
            assert sh(box, "cat /srv/file") == "content\n"
    finally:
        os.close(descriptor)


def test_a_directory_that_was_moved_away_since_is_not_mounted(stockade_home: Path) -> None:
    with private_tree(stockade_home) as tree:
        descriptor = open_beneath(tree, "/workspace/chosen", create=True)
        try:
            mount = EnvironmentMount("/chosen", descriptor, "write", "test")
            given = environment(tree, more=(mount,))
            source = mount.source
            os.rename(source, f"{source}-moved")
            os.mkdir(source)
            with Sandbox(POLICY, _environment=given) as box:
                sh(box, "touch /chosen/mark")
            assert os.listdir(source) == [] and os.listdir(f"{source}-moved") == ["mark"]
        finally:
            os.close(descriptor)


@pytest.mark.parametrize("backend", ["landlock", "bwrap"])
def test_other_backends_refuse(tree: PrivateTree, stockade_home: Path, backend: str) -> None:
    with pytest.raises(UnsupportedError, match="private environments"):
        Sandbox(Policy(backend=backend), _environment=environment(tree)).open()


def test_a_workspace_of_the_host_is_refused(tree: PrivateTree, stockade_home: Path, tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    with pytest.raises(PolicyError, match="private environment"):
        Sandbox(Policy(workspace=str(tmp_path / "host")), _environment=environment(tree)).open()


@pytest.mark.parametrize("path", ["/proc/x", "/etc", "relative", "/", "/a/../b", "/workspace"])
def test_a_mount_at_a_path_that_is_not_free_is_refused(
    tree: PrivateTree, stockade_home: Path, path: str
) -> None:
    more = (EnvironmentMount(path, tree.descriptors["/data"], "read", "test"),)
    with pytest.raises(SetupError, match="cannot be made"):
        Sandbox(POLICY, _environment=environment(tree, more=more)).open()


def test_a_grant_at_a_path_of_the_environment_is_refused(tree: PrivateTree, stockade_home: Path) -> None:
    os.makedirs("/media", exist_ok=True)
    with pytest.raises(PolicyError, match="of its own"):
        Sandbox(Policy(toolchain=False, read=["/media"]), _environment=environment(tree)).open()


def test_run_as_another_user(tree: PrivateTree, stockade_home: Path) -> None:
    need_several_ids()

    async def main() -> None:
        async with stockade.AsyncSandbox(POLICY, _environment=environment(tree)) as box:
            other = box._run_as(1234, 5678)
            ran = await other.run(["sh", "-c", "id -u; id -g; id -G; grep CapEff /proc/self/status"])
            assert ran.check().text.split() == ["1234", "5678", "5678", "CapEff:", "0" * 16]
            assert (await box.run(["id", "-u"])).text == "0\n"
            shell = other.shell()
            assert (await shell.run("id -u")).text == "1234\n"
            await shell.close()
            process = await other.start(["id", "-u"])
            assert process.stdout is not None and await process.stdout.read() == b"1234\n"
            await process.wait()
            await process.close()
            async with await other.background(["id", "-u"]) as background:
                await background.wait()
                assert background.logs().data == b"1234\n"

    asyncio.run(main())


def test_run_as_an_id_that_is_not_mapped_says_so(tree: PrivateTree, stockade_home: Path) -> None:
    async def main() -> None:
        async with stockade.AsyncSandbox(POLICY, _environment=environment(tree)) as box:
            ran = await box._run_as(70000, 70000).run(["true"])
            # A sandbox that has no other id says that no program can run as another user.
            assert ("no such id inside" if IdMaps.of_caller().several else "can run as user") in ran.reason
            assert (await box.run(["true"])).ok

    asyncio.run(main())


def test_two_sandboxes_of_one_network(tree: PrivateTree, stockade_home: Path) -> None:
    async def main() -> None:
        script = "python3 -c 'import socket; s=socket.create_server((\"127.0.0.1\", 4444)); s.accept()'"
        async with stockade.AsyncSandbox(POLICY, _environment=environment(tree)) as box:
            server = await box.start(["sh", "-c", script], stdout=None, stderr=None)
            joined = environment(tree, access="read", network=box._require_open()[0].network_fd)
            dial = "import socket; socket.create_connection(('127.0.0.1', 4444), 5)"
            async with stockade.AsyncSandbox(POLICY, _environment=joined) as other:
                for _ in range(50):
                    if (await other.run(["/usr/bin/python3", "-c", dial])).ok:
                        break
                    await asyncio.sleep(0.1)
                else:
                    pytest.fail("the sandbox that joins the network does not reach the server of the other")
            async with stockade.AsyncSandbox(POLICY, _environment=environment(tree)) as alone:
                assert not (await alone.run(["/usr/bin/python3", "-c", dial])).ok
            await server.wait(10)
            await server.close()

    asyncio.run(main())
