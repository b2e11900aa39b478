"""Git as people use it: linked worktrees, subdirectories of repositories, and who commits."""

from __future__ import annotations

from pathlib import Path

import pytest

import stockade
from stockade import Policy, Result, Sandbox
from stockade.workspace.version_control import git_config
from support.gits import git
from support.means import need_program

SECRET = "ghp_0123456789abcdefghij"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with a name, and no other configuration."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    for name in ("XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL", "EMAIL", "GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL"):
        monkeypatch.delenv(name, raising=False)
    (home / ".gitconfig").write_text('[user]\n\tname = "Ada \\"L\\" \\\\o"\n\temail = ada@example.org\n')
    return home


@pytest.fixture
def main(home: Path) -> Path:
    """A repository with one commit, a subdirectory, and a linked worktree beside it."""
    need_program("git")
    main = home / "main"
    (main / "sub").mkdir(parents=True)
    (main / "sub/file").write_text("one\n")
    git("init", "-q", "-b", "main", at=main)
    git("add", ".", at=main)
    git("commit", "-qm", "first", at=main)
    git("worktree", "add", "-q", str(home / "linked"), at=main)
    return main


def run(workspace: Path, *command: str, **clauses: object) -> Result:
    policy = Policy(workspace=str(workspace), **clauses)  # type: ignore[arg-type]
    return stockade.run(command, policy, on_exit="discard", timeout=60, advise=True)


@pytest.mark.parametrize("mode", ["overlay", "ro", "rw"])
def test_git_reads_the_repository_of_a_linked_worktree(main: Path, mode: str) -> None:
    linked = main.parent / "linked"
    (linked / "sub/file").write_text("two\n")
    may_change = [".envrc", ".vscode", ".claude"] if mode == "rw" else []
    policy = {"workspace": {"path": str(linked), "mode": mode}, "unprotect": may_change}
    for words in (["git", "log", "--format=%s"], ["git", "status", "--short"], ["git", "diff", "--stat"]):
        result = stockade.run(words, Policy(**policy), on_exit="discard", timeout=60)  # type: ignore[arg-type]
        assert result.ok and ("first" in result.text or "sub/file" in result.text), result.stderr
    assert b"sub/file" not in run(linked, "ls", str(main)).stdout


def test_the_repository_of_a_linked_worktree_cannot_be_changed_and_the_hint_says_what_to_do(
    main: Path,
) -> None:
    before = sorted((main / ".git").rglob("*"))
    result = run(main.parent / "linked", "git", "commit", "-q", "--allow-empty", "-m", "inside")
    assert not result.ok and "`git commit` outside" in result.hint
    assert sorted((main / ".git").rglob("*")) == before


@pytest.mark.parametrize(
    "text",
    [
        f'[remote "origin"]\n\turl = https://{SECRET}@example.org/x.git\n',
        f'[remote "origin"]\n\turl = https://ada:{SECRET}@example.org/x.git\n',
        f'[http "https://example.org/"]\n\textraheader = AUTHORIZATION: basic {SECRET}\n',
        f"[credential]\n\thelper = store\n[x]\n\ty = {SECRET}\n",
    ],
)
def test_credentials_of_the_repository_stay_hidden_and_git_works_without_them(main: Path, text: str) -> None:
    config = main / ".git/config"
    config.write_text(config.read_text() + text)
    (main / ".git/credentials").write_text(f"https://ada:{SECRET}@example.org\n")
    linked = main.parent / "linked"
    found = run(linked, "sh", "-c", f"git log --format=%s; grep -rs {SECRET} {main}/.git; git config -l")
    assert "first" in found.text and SECRET not in found.text
    assert any("may hold credentials: credentials, config" in line for line in found.warnings)


def test_a_repository_without_credentials_shows_its_configuration(main: Path) -> None:
    found = run(main.parent / "linked", "git", "config", "core.repositoryformatversion")
    assert found.text == "0\n" and not found.warnings


def test_a_policy_that_hides_the_git_file_shows_no_repository(main: Path) -> None:
    found = run(main.parent / "linked", "ls", f"{main}/.git", deny=[".git"])
    assert found.exit_code == 2


def test_in_a_subdirectory_of_a_repository_the_hint_says_where_to_work(main: Path) -> None:
    result = run(main / "sub", "git", "status")
    assert not result.ok and f"`-w {main}`" in result.hint


def test_in_a_submodule_the_hint_says_where_to_work(main: Path, home: Path) -> None:
    git("clone", "-q", str(main), str(home / "super"), at=home)
    allow = ("-c", "protocol.file.allow=always")
    git(*allow, "submodule", "add", "-q", str(main), "part", at=home / "super")
    result = run(home / "super/part", "git", "status")
    assert not result.ok and f"`-w {home}/super`" in result.hint


def test_a_worktree_that_was_moved_is_told_how_to_repair_it(main: Path) -> None:
    moved = (main.parent / "linked").rename(main.parent / "moved")
    result = run(moved, "git", "status")
    assert not result.ok and "git worktree repair" in result.hint


def author(workspace: Path) -> str:
    """Who a commit inside is by."""
    script = "git commit -q --allow-empty -m inside && git log -1 --format='%an <%ae> %cn <%ce>'"
    found = run(workspace, "sh", "-c", script)
    assert found.ok, (found.stderr, found.hint)
    return found.text.strip()


ADA = 'Ada "L" \\o <ada@example.org>'


def test_a_commit_inside_is_by_the_user(main: Path) -> None:
    assert author(main) == f"{ADA} {ADA}"
    policy = Policy(workspace=str(main))
    with Sandbox(policy, on_exit="discard") as box:
        assert box.run(["git", "commit", "-q", "--allow-empty", "-m", "inside"]).ok


def test_what_a_repository_says_of_its_author_counts_more(main: Path) -> None:
    git("config", "user.email", "ada@work.example.org", at=main)
    assert "<ada@work.example.org>" in author(main)


def test_what_the_user_includes_for_a_directory_counts(main: Path, home: Path) -> None:
    (home / "work").write_text("[user]\n\temail = ada@work.example.org\n")
    with (home / ".gitconfig").open("a") as file:
        file.write(
            '[includeIf "gitdir:~/main/"]\n\tpath = ~/work\n[includeIf "gitdir:~/x/"]\n\tpath = none\n'
        )
    assert "<ada@work.example.org>" in author(main)


def test_of_the_users_configuration_only_name_and_email_are_shown(main: Path, home: Path) -> None:
    with (home / ".gitconfig").open("a") as file:
        file.write(f"\tsigningkey = {SECRET}\n[github]\n\ttoken = {SECRET}\n")
    found = run(main, "sh", "-c", "cat /etc/gitconfig; git config -l --global; git config -l")
    assert SECRET not in found.text
    names = {one.name for one in git_config.parse(run(main, "sh", "-c", "cat /etc/gitconfig").stdout)}
    assert names == {"user.name", "user.email"}


def test_a_workspace_that_is_no_repository_is_not_told_who_the_user_is(home: Path, workspace: Path) -> None:
    assert run(workspace, "sh", "-c", "cat /etc/gitconfig").exit_code == 1


def test_without_an_identity_the_hint_says_what_to_type(main: Path, home: Path) -> None:
    (home / ".gitconfig").write_text("")
    result = run(main, "git", "commit", "-q", "--allow-empty", "-m", "inside")
    assert not result.ok and "git config --global user.name" in result.hint


def test_a_directory_that_git_cannot_rename_gets_what_to_type(main: Path) -> None:
    result = run(main, "git", "mv", "sub", "other")
    assert not result.ok and "git add -A OLD NEW" in result.hint
    assert run(main, "sh", "-ec", "mv sub other; git add -A sub other; git status --short").text.startswith(
        "R"
    )


def test_a_policy_can_keep_the_users_name_to_itself(main: Path) -> None:
    assert run(main, "sh", "-c", "cat /etc/gitconfig", deny=["/etc/gitconfig"]).exit_code == 1
