"""The wheel on a machine that has a Python, a shell and no compiler, and where libseccomp comes later."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from support import bare_root, wheelhouse
from support.means import applies, need, need_program
from support.wheel import call

applies(os.geteuid() == 0, "only root can make a machine of a directory; an ordinary user works there too")

ENFORCED = "This machine can enforce the default policy, by native"
ADA = (
    "import os, sys; os.setgroups([]); os.setgid(1000); os.setuid(1000); os.execv(sys.argv[1], sys.argv[1:])"
)
ACCEPTED = 'backend = "landlock"\naccept = ["files", "processes", "devices"]\n'

Inside = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="module")
def root(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root directory of that machine; Stockade is not installed yet."""
    for program in ("unshare", "ldd"):
        need_program(program)
    need(os.path.exists("/sbin/ldconfig"), "there is no ldconfig")
    made = bare_root.make(tmp_path_factory.mktemp("bare") / "root", need_program("busybox"))
    wheels = wheelhouse.fill(made / "wheels", wheelhouse.STOCKADE)
    (wheel,) = dist.glob("*.whl")
    shutil.copy(wheel, made / "wheels")
    (pip,) = wheels.glob("pip-*.whl")
    with zipfile.ZipFile(pip) as packed:
        packed.extractall(made / "pip")
    return made


@pytest.fixture
def inside(root: Path) -> Inside:
    """Runs a command on that machine."""

    def run(*argv: str, **environment: str) -> CompletedProcess[str]:
        own = {"HOME": "/root", "STOCKADE_HOME": "", "XDG_STATE_HOME": "", "PATH": bare_root.PATH}
        return call(bare_root.command(root, *argv), **own | environment)

    return run


def test_the_wheel_works_there_and_doctor_says_what_is_missing_first(root: Path, inside: Inside) -> None:
    python, stockade = str(Path(sys.executable).resolve()), "/opt/stockade/bin/stockade"
    made = inside(python, "-m", "venv", "--without-pip", "/opt/stockade")
    assert made.returncode == 0, made.stdout
    pip = [python, "-m", "pip", "--python", "/opt/stockade/bin/python", "install", "--no-compile", "-q"]
    installed = inside(*pip, "--no-index", "--find-links", "/wheels", "stockade", PYTHONPATH="/pip")
    assert installed.returncode == 0, installed.stdout

    told = inside(stockade, "doctor", COLUMNS="200")
    assert told.returncode == 1, told.stdout
    assert "native misses every control: pyseccomp does not find libseccomp" in told.stdout
    assert "fix: apt install libseccomp2, dnf install libseccomp" in told.stdout
    refused = inside(stockade, "run", "--", "id")
    assert refused.returncode == 125 and "hint: apt install libseccomp2" in refused.stdout, refused.stdout

    bare_root.add_library(root, "libseccomp.so.2")
    assert inside("/sbin/ldconfig").returncode == 0
    told = inside(stockade, "doctor")
    assert told.returncode == 0 and ENFORCED in told.stdout, told.stdout
    ran = inside(stockade, "run", "-q", "--", "id")
    assert (ran.returncode, ran.stdout) == (0, "uid=0(root) gid=0(root)\n")
    ran = inside(python, "-c", ADA, stockade, "run", "-q", "--", "id", HOME="/tmp")
    assert (ran.returncode, ran.stdout) == (0, "uid=1000(ada) gid=1000(ada)\n")

    # After chroot() the kernel lets nobody make user namespaces; Landlock still works.
    told = call(bare_root.command(root, stockade, "doctor", chroot=True), COLUMNS="200", HOME="/root")
    assert told.returncode == 1, told.stdout
    assert "a chroot) refuses user namespaces" in " ".join(told.stdout.split())
    (root / "root/policy.toml").write_text(ACCEPTED)
    argv = [stockade, "run", "-q", "-p", "/root/policy.toml", "--", "id"]
    ran = call(bare_root.command(root, *argv, chroot=True), HOME="/root", PATH=bare_root.PATH)
    assert (ran.returncode, ran.stdout) == (0, "uid=0(root) gid=0(root)\n")
