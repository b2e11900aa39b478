"""Every test has a state directory of its own and leaves the host as it was."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from support import gatebuild, leaks, network, wheel
from support.installs import SYSTEM_PATH

FAILED = pytest.StashKey[bool]()
#: What is in here starts no process and makes no sandbox: there is nothing to be left.
UNIT = Path(__file__).parent / "unit"

# Time limits belong to the tests in performance/; elsewhere a busy machine is no failure.
hypothesis.settings.register_profile("stockade", deadline=None)
hypothesis.settings.load_profile("stockade")


def pytest_configure() -> None:
    # Under nohup and cron, and behind a shell's `&`, SIGINT is ignored, and programs inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Compiled modules are kept, whatever the caller prefers: a start without them takes twice as long,
    # and there are thousands.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    leaks.watch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count what was skipped, by reason: nothing is skipped silently."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="session", autouse=True)
def host_as_it_was(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The whole session leaves nothing. Temporary files go to a directory that no one else uses."""
    with pytest.MonkeyPatch.context() as patch:
        private = tmp_path_factory.mktemp("tmp", numbered=False)
        patch.setenv("TMPDIR", str(private))
        patch.setattr(tempfile, "tempdir", str(private))
        before = leaks.snapshot(final=True)
        yield
        left = leaks.settled(leaks.overgrown)
        leaks.quiesce()
        left += leaks.settled(lambda: sorted(leaks.snapshot(final=True) - before))
    leaks.end_strays()
    if left:
        pytest.fail("the session left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def stockade_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of this test; the library makes it."""
    home = tmp_path / "state"
    monkeypatch.setenv("STOCKADE_HOME", str(home))
    # Commands are the system's: what else is installed where the tests run is none of theirs.
    monkeypatch.setenv("PATH", SYSTEM_PATH)
    return home


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, stockade_home: Path) -> Iterator[None]:
    """No process, mount, cgroup, namespace, file or descriptor outlives the test."""
    if request.path.is_relative_to(UNIT):
        yield
        leaks.let_go_of_register()
        return
    members = leaks.family()
    before, gates = leaks.snapshot(stockade_home, members), leaks.residents(members)
    yield
    leaks.let_go_of_register()

    def left() -> list[str]:
        members = leaks.family()
        new = sorted(leaks.snapshot(stockade_home, members) - before)
        # The first use of the library connects it to its resident gate; what stays then is the base line.
        if new and leaks.residents(members) != gates:
            new = [sentence for sentence in new if not leaks.is_connection(sentence)]
        return new

    # A failed test's traceback keeps its objects alive; its failure is the news.
    if request.node.stash.get(FAILED, False):
        return
    remaining = leaks.settled(left)
    if remaining:
        pytest.fail("the test left behind:\n  " + "\n  ".join(remaining), pytrace=False)


@pytest.fixture
def swept(stockade_home: Path) -> Iterator[None]:
    """For tests that kill supervisors: what these leave in the register is for the next start to collect."""
    yield
    from stockade.runs.register import register

    register.sweep(str(stockade_home))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """An empty directory to work in, beside the state directory."""
    directory = tmp_path / "workspace"
    directory.mkdir()
    return directory


@pytest.fixture(scope="module")
def shared_internet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[network.Internet]:
    """A small internet for the tests of one module; `internet` is what they take."""
    with network.small_internet(tmp_path_factory.mktemp("internet")) as internet:
        yield internet


@pytest.fixture
def internet(shared_internet: network.Internet) -> network.Internet:
    """A small internet in which nothing has happened yet."""
    shared_internet.reset()
    return shared_internet


@pytest.fixture(scope="session")
def sanitized_gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gate that stops at the first memory error or undefined behaviour."""
    return gatebuild.sanitized(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="session")
def sabotaged_gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gate that leaves walls out on request."""
    return gatebuild.sabotaged(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the source distribution and the wheel, as they are handed out."""
    # `make test` builds them once for all its passes.
    made = os.environ.get(wheel.DIST)
    return Path(made) if made else wheel.build(tmp_path_factory.mktemp("dist"))
