"""What belongs to others in a workspace: an ordinary user's overlay cannot copy it up, and is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stockade.resolve import owners
from support.means import applies, need
from support.paths import ROOT

US, THEM, GROUP = 65534, 54321, 54322
#: The groups of the ordinary user beside its own.
AS_US = ["setpriv", f"--reuid={US}", f"--regid={US}", f"--groups={GROUP}"]
ENVIRON = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}

Own = Callable[..., Path]


@pytest.fixture
def workspace() -> Iterator[Path]:
    """A directory of the ordinary user; what is made for a test of root's is closed to others."""
    applies(os.geteuid() == 0, "for root only: it gives files away")
    seen = subprocess.run([*AS_US, sys.executable, "-c", "import stockade"], env=ENVIRON, check=False)
    need(seen.returncode == 0, "others may not read this checkout")
    with tempfile.TemporaryDirectory(prefix="stockade-owners-", dir="/var/tmp") as top:
        os.chmod(top, 0o755)
        for name in ("workspace", "home"):
            os.mkdir(f"{top}/{name}")
            os.chown(f"{top}/{name}", US, US)
        yield Path(top, "workspace")


@pytest.fixture
def own(workspace: Path) -> Own:
    """Makes a path of the workspace that belongs to somebody; a path that ends in / is a directory."""

    def make(path: str, uid: int = US, gid: int = US, mode: int = 0o644) -> Path:
        made = workspace / path
        made.mkdir() if path.endswith("/") else made.write_text("text\n")
        os.chown(made, uid, gid)
        made.chmod(mode)
        return made

    return make


def as_us(workspace: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Python of the ordinary user, in the workspace."""
    home = workspace.parent / "home"
    environ = ENVIRON | {"HOME": str(home), "STOCKADE_HOME": str(home / "state")}
    command = [*AS_US, sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, cwd=workspace, env=environ, capture_output=True, text=True, check=False)


def run(workspace: Path, command: str, mode: str = "overlay") -> str:
    """What came of a run: its output, or why it was refused."""
    done = as_us(
        workspace,
        f"""
        import stockade
        try:
            rule = {{"path": ".", "mode": {mode!r}}}
            policy = stockade.Policy(workspace=rule, protect=[])
            result = stockade.run(["sh", "-c", {command!r}], policy, on_exit="discard")
            print(result.text + result.stderr.decode() + "done")
        except stockade.PolicyError as error:
            print("refused", error.message, error.hint)
        """,
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("uid", "gid", "mode"),
    [(THEM, THEM, 0o666), (THEM, GROUP, 0o664), (US, GROUP, 0o644), (US, THEM, 0o600)],
    ids=["everybody's", "our-group's", "ours-with-our-group", "ours-with-another-group"],
)
def test_a_file_of_others_that_we_may_write_is_refused(
    own: Own, workspace: Path, uid: int, gid: int, mode: int
) -> None:
    own("file", uid, gid, mode)
    said = run(workspace, "echo >> file")
    assert said.startswith(f'refused workspace = ".": {workspace}/file belongs to ')
    assert "chown" in said and "mode ro or rw" in said and "run as root" in said
    assert run(workspace, "echo >> file", "rw") == "done"
    assert run(workspace, "cat file", "ro") == "text\n\ndone"


def test_the_wall_is_needed(own: Own, workspace: Path) -> None:
    """Without it, the program fails in the middle of its work, where the plain directory would do."""
    own("group", US, GROUP)
    own("closed/", THEM, THEM, 0o755)
    own("closed/ours")
    own("open/", THEM, THEM, 0o777)
    done = as_us(
        workspace,
        """
        import stockade, subprocess
        from stockade.resolve import owners
        owners.first = lambda *_: None
        for script in ("echo >> group", "echo >> closed/ours", "echo > open/new"):
            subprocess.run(["sh", "-c", script], check=True)
            result = stockade.run(["sh", "-c", script], stockade.Policy(workspace="."), on_exit="discard")
            print(result.stderr.decode())
        """,
    )
    assert done.stdout.count("Value too large for defined data type") == 3, done


def test_a_directory_counts_if_something_can_be_made_or_written_in_it(own: Own, workspace: Path) -> None:
    own("theirs/", THEM, THEM, 0o755)
    own("theirs/file", THEM, THEM)
    assert run(workspace, "cat theirs/file; echo > new; rm -r theirs") != "done"  # theirs cannot be emptied
    own("theirs/ours")
    assert f"{workspace}/theirs belongs to {THEM}:{THEM}" in run(workspace, "echo >> theirs/ours")
    (workspace / "theirs/ours").unlink()
    (workspace / "theirs").chmod(0o777)
    assert f"{workspace}/theirs belongs to {THEM}:{THEM}" in run(workspace, "echo > theirs/new")


def test_what_we_may_not_write_anyway_does_no_harm(own: Own, workspace: Path) -> None:
    own("file", THEM, THEM)
    own("group", THEM, GROUP)
    own("closed/", THEM, THEM, 0o700)
    (workspace / "link").symlink_to("/tmp")
    os.mkfifo(workspace / "pipe", 0o666)
    assert run(workspace, "cat file; rm file; echo new > file; cat file") == "text\nnew\ndone"


def test_the_workspace_itself_may_be_of_others(own: Own, workspace: Path) -> None:
    own("ours")
    os.chown(workspace, THEM, THEM)
    workspace.chmod(0o777)
    assert run(workspace, "echo >> ours; echo > new; cat ours") == "text\n\ndone"


def test_root_is_not_refused(own: Own, workspace: Path) -> None:
    import stockade

    own("file", THEM, GROUP, 0o666)
    result = stockade.run(["sh", "-c", "echo >> file"], stockade.Policy(workspace=str(workspace)))
    assert [change.path for change in result.changes] == ["file"]


def test_a_start_looks_at_the_nearest_only(own: Own, workspace: Path) -> None:
    own("a/", mode=0o755)
    own("a/b/", mode=0o755)
    own("a/b/theirs", THEM, THEM, 0o666)
    assert f"{workspace}/a/b/theirs" in run(workspace, "true")
    for number in range(owners.NEAREST):
        own(f"{number}")
    assert run(workspace, "true") == "done"


CHECK = """
import sys
from stockade.cli import main
sys.exit(main(["workspaces", "check", *{words!r}]))
"""


def test_the_whole_tree_is_checked_on_request(own: Own, workspace: Path) -> None:
    for number in range(owners.NEAREST):
        own(f"{number}")
    done = as_us(workspace, CHECK.format(words=[]))
    assert (done.returncode, done.stdout) == (
        0,
        f"an overlay of {workspace} can change every file that you can\n",
    ), done
    own("a/", THEM, THEM, 0o755)
    own("a/b/", THEM, THEM, 0o755)
    own("a/b/ours")
    own("a/theirs", THEM, THEM, 0o666)
    own("harmless", THEM, THEM, 0o644)
    done = as_us(workspace, CHECK.format(words=[]))
    assert done.returncode == 1
    assert done.stdout.split()[2:] == [
        *(f"{THEM}:{THEM}", "a"),
        *(f"{THEM}:{THEM}", "a/theirs"),
        *(f"{THEM}:{THEM}", "a/b"),
    ]
    assert "3 paths" in done.stderr and "chown" in done.stderr
    done = as_us(workspace, CHECK.format(words=[str(workspace), "--json"]))
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["count"] == 3 and found["path"] == str(workspace)
    assert found["found"][1] == {"path": "a/theirs", "owner": f"{THEM}:{THEM}", "uid": THEM, "gid": THEM}


def test_a_link_is_not_followed(own: Own, workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    theirs = tmp_path / "outside/theirs"
    theirs.write_text("")
    theirs.chmod(0o666)
    (workspace / "link").symlink_to(tmp_path / "outside")
    os.chown(workspace / "link", US, US, follow_symlinks=False)
    assert as_us(workspace, CHECK.format(words=[])).returncode == 0
