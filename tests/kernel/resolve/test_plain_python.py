"""`python` inside, on a system that has only `python3`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

import stockade
from stockade import Policy
from support.installs import SYSTEM_PATH
from support.means import applies, clauses_for

WHERE = ["sh", "-c", "command -v python && python -c 'print(6 * 7)'"]


@pytest.fixture(autouse=True)
def only_python3() -> None:
    found = [shutil.which(name, path=SYSTEM_PATH) for name in ("python", "python3")]
    applies(found[0] is None and found[1] is not None, "the system has a python of its own")


@pytest.mark.parametrize("backend", ["native", "bwrap"])
def test_python_is_the_systems_python3(backend: str) -> None:
    result = stockade.run(WHERE, Policy(toolchain=False, **clauses_for(backend)))
    assert result.text == "/run/stockade/bin/python\n42\n"


def test_nothing_can_be_put_beside_the_link() -> None:
    spoil = "cd /run/stockade/bin; echo x > x || rm python || mv python x || ln -sf /bin/true python"
    result = stockade.run(["sh", "-c", f"{spoil}; ls"], Policy())
    assert result.text == "python\n"


def test_nothing_of_the_hosts_run_is_beside_it() -> None:
    result = stockade.run(["find", "/run"], Policy())
    names = ["bin", "bin/python", "policy.json", "policy.txt"]
    assert sorted(result.text.split()) == [
        "/run",
        "/run/stockade",
        *(f"/run/stockade/{name}" for name in names),
    ]


def test_another_python_of_the_caller_comes_first(tmp_path: Path) -> None:
    python = tmp_path / "project" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho mine\n")
    python.chmod(0o755)
    policy = Policy(workspace={"path": str(tmp_path / "project"), "mode": "ro"}, toolchain=False)
    result = stockade.run(["sh", "-c", "PATH=$PWD/bin:$PATH; python"], policy)
    assert result.text == "mine\n"


@pytest.mark.parametrize(
    "clauses", [{"exec": ["/usr/bin/*"]}, {"env": {"PATH": "/usr/bin"}}], ids=["exec", "PATH"]
)
def test_a_policy_that_says_what_is_found_gets_no_link(clauses: dict[str, object]) -> None:
    result = stockade.run(["ls", "/run/stockade"], Policy(**clauses))
    assert result.text.split() == ["policy.json", "policy.txt"]


def test_var_tmp_is_writable_and_executable_for_the_sandboxs_life() -> None:
    """Also where the workspace lies in /var/tmp, which is then no link to /tmp."""
    tool = "/var/tmp/.stockade-test-tool"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as workspace:
        for policy in (Policy(), Policy(workspace=workspace)):
            with stockade.Sandbox(policy, on_exit="discard") as box:
                box.run(["sh", "-c", f"printf '#!/bin/sh\\necho runs' > {tool}; chmod +x {tool}"]).check()
                assert box.run([tool]).text == "runs\n"
    assert not Path(tool).exists()
