"""Building and installing the package: the wheel, the gate in it, and what a failing build says."""

from __future__ import annotations

import os
import struct
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from support.means import applies
from support.paths import PACKAGE
from support.wheel import OFFLINE, PIP, build_wheel, call, copy_of_the_source

applies(os.geteuid() != 0, "a build is the same for everybody, and the ordinary user makes it")

GATE = "stockade/gate/bin/stockade-gate"
LIBRARY = "stockade/gate/bin/libstockade-gate.so"
PT_INTERP = 3
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def gate(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GATE, tmp_path_factory.mktemp("gate")))


def segments(executable: bytes) -> list[int]:
    """The types of an ELF file's program headers."""
    assert executable[:5] == b"\x7fELF\x02", "not a 64-bit ELF file"
    (start,) = struct.unpack_from("<Q", executable, 32)
    size, count = struct.unpack_from("<HH", executable, 54)
    return [struct.unpack_from("<I", executable, start + size * index)[0] for index in range(count)]


def test_the_wheel_is_for_this_platform_and_any_python(wheel: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")


def test_the_wheel_holds_the_gate_both_ways(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.getinfo(GATE).external_attr >> 16 & 0o111 == 0o111, "the gate is not executable"
        assert archive.getinfo(LIBRARY).file_size > 0


def test_the_wheel_holds_every_module_and_profile(wheel: Path) -> None:
    wanted = {
        str(path.relative_to(PACKAGE.parent))
        for pattern in ("*.py", "*.toml", "py.typed")
        for path in PACKAGE.rglob(pattern)
    }
    assert "stockade/py.typed" in wanted, "type checkers would ignore the annotations"
    with zipfile.ZipFile(wheel) as archive:
        assert wanted - set(archive.namelist()) == set()


def test_the_gate_is_static_and_small(gate: Path) -> None:
    content = gate.read_bytes()
    assert PT_INTERP not in segments(content), "the gate needs a dynamic loader"
    assert len(content) < MEBIBYTE


@pytest.mark.parametrize("environment", [{"CC": "/none/cc"}, {"PATH": "/none"}], ids=["CC", "PATH"])
def test_without_a_compiler_the_build_stops_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    monkeypatch.delenv("CC", raising=False)
    source = copy_of_the_source(tmp_path)
    done = call([*PIP, "wheel", *OFFLINE, "--wheel-dir", str(tmp_path), str(source)], **environment)
    assert done.returncode != 0
    assert "apt install gcc libc6-dev" in done.stdout
    assert "Traceback" not in done.stdout
    assert list(tmp_path.glob("*.whl")) == []


def test_an_editable_install_builds_the_gate_beside_the_sources(tmp_path: Path) -> None:
    source = copy_of_the_source(tmp_path)
    venv = tmp_path / "venv"
    python = venv / "bin" / "python"
    made = call([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    assert made.returncode == 0, made.stdout
    # The new environment is empty; setuptools comes from the one that the tests run in.
    borrowed = sysconfig.get_path("purelib")
    install = [*PIP, "--python", str(python), "install", *OFFLINE, "--editable", str(source)]
    done = call(install, PYTHONPATH=borrowed)
    assert done.returncode == 0, done.stdout
    assert os.access(source / "src" / GATE, os.X_OK)
    assert (source / "src" / LIBRARY).exists()
    assert (venv / "bin" / "stockade").exists()
    look = "import importlib.util as u; print(u.find_spec('stockade').origin)"
    where = call([str(python), "-c", look], PYTHONPATH="")
    assert where.stdout.strip() == str(source / "src" / "stockade" / "__init__.py")


def test_uninstalled_it_leaves_nothing_but_what_purge_removes(wheel: Path, tmp_path: Path) -> None:
    venv, home = tmp_path / "venv", tmp_path / "home"
    python = venv / "bin" / "python"
    home.mkdir()
    made = call([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    assert made.returncode == 0, made.stdout

    def files() -> set[Path]:
        return {path for path in tmp_path.rglob("*") if "state" not in path.relative_to(tmp_path).parts[:1]}

    before = files()
    pip = [*PIP, "--python", str(python)]
    installed = call([*pip, "install", "--no-deps", "--no-index", str(wheel)])
    assert installed.returncode == 0, installed.stdout
    # What it needs comes from the environment that the tests run in.
    own = sysconfig.get_path("purelib", vars={"base": str(venv)})
    paths = f"{own}:{sysconfig.get_path('purelib')}"
    environ = {"PYTHONPATH": paths, "HOME": str(home), "XDG_STATE_HOME": ""}
    environ["STOCKADE_HOME"] = ""
    where = call([str(python), "-c", "import stockade; print(stockade.__file__)"], **environ)
    assert where.stdout.startswith(str(venv)), where.stdout
    ran = call([str(venv / "bin/stockade"), "run", "-q", "--", "true"], **environ)
    assert ran.returncode == 0, ran.stdout
    state = home / ".local/state/stockade"
    assert state.is_dir()
    outside = {path for path in files() - before if venv not in path.parents}
    assert all(path == state or state in path.parents or path in state.parents for path in outside)
    purged = call([str(venv / "bin/stockade"), "purge", "--yes"], **environ)
    assert purged.returncode == 0 and not state.exists(), purged.stdout
    gone = call([*pip, "uninstall", "--yes", "stockade"])
    assert gone.returncode == 0, gone.stdout
    left = {path for path in files() - before if path not in state.parents}
    assert left == set()
