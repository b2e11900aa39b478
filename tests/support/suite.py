"""Runs the whole suite: `make test`.

As the current user; for root also as an ordinary user, because half of what
Stockade promises is a promise to those without privileges. Several passes of each
go on at the same time: the tests wait as much as they compute, and each looks for
leaks only among what it has started itself. What does not depend on the user runs
once: what needs no sandbox as root, and what only an ordinary user's rights could
stop as that user. If a few fail then, the suite runs them
again by themselves, and the summary names them: a busy machine is no failure.
A wall that gives way only sometimes has given way, so an attack must then hold
ten times in a row. Only what compares times follows, one after the other.

Tests wait for the disk more than for anything else, though all they write goes
a moment later. So root lets them work on a file system of the usual kind that
lies in memory. What compares times works on the disk.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from support import as_user, wheel
from support.paths import ROOT

TIMED = "tests/performance"
ONCE = ("tests/style", "tests/unit")
OPTIONS = ["--durations=15"]
#: What does the same for every user, and needs no right: words, screens, faces for other programs, and the
#: judgement of bytes, names and files. If root runs the suite, only the ordinary user's passes run these.
FOR_ORDINARY_USERS = (
    "tests/attacks/egress/test_ask.py",
    "tests/attacks/egress/test_bodies_as_requests.py",
    "tests/attacks/egress/test_budget.py",
    "tests/attacks/egress/test_floods.py",
    "tests/attacks/egress/test_forged_records.py",
    "tests/attacks/egress/test_hostile_servers.py",
    "tests/attacks/egress/test_judged_requests.py",
    "tests/attacks/egress/test_live_rules.py",
    "tests/attacks/egress/test_names.py",
    "tests/attacks/egress/test_other_hosts.py",
    "tests/attacks/egress/test_proxy.py",
    "tests/attacks/egress/test_secrets.py",
    "tests/attacks/egress/test_urgent_bytes.py",
    "tests/attacks/functions/test_hostile_values.py",
    "tests/attacks/integrations/test_host_oracle.py",
    "tests/attacks/resolve/test_repositories.py",
    "tests/attacks/resolve/test_wider_policies.py",
    "tests/attacks/sandbox/test_attach_clients.py",
    "tests/attacks/workspace/test_holdback.py",
    "tests/attacks/workspace/test_holdback_handoffs.py",
    "tests/attacks/workspace/test_hook_paths.py",
    "tests/interop/egress/test_agents.py",
    "tests/interop/egress/test_judged_programs.py",
    "tests/interop/egress/test_learn.py",
    "tests/interop/egress/test_programs.py",
    "tests/interop/frameworks",
    "tests/interop/integrations",
    "tests/interop/mcp",
    "tests/interop/server/test_langchain.py",
    "tests/interop/server/test_mcp.py",
    "tests/interop/server/test_openapi.py",
    "tests/interop/server/test_osb.py",
    "tests/interop/server/test_own_client.py",
    "tests/interop/server/test_sdk_async.py",
    "tests/interop/server/test_sdk_code.py",
    "tests/interop/server/test_sdk_commands.py",
    "tests/interop/server/test_sdk_defaults.py",
    "tests/interop/server/test_sdk_files.py",
    "tests/interop/server/test_sdk_javascript.py",
    "tests/interop/server/test_sdk_network.py",
    "tests/interop/server/test_transport_rules.py",
    "tests/interop/test_agent_recipes.py",
    "tests/interop/test_loop_claude.py",
    "tests/interop/test_workspace_tools.py",
    "tests/kernel/agents",
    "tests/kernel/cli/test_advice.py",
    "tests/kernel/cli/test_ask_terminal.py",
    "tests/kernel/cli/test_change_list.py",
    "tests/kernel/cli/test_change_report.py",
    "tests/kernel/cli/test_cli_answers.py",
    "tests/kernel/cli/test_cli_attach.py",
    "tests/kernel/cli/test_cli_branches.py",
    "tests/kernel/cli/test_cli_cancel.py",
    "tests/kernel/cli/test_cli_completion.py",
    "tests/kernel/cli/test_cli_explain.py",
    "tests/kernel/cli/test_cli_hook.py",
    "tests/kernel/cli/test_cli_init.py",
    "tests/kernel/cli/test_cli_learn.py",
    "tests/kernel/cli/test_cli_logs.py",
    "tests/kernel/cli/test_cli_manners.py",
    "tests/kernel/cli/test_cli_receipts.py",
    "tests/kernel/cli/test_cli_streams.py",
    "tests/kernel/cli/test_cli_terminal.py",
    "tests/kernel/cli/test_cli_workspaces.py",
    "tests/kernel/cli/test_mistakes.py",
    "tests/kernel/cli/test_picture.py",
    "tests/kernel/cli/test_shell_prompt.py",
    "tests/kernel/cli/test_start_directory.py",
    "tests/kernel/cli/test_startup.py",
    "tests/kernel/cli/test_workspace_choice.py",
    "tests/kernel/egress/test_bounds.py",
    "tests/kernel/egress/test_datagrams.py",
    "tests/kernel/egress/test_decoders_alone.py",
    "tests/kernel/egress/test_interrupted_end.py",
    "tests/kernel/egress/test_live_rules.py",
    "tests/kernel/egress/test_names_inside.py",
    "tests/kernel/egress/test_process_names.py",
    "tests/kernel/egress/test_relay.py",
    "tests/kernel/egress/test_secrets.py",
    "tests/kernel/egress/test_stale_template.py",
    "tests/kernel/egress/test_upstream_proxy.py",
    "tests/kernel/functions/test_executor.py",
    "tests/kernel/gate/test_build.py",
    "tests/kernel/integrations",
    "tests/kernel/loop",
    "tests/kernel/pipeline",
    "tests/kernel/receipt/test_interrupted_records.py",
    "tests/kernel/sandbox/test_both_faces.py",
    "tests/kernel/sandbox/test_plausible_calls.py",
    "tests/kernel/server/test_telemetry.py",
    "tests/kernel/sessions/test_interpreter.py",
    "tests/kernel/sessions/test_shell.py",
    "tests/kernel/test_docs_names.py",
    "tests/kernel/test_examples.py",
    "tests/kernel/test_public_names.py",
)
#: Into how many passes at the same time root's tests are dealt out, and an ordinary user's.
ROOT_PARTS, USER_PARTS = 2, 4
#: More failures than this are no accident.
FEW = 10
#: How often an attack that failed once must hold.
ATTACK_TIMES = 10
MEMORY = Path("/dev/shm")
#: Several times what the tests of both users have written at once, in GiB; and of files, which are small.
ROOM = 6
MOST_FILES = 1_500_000


def main() -> int:
    # Ended from outside, the user and its files still go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="suite-", dir=as_user.PARENT))
        )
        directory.chmod(0o755)
        own, others = stack.enter_context(_in_memory(directory / "ram"))
        _say("the wheel, for everybody")
        dist = wheel.build(directory / "dist")
        dist.chmod(0o755)
        os.environ[wheel.DIST] = str(dist)
        name = pwd.getpwuid(os.geteuid()).pw_name
        user = base = None
        begun: list[Pass] = []
        if os.geteuid() == 0:
            user = stack.enter_context(as_user.ordinary_user())
            base = stack.enter_context(as_user.ground(user, dist))
            os.chown(others, user.pw_uid, user.pw_gid)
            # As root: the kernel counts the tasks of an ordinary user, and tests there let them run out.
            begun.append(_begin(stack, directory, own, f"{name}, once", "once", [*ONCE]))
            for number, files in enumerate(_parts(_files(TIMED, *ONCE), USER_PARTS)):
                report = f"part-{number}"
                begun.append(_begin(stack, base / "t", others, as_user.NAME, report, files, user))
            elsewhere: tuple[str, ...] = (TIMED, *ONCE, *FOR_ORDINARY_USERS)
        else:
            elsewhere = (TIMED,)
        for number, files in enumerate(_parts(_files(*elsewhere), ROOT_PARTS)):
            begun.append(_begin(stack, directory, own, name, f"part-{number}", files, live=number == 0))
        for each in begun:
            each.wait()
            _say(f"as {each.name}, at the same time as the others")
            each.show()
        passes = begun + [again for each in begun for again in _again(stack, each)]
        left: list[str] = []
        if user is not None and base is not None:
            _say(f"what is timed, as the ordinary user {as_user.NAME}")
            passes.append(
                _begin(stack, base / "t", base / "t", as_user.NAME, "timed", [TIMED], user, live=True)
            )
            passes[-1].wait()
            left = as_user.left_over(user)
        _say(f"what is timed, as {name}")
        passes.append(_begin(stack, directory, directory, name, "timed", [TIMED], live=True))
        passes[-1].wait()
        summaries = [each.summary() for each in passes]
    print()
    for line, _ in summaries:
        print(line)
    for thing in left:
        print(f"left behind by {as_user.NAME}: {thing}")
    return 0 if all(ok for _, ok in summaries) and not left else 1


def _files(*apart: str) -> list[str]:
    """Every file with tests that is none of these, and lies in none of them."""
    assert all((ROOT / place).exists() for place in apart), apart
    folders = tuple(f"{place}/" for place in apart)
    found = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py"))
    return [file for file in found if file not in apart and not file.startswith(folders)]


def _parts(files: list[str], count: int) -> list[list[str]]:
    """Deal files out to passes that take as long as each other.

    Neighbours take about as long, so they are dealt out in order, there and back.
    """
    parts: list[list[str]] = [[] for _ in range(count)]
    for file, part in zip(files, itertools.cycle([*parts, *reversed(parts)])):
        part.append(file)
    return parts


def _again(stack: contextlib.ExitStack, begun: Pass) -> list[Pass]:
    """Run what failed in a pass again and alone; that verdict counts instead."""
    failed = begun.failed()
    if not 0 < len(failed) <= FEW:
        return []
    _say(f"what failed as {begun.name}, by itself")
    tests = [*json.loads((begun.cache / "v/cache/lastfailed").read_bytes())]
    times = ATTACK_TIMES if any(test.startswith("tests.attacks") for test in failed) else 1
    begun.replaced = True
    passes: list[Pass] = []
    for number in range(times):
        again = begun.again(stack, f"{begun.cache.stem}-{number}", tests)
        again.wait()
        passes.append(again)
        if not again.summary()[1]:
            break
    return passes


class Pass:
    """One run of pytest, as somebody, on a ground of its own."""

    def __init__(
        self,
        directory: Path,
        ground: Path,
        name: str,
        report: str,
        arguments: list[str],
        user: pwd.struct_passwd | None,
        *,
        live: bool,
    ) -> None:
        #: Whether another pass has tried again what failed in this one.
        self.replaced = False
        self.name = name
        self._begin = partial(_begin, directory=directory, ground=ground, name=name, user=user, live=True)
        self._report = directory / f"{report}.xml"
        #: What pytest remembers, such as what failed.
        self.cache = self._report.with_suffix(".cache")
        self._output = None if live else self._report.with_suffix(".log")
        places = [
            f"--basetemp={ground / report}",
            f"--junitxml={self._report}",
            "-o",
            f"cache_dir={self.cache}",
        ]
        arguments = [*OPTIONS, *places, *arguments]
        with open(self._output, "wb") if self._output else contextlib.nullcontext() as output:
            if user is None:
                command = [sys.executable, "-m", "pytest", *arguments]
                self._process = subprocess.Popen(
                    command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            else:
                self._process = as_user.pytest(directory.parent, user, arguments, output)

    def again(self, stack: contextlib.ExitStack, report: str, tests: list[str]) -> Pass:
        """Begin another pass with some of its tests."""
        return self._begin(stack, report=report, arguments=tests)

    def show(self) -> None:
        """Print what pytest has printed, unless it did so while it ran."""
        if self._output is not None:
            print(self._output.read_text(errors="replace"), flush=True)

    def wait(self) -> None:
        self._process.wait()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def failed(self) -> list[str]:
        """Return the tests that did not pass; none also where there is no report."""
        with contextlib.suppress(OSError, ElementTree.ParseError):
            tests = ElementTree.parse(self._report).getroot().iter("testcase")
            bad = [
                test for test in tests if test.find("failure") is not None or test.find("error") is not None
            ]
            return [f"{test.attrib['classname']}::{test.attrib['name']}" for test in bad]
        return []

    def summary(self) -> tuple[str, bool]:
        """The counts, from the report that pytest wrote, and the verdict."""
        status, suite = self._process.wait(), self._counted()
        if not suite:
            return f"as {self.name}: pytest did not come to an end (exit code {status})", False
        total, failed, errors, skipped = (
            int(suite[key]) for key in ("tests", "failures", "errors", "skipped")
        )
        passed = total - failed - errors - skipped
        counts = f"{passed} passed, {failed} failed, {errors} errors, {skipped} skipped"
        after = f"; tried again: {', '.join(self.failed())}" if self.replaced else ""
        line = f"as {self.name}: {counts} in {float(suite['time']):.0f} s (exit code {status}){after}"
        return line, status == 0 or (self.replaced and status == 1)

    def _counted(self) -> dict[str, str]:
        try:
            return dict(next(ElementTree.parse(self._report).getroot().iter("testsuite")).attrib)
        except (OSError, ElementTree.ParseError, StopIteration):
            return {}


@contextlib.contextmanager
def _in_memory(place: Path) -> Iterator[tuple[Path, Path]]:
    """Two directories in memory; on the disk where that cannot be had."""
    place.mkdir()
    image = MEMORY / place.parent.name
    make = ["mkfs.ext4", "-q", "-F", "-N", str(MOST_FILES), str(image), f"{ROOM}G"]
    mount = ["mount", "-o", "loop,discard", str(image), str(place)]
    mounted = False
    try:
        if os.geteuid() == 0 and _free() >= ROOM << 30:
            mounted = all(
                subprocess.run(step, stdin=subprocess.DEVNULL, check=False).returncode == 0
                for step in (make, mount)
            )
    except FileNotFoundError as error:
        _say(f"{error.filename} is not there")
    finally:
        image.unlink(missing_ok=True)
    if not mounted:
        _say("the tests work on the disk")
    try:
        place.chmod(0o755)
        places = place / "own", place / "user"
        for each in places:
            each.mkdir()
        yield places
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", place], check=True)


def _free() -> int:
    """How much memory a file in memory may take."""
    limit = os.statvfs(MEMORY)
    available = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]
    return min(limit.f_bavail * limit.f_frsize, int(available) << 10)


def _begin(
    stack: contextlib.ExitStack,
    directory: Path,
    ground: Path,
    name: str,
    report: str,
    arguments: list[str],
    user: pwd.struct_passwd | None = None,
    *,
    live: bool = False,
) -> Pass:
    """Begin a pass that does not outlive the stack; `live` lets pytest print while it runs."""
    begun = Pass(directory, ground, name, report, arguments, user, live=live)
    stack.callback(begun.end)
    return begun


def _say(line: str) -> None:
    print(f"\n== {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
