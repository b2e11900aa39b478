"""uvx and pipx, with a wheel and with a source distribution."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from support import wheelhouse
from support.means import applies
from support.wheel import call

applies(os.geteuid() != 0, "an installer does the same for everybody, and the ordinary user runs it")

BIN = Path(sysconfig.get_path("scripts"))
ENFORCED = "This machine can enforce the default policy, by native"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with wheels of what Stockade needs, and of what builds it."""
    return wheelhouse.fill(tmp_path_factory.mktemp("wheels"), wheelhouse.STOCKADE)


@pytest.fixture(scope="module")
def place(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The settings with which installers use a home of their own and fetch nothing."""
    home = tmp_path_factory.mktemp("home")
    offline = {"UV_OFFLINE": "1", "UV_NO_INDEX": "1", "UV_FIND_LINKS": str(wheels), "UV_NO_PROGRESS": "1"}
    pipx = {"PIPX_DEFAULT_PYTHON": sys.executable, "USE_EMOJI": "0"}
    # uv leaves the locks of its builds in the directory for temporary files.
    return {
        "HOME": str(home),
        "TMPDIR": str(home),
        "UV_PYTHON": sys.executable,
        "XDG_DATA_HOME": "",
        **offline,
        **pipx,
    }


@pytest.fixture(scope="module", params=["*.whl", "*.tar.gz"], ids=["wheel", "sdist"])
def archive(request: pytest.FixtureRequest, dist: Path) -> str:
    (found,) = dist.glob(request.param)
    return str(found)


def test_uvx_runs_doctor(archive: str, place: dict[str, str]) -> None:
    done = call([str(BIN / "uvx"), "--from", archive, "stockade", "doctor"], **place)
    assert done.returncode == 0 and ENFORCED in done.stdout, done.stdout


def test_pipx_installs_a_command_that_runs_others(archive: str, place: dict[str, str]) -> None:
    path = f"{BIN}:{os.environ['PATH']}"
    installed = call([str(BIN / "pipx"), "install", "--force", archive], PATH=path, **place)
    assert installed.returncode == 0, installed.stdout
    command = f"{place['HOME']}/.local/bin/stockade"
    done = call([command, "run", "-q", "--", "echo", "inside"], **place)
    assert (done.returncode, done.stdout) == (0, "inside\n")
