"""What a commit brings to the host where the host's own configuration makes a tool run it.

Each case is a repository whose owner configured something that is harmless,
and a program that changes a file which that configuration names. The control
copies the layer as one would by hand, and sees that the tool runs it.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

import stockade
from stockade import Policy, PolicyError
from stockade.workspace.version_control.hook_paths import hook_paths
from stockade.workspace.version_control.repositories import search
from support.means import need_program
from support.trees import changed
from support.version_control import home_alone, new_repository, types

SCRIPT = "#!/bin/sh\\ntouch $MARK\\n"


class Case(NamedTuple):
    """What the owner configured, what the program does, what the user types, what must be held and why."""

    owner: str
    program: str
    types: str
    held: str
    why: str


def writes(*paths: str) -> str:
    """A script that makes each of the paths a program."""
    return "; ".join(
        f'mkdir -p $(dirname {path}); printf "{SCRIPT}" > {path}; chmod +x {path}' for path in paths
    )


EMPTY = "git commit --allow-empty -qm x"
WATCH = 'printf "[core]\\n\\tfsmonitor = \\"touch $MARK; false\\"\\n"'
CASES = {
    "core.hooksPath": Case(
        "git config core.hooksPath scripts/hooks",
        writes("scripts/hooks/pre-commit"),
        EMPTY,
        "scripts/hooks/pre-commit",
        "core.hookspath of {project}/.git/config points here",
    ),
    "core.hooksPath of the user": Case(
        "git config --global core.hooksPath scripts/hooks",
        writes("scripts/hooks/pre-commit"),
        EMPTY,
        "scripts/hooks/pre-commit",
        "core.hookspath of {home}/.gitconfig points here",
    ),
    "core.hooksPath of a worktree": Case(
        "git config extensions.worktreeConfig true; git config --worktree core.hooksPath $PWD/hooked",
        writes("hooked/pre-commit"),
        EMPTY,
        "hooked/pre-commit",
        "config.worktree points here",
    ),
    "another directory in place of that of the hooks": Case(
        "mkdir -p scripts/hooks; touch scripts/hooks/x; git config core.hooksPath scripts/hooks",
        f"rm -r scripts; ln -s mine scripts; {writes('mine/hooks/pre-commit')}",
        EMPTY,
        "scripts",
        "points here",
    ),
    "an include": Case(
        "mkdir conf; touch conf/team; git config include.path ../conf/team",
        f"{WATCH} > conf/team",
        "git status",
        "conf/team",
        "include.path of {project}/.git/config points here",
    ),
    "an include of an include": Case(
        "mkdir conf; touch conf/more; git config --global include.path $PWD/conf/base; "
        'git config --file conf/base "includeIf.gitdir:$PWD/.path" more',
        f"{WATCH} > conf/more",
        "git status",
        "conf/more",
        "path of {project}/conf/base points here",
    ),
    "hooks that are a link": Case(
        "mkdir own; touch own/x; rm -rf .git/hooks; ln -s ../own .git/hooks",
        writes("own/pre-commit"),
        EMPTY,
        "own/pre-commit",
        ".git/hooks leads here",
    ),
    "a hook that is a link": Case(
        "mkdir tools .git/hooks; echo true > tools/check; chmod +x tools/check; "
        "ln -s ../../tools/check .git/hooks/pre-commit",
        writes("tools/check"),
        EMPTY,
        "tools/check",
        ".git/hooks/pre-commit leads here",
    ),
    "husky elsewhere": Case(
        "mkdir -p config/husky/_; git config core.hooksPath config/husky/_; "
        'printf "#!/bin/sh\\nsh -e config/husky/pre-commit\\n" > config/husky/_/pre-commit; '
        "chmod +x config/husky/_/pre-commit; echo true > config/husky/pre-commit",
        writes("config/husky/pre-commit"),
        EMPTY,
        "config/husky/pre-commit",
        "core.hookspath",
    ),
    "core.fsmonitor": Case(
        "mkdir tools; git config core.fsmonitor tools/watch",
        writes("tools/watch"),
        "git status",
        "tools/watch",
        "core.fsmonitor of {project}/.git/config points here",
    ),
    "an alias": Case(
        "git config alias.st '!f() { sh tools/st \"$@\"; }; f'",
        writes("tools/st"),
        "git st",
        "tools/st",
        "alias.st of {project}/.git/config points here",
    ),
    "an alias that asks where the tree begins": Case(
        "git config alias.st '!$(git rev-parse --show-toplevel)/tools/st'",
        writes("tools/st"),
        "git st",
        "tools/st",
        "alias.st",
    ),
    "a filter": Case(
        "git config filter.x.clean 'sh tools/clean %f'; echo '* filter=x' > .gitattributes",
        f"{writes('tools/clean')}; echo b > b",
        "git add b",
        "tools/clean",
        "filter.x.clean",
    ),
    "an alias with a setting": Case(
        "git config alias.st '-c core.fsmonitor=tools/watch status'",
        writes("tools/watch"),
        "git st",
        "tools/watch",
        "alias.st",
    ),
    "a remote that is a command": Case(
        "git config protocol.ext.allow always; git config remote.origin.url 'ext::tools/reach %S'",
        writes("tools/reach"),
        "git fetch origin",
        "tools/reach",
        "remote.origin.url",
    ),
    "an option with its value right behind it": Case(
        "git config core.sshCommand 'ssh -Ftools/ssh'; git config remote.origin.url git@example.org:x",
        'mkdir tools; printf "Host *\n\tProxyCommand touch $MARK\n" > tools/ssh',
        "git fetch origin",
        "tools/ssh",
        "core.sshcommand",
    ),
    "an external diff": Case(
        "git config diff.external ./tools/diff; echo b > a",
        writes("tools/diff"),
        "git diff",
        "tools/diff",
        "diff.external",
    ),
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return home_alone(tmp_path, monkeypatch)


@pytest.fixture
def repository(workspace: Path) -> Path:
    return new_repository(workspace)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


@pytest.mark.parametrize("name", CASES)
def test_a_commit_holds_back_what_the_hosts_git_is_configured_to_run(
    repository: Path, home: Path, mark: Path, name: str
) -> None:
    case = CASES[name]
    types(case.owner, repository)
    workspace = changed(repository, f"export MARK={mark}; echo more > plain; {case.program}")
    done = workspace.commit()
    reasons = {one.path: one.detail for one in done.held}
    assert case.why.format(project=repository, home=home) in reasons[case.held], reasons
    assert (repository / "plain").exists()
    types(case.types, repository, MARK=str(mark))
    assert not mark.exists()


@pytest.mark.parametrize("name", CASES)
def test_control_where_the_user_agrees_to_it_git_does_run_it(repository: Path, mark: Path, name: str) -> None:
    case = CASES[name]
    types(case.owner, repository)
    changed(repository, f"export MARK={mark}; {case.program}").commit(allow_exec_config=True)
    types(case.types, repository, MARK=str(mark))
    assert mark.exists()


#: Where the file that the configuration names is absent, and a command only may name it.
ONLY_LISTED = (
    "core.fsmonitor",
    "an alias",
    "an alias that asks where the tree begins",
    "a filter",
    "an alias with a setting",
    "a remote that is a command",
    "an option with its value right behind it",
    "an external diff",
)
#: Where what git runs does not exist before.
ABSENT_BEFORE = ("core.hooksPath", "core.hooksPath of the user", "core.hooksPath of a worktree")


def rw(project: Path, *more: str) -> Policy:
    names = [".envrc", ".vscode", ".claude", *more]
    return Policy(workspace={"path": str(project), "mode": "rw"}, unprotect=names)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ONLY_LISTED])
def test_in_mode_rw_the_program_cannot_write_it(repository: Path, mark: Path, name: str) -> None:
    case = CASES[name]
    types(case.owner, repository)
    if name in ABSENT_BEFORE:
        with pytest.raises(PolicyError, match="could create these protected paths") as caught:
            stockade.run(["true"], rw(repository))
        place = os.path.dirname(case.held)
        assert f"--unprotect {place}" in caught.value.hint
        (repository / place).mkdir(parents=True)
    stockade.run(["sh", "-c", f"export MARK={mark}; {case.program}"], rw(repository), timeout=60)
    types(case.types, repository, MARK=str(mark))
    assert not mark.exists()


@pytest.mark.parametrize("name", ONLY_LISTED)
def test_in_mode_rw_a_command_that_did_not_exist_is_listed(repository: Path, mark: Path, name: str) -> None:
    case = CASES[name]
    types(case.owner, repository)
    script = ["sh", "-c", f"export MARK={mark}; {case.program}"]
    result = stockade.run(script, rw(repository), timeout=60)
    found = {one.path: one.reason for one in result.handoffs}
    assert case.why.format(project=repository) in found[str(repository / case.held)]
    (repository / case.held).write_text("#!/bin/sh\n")
    stockade.run(script, rw(repository), timeout=60)
    types(case.types, repository, MARK=str(mark))
    assert not mark.exists()


@pytest.mark.parametrize("name", CASES)
def test_control_without_the_wall_git_does_run_it(repository: Path, mark: Path, name: str) -> None:
    case = CASES[name]
    types(case.owner, repository)
    subprocess.run(
        ["sh", "-c", case.program],
        cwd=repository,
        env={**os.environ, "MARK": str(mark)},
        check=False,
        capture_output=True,
        timeout=60,
    )
    types(case.types, repository, MARK=str(mark))
    assert mark.exists()


HG = {
    "a hook": Case(
        'printf "[hooks]\npre-status = tools/check\n" >> .hg/hgrc',
        writes("tools/check"),
        "hg status",
        "tools/check",
        "hooks.pre-status of {project}/.hg/hgrc points here",
    ),
    "a hook in Python": Case(
        'printf "[hooks]\npre-status = python:tools/check.py:run\n" >> .hg/hgrc',
        "mkdir tools; "
        "printf \"import os\\ndef run(**_):\\n    os.system('touch $MARK')\\n\" > tools/check.py",
        "hg status",
        "tools/check.py",
        "hooks.pre-status",
    ),
    "an extension": Case(
        'printf "[extensions]\nx = $PWD/tools/x.py\n" >> $HGRCPATH',
        "mkdir tools; printf \"import os\\nos.system('touch $MARK')\\n\" > tools/x.py",
        "hg status",
        "tools/x.py",
        "extensions.x of {home}/.hgrc points here",
    ),
    "a program that signs": Case(
        'printf "[extensions]\ngpg =\n[gpg]\ncmd = tools/gpg\n" >> .hg/hgrc',
        writes("tools/gpg"),
        "hg sign --force",
        "tools/gpg",
        "gpg.cmd of {project}/.hg/hgrc points here",
    ),
    "a program that sends mail": Case(
        'printf "[extensions]\npatchbomb =\n[email]\nmethod = tools/send\nfrom = a@b.c\n" >> .hg/hgrc; '
        "echo b > b; hg add b; hg commit -m second",
        writes("tools/send"),
        "hg email --to b@example.org --cc= -r tip </dev/null",
        "tools/send",
        "email.method",
    ),
    "an included file": Case(
        'mkdir conf; touch conf/team; printf "%%include ../conf/team\n" >> .hg/hgrc',
        'printf "[hooks]\npre-status = touch $MARK\n" > conf/team',
        "hg status",
        "conf/team",
        "%include of {project}/.hg/hgrc points here",
    ),
}


@pytest.fixture
def hg(workspace: Path) -> Path:
    need_program("hg")
    types("hg init .; echo a > a; hg add a; hg commit -m first", workspace)
    return workspace


@pytest.mark.parametrize("name", HG)
def test_a_commit_holds_back_what_the_hosts_mercurial_is_configured_to_run(
    hg: Path, home: Path, mark: Path, name: str
) -> None:
    case = HG[name]
    types(case.owner, hg)
    done = changed(hg, f"export MARK={mark}; {case.program}").commit()
    reasons = {one.path: one.detail for one in done.held}
    assert case.why.format(project=hg, home=home) in reasons[case.held], reasons
    types(case.types, hg, MARK=str(mark))
    assert not mark.exists()


@pytest.mark.parametrize("name", HG)
def test_control_where_the_user_agrees_to_it_mercurial_does_run_it(hg: Path, mark: Path, name: str) -> None:
    case = HG[name]
    types(case.owner, hg)
    changed(hg, f"export MARK={mark}; {case.program}").commit(allow_exec_config=True)
    types(case.types, hg, MARK=str(mark))
    assert mark.exists()


def test_jujutsus_tools_in_the_workspace_are_held_back(workspace: Path, home: Path) -> None:
    (workspace / ".jj" / "repo").mkdir(parents=True)
    (workspace / ".jj" / "repo" / "config.toml").write_text(
        '[fix.tools.x]\ncommand = ["tools/fix", "$path"]\n'
    )
    (home / ".config" / "jj").mkdir(parents=True)
    (home / ".config" / "jj" / "config.toml").write_text('aliases.st = ["util", "exec", "--", "tools/st"]\n')
    done = changed(
        workspace, "mkdir tools; echo x > tools/fix; echo x > tools/st; echo x > tools/other"
    ).commit()
    assert {one.path: one.detail.partition(" of ")[0] for one in done.held} == {
        "tools/fix": "fix.tools.x.command",
        "tools/st": "aliases.st",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gc.recentObjectsHook", "tools/x"),
        ("core.pager", "less -ktools/x"),
        ("submodule.lib.url", "ext::tools/x %S"),
        ("remote.origin.pushurl", "ext::sh -c tools/x"),
        ("svn.authorsProg", "tools/x"),
        ("gitflow.path.hooks", "tools"),
        ("core.attributesFile", "tools/x"),
        ("gpg.ssh.allowedSignersFile", "tools/x"),
    ],
)
def test_what_other_settings_name_is_held_back(repository: Path, name: str, value: str) -> None:
    types(f"git config {name} '{value}'", repository)
    done = changed(repository, "mkdir tools other; echo x > tools/x; echo x > other/x").commit()
    assert [one.path for one in done.held] == ["tools/x"]


def test_in_a_subdirectory_of_a_repository_its_configuration_counts(repository: Path) -> None:
    types("git config core.hooksPath sub/hooks; mkdir sub; echo x > sub/x", repository)
    done = changed(repository / "sub", "mkdir hooks; echo x > hooks/pre-commit; echo y > x").commit()
    assert [one.path for one in done.held] == ["hooks/pre-commit"]


def test_the_programs_own_configuration_leads_nowhere(repository: Path) -> None:
    """What counts is the host's, so that a program cannot hide changes, or make all of them look bad."""
    done = changed(repository, "git config core.hooksPath .; echo x > plain").commit()
    assert [one.path for one in done.held] == [".git/config"]
    assert (repository / "plain").exists()


def test_files_that_no_configuration_names_are_committed(repository: Path) -> None:
    types(
        "git config alias.co checkout; git config core.editor vim; git config user.name src; "
        "git remote add origin ../lib; git config core.pager 'less -R'",
        repository,
    )
    done = changed(
        repository, "mkdir src lib; echo x > src/x; echo x > vim; echo x > checkout; echo x > less"
    ).commit()
    assert done.held == ()


def test_a_configuration_that_includes_itself_or_is_no_file_is_passed_over(repository: Path) -> None:
    os.mkfifo(repository / ".git" / "pipe")
    with (repository / ".git" / "config").open("a") as file:
        file.writelines(
            f"[include]\npath = {path}\n" for path in ("config", "/dev/zero", "pipe", "..", "x\\ty")
        )
        file.write("[core]\nhooksPath = hooked\n")
    done = changed(repository, "mkdir hooked; echo x > hooked/pre-commit").commit()
    assert [one.path for one in done.held] == ["hooked/pre-commit"]


PIECES = [
    b"[core]", b"[include]", b'[includeIf "gitdir:/"]', b"[alias]", b"[hooks]", b"[extensions]", b"\n", b"\n",
    b"hooksPath = ", b"path = ", b"st = !", b"x = ", b"worktree = ", b"../", b"~", b"~root/", b"~nobody\0",
    b"\0", b"\xff", b"a/b", b"/etc/x", b"'", b'"', b"$(", b"%include ", b"python:x.py:f", b"_", b".", b"\\",
    b"#", b"x" * 300 + b"/", b"gitdir: ", b"[[",
]  # fmt: skip
FILES = (
    ".git/config",
    ".git/commondir",
    "sub/.git",
    ".hg/hgrc",
    ".hg/sharedpath",
    ".jj/repo",
    "deep/.git/config",
)


def test_whatever_is_configured_is_followed_no_further_than_the_workspace(
    workspace: Path, home: Path
) -> None:
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    for _ in range(100):
        for place in workspace.iterdir():
            shutil.rmtree(place)
        for name in (*chance.sample(FILES, 4), str(home / ".gitconfig"), str(home / ".jjconfig.toml")):
            path = workspace / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"".join(chance.choice(PIECES) for _ in range(chance.randint(0, 20))))
        found = hook_paths(search([str(workspace)]), {}, str(home))
        assert all(lead.path.startswith(f"{workspace}/") for lead in found.leads), seed
