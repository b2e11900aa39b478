"""The documentation as a program: the fenced blocks of a page, run from top to bottom as a reader would.

A `console` block holds commands after `$ ` and what they print; `sh` a script;
`python` a program; `toml` a policy. They share one shell for the page, so that
a `cd` and a workspace's id hold until its end. In what is printed, `...` stands
for anything, `/home/ada` for the home, an id for the one that was really given,
here and in later commands, and a port from 18000 to 18099 for one that is free:
several users run the pages at the same time.

A comment right before a block says what is special about it:

    <!-- file: NAME -->       the block is the content of that file, for the commands that follow
    <!-- not run: REASON -->  it cannot be run here; such blocks are counted
    <!-- output varies -->    what is printed is only an example
    <!-- needs: NAME -->      run where the host keeps that control, or has that program
    <!-- lacks: NAME -->      run where it does not
    <!-- eventually -->       the output may take a moment to become what is shown
    <!-- exits: N -->         the last command's exit code, where it is not 0
"""

from __future__ import annotations

import contextlib
import random
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LANGUAGES = ("console", "sh", "python", "toml")
HOME = "/home/ada"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- ([a-z ]+)(?:: (.*?))? -->\n\Z")
_ID = re.compile(r"\b[0-9a-f]{12}\b")
_PREFIX = re.compile(r"(?<![\w/])(@?)([0-9a-f]{4,12})\b")
_PORT = re.compile(r"\b180\d\d\b")
#: What a machine has by chance: process and user ids, ports, versions.
_CHANCE = re.compile(r"\d+\.\d+\.\d+|\b\d{4,}\b")
_SHOWN = re.compile(r"^(?P<code>.*\bprint\(.*\))  # (?P<shown>.+)$")
END = "stockade-docs-end"
PATIENCE = 10.0


class Block(NamedTuple):
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


class Step(NamedTuple):
    """One command, and what it prints, if that is shown."""

    command: str
    shown: list[str]


def blocks(page: Path, name: str) -> Iterator[Block]:
    """The blocks of a page. One whose language is not known here is an error: it would go untested."""
    text = page.read_text(encoding="utf-8")
    for fence in _FENCE.finditer(text):
        line = text.count("\n", 0, fence.start()) + 1
        marks, before = {}, text[: fence.start()]
        while found := _COMMENT.search(before):
            marks[found[1]] = found[2] or ""
            before = before[: found.start()]
        if fence[1] and fence[1] not in (*LANGUAGES, "text"):
            raise ValueError(f"{name}:{line}: nobody runs a block of {fence[1]!r}")
        if fence[1] in LANGUAGES:
            yield Block(name, line, fence[1], fence[2], marks)


def steps(text: str) -> list[Step]:
    """The commands of a console block."""
    found: list[Step] = []
    for line in text.rstrip().split("\n"):
        if line.startswith("$ "):
            if found and found[-1].shown and not found[-1].shown[-1]:
                found[-1].shown.pop()  # an empty line before the next command
            found.append(Step(line[2:], []))
        elif line.startswith("> ") and found and not found[-1].shown:
            found[-1] = Step(f"{found[-1].command}\n{line[2:]}", [])
        elif found:
            found[-1].shown.append(line)
        else:
            raise ValueError(f"output before the first command: {line!r}")
    return found


class Session:
    """A shell in a prepared home, and the ids that it has met."""

    def __init__(self, home: Path, directory: Path, environment: dict[str, str]) -> None:
        self.home = home
        self.ids: dict[str, str] = {}
        self.ports: dict[str, str] = {}
        self._status = 0
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=directory,
            env=environment | {"HOME": str(home)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._shell.stdin and self._shell.stdout
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._shell.stdin.write("wait\n")  # for what a page started in the background
            self._shell.stdin.close()
        self._shell.stdout.close()
        self._shell.wait(60)

    def run(self, block: Block) -> list[str]:
        """Run a block; the result are its faults in words."""
        block = block._replace(text=_PORT.sub(self._port, block.text))
        text = block.text.replace(HOME, str(self.home))
        if name := block.marks.get("file"):
            path = shlex.quote(name.replace("~", str(self.home)))
            _, printed = self._sh(f'mkdir -p "$(dirname {path})" && printf %s {shlex.quote(text)} > {path}')
            return [printed] if printed else []
        if block.language == "toml":
            return self._policy(text)
        if block.language == "python":
            return self._python(block, text)
        if block.language == "sh":
            return self._judged(block, Step(self._real(text), []), last=True)
        faults = []
        known = steps(block.text)
        for step in known:
            faults += self._judged(block, step, last=step is known[-1])
        return faults

    def _judged(self, block: Block, step: Step, *, last: bool) -> list[str]:
        command = self._real(step.command).replace(HOME, str(self.home))
        status, printed = self._sh(command)
        end = time.monotonic() + (PATIENCE if "eventually" in block.marks else 0)
        while step.shown and time.monotonic() < end and not self._matches(step.shown, printed):
            status, printed = self._sh(command)
        wanted = int(block.marks.get("exits", 0)) if last else 0
        if step.shown and "output varies" not in block.marks:
            if not self._matches(step.shown, printed):
                shown = "\n".join(step.shown)
                return [f"$ {command}\nprinted\n{printed}\nand not\n{shown}"]
            wanted = wanted or status  # what it says is what was promised
        if status != wanted:
            return [f"$ {command}\nended with {status}, not {wanted}:\n{printed}"]
        return []

    def _policy(self, text: str) -> list[str]:
        from stockade import Policy, StockadeError

        try:
            Policy.from_toml(text, base=str(self.home / "project")).controls()
        except StockadeError as error:
            return [f"{error}: {error.hint}"]
        return []

    def _python(self, block: Block, text: str) -> list[str]:
        with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            status, printed = self._sh(f"{shlex.quote(sys.executable)} {file.name}")
        if status != int(block.marks.get("exits", 0)):
            return [f"ended with {status}:\n{printed}"]
        shown = [match["shown"] for line in text.split("\n") if (match := _SHOWN.match(line))]
        said = " ".join(printed.split())
        at = 0
        for words in shown if "output varies" not in block.marks else ():
            at = said.find(" ".join(words.split()), at)
            if at < 0:
                return [f"does not print {words!r}:\n{printed}"]
        return []

    def _sh(self, command: str) -> tuple[int, str]:
        """Let the shell do something, with an empty stdin, and hand over what it printed."""
        assert self._shell.stdin and self._shell.stdout
        with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as file:
            script = f"(exit {self._status})\n{{ {command}\n}} </dev/null >{file.name} 2>&1\necho {END} $?\n"
            self._shell.stdin.write(script)
            self._shell.stdin.flush()
            word = self._shell.stdout.readline().split()
            if word[:1] != [END]:
                raise AssertionError(f"the shell ended at: {command}")
            self._status = int(word[1])
            return self._status, file.read()

    def _port(self, shown: re.Match[str]) -> str:
        if shown[0] not in self.ports:
            self.ports[shown[0]] = str(_free_port())
        return self.ports[shown[0]]

    def _real(self, command: str) -> str:
        """The command with the ids that were really given."""

        def real(match: re.Match[str]) -> str:
            for shown, given in self.ids.items():
                if shown.startswith(match[2]):
                    return match[1] + given[: len(match[2])]
            return match[0]

        return _PREFIX.sub(real, command)

    def _matches(self, shown: list[str], printed: str) -> bool:
        groups: dict[str, str] = {}
        pattern = "".join(self._line(line, groups) for line in shown)
        found = re.fullmatch(pattern, printed.rstrip() + "\n")
        if found is None:
            return False
        self.ids |= {id: found[group] for id, group in groups.items()}
        return True

    def _line(self, line: str, groups: dict[str, str]) -> str:
        if line.strip() == "...":
            return r"(?:.*\n)*?"
        line = line.replace(HOME, str(self.home))
        made, at = "", 0
        for match in re.finditer(rf"{_ID.pattern}|{_CHANCE.pattern}|\.\.\.|…| {{2,}}", line):
            made += re.escape(line[at : match.start()])
            made += self._pattern(match[0], groups)
            at = match.end()
        return made + re.escape(line[at:]) + r"[ ]*\n"

    def _pattern(self, word: str, groups: dict[str, str]) -> str:
        if word in ("...", "…"):
            return ".*"
        if not word.strip():
            return " {2,}"
        if not _ID.fullmatch(word):
            return r"[\d.]+"
        if word in self.ids:
            return self.ids[word]
        if word in groups:
            return f"(?P={groups[word]})"
        groups[word] = f"id{len(groups)}"
        return f"(?P<{groups[word]}>[0-9a-f]{{12}})"


def _free_port() -> int:
    """Return a port that nobody has, and that the kernel does not give to the next who asks for any."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
