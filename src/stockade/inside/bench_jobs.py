"""The jobs that the bench times inside and outside. It passes this file to a bare Python as text.

For each line on standard input, the name of a job, it does the job once in the
directory of its argument and prints how many seconds that took, and how many
of a processor.
"""

from __future__ import annotations

import io
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable

#: Real source code that every machine with a compiler has, and how many files of it are searched.
HEADERS, MOST = "/usr/include", 2000
#: Also three thousand files of about 4 KB: a search of them mostly opens and closes files.
FOLDERS, FILES, LINES = 60, 50, 220
#: As a package manager unpacks them: many small files in nested directories.
PACKAGES, NESTED = 150, ("package.json", "index.js", "lib/a.js", "lib/b.js", "lib/util/c.js", "dist/cjs/d.js")
BRANCHES, ARCHIVE = 3, "small.tar"
IMPORTS = "asyncio, argparse, decimal, email.mime.text, http.client, json, logging, unittest, xml.dom.minidom"
SOURCE = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <unistd.h>
int part%d(int n) { int s = rand(); for (int i = 0; i < n; i++) s += (int)strlen("text") * i %% 7; return s; }
"""
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.com",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.com",
}


def prepare(base: str) -> None:
    """Make the trees for the searches."""
    for path in headers():
        copy = os.path.join(base, "tree", os.path.relpath(path, HEADERS))
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        shutil.copyfile(path, copy)
    for folder in range(FOLDERS):
        path = os.path.join(base, "small", f"folder{folder}")
        os.makedirs(path, exist_ok=True)
        for number in range(FILES):
            with open(os.path.join(path, f"file{number}.c"), "w", encoding="ascii") as file:
                file.write(f"int value{number} = {folder};\n" * LINES)


def archive(base: str) -> None:
    """Make the archive for `untar`."""
    with tarfile.open(os.path.join(base, ARCHIVE), "w") as tar:
        for number in range(FOLDERS * FILES):
            entry = tarfile.TarInfo(f"folder{number % FOLDERS}/file{number}.c")
            text = f"int value{number};\n".encode() * LINES
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))


def headers() -> list[str]:
    """The first regular files of the headers, in an order that is the same everywhere."""
    found: list[str] = []
    for directory, folders, names in os.walk(HEADERS):
        folders.sort()
        paths = [os.path.join(directory, name) for name in sorted(names)]
        found += [path for path in paths if os.path.isfile(path) and not os.path.islink(path)]
        if len(found) >= MOST:
            break
    return found[:MOST]


def git(base: str) -> None:
    origin = os.path.join(base, "origin")
    _do("git", "init", "-q", origin)
    for number in range(5):
        with open(os.path.join(origin, f"file{number}"), "w", encoding="ascii") as file:
            file.write(f"{number}\n" * 100)
        _do("git", "-C", origin, "add", ".")
        _do("git", "-C", origin, "commit", "-q", "-m", f"commit {number}")
    _do("git", "clone", "-q", "--no-local", origin, os.path.join(base, "clone"))


def compile(base: str) -> None:
    objects = []
    for number in range(3):
        path = os.path.join(base, f"part{number}.c")
        with open(path, "w", encoding="ascii") as file:
            file.write(SOURCE % number)
            if number == 0:
                file.write("int main(void) { return part0(3) == 0; }\n")
        objects.append(path.replace(".c", ".o"))
        _do("gcc", "-O2", "-c", path, "-o", objects[-1])
    _do("gcc", *objects, "-o", os.path.join(base, "program"))


def search(base: str) -> None:
    tree = os.path.join(base, "..", "tree")
    for _ in range(2):
        _do("find", tree, "-name", "*.h", "-size", "+0")
        _do("grep", "-rl", "pthread_mutex_t", tree)


def search_small(base: str) -> None:
    tree = os.path.join(base, "..", "small")
    for _ in range(3):
        _do("find", tree, "-name", "*7.c", "-size", "+0")
        _do("grep", "-rl", "value7 = 7;", tree)


def imports(base: str) -> None:
    for _ in range(2):
        _do("/usr/bin/python3", "-I", "-S", "-c", f"import {IMPORTS}")


def untar(base: str) -> None:
    _do("tar", "-C", base, "-xf", os.path.join(base, "..", ARCHIVE))


def install(base: str) -> None:
    for number in range(PACKAGES):
        for inner in ("", "node_modules/inner/"):
            for name in NESTED:
                path = os.path.join(base, "node_modules", f"package{number}", inner + name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w", encoding="ascii") as file:
                    file.write(f"module.exports = {number};\n" * 40)


def checkout(base: str) -> None:
    """Make a repository of a thousand files with branches that each change a third; check all out."""
    _do("git", "-C", base, "init", "-q", "-b", "branch0")
    for branch in range(BRANCHES):
        if branch:
            _do("git", "-C", base, "checkout", "-q", "-b", f"branch{branch}")
        for number in range(1000):
            if not branch or number % BRANCHES == branch:
                path = os.path.join(base, f"folder{number % 20}", f"file{number}")
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w", encoding="ascii") as file:
                    file.write(f"{branch} {number}\n" * 50)
        _do("git", "-C", base, "add", ".")
        _do("git", "-C", base, "commit", "-q", "-m", f"branch {branch}")
    for branch in (*range(BRANCHES), *range(BRANCHES)):
        _do("git", "-C", base, "checkout", "-q", f"branch{branch}")


JOBS: dict[str, Callable[[str], None]] = {
    "git": git,
    "compile": compile,
    "search": search,
    "imports": imports,
    "search of small files": search_small,
}
#: Jobs that mostly make files, which an overlay could make expensive.
MAKES: dict[str, Callable[[str], None]] = {"untar": untar, "install": install, "checkout": checkout}


def _do(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _processor_time() -> float:
    """Return the seconds that this process and its children have used."""
    taken = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in taken)


def main() -> None:
    base = sys.argv[1]
    os.environ.clear()
    os.environ.update(ENVIRONMENT, HOME=base, TMPDIR=base)
    if not {"tree", ARCHIVE} & set(os.listdir(base)):
        prepare(base)
    for line in sys.stdin:
        job = (JOBS | MAKES)[line.strip()]
        scratch = os.path.join(base, "scratch")
        os.makedirs(scratch)
        began, used = time.monotonic(), _processor_time()
        job(scratch)
        print(time.monotonic() - began, _processor_time() - used, flush=True)
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
