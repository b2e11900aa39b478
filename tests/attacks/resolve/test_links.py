"""Links in the workspace, and in whatever a program can write, do not decide what a policy grants."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stockade
from attacks.sandbox.test_confine import ACCEPT
from stockade import AsyncSandbox, Policy, Pool, Sandbox, Workspace, backends, cli
from stockade.errors import PolicyError
from stockade.linux.user import Caller
from stockade.policy.toml import load
from stockade.resolve.child_policy import ChildRefusedError, child
from stockade.resolve.discovery import discover
from stockade.resolve.resolution import resolve
from stockade.sandbox.sandbox import RunExtras, run_once
from support.ground import SECRET, Ground
from support.means import clauses_for


@pytest.fixture(params=list(backends.BACKENDS))
def walls(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The clauses of a policy for each backend, with what it has only in part accepted."""
    # Without mounts there are no overlays, and nothing in the workspace is protected.
    mode = "ro" if request.param == "landlock" else "overlay"
    workspace = {"path": ".", "mode": mode}
    return {**clauses_for(request.param), "workspace": workspace, "protect": []}


def shown(path: Path, policy: Policy) -> str:
    result = stockade.run(["cat", str(path)], policy, on_exit="discard")
    return result.stdout.decode() if result.ok else ""


@pytest.mark.parametrize("clause", ["read", "write"])
@pytest.mark.parametrize(
    ("link", "path"),
    [
        ("out", "./out"),
        ("out", "out/"),
        ("out", "{repository}/out"),
        ("out", "~/repository/out"),
        ("out", "./out/key"),
        ("out", "./out/key?"),
        ("deep/out", "deep/out?"),
    ],
)
def test_a_link_in_the_workspace_grants_nothing_outside_of_it(
    ground: Ground, walls: dict[str, Any], clause: str, link: str, path: str
) -> None:
    made = ground.link(link)
    clauses = {clause: [path.format(repository=ground.repository)]}
    ground.refused(Policy(**walls, **clauses), f"the link {made} leads to {ground.private}", f"--{clause} ")
    made.unlink()
    made.mkdir()
    (made / "key").write_text("ours\n")
    assert shown(made / "key", Policy(**walls, **clauses)) == "ours\n"


@pytest.mark.parametrize("target", ["../private", "./../repository/../private", "hop", "{private}/", "hop/."])
def test_however_the_link_is_written_and_through_how_many_it_leads(
    ground: Ground, walls: dict[str, Any], target: str
) -> None:
    ground.link("hop", "further")
    ground.link("further", "../private")
    made = ground.link("out", target.format(private=ground.private))
    ground.refused(Policy(**walls, write=["./out"]), f"the link {made} leads to {ground.private}")


def test_a_link_out_of_a_link_inside_is_refused_too(ground: Ground, walls: dict[str, Any]) -> None:
    (ground.repository / "inner").mkdir()
    ground.link("way", "inner")
    ground.link("inner/out")
    ground.refused(Policy(**walls, read=["./way/out/key"]), ground.repository / "inner/out", ground.private)


def test_a_link_that_leads_out_and_back_in_is_refused(ground: Ground, walls: dict[str, Any]) -> None:
    (ground.repository / "inner").mkdir()
    (ground.private / "back").symlink_to(ground.repository / "inner")
    ground.link("out")
    with pytest.raises(PolicyError, match=f"leads to {ground.private}"):
        stockade.run(["true"], Policy(**walls, write=["./out/back"]))


def test_links_that_stay_in_the_workspace_are_followed(ground: Ground, walls: dict[str, Any]) -> None:
    (ground.repository / "real").mkdir()
    (ground.repository / "real" / "file").write_text("ours\n")
    ground.link("one", "real")
    ground.link("two", ground.repository / "one")
    ground.link("deep/three", "../two")
    policy = Policy(**walls, write=["./one", "deep/three"])
    assert stockade.run(["sh", "-c", "echo new > real/file"], policy, on_exit="discard").ok
    assert (ground.repository / "real" / "file").read_text() == "new\n"


def test_what_a_link_leads_to_is_granted_if_the_policy_names_it(
    ground: Ground, walls: dict[str, Any]
) -> None:
    ground.link("out")
    by_name = Policy(**walls, read=["./out", str(ground.private)])
    assert shown(ground.key, by_name) == SECRET
    assert shown(ground.key, Policy(**walls, read=["./out/key", str(ground.root / "private")])) == SECRET
    ground.refused(Policy(**walls, read=[str(ground.private)], write=["./out"]), ground.private)
    ground.refused(Policy(**walls, read=["./out", f"{ground.private}/key"]), ground.private)
    ground.link("sh", "/bin/sh")
    assert stockade.run(["true"], Policy(**walls, read=["./sh"])).ok, "the profile shows it anyhow"


@pytest.mark.parametrize("target", [".git", ".git/modules/x", "sub/.hg"])
def test_a_link_does_not_make_what_version_control_obeys_writable(
    ground: Ground, walls: dict[str, Any], target: str
) -> None:
    (ground.repository / target).mkdir(parents=True)
    made = ground.link("out", target)
    ground.refused(Policy(**walls, write=["./out"]), made, "version control")
    assert stockade.run(["true"], Policy(**walls, read=["./out"])).ok


def test_links_of_the_host_outside_the_workspace_are_the_hosts_own(
    ground: Ground, walls: dict[str, Any]
) -> None:
    (ground.root / "home").symlink_to("private")
    assert shown(ground.key, Policy(**walls, read=[f"{ground.root}/home"])) == SECRET
    assert shown(ground.key, Policy(**walls, read=["~/home/key"])) == SECRET
    (ground.root / "mine").symlink_to("repository")
    (ground.repository / "file").write_text("ours\n")
    walls["workspace"]["path"] = f"{ground.root}/mine"
    assert shown(ground.repository / "file", Policy(**walls, read=[f"{ground.root}/mine/file"])) == "ours\n"
    ground.link("out")
    ground.refused(Policy(**walls, read=[f"{ground.root}/mine/out"]), ground.repository / "out")


def test_a_relative_path_outside_the_workspace_stays_where_it_is_counted_from(
    ground: Ground, walls: dict[str, Any], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    walls["workspace"]["path"] = str(elsewhere)
    made = ground.link("data")
    ground.refused(Policy(**walls, read=["./data"]), made, ground.private, "relative to")
    (ground.root / "beside").symlink_to("private")
    assert shown(ground.key, Policy(**walls, read=["../beside"])) == SECRET, "it stays beside the repository"
    (ground.root / "away").symlink_to("/srv")
    ground.refused(Policy(**walls, read=["../away"]), ground.root / "away", "/srv")
    (elsewhere / "way").symlink_to(ground.private)
    ground.refused(Policy(**walls, read=["../elsewhere/way"]), elsewhere / "way", "the workspace")


def test_a_workspace_that_is_a_link_of_the_repository_is_refused(
    ground: Ground, walls: dict[str, Any]
) -> None:
    made = ground.link("sub")
    walls["workspace"]["path"] = "./sub"
    ground.refused(Policy(**walls), f"the link {made} leads to {ground.private}", "-w ", "workspace.path")
    (ground.repository / "inner").mkdir()
    made.unlink()
    ground.link("sub", "inner")
    assert stockade.run(["true"], Policy(**walls)).ok
    walls["workspace"]["path"] = str(ground.root / "alias")
    (ground.root / "alias").symlink_to("repository")
    assert stockade.run(["true"], Policy(**walls)).ok, "an absolute path is the caller's own word"


@pytest.mark.parametrize("name", [".git", ".hg", ".jj", ".sl"])
@pytest.mark.parametrize("clause", ["workspace", "read", "write"])
def test_a_link_of_a_repository_decides_nothing_by_an_absolute_path(
    ground: Ground, walls: dict[str, Any], clause: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the caller is elsewhere, and the repository is not the workspace."""
    made = ground.link("sub/out")
    monkeypatch.chdir(ground.root)
    away = ground.root / "away"
    away.mkdir()
    grant = {"workspace": {**walls["workspace"], "path": str(away)}, clause: [str(made)]}
    if clause == "workspace":
        grant = {"workspace": {**walls["workspace"], "path": str(made)}}
    policy = Policy(**{**walls, **grant})
    # The control: a directory that is no repository has links of its owner's.
    assert stockade.run(["true"], policy, on_exit="discard").ok
    (ground.repository / name).mkdir()
    told = ground.refused(policy, made, ground.private, "a repository", "name that")
    assert str(ground.private) in told
    made.unlink()
    made.symlink_to("../inner")
    (ground.repository / "inner").mkdir()
    assert stockade.run(["true"], policy, on_exit="discard").ok, "a link that stays in it"


def test_a_link_of_the_current_directory_decides_nothing_by_an_absolute_path(
    ground: Ground, walls: dict[str, Any]
) -> None:
    made = ground.link("out")
    walls["workspace"]["path"] = str(made)
    ground.refused(Policy(**walls), made, ground.private, "the current directory")


def test_a_home_that_is_a_repository_has_links_of_its_owners(
    ground: Ground, walls: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (ground.root / ".git").mkdir()
    (ground.root / "data").symlink_to(ground.private)
    walls["workspace"]["path"] = str(ground.repository)
    monkeypatch.setenv("HOME", str(ground.root))
    assert shown(ground.key, Policy(**walls, read=["~/data"])) == SECRET
    (ground.root / "beyond").symlink_to("/usr/share")
    assert stockade.run(["true"], Policy(**walls, read=["~/beyond"]), on_exit="discard").ok


class TestPlanted:
    """A run chooses nothing for the next one."""

    @pytest.fixture
    def out(self, ground: Ground, walls: dict[str, Any]) -> Path:
        """A directory outside the repository that programs may write."""
        made = ground.root / "out"
        made.mkdir()
        return made

    def plant(self, walls: dict[str, Any], out: Path, link: str, target: Path) -> None:
        code = 'mkdir -p "$(dirname "$1")" && ln -s "$2" "$1"'
        result = stockade.run(
            ["sh", "-c", code, "sh", f"{out}/{link}", str(target)], Policy(**walls, write=[str(out)])
        )
        assert result.ok, result.stderr
        assert (out / link).is_symlink()

    @pytest.mark.parametrize("clause", ["read", "write"])
    def test_an_absent_grant_below_a_writable_one_is_not_planted_as_a_link(
        self, ground: Ground, walls: dict[str, Any], out: Path, clause: str
    ) -> None:
        policy = {**walls, "write": [str(out)]}
        policy[clause] = [*policy.get(clause, []), f"{out}/x/in?"]
        if clause == "write" or walls["backend"] != "landlock":  # which cannot take away below what it gives
            assert stockade.run(["true"], Policy(**policy), on_exit="discard").ok
        self.plant(walls, out, "x/in", ground.private)
        ground.refused(Policy(**policy), f"{out}/x/in", ground.private, "where programs may write")

    def test_nor_is_one_of_the_profile(self, ground: Ground, walls: dict[str, Any]) -> None:
        cache = ground.root / ".cache"
        cache.mkdir()
        self.plant(walls, cache, "pip", ground.private)
        ground.refused(Policy(**walls, profile="dev", write=[str(cache)]), f"{cache}/pip", ground.private)

    def test_nor_does_it_make_another_part_of_the_workspace_writable(
        self, ground: Ground, walls: dict[str, Any]
    ) -> None:
        if walls["workspace"]["mode"] == "ro":
            return  # all of it is
        for name in ("out", "src"):
            (ground.repository / name).mkdir()
        policy = Policy(**walls, write=["./out", "./out/in?"])
        assert stockade.run(["sh", "-c", "ln -s ../src out/in"], policy, on_exit="discard").ok
        ground.refused(policy, ground.repository / "out/in", ground.repository / "src")
        assert stockade.run(["true"], Policy(**walls, read=["./out/in"], write=["./out"])).ok

    def test_an_absent_grant_is_not_planted_by_a_commit_which_says_that_it_could_be(
        self, ground: Ground, walls: dict[str, Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        if walls["workspace"]["mode"] == "ro":
            return  # there is nothing to commit
        policy = Policy(**walls, write=["./cache?"], read=["./in/deep?"])
        code = f"ln -s {ground.private} cache; ln -s . in; ln -s cache other"
        result = stockade.run(["sh", "-c", code], policy)
        assert cli.main(["commit", result.workspace_id]) == 0
        said = capsys.readouterr().err
        assert f'cache: a link to {ground.private} now stands where write = "./cache?" of the policy' in said
        assert 'in: a link to . now stands where read = "./in/deep?" of the policy points' in said
        assert "other: a link to" not in said
        ground.refused(policy, ground.repository / "cache", ground.private)

    def test_a_continued_workspace_knows_the_grants_of_all_its_runs(
        self, ground: Ground, walls: dict[str, Any]
    ) -> None:
        if walls["workspace"]["mode"] == "ro":
            return
        first = stockade.run(["touch", "new"], Policy(**walls))
        kept = Workspace.open(first.workspace_id)
        policy = Policy(**walls, write=["./cache?"])
        again = stockade.run(["ln", "-s", str(ground.private), "cache"], policy, resume=kept)
        assert again.ok, again.stderr
        notes = [note.what for note in Workspace.open(first.workspace_id).commit().notes]
        assert any('where write = "./cache?"' in note for note in notes), notes
        later = stockade.run(["touch", "more"], Policy(**walls))
        with pytest.raises(PolicyError, match="leads to"):
            stockade.run(["true"], policy, resume=Workspace.open(later.workspace_id))

    def test_workspaces_that_are_merged_know_the_grants_of_both(self, ground: Ground) -> None:
        kept = [
            Workspace.open(stockade.run(command, Policy(workspace=".", write=write)).workspace_id)
            for command, write in ((["touch", "new"], []), (["ln", "-s", "..", "cache"], ["./cache?"]))
        ]
        kept[0].merge(kept[1])
        notes = [note.what for note in Workspace.open(kept[0].id).commit().notes]
        assert any('where write = "./cache?"' in note for note in notes), notes

    def test_a_link_in_the_layer_leads_a_grant_nowhere(self, ground: Ground, walls: dict[str, Any]) -> None:
        if walls["workspace"]["mode"] == "ro":
            return
        first = stockade.run(["ln", "-s", "/etc", "out"], Policy(**walls))
        kept = Workspace.open(first.workspace_id)
        (ground.repository / "out").mkdir()  # the host's, behind the link of the layer
        with pytest.raises((PolicyError, stockade.SetupError)):
            stockade.run(["touch", "out/evil"], Policy(**walls, write=["./out"]), resume=kept)
        assert list((ground.repository / "out").iterdir()) == []


class TestEverySource:
    """Wherever the policy comes from."""

    def discovered(self, **options: Any) -> Any:
        caller = Caller.current()
        found = discover(caller.cwd, caller.environ, caller.home, workspace=caller.cwd, **options)
        return run_once(["true"], found.policy, {}, RunExtras(pinned=found.pinned))

    def write(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def refuses(self, ground: Ground, make: Callable[[], Any], name: str = "out") -> None:
        with pytest.raises(PolicyError, match="leads to") as caught:
            make()
        assert str(ground.private) in caught.value.message and name in caught.value.message

    @pytest.mark.parametrize("clause", ["read", "write"])
    def test_flags(self, ground: Ground, clause: str, capsys: pytest.CaptureFixture[str]) -> None:
        ground.link("out")
        assert cli.main(["run", f"--{clause}", "./out", "--", "true"]) == cli.REFUSED
        assert f"the link {ground.repository}/out leads to {ground.private}" in capsys.readouterr().err
        assert cli.main(["plan", f"--{clause}", "./out", "--", "true"]) == cli.REFUSED
        assert cli.main(["run", "-w", "out", "--", "true"]) == cli.REFUSED

    @pytest.mark.parametrize("path", ["./out", "out/key?"])
    def test_a_file_that_is_named(self, ground: Ground, path: str) -> None:
        ground.link("out")
        file = self.write(ground.repository / "p.toml", f'read = ["{path}"]')
        self.refuses(ground, lambda: self.discovered(file=str(file)))
        self.refuses(ground, lambda: stockade.run(["true"], load(str(file))))
        file = self.write(ground.root / "elsewhere" / "p.toml", 'read = ["data"]')
        (ground.root / "elsewhere" / "data").symlink_to(ground.private)
        self.refuses(ground, lambda: self.discovered(file=str(file)), "data")

    def test_the_users_own_policy(self, ground: Ground) -> None:
        ground.link("out")
        self.write(ground.root / ".config/stockade/config.toml", f'write = ["{ground.repository}/out?"]')
        self.refuses(ground, self.discovered)
        self.write(ground.root / ".config/stockade/config.toml", 'write = ["../../repository/out"]')
        self.refuses(ground, self.discovered)

    @pytest.mark.parametrize("text", ['read = ["out"]', 'write = ["./out?"]', '[workspace]\npath = "out"'])
    def test_a_project(self, ground: Ground, text: str) -> None:
        self.write(ground.repository / "stockade.toml", text)
        ground.link("out")
        self.refuses(ground, self.discovered)
        assert cli.main(["trust"]) == 0
        self.refuses(ground, self.discovered)

    def test_flags_over_a_project(self, ground: Ground) -> None:
        self.write(ground.repository / "stockade.toml", "[limits]\nwall = 5")
        ground.link("out")
        self.refuses(ground, lambda: self.discovered(flags={"read": ["./out"]}))
        assert self.discovered(flags={"read": ["./out", str(ground.private)]}).ok

    def test_layers_and_their_ceiling(self, ground: Ground) -> None:
        ground.link("out")
        file = ground.root / ".config/stockade/policies.toml"
        own = f'[agent.a]\nread = ["{ground.repository}/out"]\n'
        self.write(file, own)
        self.refuses(ground, lambda: self.discovered(agent="a"))
        self.write(file, f'{own}[ceiling]\nread = ["{ground.root}"]\nworkspace = "{ground.repository}"')
        self.refuses(ground, lambda: self.discovered(agent="a"))
        (ground.root / ".config/stockade/data").symlink_to(ground.private)
        self.write(file, '[agent.a]\nread = ["data"]\n')
        self.refuses(ground, lambda: self.discovered(agent="a"), "data")

    def test_a_registered_agent(self, ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
        ground.link("out")
        self.write(ground.repository / "p.toml", 'read = ["out"]')
        assert cli.main(["agents", "add", "helper", "-p", "p.toml"]) == 0
        assert cli.main(["run", "--agent", "helper", "--", "true"]) == cli.REFUSED
        assert f"leads to {ground.private}" in capsys.readouterr().err

    def test_sandboxes_and_pools(self, ground: Ground, walls: dict[str, Any]) -> None:
        policy = Policy(**walls, write=["./out?"])
        ground.link("out")

        async def awaited() -> None:
            async with AsyncSandbox(policy):
                pass

        def pooled() -> None:
            with Pool(policy, size=1) as pool:
                pool.run(["true"])

        self.refuses(ground, lambda: Sandbox(policy).__enter__())
        self.refuses(ground, lambda: asyncio.run(awaited()))
        self.refuses(ground, pooled)

    def test_a_shell_that_is_kept(self, ground: Ground) -> None:
        ground.link("out")
        terminal = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
        command = [sys.executable, "-m", "stockade", "shell", "--keep", "--write", "./out"]
        done = subprocess.run(
            [sys.executable, "-c", terminal, *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == cli.REFUSED
        assert f"leads to {ground.private}" in "".join(done.stdout.splitlines()), done.stdout

    def test_a_pool_looks_again_for_every_sandbox(self, ground: Ground, walls: dict[str, Any]) -> None:
        policy = Policy(**walls, write=["./out?"])
        with Pool(policy, size=1) as pool:
            assert pool.run(["true"]).ok
            ground.link("out")
            with pytest.raises(PolicyError, match="leads to"):
                for _ in range(3):  # one may be ready since before
                    pool.run(["true"])

    def test_a_process_that_confines_itself(self, ground: Ground) -> None:
        ground.link("out")
        code = """
import json, sys, stockade
try:
    stockade.confine(stockade.Policy(accept=json.loads(sys.argv[1]), read=["/usr", sys.prefix, "./out"]))
except stockade.PolicyError as error:
    print(error)
"""
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(ACCEPT)], capture_output=True, text=True, check=False
        )
        assert f"leads to {ground.private}" in done.stdout, done.stderr

    def test_what_a_program_asks_for_a_child(self, ground: Ground, stockade_home: Path) -> None:
        out = ground.root / "out"
        out.mkdir()
        (out / "in").symlink_to(ground.private)
        policy = Policy(write=[str(out)], delegate=True)
        with (
            resolve(policy, Caller.current(), str(stockade_home)) as parent,
            pytest.raises(ChildRefusedError, match="a link"),
        ):
            child({"read": [str(out / "in")]}, parent, "native", {})


class TestPrograms:
    """`exec` names files too."""

    def program(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy("/bin/true", path)
        path.chmod(0o755)
        return path

    def clauses(self, ground: Ground, *patterns: str) -> dict[str, Any]:
        return {"workspace": {"path": str(ground.repository), "mode": "ro"}, "exec": [*patterns, "/bin/true"]}

    @pytest.mark.parametrize("pattern", ["./tool", "tool?", "./*", "./**", "{repository}/t*", "way/*"])
    def test_a_link_does_not_name_another_program(self, ground: Ground, pattern: str) -> None:
        other = self.program(ground.private / "other")
        made = ground.link("tool", other)
        if pattern.startswith("way"):
            made = ground.link("way")
        self.program(ground.repository / "own")
        pattern = pattern.format(repository=ground.repository)
        with pytest.raises(PolicyError, match=f"the link {made} leads to {ground.private}"):
            stockade.run(["true"], Policy(**self.clauses(ground, pattern), read=[str(ground.private)]))
        named = self.clauses(ground, pattern, f"{ground.private}/*")
        assert stockade.run(["true"], Policy(**named, read=[str(ground.private)])).ok

    def test_one_that_stays_in_the_workspace_does(self, ground: Ground) -> None:
        self.program(ground.repository / "bin" / "real")
        ground.link("tool", "bin/real")
        policy = Policy(**self.clauses(ground, "./tool"))
        assert stockade.run([str(ground.repository / "tool")], policy).ok

    def test_the_link_of_a_project_that_is_trusted(self, ground: Ground) -> None:
        self.program(ground.private / "other")
        ground.link("bin/tool", ground.private / "other")
        (ground.root / ".config/stockade").mkdir(parents=True)
        (ground.root / ".config/stockade/config.toml").write_text(f'exec = ["/bin/*", "{ground.private}/x?"]')
        (ground.repository / "stockade.toml").write_text('exec = ["bin/*"]')
        assert cli.main(["trust"]) == 0
        caller = Caller.current()
        found = discover(caller.cwd, caller.environ, caller.home)
        with pytest.raises(PolicyError, match="leads to"):
            run_once(["true"], found.policy, {}, RunExtras(pinned=found.pinned))


def test_whoever_swaps_links_while_they_are_looked_up_gains_nothing(
    ground: Ground, stockade_home: Path
) -> None:
    """The same name is a directory and a link by turns; what is opened is never what was not named."""
    inner = ground.repository / "inner"
    inner.mkdir()
    (ground.repository / "real").mkdir()
    ground.link("spare")
    over = threading.Event()

    def swap() -> None:
        import ctypes

        exchange = ctypes.CDLL(None, use_errno=True).renameat2
        names = [os.fsencode(ground.repository / name) for name in ("real", "spare")]
        while not over.is_set():
            exchange(-100, names[0], -100, names[1], 2)

    swapping = threading.Thread(target=swap)
    swapping.start()
    seen: set[str] = set()
    try:
        for _ in range(1000):
            try:
                policy = Policy(workspace=".", write=["./real"])
                with resolve(policy, Caller.current(), str(stockade_home)) as found:
                    (grant,) = (one for one in found.grants if one.access == "write")
                    seen.add(os.readlink(f"/proc/self/fd/{grant.fd}").removeprefix(f"{ground.repository}/"))
                    assert not os.path.samestat(os.fstat(grant.fd), os.stat(ground.private))
            except PolicyError as error:
                seen.add("refused" if "leads to" in error.message else "moved")
    finally:
        over.set()
        swapping.join()
    assert "refused" in seen and seen & {"real", "spare"}, seen
