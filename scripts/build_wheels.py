"""Build what is handed out: the source distribution, and from it the wheel for this architecture, in `dist`.

    python scripts/build_wheels.py [--out DIRECTORY]

The wheel's tag is a promise to every system with that C library or a newer one. The script reads from the
gate's files whether the promise holds; if not, it hands out nothing and says why.

Two builds of the same sources with the same Python, setuptools, compiler and C library have the same bytes,
wherever and by whomever they are made; SHA256SUMS beside the archives has their digests. The times in the
archives are `$SOURCE_DATE_EPOCH`, or that of the last commit.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "LICENSE",
    "README.md",
    "Makefile",
    "scripts/build_wheels.py",
)
TREES = ("src", "tests", "examples")
#: What builds and runs leave among the sources.
PRODUCTS = shutil.ignore_patterns("__pycache__", "*.egg-info", "bin")

#: The oldest C library that the wheel is for: that of RHEL 9, older than those of Debian 12 and Ubuntu 22.04.
#: Systems before have no kernel that Stockade could use, unless a newer one was added.
GLIBC = (2, 34)
#: The only library of the system that the gate's library may load.
LIBC = "libc.so.6"
GATE = "stockade/gate/bin/stockade-gate"
LIBRARY = "stockade/gate/bin/libstockade-gate.so"

#: Calls a hook of the build backend: its name, where the result goes, and options of setuptools' own.
CALL = """
import sys
from setuptools import build_meta
_, hook, out, *options = sys.argv
getattr(build_meta, hook)(out, {"--build-option": options})
"""


class BuildError(Exception):
    """Nothing was handed out; the message says why, and what to do."""


def main(argv: list[str]) -> int:
    """Build both archives and print their digests; return the exit code."""
    parser = argparse.ArgumentParser(description="Build the source distribution and the wheel.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where they go (default: dist)")
    options = parser.parse_args(argv)
    try:
        made = build(options.out)
    except BuildError as error:
        print(f"build_wheels: {error}", file=sys.stderr)
        return 1
    print(f"built by setuptools {metadata.version('setuptools')}, Python {platform.python_version()}")
    print((options.out / "SHA256SUMS").read_text(), end="")
    print(f"{made.name} is for {platform.machine()}, glibc {dotted(GLIBC)} and Python 3.11, or newer")
    return 0


def build(out: Path) -> Path:
    """Build both archives into a directory and return the wheel's path."""
    if "-march" in os.environ.get("CC", ""):
        raise BuildError(f"the wheel is for every {platform.machine()} processor: leave -march out of $CC")
    epoch = time_of_the_sources()
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{platform.machine()}"
    with tempfile.TemporaryDirectory(prefix="stockade-build-") as name:
        place = Path(name)
        sources = copy_of_the_sources(place / "sources")
        archive = normalized(run_build("build_sdist", sources, place / "sdist", epoch), place, epoch)
        shutil.unpack_archive(archive, place / "unpacked")
        (unpacked,) = (place / "unpacked").iterdir()
        wheel = run_build("build_wheel", unpacked, place / "wheel", epoch, f"--plat-name={tag}")
        keep_the_promise(wheel, place)
        sums = "".join(
            f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in (archive, wheel)
        )
        (place / "SHA256SUMS").write_text(sums)
        out.mkdir(parents=True, exist_ok=True)
        for file in (archive, wheel, place / "SHA256SUMS"):
            shutil.copyfile(file, out / file.name)
            (out / file.name).chmod(0o644)
    return out / wheel.name


def time_of_the_sources() -> int:
    """Return the time that every file of the archives gets."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    try:
        last = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
        return int(subprocess.run(last, capture_output=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        raise BuildError(
            f"{ROOT} is no git checkout, so its sources have no date: set one, for example "
            "SOURCE_DATE_EPOCH=1767225600"
        ) from None


def copy_of_the_sources(directory: Path) -> Path:
    """Copy what the archives are made of, without what an earlier build left: setuptools would include it."""
    for file in FILES:
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, directory / file)
    for tree in TREES:
        shutil.copytree(ROOT / tree, directory / tree, ignore=PRODUCTS)
    return directory


def run_build(hook: str, sources: Path, out: Path, epoch: int, *options: str) -> Path:
    """Call a hook of the build backend, in a process of its own, and return the file that it made."""
    out.mkdir()
    command = [sys.executable, "-c", CALL, hook, str(out), *options]
    done = subprocess.run(
        command,
        cwd=sources,
        env=os.environ | {"SOURCE_DATE_EPOCH": str(epoch)},
        umask=0o022,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BuildError(f"{hook} failed:\n{done.stdout}")
    (made,) = out.iterdir()
    return made


def normalized(archive: Path, directory: Path, epoch: int) -> Path:
    """Write an archive again without what differs between machines: order, owners, times and modes."""
    content = io.BytesIO()
    with (
        tarfile.open(archive) as old,
        tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for entry in sorted(old.getmembers(), key=lambda member: member.name):
            fresh = tarfile.TarInfo(entry.name)
            fresh.type, fresh.size, fresh.mtime = entry.type, entry.size, epoch
            fresh.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            new.addfile(fresh, old.extractfile(entry) if entry.isreg() else None)
    made = directory / archive.name
    with open(made, "wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed:
        packed.write(content.getvalue())
    return made


def keep_the_promise(wheel: Path, place: Path) -> None:
    """Refuse a wheel whose gate needs more of a system than its tag says, or that names the build machine."""
    with zipfile.ZipFile(wheel) as archive:
        gate, library = (Path(archive.extract(name, place / "gate")) for name in (GATE, LIBRARY))
    faults = [*beyond_the_tag(gate, library), *traces(gate, place), *traces(library, place)]
    if faults:
        raise BuildError("; ".join(faults))


def beyond_the_tag(gate: Path, library: Path) -> list[str]:
    """Return what the gate needs of a system and the tag does not say, as sentences."""
    faults = []
    if "INTERP" in readelf("--program-headers", gate):
        faults.append("the gate's executable is not static: it would need the loader of the build machine")
    dynamic = readelf("--dynamic", library)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    if more := sorted(name for name in needed - {LIBC} if not name.startswith("ld-linux")):
        faults.append(f"the gate's library needs {', '.join(more)}")
    if "RPATH" in dynamic or "RUNPATH" in dynamic:
        faults.append("the gate's library looks for others in a directory of the build machine")
    versions = {
        tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([\d.]+)", readelf("-V", library))
    }
    if not versions:
        faults.append("the gate's library names no version of glibc: it was built for another C library")
    elif (newest := max(versions)) > GLIBC:
        faults.append(
            f"the gate's library needs glibc {dotted(newest)}, and the tag promises {dotted(GLIBC)}: "
            "build on an older system, such as Debian 12"
        )
    return faults


def traces(file: Path, place: Path) -> list[str]:
    """Return which directories of the build machine a file names, as sentences."""
    content = file.read_bytes()
    named = [name for name in (str(place), str(ROOT), str(Path.home())) if os.fsencode(name + "/") in content]
    return [f"{file.name} contains the path {name} of the build machine" for name in named]


def readelf(option: str, file: Path) -> str:
    """Return what binutils say about a file."""
    try:
        done = subprocess.run(
            ["readelf", "--wide", option, str(file)],
            env=os.environ | {"LC_ALL": "C"},
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError:
        raise BuildError(
            "readelf is missing, which reads what the gate needs: install it with `apt install binutils`"
        ) from None
    return done.stdout


def dotted(version: tuple[int, ...]) -> str:
    """Return a version as it is written."""
    return ".".join(map(str, version))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
