"""What a repository does with its `.git` to have another repository, or a place of secrets, shown."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from stockade import Policy
from stockade.linux.user import Caller
from stockade.resolve import git_repository
from stockade.resolve.resolution import resolve
from support.means import need_program


def repository(place: Path) -> Path:
    """What git takes for a repository."""
    for name in ("objects", "refs"):
        (place / name).mkdir(parents=True)
    (place / "HEAD").write_text("ref: refs/heads/main\n")
    return place


def link(common: Path, worktree: Path, name: str = "w") -> Path:
    """Make the files of `git worktree add`; return git's own directory of the worktree."""
    own = common / "worktrees" / name
    own.mkdir(parents=True)
    (own / "gitdir").write_text(f"{worktree}/.git\n")
    (own / "commondir").write_text("../..\n")
    worktree.mkdir(exist_ok=True)
    (worktree / ".git").write_text(f"gitdir: {own}\n")
    return own


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with another project and its worktree, a directory of secrets, and a hostile project."""
    home = tmp_path / "home"
    link(repository(home / "other/.git"), home / "others-worktree")
    (home / ".ssh").mkdir()
    (home / ".ssh/id").write_text("key")
    (home / "project").mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def shown(home: Path) -> set[str]:
    """What is granted of the home besides the project."""
    policy = Policy(workspace=str(home / "project"), toolchain=False)
    with resolve(policy, Caller.current(), os.environ["STOCKADE_HOME"], command="git") as found:
        return {grant.path for grant in found.grants if grant.path.startswith(str(home))}


def names(text: str) -> Callable[[Path], None]:
    def plant(home: Path) -> None:
        (home / "project/.git").write_text(f"gitdir: {text.format(home=home)}\n")

    return plant


def own_files(common: str) -> Callable[[Path], None]:
    """The project's own directory of git points back, and names another directory as the common one."""

    def plant(home: Path) -> None:
        own = link(repository(home / "project/fake"), home / "project")
        (own / "commondir").write_text(common.format(home=home) + "\n")

    return plant


def through_link(home: Path) -> None:
    (home / "project/way").symlink_to(home / "other/.git")
    names("{home}/project/way/worktrees/w")(home)


def linked_worktrees(home: Path) -> None:
    """The directory of worktrees is the project's own; the repository around it is said to be another's."""
    own = link(home / "project/fake", home / "project")
    (home / "project/fake/HEAD").symlink_to(home / "other/.git/HEAD")
    for name in ("objects", "refs"):
        (home / "project/fake" / name).symlink_to(home / "other/.git" / name)
    (own / "commondir").write_text(f"{home}/other/.git\n")


def files_added_to_a_directory_of_the_users(home: Path) -> None:
    """An archive that is extracted in the home adds the files of a bare repository to a directory there."""
    (home / "letters").mkdir()
    (home / "letters/taxes.txt").write_text("secret")
    link(repository(home / "letters"), home / "project")


def git_is_a_link(home: Path) -> None:
    (home / "project/.git").symlink_to(home / "others-worktree/.git")


def link_to_secret(home: Path) -> None:
    (home / "project/.git").symlink_to(home / ".ssh/id")


def waits(home: Path) -> None:
    os.mkfifo(home / "project/.git")


ATTACKS: dict[str, Callable[[Path], None]] = {
    "another repository": names("{home}/other/.git"),
    "another repository's worktree": names("{home}/other/.git/worktrees/w"),
    "another's worktree, on a relative way": names("../other/.git/worktrees/w"),
    "a place of secrets": names("{home}/.ssh"),
    "a place of secrets, as a worktree": names("{home}/.ssh/worktrees/w"),
    "no path": names("{home}/other/.git\0/worktrees/w"),
    "its own directory, for another repository": own_files("{home}/other/.git"),
    "its own directory, for a place of secrets": own_files("{home}/.ssh"),
    "its own directory, for the home": own_files("{home}"),
    "a link on the way": through_link,
    "links in a repository of its own": linked_worktrees,
    "a directory of the user's, made a bare repository": files_added_to_a_directory_of_the_users,
    "a link in place of the file": git_is_a_link,
    "a link to a secret": link_to_secret,
    "a file that waits": waits,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_git_file_has_nothing_of_the_home_shown(home: Path, name: str) -> None:
    ATTACKS[name](home)
    assert shown(home) == set()


@pytest.mark.parametrize("name", ["another repository's worktree", "a link on the way"])
def test_without_the_word_of_the_repository_the_attack_gets_through(
    home: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ATTACKS[name](home)
    monkeypatch.setattr(git_repository, "_points_back", lambda *_: True)
    assert shown(home) == {f"{home}/other/.git"}


def test_the_users_own_worktree_is_shown_its_repository(home: Path) -> None:
    link(home / "other/.git", home / "project", "mine")
    assert shown(home) == {f"{home}/other/.git"}


def test_a_worktree_of_a_bare_repository_is_shown_it(home: Path) -> None:
    need_program("git")
    subprocess.run(["git", "init", "-q", "--bare", str(home / "bare")], check=True)
    link(home / "bare", home / "project")
    (home / "bare/FETCH_HEAD").touch()
    assert shown(home) == {f"{home}/bare"}


def test_a_repository_around_the_workspace_is_not_shown(home: Path) -> None:
    """Worktrees in a bare repository: everything beside this one would be shown."""
    link(repository(home), home / "project")
    assert shown(home) == set()


@pytest.mark.parametrize("name", [".ssh", ".config/gh"])
def test_a_place_of_secrets_is_not_shown_even_if_it_is_a_repository(home: Path, name: str) -> None:
    link(repository(home / name), home / "project")
    assert shown(home) == set()


def test_a_repository_of_another_user_is_not_shown(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link(home / "other/.git", home / "project", "mine")
    monkeypatch.setattr(git_repository, "_owner", lambda path: os.getuid() + 1)
    assert shown(home) == set()


def hidden(home: Path) -> set[str]:
    """What stays hidden of the repository of a worktree, by the names in it."""
    link(home / "other/.git", home / "project", "mine")
    found = git_repository.linked_worktree(str(home / "project"), Caller.current())
    assert found is not None
    return {os.path.relpath(path, found.repository) for path in found.hidden}


@pytest.mark.parametrize("record", ["logs/HEAD", "logs/refs/heads/main", "worktrees/w/logs/HEAD"])
@pytest.mark.parametrize("address", ["https://me:word@git.example/x", f"https://{'t' * 40}@git.example/x"])
def test_an_address_with_a_password_that_git_has_logged_is_hidden(
    home: Path, record: str, address: str
) -> None:
    file = home / "other/.git" / record
    file.parent.mkdir(parents=True)
    file.write_text(f"0 1 me <me@example> 1 +0000\tpull {address} main: Fast-forward\n")
    assert hidden(home) == {f"{record.partition('logs')[0]}logs"}


def test_a_log_that_only_speaks_of_passwords_is_shown(home: Path) -> None:
    file = home / "other/.git/logs/HEAD"
    file.parent.mkdir()
    file.write_text("0 1 me <me@example> 1 +0000\tcommit: hide the password and the token\n")
    assert hidden(home) == set()


@pytest.mark.parametrize("name", ["config", "config.lock", "config.bak", "config~"])
def test_a_copy_of_a_configuration_with_a_password_is_hidden_too(home: Path, name: str) -> None:
    (home / "other/.git" / name).write_text('[remote "o"]\n\turl = https://me:word@git.example/x\n')
    assert hidden(home) == {name}
