"""A program reads its own policy, learns nothing that the policy hides, and cannot change or forge it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Sandbox
from support.means import clauses_for

BACKENDS = ("native", "bwrap", "landlock")
#: Finds the file as a page for agents says, and tries to change it in every way.
ATTACK = r"""
import json, os
path = os.environ.get("STOCKADE_POLICY", "/run/stockade/policy.json")
above = os.path.dirname(path)
done = []
def attempt(name, call):
    try:
        call()
        done.append(name)
    except OSError:
        pass
attempt("write", lambda: open(path, "w").close())
attempt("append", lambda: open(path, "a").close())
attempt("truncate", lambda: os.truncate(path, 0))
attempt("chmod", lambda: os.chmod(path, 0o777))
attempt("unlink", lambda: os.unlink(path))
attempt("rename", lambda: os.rename(path, path + ".old"))
attempt("rename directory", lambda: os.rename(above, above + ".old"))
attempt("rename the one above", lambda: os.rename(os.path.dirname(above), os.path.dirname(above) + ".old"))
attempt("replace", lambda: os.replace(__file__, path) if "__file__" in globals() else open(path + "x", "x"))
attempt("link", lambda: os.link("/etc/hostname", above + "/other"))
attempt("make", lambda: os.mkdir(above + "/made"))
attempt("proc", lambda: open(f"/proc/self/fd/{os.open(path, os.O_RDONLY)}", "r+").close())
with open(path) as file, open(above + "/policy.txt") as words:
    print(json.dumps([done, json.load(file), words.read()]))
"""


def policy(backend: str, **clauses: object) -> Policy:
    return Policy(**clauses_for(backend), **clauses)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_program_changes_its_policy(backend: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    given = policy(backend, read=[str(data)], env={"TOKEN_NAME": "the-value"})
    first = stockade.run(["/usr/bin/python3", "-c", ATTACK], given).check()
    done, facts, words = json.loads(first.stdout)
    assert done == []
    assert {"path": str(data), "access": "read"} in facts["files"]
    assert facts["network"]["mode"] == "none"
    assert facts["backend"] == backend
    assert str(data) in words
    assert "TOKEN_NAME" in facts["environment"]
    assert b"the-value" not in first.stdout
    # The next run finds its own.
    assert json.loads(stockade.run(["/usr/bin/python3", "-c", ATTACK], given).check().stdout)[1] == facts


def test_what_the_policy_hides_is_counted_and_not_named(workspace: Path) -> None:
    (workspace / "payroll.csv").write_text("")
    given = Policy(
        workspace=str(workspace),
        deny=["payroll.csv", "merger-*?"],
        net=["example.com", "!intranet.example.com"],
    )
    run = stockade.run(["sh", "-c", "cat /run/stockade/policy.*"], given, on_exit="discard").check()
    assert b"payroll" not in run.stdout
    assert b"merger" not in run.stdout
    assert b"intranet" not in run.stdout
    assert b"example.com" in run.stdout
    assert json.loads(run.stdout[: run.stdout.rindex(b"}") + 1])["hidden"] == 2
    assert given.hash.encode() not in run.stdout


def test_questions_proxies_and_secrets_are_in_the_files_and_no_value_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("API_KEY", "the-value-of-the-key")
    given = Policy(
        net=["ask", "* https://api.example.com/**", "!other.example.com"],
        proxy=True,
        secrets={"API_KEY": {"from_env": "API_KEY", "hosts": ["api.example.com"], "inside": "both"}},
    )
    run = stockade.run(["sh", "-c", "cat /run/stockade/policy.*"], given).check()
    assert b"the-value" not in run.stdout
    end = run.text.rindex("}") + 1
    facts, words = json.loads(run.text[:end]), run.text[end:]
    assert facts["network"] == {
        "mode": "rules",
        "allow": ["* https://api.example.com/**"],
        "denying": 1,
        "ask": True,
        "proxy": "http://198.18.0.1:3128",
    }
    secret = {"hosts": ["api.example.com"], "variable": "API_KEY", "file": "/run/secrets/API_KEY"}
    assert facts["secrets"] == [{"name": "API_KEY", **secret}]
    assert "the user is asked if there is a terminal" in words
    assert "other names are not found" not in words
    assert "$API_KEY and /run/secrets/API_KEY: a placeholder" in words


def test_a_long_lived_sandbox_keeps_its_policy(workspace: Path) -> None:
    with Sandbox(Policy(workspace=str(workspace))) as box:
        read = ["cat", "/run/stockade/policy.txt"]
        before = box.run(read).check().stdout
        box.run(
            ["sh", "-c", "rm -rf /run/stockade; echo forged > /run/stockade/policy.txt; mkdir -p /tmp/run"]
        )
        assert box.run(read).check().stdout == before


def test_names_that_are_no_text_do_not_forge_a_line(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"odd\xff\nNetwork\n  everything")
    odd.mkdir()
    run = stockade.run(["cat", "/run/stockade/policy.txt"], Policy(read=[str(odd)])).check()
    assert "\n  everything" not in run.text
    assert "\n  none: every connection fails" in run.text


def test_a_grant_at_its_place_wins(tmp_path: Path) -> None:
    """Nothing in a tree of the host is replaced: the file is absent there."""
    if not os.path.isdir("/run/lock"):
        return
    run = stockade.run(["cat", "/run/stockade/policy.txt"], Policy(read=["/run/lock"])).check()
    assert "/run/lock" in run.text
