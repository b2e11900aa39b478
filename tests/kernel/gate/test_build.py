"""Building and installing the package: the wheel, the gate in it, and what a failing build says."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging import tags
from packaging.utils import parse_wheel_filename

from stockade.gate import build as gate_build
from support.means import applies
from support.paths import GATE_SOURCES, PACKAGE, ROOT
from support.wheel import OFFLINE, PIP, SCRIPT, build, call

applies(os.geteuid() != 0, "a build is the same for everybody, and the ordinary user makes it")

GATE = "stockade/gate/bin/stockade-gate"
LIBRARY = "stockade/gate/bin/libstockade-gate.so"
MEBIBYTE = 1 << 20
#: The Pythons that the wheel is for; the last one is not out yet.
PYTHONS = [(3, 11), (3, 12), (3, 13), (3, 14)]


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def archive(dist: Path) -> Path:
    (found,) = dist.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def gate(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with zipfile.ZipFile(wheel) as packed:
        return Path(packed.extract(GATE, tmp_path_factory.mktemp("gate")))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The build script as a module."""
    spec = importlib.util.spec_from_file_location("build_wheels", ROOT / SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unpacked(archive: Path, directory: Path) -> Path:
    """The sources in a source distribution."""
    shutil.unpack_archive(archive, directory)
    return directory / archive.name.removesuffix(".tar.gz")


def test_the_wheel_is_for_every_python_from_3_11_and_every_glibc_from_2_34(wheel: Path) -> None:
    machine = os.uname().machine
    _, _, _, named = parse_wheel_filename(wheel.name)
    assert named == tags.parse_tag(f"py3-none-manylinux_2_34_{machine}")
    for python in PYTHONS:
        # As pip on that Python asks; this machine's glibc decides which manylinux tags it asks for.
        assert named & set(tags.compatible_tags(python)), python


def test_a_second_opinion_on_the_tag(wheel: Path) -> None:
    shown = call([sys.executable, "-m", "auditwheel", "show", str(wheel)])
    assert shown.returncode == 0, shown.stdout
    words = " ".join(shown.stdout.split())
    assert f'following platform tag: "manylinux_2_34_{os.uname().machine}"' in words


def test_another_build_elsewhere_by_its_own_source_distribution_has_the_same_bytes(
    dist: Path, archive: Path, tmp_path: Path
) -> None:
    sources = unpacked(archive, tmp_path / "a place with another name")
    again = build(tmp_path / "again", sources=sources, umask=0o077, TZ="Asia/Tokyo", LC_ALL="C.UTF-8")
    names = {file.name for file in dist.iterdir()}
    assert names == {file.name for file in again.iterdir()} and len(names) == 3
    assert [name for name in names if (dist / name).read_bytes() != (again / name).read_bytes()] == []


def test_a_gate_that_needs_more_than_the_tag_says_is_not_handed_out(
    gate: Path, wheel: Path, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(wheel) as packed:
        library = Path(packed.extract(LIBRARY, tmp_path))
    assert script.beyond_the_tag(gate, library) == []
    source, dynamic = tmp_path / "dynamic.c", tmp_path / "dynamic"
    source.write_text("#include <math.h>\nint main(int c, char **v) { return (int)cos(c) + *v[0]; }\n")
    options = ["-Wl,--no-as-needed", "-Wl,-rpath,/opt/lib", "-lm"]
    made = call([*gate_build.compiler(), str(source), "-o", str(dynamic), *options])
    assert made.returncode == 0, made.stdout
    monkeypatch.setattr(script, "GLIBC", (2, 16))
    told = "; ".join(script.beyond_the_tag(dynamic, dynamic))
    for fault in (
        "is not static",
        "needs libm.so.6",
        "a directory of the build machine",
        "the tag promises 2.16",
    ):
        assert fault in told
    assert script.traces(source, tmp_path) == []
    source.write_text(f'"{tmp_path}/gate.c"')
    assert f"contains the path {tmp_path}" in script.traces(source, tmp_path)[0]


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


def test_the_gate_is_static_and_small(gate: Path, script: ModuleType) -> None:
    assert "INTERP" not in script.readelf("--program-headers", gate), "the gate needs a dynamic loader"
    assert "NEEDED" not in script.readelf("--dynamic", gate)
    assert gate.stat().st_size < MEBIBYTE


@pytest.mark.parametrize("environment", [{"CC": "/none/cc"}, {"PATH": "/none"}], ids=["CC", "PATH"])
def test_without_a_compiler_the_build_stops_with_one_sentence(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    monkeypatch.delenv("CC", raising=False)
    done = call([*PIP, "wheel", *OFFLINE, "--wheel-dir", str(tmp_path), str(archive)], **environment)
    assert done.returncode != 0
    assert "apt install gcc libc6-dev" in done.stdout
    assert "Traceback" not in done.stdout
    assert list(tmp_path.glob("*.whl")) == []


def test_a_compiler_without_headers_is_told_from_one_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", f"gcc -nostdinc -isystem {tmp_path}")
    with pytest.raises(gate_build.BuildError, match=r"header \S+\.h is missing: `apt install libc6-dev`"):
        gate_build.library(tmp_path / "library.so", sources=GATE_SOURCES)  # a wheel has no sources


def test_sources_without_a_date_are_not_built(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    with pytest.raises(script.BuildError, match="set one, for example SOURCE_DATE_EPOCH="):
        script.time_of_the_sources()


def test_an_editable_install_builds_the_gate_beside_the_sources(archive: Path, tmp_path: Path) -> None:
    source = unpacked(archive, tmp_path)
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
