"""How the gate is compiled: the one place that knows the command lines.

The build (`setup.py`), the tests and `make gate-check` all come here. The
build runs before Stockade is installed and loads this file by its path, so
it needs nothing but the standard library.

`python3 build.py check` compiles every source with warnings as errors and
GCC's static analyser, and keeps nothing.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
EXECUTABLE = "stockade-gate"
LIBRARY = "libstockade-gate.so"

LANGUAGE = ("-std=gnu11", "-Wall", "-Wextra")
# Ubuntu's GCC defines _FORTIFY_SOURCE itself and warns when it is defined again.
HARDENED = ("-O2", "-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2")
# For the executable only: the library would become empty, since the sources mark almost nothing as exported.
SMALL = ("-fvisibility=hidden", "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections")
LINKED = ("-s", "-pthread", "-Wl,-z,relro,-z,now,-z,noexecstack")


class BuildError(Exception):
    """The gate cannot be built; the message is one sentence that says what to do."""


def compiler() -> list[str]:
    """Return the C compiler as the beginning of a command line: `$CC`, else the first of cc, gcc, clang."""
    wanted = os.environ.get("CC")
    for command in [wanted] if wanted else ["cc", "gcc", "clang"]:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    missing = f"$CC names {wanted!r}, which is not there" if wanted else "none was found"
    raise BuildError(
        f"Stockade needs a C compiler to build its gate and {missing}: "
        "install one, for example with `apt install gcc libc6-dev`."
    )


def executable(output: Path, *, sources: Path = SOURCES, defines: Iterable[str] = ()) -> Path:
    """Build the static executable that every sandboxed process passes through."""
    flags = [*HARDENED, *SMALL, *LINKED, "-static", *(f"-D{name}" for name in defines)]
    return _compile(output, _c_files(sources), flags)


def library(output: Path, *, sources: Path = SOURCES, defines: Iterable[str] = ()) -> Path:
    """Build the shared library that confines the process that loads it."""
    shared = [source for source in _c_files(sources) if source.name != "main.c"]
    # The library calls its own functions, also where the program that loads it has some of the same name.
    flags = [*HARDENED, *LINKED, "-Wl,-Bsymbolic", *(f"-D{name}" for name in defines)]
    return _compile(output, shared, [*flags, "-fPIC", "-shared"])


def sanitized(output: Path, *, sources: Path = SOURCES) -> Path:
    """Build an executable that stops at the first memory error or undefined behaviour."""
    flags = ["-O1", "-g", "-pthread", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    return _compile(output, _c_files(sources), flags)


def check(*, sources: Path = SOURCES) -> None:
    """Compile every source with warnings as errors and the static analyser; raise BuildError on findings."""
    if not shutil.which("gcc"):
        raise BuildError("The static analyser is GCC's: install it with `apt install gcc libc6-dev`.")
    for source in _c_files(sources):
        # One file at a time: the analyser's memory grows with what it sees at once.
        command = ["gcc", *LANGUAGE, *HARDENED, "-Werror", "-fanalyzer", "-fPIC", "-c", "-o", os.devnull]
        _run([*command, str(source)])


def _c_files(sources: Path) -> list[Path]:
    found = sorted(sources.glob("*.c"))
    if not found:
        raise BuildError(f"The gate's C sources are not in {sources}: unpack the whole source tree again.")
    return found


def _compile(output: Path, sources: list[Path], flags: list[str]) -> Path:
    # Where the sources lie on the machine that builds is nobody's business, and would be part of the result.
    command = [*compiler(), *LANGUAGE, *flags, f"-ffile-prefix-map={sources[0].parent}=gate"]
    # Only on request: a new warning of a newer compiler must not prevent an installation.
    if os.environ.get("STOCKADE_WERROR") == "1":
        command.append("-Werror")
    output.parent.mkdir(parents=True, exist_ok=True)
    # A gate that is running cannot be written to, only replaced.
    fresh = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        _run([*command, "-o", str(fresh), *map(str, sources)])
        fresh.replace(output)
    finally:
        fresh.unlink(missing_ok=True)
    return output


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        sys.stderr.write(done.stderr)
        return
    hint = ""
    if "-static" in command and "cannot find -l" in done.stderr:
        hint = " (the static C library is missing: `apt install libc6-dev`, or `dnf install glibc-static`)"
    elif missing := re.search(r"fatal error: (\S+): No such file", done.stderr):
        hint = f" (the header {missing[1]} is missing: `apt install libc6-dev`, or `dnf install glibc-devel`)"
    raise BuildError(f"{done.stderr.strip()}\nThe gate did not compile with `{shlex.join(command)}`{hint}.")


if __name__ == "__main__":
    if sys.argv[1:] != ["check"]:
        sys.exit("usage: build.py check")
    try:
        check()
    except BuildError as error:
        sys.exit(str(error))
