"""The judge: the verify command, in a second sandbox over a fork of the attempt.

The agent never runs in this sandbox, and its key and network are not there. In the fork, the judge's files
are those of the base (`judge_files`). The report of the test runner is written to a new, unguessable name in
the sandbox's private /tmp, and read when the command and all that it started have ended. The code under test
runs in that sandbox too, as the same user: NP-87 in docs/security/loop.md says what it can still forge.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from stockade.errors import NotFoundError, StockadeError
from stockade.linux import dirwalk
from stockade.linux.plain_text import clean
from stockade.loop.judge.files import LARGEST, SECTIONS, judge_matcher, restore_sections
from stockade.loop.judge.judgement import VerifyRun
from stockade.loop.reports import MOST_BYTES, Report, ReportError, read_report
from stockade.loop.work.watch import watch
from stockade.policy.model import Policy
from stockade.result import Outcome
from stockade.sandbox.sandbox import Sandbox
from stockade.sandbox.workspace import Workspace

#: How much of a verify command's output is kept for the next prompt, and of stdout if it is the report.
MOST_OUTPUT = 16 << 10
#: How much output of a verify command is logged.
MOST_LOGGED = 16 << 20
#: The kernel's errors that are the host's fault and no attempt's.
HOSTS_FAULT = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)

Lines = Callable[[str], object]


class JudgeFilesError(StockadeError):
    """The judge's files cannot be restored in an attempt, so the attempt fails."""


class JudgeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a verify command."""

    command: str
    policy: Policy
    report: str = "auto"
    timeout: float
    #: The sandbox's name, and who asks, for the receipt.
    name: str
    who: dict[str, str]


def fork_for_judge(
    attempt: Workspace,
    judge: tuple[str, ...],
    on_fork: Callable[[str], object],
    *,
    defaults: bool = True,
) -> tuple[Workspace, tuple[str, ...]]:
    """Fork an attempt and restore the judge's files in the fork; return it, and the files that it restored.

    `on_fork` gets the id of the fork. Raises `JudgeFilesError` if the files cannot be restored, and removes
    the fork.
    """
    matches = judge_matcher(judge, defaults=defaults)
    try:
        fork = attempt.fork(1)[0]
    except StockadeError as error:
        raise _blamed(error) from error
    try:
        on_fork(fork.id)
        restored = {change.path for change in fork.revert(matches)}
        if defaults:
            restored |= _restore_all_sections(fork, matches)
        if left := [change.path for change in fork.changes() if matches(change.path)]:
            raise JudgeFilesError(f"these files of the judge's are still changed: {', '.join(left[:5])}")
        return fork, tuple(sorted(restored))
    except (StockadeError, OSError) as error:
        fork.discard()
        raise _blamed(error) from error
    except BaseException:
        fork.discard()
        raise


def is_hosts_fault(error: Exception) -> bool:
    """Whether an error about an attempt's changes is the host's: a full disk, too many open files."""
    return getattr(error, "errno", 0) in HOSTS_FAULT


def _blamed(error: Exception) -> Exception:
    """Return the error that says that an attempt failed; the host's own troubles stay what they are."""
    if isinstance(error, JudgeFilesError) or is_hosts_fault(error):
        return error
    return JudgeFilesError("the judge's files cannot be restored in this attempt", hint=str(error))


def _restore_all_sections(fork: Workspace, matches: Callable[[str], bool]) -> set[str]:
    """Restore what test runners read in files that say other things too."""
    restored, whole = set(), set()
    changed = [change for change in fork.changes() if os.path.basename(change.path) in SECTIONS]
    with fork.files as files:
        for change in changed:
            path = f"{fork.path}/{change.path}"
            base = None if change.kind == "added" else _read_base(fork.path, change.path)
            try:
                made = None
                if change.kind != "deleted":
                    made = restore_sections(os.path.basename(path), base, files.read(path))
                elif base is not None:
                    whole.add(change.path)
            except (ValueError, OSError):
                whole.add(change.path)
            else:
                if made is not None:
                    files.write(path, made, replace=True)
                    restored.add(change.path)
    if whole:
        restored |= {change.path for change in fork.revert(lambda path: path in whole)}
    return restored


def _read_base(tree: str, path: str) -> bytes | None:
    """Return the base's version, through no link; None if it is no plain file."""
    parent, name = dirwalk.split(path)
    root = os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with (
            contextlib.suppress(OSError),
            dirwalk.listed(root, parent) as directory,
            dirwalk.content(directory, name) as file,
        ):
            return os.read(file, LARGEST + 1)
    finally:
        os.close(root)
    return None


def run_verify(
    request: JudgeRequest,
    workspace: Workspace | None,
    on_line: Lines,
    stop: Callable[[], bool],
    log: BinaryIO | None = None,
) -> VerifyRun:
    """Run a verify command over a workspace, which is removed at the end, or over the project as it is.

    Errors of the sandbox are raised as they are.
    """
    place = f"/tmp/stockade-report-{os.urandom(16).hex()}"
    began = time.monotonic()

    def must_end(_idle: float) -> str:
        if stop():
            return "cancelled"
        late = time.monotonic() - began > request.timeout
        return f"the verify command did not end within {request.timeout:g} seconds" if late else ""

    box = Sandbox(request.policy, on_exit="discard", resume=workspace, name=request.name, who=request.who)
    try:
        box.open()
    except BaseException:
        if workspace is not None:
            with contextlib.suppress(StockadeError):
                workspace.discard()
        raise
    output = _Output(on_line, log, keep_all=request.report == "stdout")
    try:
        _remove_old_report(request, box)
        environment = _report_variables(request, f"{place}.xml")
        process = box.start(["sh", "-c", request.command], env=environment, stderr=subprocess.PIPE)
        stopped, result = watch(process, output.take, output.take_error, must_end)
        output.finish()
        report, problem = _report_of(request, box, f"{place}.xml", output)
    finally:
        box.close()
    if result.outcome not in (Outcome.EXITED, Outcome.SIGNALLED):
        problem = problem or result.reason
    return VerifyRun(
        exit_code=result.exit_code,
        output=output.tail,
        report=report,
        problem=stopped or problem,
        receipt="" if result.receipt is None else result.receipt.id,
        ended=bool(stopped),
    )


def _report_variables(request: JudgeRequest, place: str) -> dict[str, str]:
    if request.report != "auto":
        return {}
    own = request.policy.env.get("PYTEST_ADDOPTS", "")
    return {"STOCKADE_REPORT": place, "PYTEST_ADDOPTS": f"{own} --junitxml={place}".strip()}


def _remove_old_report(request: JudgeRequest, box: Sandbox) -> None:
    """Remove what lies where the report is expected: an attempt could have written the report itself."""
    if request.report not in ("auto", "none", "stdout"):
        with contextlib.suppress(NotFoundError):
            box.files.remove(request.report, recursive=True)


def _report_of(request: JudgeRequest, box: Sandbox, place: str, output: _Output) -> tuple[Report | None, str]:
    """Return the report, or why there is none."""
    if request.report == "none":
        return None, ""
    try:
        if request.report == "stdout":
            data = output.whole()
        else:
            data = box.files.read(place if request.report == "auto" else request.report, limit=MOST_BYTES)
        return read_report(data), ""
    except NotFoundError:
        return None, "the command left no report"
    except (ReportError, OSError, StockadeError) as error:
        return None, clean(str(error))[:500]


class _Output:
    """What a verify command prints: lines as they come, the end of it, and a log, all bounded."""

    def __init__(self, on_line: Lines, log: BinaryIO | None, *, keep_all: bool) -> None:
        self._on_line = on_line
        self._log = log
        self._room = MOST_LOGGED
        self._keep_all = keep_all
        self._whole = bytearray()
        self._kept = bytearray()
        self._lines = {True: bytearray(), False: bytearray()}

    def take(self, piece: bytes) -> None:
        if self._keep_all and len(self._whole) <= MOST_BYTES:
            self._whole += piece
        self._add(piece, False)

    def take_error(self, piece: bytes) -> None:
        self._add(piece, True)

    def _add(self, piece: bytes, error: bool) -> None:
        self._kept = (self._kept + piece)[-MOST_OUTPUT:]
        if self._log is not None and self._room > 0:
            self._log.write(piece[: self._room])
            self._room -= len(piece)
        line = self._lines[error]
        line += piece
        *whole, rest = line.split(b"\n")
        for one in whole:
            self._tell(one)
        self._lines[error] = rest if len(rest) < MOST_OUTPUT else bytearray()
        if len(rest) >= MOST_OUTPUT:
            self._tell(rest)

    def finish(self) -> None:
        for line in self._lines.values():
            if line:
                self._tell(line)

    def _tell(self, line: bytes | bytearray) -> None:
        text = clean(line.decode("utf-8", "replace").rstrip("\r")[:2000]).replace("\n", "\\n")
        self._on_line(text)

    def whole(self) -> bytes:
        return bytes(self._whole)

    @property
    def tail(self) -> str:
        return clean(self._kept.decode("utf-8", "replace"))
