"""The answers about files are what the kernel does, and the change that an answer names allows the access."""

from __future__ import annotations

import errno
import json
import os
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

import stockade
from stockade import Policy
from stockade.observe.access import Access, Action
from stockade.observe.answer_values import Answer
from stockade.observe.answers import answer
from stockade.observe.view import Walls
from stockade.runs.prepare import prepare

PYTHON = "/usr/bin/python3"
#: Tries each access in turn, and prints the error numbers.
TRIES = """
import json, os, sys
def attempt(action, target, other):
    if action == "read":
        os.listdir(target) if os.path.isdir(target) else os.close(os.open(target, os.O_RDONLY))
    elif action == "write":
        os.close(os.open(target, os.O_WRONLY))
    elif action == "create":
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    elif action == "remove":
        os.unlink(target)
    elif action == "rename":
        os.rename(target, other)
    elif action == "execute":
        os.waitpid(os.posix_spawn(target, [target], {}), 0)
found = []
for one in json.load(sys.stdin):
    try:
        attempt(*one)
        found.append(0)
    except OSError as error:
        found.append(error.errno)
print(json.dumps(found))
"""


class Tree(msgspec.Struct):
    """A project, and what lies around it on the host."""

    top: Path


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    found = Tree(tmp_path / "tree")
    for name in ("home/.ssh", "data", "out", "work/docs", "work/.git/hooks", "elsewhere"):
        (found.top / name).mkdir(parents=True)
    for name in (
        "home/.profile", "data/file", "out/file", "work/file", "work/secret", "work/docs/page", "work/closed",
        "work/stockade.toml", "elsewhere/file",
    ):  # fmt: skip
        (found.top / name).write_text("#!/bin/sh\n")
    (found.top / "work/link").symlink_to(found.top / "elsewhere/file")
    (found.top / "data/tool").write_text("#!/bin/sh\nexit 0\n")
    (found.top / "data/tool").chmod(0o755)
    (found.top / "work/closed").chmod(0)
    monkeypatch.setenv("HOME", str(found.top / "home"))
    return found


def tried(policy: Policy, accesses: Sequence[Access]) -> list[Access]:
    """The accesses with the errors that a program inside got."""
    words = json.dumps([(one.action.value, one.target, one.other) for one in accesses])
    result = stockade.run([PYTHON, "-c", TRIES], policy, input=words, on_exit="discard").check()
    return [
        msgspec.structs.replace(one, error=error)
        for one, error in zip(accesses, json.loads(result.stdout), strict=True)
    ]


Answers = Callable[..., list[Answer]]


@pytest.fixture
def answers() -> Answers:
    def give(policy: Policy, accesses: Sequence[Access], sources: tuple[str, ...] = ()) -> list[Answer]:
        prepared = prepare(policy, dry=True, command=[PYTHON])
        try:
            walls = Walls(prepared.resolved, prepared.plan.backend, sources)
            return [answer(one, walls) for one in accesses]
        finally:
            prepared.close(discard=True)

    return give


def access(action: str, target: object, other: object = "") -> Access:
    return Access(action=Action(action), target=str(target), other=str(other))


def project(tree: Tree, mode: str = "overlay", **clauses: object) -> Policy:
    work = str(tree.top / "work")
    return Policy(
        workspace={"path": work, "mode": mode},
        read=[str(tree.top / "data")],
        write=[str(tree.top / "out")],
        **clauses,  # type: ignore[arg-type]
    )


def test_every_answer_is_what_the_kernel_does(tree: Tree, answers: Answers) -> None:
    top = tree.top
    #: What is tried, and the wall that refuses it; empty for what is allowed.
    expected = {
        ("read", top / "work/file"): "",
        ("read", top / "work"): "",
        ("write", top / "work/file"): "",
        ("create", top / "work/new"): "",
        ("remove", top / "work/new"): "",
        ("read", top / "work/secret"): "deny",
        ("read", top / "work/link"): "files",
        ("write", top / "work/stockade.toml"): "protect",
        ("rename", top / "work/docs", top / "work/pages"): "workspace.overlay",
        ("rename", top / "work/file", top / "work/renamed"): "",
        ("rename", top / "out/file", top / "work/moved"): "files",
        ("read", top / "data/file"): "",
        ("write", top / "data/file"): "files",
        ("create", top / "data/new"): "files",
        ("remove", top / "data/file"): "files",
        ("execute", top / "data/tool"): "",
        ("create", top / "out/new"): "",
        ("remove", top / "out/new"): "",
        ("read", top / "elsewhere/file"): "files",
        ("read", top / "elsewhere"): "files",
        ("read", top / "home/.profile"): "files",
        ("create", top / "home/new"): "",
        ("read", "/var/lib"): "files",
        ("create", "/var/lib/made-inside"): "files",
        ("create", "/made-inside"): "files",
        ("read", "/usr/bin/env"): "",
        ("execute", "/usr/bin/true"): "",
        ("write", "/usr/bin/true"): "files",
        ("read", "/etc/passwd"): "",
        ("write", "/etc/passwd"): "files",
        ("read", "/dev/null"): "",
        ("write", "/dev/null"): "",
        ("read", "/proc/self/status"): "",
        ("read", "/sys/kernel"): "files",
        ("read", "/run/stockade/policy.json"): "",
        ("write", "/run/stockade/policy.json"): "files",
    }
    policy = project(tree, deny=["secret"], protect=["stockade.toml"])
    asked = [access(*row) for row in expected]
    found = tried(policy, asked)
    before = answers(policy, asked)
    after = answers(policy, found)
    for row, one, first, second in zip(expected.items(), found, before, after, strict=True):
        refused = row[1]
        by_mode = one.error == errno.EACCES and os.getuid() != 0 and os.path.exists(one.target)
        assert bool(one.error) == bool(refused), (row, one)
        assert first.allowed == (not refused), (row, first)
        assert first.wall == (refused or "files"), (row, first)
        # Where the mode of a file refuses an ordinary user too, no wall is to blame.
        assert second.allowed == (not refused or by_mode), (row, one, second)
        assert second.reason


def test_what_the_host_refuses_too_is_no_denial(tree: Tree, answers: Answers) -> None:
    asked = [
        access("read", tree.top / "work/none"),
        access("read", tree.top / "none/at/all"),
        access("read", "/nowhere"),
        access("read", "/etc/ld.so.preload.none"),
        access("remove", tree.top / "work/none"),
        access("rename", tree.top / "work/none", tree.top / "work/other"),
        access("execute", "/usr/bin/no-such-program"),
        access("create", tree.top / "work/file"),
    ]
    policy = project(tree)
    found = tried(policy, asked)
    assert all(one.error for one in found)
    assert [one.allowed for one in answers(policy, found)] == [True] * len(asked)


def test_a_file_that_the_mode_closes_is_root_without_its_rights_or_nothing(
    tree: Tree, answers: Answers
) -> None:
    policy = project(tree)
    (found,) = tried(policy, [access("read", tree.top / "work/closed")])
    assert found.error == errno.EACCES
    (judged,) = answers(policy, [found])
    root = os.getuid() == 0
    assert judged.allowed is not root
    if root:
        assert (judged.wall, judged.change) == ("privileges", None)


def test_the_change_that_an_answer_names_allows_the_access(tree: Tree, answers: Answers) -> None:
    asked = [
        access("read", tree.top / "elsewhere/file"),
        access("read", tree.top / "home/.profile"),
        access("read", tree.top / "home/.ssh"),
        access("write", tree.top / "data/file"),
        access("create", tree.top / "elsewhere/new"),
        access("rename", tree.top / "work/docs", tree.top / "work/pages"),
        access("read", tree.top / "work/secret"),
    ]
    base = project(tree, protect=[], unprotect=[".git"])
    hiding = project(tree, deny=["secret"], protect=[], unprotect=[".git"])
    judged = [
        *((base, one) for one in answers(base, tried(base, asked[:-1]))),
        *((hiding, one) for one in answers(hiding, tried(hiding, asked[-1:]))),
    ]
    for policy, one in judged:
        assert not one.allowed
        assert one.change is not None, one
        table = policy.table()
        if one.change.remove:
            assert one.change.remove == 'deny = "secret"'
            del table["deny"]
        for key, value in tomllib.loads(one.change.toml).items():
            if isinstance(value, dict):
                table[key] = {**table.get(key, {}), **value}
            else:
                table[key] = [*table.get(key, ()), *value]
        wider = Policy(**table)
        (again,) = tried(wider, [msgspec.structs.replace(one.access, error=0)])
        assert again.error == 0, (one, again)


def test_a_program_that_exec_does_not_list(tree: Tree, answers: Answers) -> None:
    programs = [os.path.realpath(PYTHON)]
    policy = project(tree, exec=programs)
    asked = [access("execute", tree.top / "data/tool"), access("execute", tree.top / "work/file")]
    found = tried(policy, asked)
    listed, writable = answers(policy, found)
    assert (listed.allowed, listed.wall) == (False, "exec")
    assert tomllib.loads(listed.change.toml) == {"exec": [*programs, str(tree.top / "data/tool")]}
    assert (writable.allowed, writable.change) == (False, None)


def test_dangerous_changes_say_so_and_impossible_ones_are_not_named(tree: Tree, answers: Answers) -> None:
    asked = [
        access("read", tree.top / "home/.ssh"),
        access("read", tree.top / "home"),
        access("write", tree.top / "data/file"),
        access("read", "/"),
        access("read", "/sys/kernel"),
        access("write", "/usr/bin/true"),
        access("read", os.environ["STOCKADE_HOME"]),
    ]
    found = answers(project(tree), asked)
    secret, home, write, *others = found
    assert "a place for secrets" in secret.change.danger
    assert home.allowed  # the directory itself is the private home
    assert "real" in write.change.danger
    assert [one.change for one in others] == [None] * 4


def test_a_denial_does_not_say_whether_a_secret_exists(tree: Tree, answers: Answers) -> None:
    (tree.top / "home/.ssh/id_there").write_text("key")
    asked = [access("read", tree.top / f"home/.ssh/id_{name}") for name in ("there", "none_")]
    found = answers(project(tree), tried(project(tree), asked))
    there, none = (
        msgspec.json.encode(msgspec.structs.replace(one, access=asked[0])).replace(b"id_there", b"id_none_")
        for one in found
    )
    assert there == none
    assert not found[0].allowed


def test_the_place_of_a_clause_is_its_line(tree: Tree, answers: Answers) -> None:
    file = tree.top / "own.toml"
    file.write_text('# mine\n\ndeny = ["secret"]\n')
    policy = project(tree, deny=["secret"])
    (found,) = answers(policy, [access("read", tree.top / "work/secret")], (str(file),))
    assert found.place == f"{file}:3"


@pytest.mark.parametrize("mode", ["rw", "ro"])
def test_protected_paths_and_read_only_workspaces(tree: Tree, answers: Answers, mode: str) -> None:
    policy = project(tree, mode, protect=[".git/hooks"])
    asked = [
        access("create", tree.top / "work/.git/hooks/post-commit"),
        access("write", tree.top / "work/file"),
    ]
    found = tried(policy, asked)
    hook, file = answers(policy, found)
    assert not hook.allowed
    if mode == "rw":
        assert (hook.wall, hook.change.flag) == ("protect", "--unprotect .git")
        assert hook.change.danger
        assert file.allowed
    else:
        assert (file.wall, file.change.flag, file.change.danger) == ("files", "--mode overlay", "")


def test_without_namespaces_the_same_answers_hold(tree: Tree, answers: Answers) -> None:
    policy = Policy(
        backend="landlock",
        accept=["files", "processes", "devices", "limits.tasks"],
        read=[str(tree.top / "data")],
        write=[str(tree.top / "out")],
    )
    expected = {
        ("read", tree.top / "data/file"): True,
        ("write", tree.top / "data/file"): False,
        ("read", tree.top / "elsewhere/file"): False,
        ("create", tree.top / "out/new"): True,
        ("create", "/tmp/made-inside"): False,
        ("read", tree.top / "home/.profile"): False,
        ("read", "/nowhere"): True,
    }
    found = tried(policy, [access(*row) for row in expected])
    assert [one.allowed for one in answers(policy, found)] == list(expected.values())
