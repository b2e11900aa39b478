"""What a policy shows of the host's /etc, beside the sandbox's own."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

import stockade
from stockade import Policy, PolicyError, backends
from support.means import clauses_for

#: Beside what is there anyway, in its place, around it, in it, and a directory of its own.
NAMES = ["/etc/login.defs", "/etc/hosts", "/etc/ssl", "/etc/ssl/certs/ca-certificates.crt", "/etc/init.d"]
SCRIPT = "for path; do test -d $path && ls $path || cat $path; done"


@pytest.fixture(params=list(backends.BACKENDS))
def walls(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The clauses of a policy for each backend, with what it has only in part accepted."""
    return clauses_for(request.param)


def _is_open(entry: os.DirEntry[str]) -> bool:
    return os.access(entry.path, os.R_OK)


def test_what_is_granted_is_the_hosts(walls: dict[str, Any]) -> None:
    # A directory with one in it that is closed to the caller is refused on bwrap, wherever it lies.
    closed = {name for name in NAMES if os.path.isdir(name) and not all(map(_is_open, os.scandir(name)))}
    left_out = closed if walls["backend"] == "bwrap" else set()
    grants = [name for name in NAMES if os.path.exists(name) and name not in left_out]
    for read in (grants, *([one] for one in grants)):
        result = stockade.run(["sh", "-c", SCRIPT, "sh", *read], Policy(**walls, read=read))
        outside = subprocess.run(["sh", "-c", SCRIPT, "sh", *read], capture_output=True, check=True)
        assert result.check().stdout == outside.stdout


def test_all_of_it_is_refused_where_it_is_the_sandboxs_own(walls: dict[str, Any]) -> None:
    policy = Policy(**walls, read=["/etc"])
    if walls["backend"] == "landlock":  # there it is the host's
        assert stockade.run(["true"], policy).ok
        return
    with pytest.raises(PolicyError, match="an /etc of its own") as caught:
        stockade.run(["true"], policy)
    assert "/etc/apt" in caught.value.hint
