"""Builds of the gate that are for tests only."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from stockade.gate import build
from support.paths import GATE_SOURCES

FUZZERS = Path(__file__).parent / "fuzz"

# The gate is started with an empty environment, so what the sanitizers shall do is compiled in.
OPTIONS = """
#define OPTIONS "log_path={log}:detect_leaks=0:abort_on_error=0:exitcode=99:print_stacktrace=1"
const char *__asan_default_options(void);
const char *__ubsan_default_options(void);
const char *__asan_default_options(void) {{ return OPTIONS; }}
const char *__ubsan_default_options(void) {{ return OPTIONS; }}
"""


def sanitized(directory: Path) -> Path:
    """A gate with the address and undefined-behaviour sanitizers in it, dynamically linked.

    What they find is written to files beside the executable: see `reports`.
    """
    sources = directory / "sources"
    shutil.copytree(GATE_SOURCES, sources)
    (sources / "options.c").write_text(OPTIONS.format(log=directory / "sanitized" / "report"))
    return build.sanitized(directory / "sanitized" / build.EXECUTABLE, sources=sources)


def reports(gate: Path) -> list[str]:
    """What the sanitizers have found so far in a gate that `sanitized` built."""
    return [path.read_text(errors="replace") for path in sorted(gate.parent.glob("report*"))]


def sabotaged(directory: Path) -> Path:
    """A gate that leaves walls out on request, to show that the checks notice."""
    output = directory / "sabotaged" / build.EXECUTABLE
    return build.executable(output, sources=GATE_SOURCES, defines=["GATE_SABOTAGE"])


def sabotaged_library(directory: Path) -> Path:
    """The same as a library, for templates and `confine`. To optimise it takes longer than that gains."""
    sources = [source for source in sorted(GATE_SOURCES.glob("*.c")) if source.name != "main.c"]
    output = directory / "sabotaged" / build.LIBRARY
    command = [*build.compiler(), *build.LANGUAGE, "-O0", "-DGATE_SABOTAGE", "-fPIC", "-shared"]
    output.parent.mkdir(exist_ok=True)
    subprocess.run([*command, "-Wl,-Bsymbolic", "-o", str(output), *map(str, sources)], check=True)
    return output


def decoder_fuzzer(directory: Path) -> Path:
    """The driver that feeds the plan decoder with mutated plans, under the sanitizers."""
    sources = directory / "fuzz"
    sources.mkdir()
    shutil.copy(FUZZERS / "decoder.c", sources)
    for name in ("plan.c", "plan.h", "wire.h"):
        shutil.copy(GATE_SOURCES / name, sources)
    return build.sanitized(sources / "decoder", sources=sources)
