"""Where namespaces are refused, by a setting or by a container's filter, there is still a wall."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from stockade.host import host
from support.blocked import NO_USER_NAMESPACES
from support.means import need, need_program

IN_PART = ["files", "processes", "devices"]

PROGRAM = f"""
import json, os, subprocess, sys
import stockade
from stockade import Policy, Sandbox
from stockade.backends.selection import enforcement
from stockade.host import host
from support.marks import MARK, gone, marked

told = {{}}
try:
    stockade.run(["true"])
except stockade.UnsupportedError as error:
    told["default"] = [sorted(error.missing), error.hint]
try:
    stockade.run(["true"], Policy(backend="native"))
except stockade.UnsupportedError as error:
    told["native"] = str(error)
policy = Policy(accept={IN_PART!r})
result = stockade.run(["sh", "-c", "cat; cat /etc/shadow; exit 3"], policy, input=b"in")
told["run"] = [result.outcome, result.exit_code, result.text, b"ermission denied" in result.stderr]
daemon = f"cd; (setsid sh -c 'trap : TERM; echo >up; sleep 60; :' {{MARK}} >&- 2>&- &)"
daemon += "; until [ -e up ]; do :; done"
stockade.run(["sh", "-c", daemon], policy).check()
told["left"] = len(marked())
told["late"] = str(stockade.run(["sh", "-c", daemon + "; sleep 60"], policy, timeout=1, grace=0.1).outcome)
told["left"] += len(marked())
with Sandbox(policy) as box:
    box.run(["sh", "-c", daemon]).check()
    told["lives"] = len(marked()) > 0
    with box.start(["sh", "-c", "read x; echo got $x"], pty=True) as process:
        process.stdin.write(b"this\\n")
        told["terminal"] = "got this" in process.stdout.read().decode()
told["gone"] = gone()
told["plan"] = result.plan != ""
offers = enforcement(stockade.policy.Policy(accept={IN_PART!r}), host())
told["backend"] = offers["cleanup"].mechanism[:14]
print(json.dumps(told))
"""


@pytest.mark.parametrize("how", ["no user namespaces", "a container's filter", "both"])
def test_without_namespaces_the_wall_is_another_one(how: str) -> None:
    need(host().has("userns") and host().has("scopes"), "user namespaces or Landlock do not work here anyway")
    before: list[str] = []
    if how != "a container's filter":
        before += [need_program("unshare"), *NO_USER_NAMESPACES[1:]]
    if how != "no user namespaces":
        before += [sys.executable, "-m", "support.blocked"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [*before, sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    backends, hint = told["default"]
    assert backends == ["bwrap", "landlock", "native"]
    assert 'or waive it in the policy: accept = ["files", "processes", "devices"]' in hint
    assert "native misses" in told["native"] and "user namespaces" in told["native"]
    assert told["run"] == ["exited", 3, "in", True]
    assert (told["left"], told["late"], told["lives"], told["gone"]) == (0, "timed-out", True, True)
    assert told["terminal"] and told["plan"]
    assert told["backend"] == "two subreapers"
