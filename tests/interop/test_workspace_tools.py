"""Everyday tools in an overlay workspace: after a commit the tree is as they leave a plain directory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Workspace
from support.means import need, need_program
from support.trees import Tree, changed, snapshot

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    **{f"GIT_{who}_DATE": "1700000000 +0000" for who in ("AUTHOR", "COMMITTER")},
}
REPOSITORY = "git init -q -b main; git add .; git commit -qm first"
SCRIPTS = {
    "mv of a directory": "mv src moved; mv moved/deep up; test ! -e src",
    "tar": "tar cf all.tar src; rm -r src; tar xf all.tar; rm all.tar; echo x >> src/one",
    "rsync": "rsync -a src/ copy/; echo more >> src/one; rm src/two; rsync -a --delete src/ copy/",
    "links": "ln -s src/one link; ln -s src dir; cp src/one n; ln n hard; echo x >> hard; cp -a src again",
    "sparse": "truncate -s 64M hole; printf end >> hole; cp --sparse=always hole second",
    "long name": f"echo x > {'n' * 255}; mkdir {'d' * 255}; mv {'n' * 255} {'d' * 255}/",
    "not utf-8": r"""n=$(printf 'caf\351'); echo x > "$n"; mkdir "$n.d"; mv "$n" "$n.d/" """,
    "deep": "p=src; for i in $(seq 80); do p=$p/d; done; mkdir -p $p; echo x > $p/end; mv src/one $p/one",
}
GIT = {
    "mv": "mv src moved; git add -A; git commit -qm moved; git mv moved/deep up; git commit -qm up",
    "mv of files": "mkdir new; git mv src/one src/two new/; git commit -qm moved",
    "branches": "git checkout -q -b work; echo x >> src/one; git rm -q src/two; git commit -qam work; "
    "git checkout -q main; git checkout -q work; git merge -q main",
    "stash": "echo x >> src/one; : > new; git add new; git stash -q; git stash pop -q; git commit -qam x",
    "gc": "for i in 1 2 3; do echo $i >> src/one; git commit -qam $i; done; git gc -q --prune=now",
    "hard links": "ln src/one src/hard; echo x >> src/hard; git add -A; git commit -qm linked",
}


@pytest.fixture
def project(workspace: Path) -> Path:
    for name in ("src/one", "src/two", "src/deep/three", "src/deep/er/four"):
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / name).write_text(f"{name}\n" * 20)
    # Two names of one file: an overlay parts them when one is written.
    os.link(workspace / "src/two", workspace / "src/second")
    return workspace


def outside(place: Path, script: str) -> None:
    subprocess.run(["sh", "-ec", script], cwd=place, env={**ENVIRONMENT, "HOME": str(place)}, check=True)


def inside(place: Path, script: str) -> None:
    policy = Policy(workspace=str(place), protect=[], env=ENVIRONMENT)
    result = stockade.run(["sh", "-ec", script], policy, timeout=90)
    assert result.ok, result.stderr
    assert Workspace.open(result.workspace_id).commit(allow_exec_config=True).held == ()


def twin(place: Path) -> Path:
    copy = place.with_name("twin")
    subprocess.run(["cp", "-a", str(place), str(copy)], check=True)
    return copy


def without_git(place: Path) -> Tree:
    return {path: found for path, found in snapshot(place).items() if path.split("/")[0] != ".git"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_tool_leaves_what_it_leaves_in_a_plain_directory(project: Path, name: str) -> None:
    if name == "rsync":
        need_program("rsync")
    plain = twin(project)
    inside(project, SCRIPTS[name])
    outside(plain, SCRIPTS[name])
    assert snapshot(project) == snapshot(plain)


@pytest.mark.parametrize("name", GIT)
def test_git_leaves_what_it_leaves_in_a_plain_directory(project: Path, name: str) -> None:
    need_program("git")
    outside(project, REPOSITORY)
    plain = twin(project)
    inside(project, GIT[name])
    outside(plain, GIT[name])
    assert without_git(project) == without_git(plain)
    found = []
    for place in (project, plain):
        outside(place, "git fsck --strict 2>/dev/null; git diff --exit-code; git log --format=%H > .git/seen")
        found.append((place / ".git/seen").read_text())
    assert found[0] == found[1]


def test_git_mv_of_a_directory_of_the_host_says_why_it_cannot(project: Path) -> None:
    """The kernel does not rename it in an overlay, and git, unlike mv, does not copy instead."""
    need_program("git")
    outside(project, REPOSITORY)
    policy = Policy(workspace=str(project), protect=[], env=ENVIRONMENT)
    result = stockade.run(["git", "mv", "src", "moved"], policy, on_exit="discard", timeout=60)
    assert result.exit_code == 128 and b"Invalid cross-device link" in result.stderr


def test_a_git_worktree_is_added_inside(project: Path) -> None:
    need_program("git")
    outside(project, REPOSITORY)
    inside(project, "git worktree add -q beside; echo x > beside/new; git -C beside add new; "
           "git -C beside commit -qm beside")  # fmt: skip
    outside(project, "git merge -q beside; git worktree remove beside; git fsck --strict 2>/dev/null")
    assert (project / "new").read_text() == "x\n"


def test_attributes_of_the_user_come_with_a_changed_file(project: Path) -> None:
    script = "import os; open('src/one', 'a').write('x'); os.setxattr('src/one', 'user.note', b'kept')"
    changed(project, script, python=True).commit()
    assert os.getxattr(project / "src/one", "user.note") == b"kept"


def test_npm_installs_a_directory_and_a_tarball_offline(project: Path) -> None:
    npm = need_program("npm")
    need(npm.startswith("/usr/"), "npm is not the system's")
    (project / "dep").mkdir()
    (project / "dep/package.json").write_text('{"name": "dep", "version": "1.0.0", "main": "index.js"}')
    (project / "dep/index.js").write_text("module.exports = 42;\n")
    (project / "package.json").write_text('{"name": "top", "version": "1.0.0"}')
    quiet = "--offline --no-audit --no-fund --loglevel=error --cache=/tmp/npm"
    inside(project, f"cd dep; npm pack {quiet} >/dev/null; mv dep-1.0.0.tgz ..; cd ..; "
           f"npm install {quiet} ./dep-1.0.0.tgz; npm ci {quiet}; "
           "test $(node -p 'require(\"dep\")') = 42")  # fmt: skip
    assert (project / "node_modules/dep/index.js").read_text() == "module.exports = 42;\n"
    inside(project, f"npm install {quiet} ./dep; test -L node_modules/dep")
    assert os.readlink(project / "node_modules/dep") == "../dep"


def test_pip_installs_a_directory_into_a_venv_in_the_workspace(project: Path) -> None:
    need(os.access("/usr/bin/python3", os.X_OK), "/usr/bin/python3 is not installed")
    (project / "package").mkdir()
    (project / "package/thing.py").write_text("answer = 42\n")
    (project / "package/setup.py").write_text(
        "from setuptools import setup\nsetup(name='thing', version='1', py_modules=['thing'])\n"
    )
    pip = "venv/bin/python -m pip --disable-pip-version-check -q install --no-index --no-build-isolation"
    inside(project, f"/usr/bin/python3 -m venv venv; {pip} ./package; "
           "venv/bin/python -c 'import thing; assert thing.answer == 42'")  # fmt: skip
    outside(project, "venv/bin/python -c 'import thing; assert thing.answer == 42'")
