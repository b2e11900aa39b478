"""Stockade in pytest: workers in sandboxes, tests in sandboxes, and a sandbox as a fixture.

    pytest --stockade            run the tests in a worker of pytest-xdist, inside a sandbox
    pytest --stockade -n 4       in four workers, each in its own sandbox
    pytest --stockade=ci.toml    with the policy of a file

The workers import the project, its conftest files included, and run its tests. The pytest outside only hands
out the tests and reports: it reads the project's configuration and loads the plugins that this names, but
imports no conftest and collects no test. At the end it lists what tests wrote in the project's directory,
outside of tmp_path.

pytest loads this module in every session of an environment that has Stockade, so it imports nothing more.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from stockade.policy.model import PolicyLike
    from stockade.sandbox.sandbox import Sandbox

#: The command line of a worker's sandbox sets it, and nothing else does.
_INSIDE = "STOCKADE_PYTEST_WORKER"
#: Gives each worker a file for its result, also one that replaces a worker that crashed.
_WORKER = 'report=$(mktemp "$1/XXXXXXXX") && shift && exec "$@" 3>"$report"'
#: What workers of xdist usually inherit, and pytest obeys.
_PASSED = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")
#: Options that make this pytest collect tests itself, by their names in the configuration.
_OUTSIDE = {
    "collectonly": "--collect-only",
    "looponfail": "--looponfail",
    "show_fixtures_per_test": "--fixtures-per-test",
    "showfixtures": "--fixtures",
    "usepdb": "--pdb",
}
_SHOWN = 50
_REPORTS = pytest.StashKey[Path]()
_MARKER = (
    "sandboxed(policy=None, timeout=None): run the body of the test in its own sandbox, with this policy or "
    "that of the fixture stockade_policy"
)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add --stockade."""
    # pytest rewrites the assertions of every module of a package that has a plugin. Ours are not tests:
    # Stockade must run under pytest as it runs elsewhere, and start as quickly.
    getattr(pluginmanager.rewrite_hook, "_must_rewrite", set()).discard("stockade")
    parser.getgroup("stockade").addoption(
        "--stockade",
        nargs="?",
        const="",
        metavar="POLICY",
        help="run the tests in workers of pytest-xdist that are in sandboxes, with the policy of a TOML "
        "file; list what tests wrote outside of tmp_path",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


def _in_worker() -> bool:
    return _INSIDE in os.environ


def _hands_out(config: pytest.Config) -> bool:
    """Whether this pytest is the one outside whose workers are in sandboxes."""
    namespace = getattr(config, "option", config.known_args_namespace)
    return getattr(namespace, "stockade", None) is not None and not _in_worker()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Leave the project's conftest files to the workers."""
    if getattr(early_config.known_args_namespace, "stockade", None) is not None and not _in_worker():
        early_config.known_args_namespace.noconftest = True


@pytest.hookimpl(tryfirst=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> None:
    """Refuse to collect a file outside: that would run it."""
    if _hands_out(parent.config):
        raise pytest.UsageError(
            f"--stockade: {file_path} was not collected, because that would run it outside"
        )


def pytest_cmdline_main(config: pytest.Config) -> None:
    """Make xdist start its workers in sandboxes. xdist has decided by now how many there are."""
    if _in_worker():
        config.option.basetemp = None  # the directory outside; workers have a private /tmp
    elif _hands_out(config):
        _choose_workers(config)


def _choose_workers(config: pytest.Config) -> None:
    option = config.option
    if not config.pluginmanager.hasplugin("dsession") and not config.pluginmanager.hasplugin("xdist"):
        raise pytest.UsageError("--stockade needs pytest-xdist: pip install 'stockade[pytest]'")
    for name, flag in _OUTSIDE.items():
        if getattr(option, name, False):
            raise pytest.UsageError(f"--stockade: {flag} would run the project's code outside of the sandbox")
    if option.numprocesses == 0:
        raise pytest.UsageError("--stockade: -n 0 means no workers; write -n 1, or leave -n out")
    specs = option.tx if option.numprocesses or option.tx else ["popen"]
    if any(spec != "popen" for spec in specs):
        raise pytest.UsageError("--stockade: --tx names workers that are not Stockade's; write -n instead")
    import tempfile

    reports = Path(tempfile.mkdtemp(prefix="stockade-pytest-"))
    config.stash[_REPORTS] = reports
    config.add_cleanup(lambda: _remove(reports))
    option.tx = [_spec(config, reports)] * len(specs)
    option.numprocesses = len(specs)  # xdist gives up after four times as many crashes
    if option.dist == "no":
        option.dist = "load"


def _remove(directory: Path) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)


def _sandbox_command(config: pytest.Config, *options: str) -> list[str]:
    """Return the command that runs this Python in a sandbox of the project."""
    policy = config.option.stockade
    if policy and not policy.endswith(".toml"):
        raise pytest.UsageError(
            f"--stockade {policy}: is not a policy file; write `pytest {policy} --stockade`, or "
            "--stockade=FILE.toml"
        )
    chosen = ["-p", os.path.abspath(policy)] if policy else ["-w", str(config.rootpath)]
    passed = [word for name in _PASSED if name in os.environ for word in ("--pass-env", name)]
    return [
        # -P: a project may have a module of the name `stockade`, which must not run here.
        *(sys.executable, "-P", "-m", "stockade", "run", "-q", *options, *chosen, *passed),
        # The plugin itself, which an editable install keeps elsewhere.
        *("--read", str(Path(__file__).parents[1])),
        *("--env", f"{_INSIDE}=1", "--env", "PYTHONDONTWRITEBYTECODE=1"),
        *("--name", "pytest", "--", sys.executable),
    ]


def _spec(config: pytest.Config, reports: Path) -> str:
    """Return what xdist starts for a worker, in the notation of execnet; first try whether it starts."""
    import subprocess

    tried = subprocess.run(
        [*_sandbox_command(config, "--discard"), "-c", ""], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        raise pytest.UsageError(f"--stockade: no worker could start\n{tried.stderr.strip()}")
    line = shlex.join(["sh", "-c", _WORKER, "sh", str(reports), *_sandbox_command(config, "--json-fd", "3")])
    if "//" in line:
        raise pytest.UsageError(f"--stockade: xdist cannot start a worker whose command has // in it: {line}")
    return f"popen//python={line}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List what the tests of each worker wrote in the project's directory."""
    reports = config.stash.get(_REPORTS, None)
    if reports is None:
        return
    write = terminalreporter.write_line
    terminalreporter.section("stockade")
    found = [_report(file) for file in sorted(reports.iterdir())]
    for report in found:
        if report is None:
            write("a worker's sandbox ended before it could report", red=True)
            continue
        changes = report["changes"]
        for change in changes[:_SHOWN]:
            write(f"{change['kind']} {ascii(change['path'])[1:-1]}", yellow=True)
        if len(changes) > _SHOWN:
            write(f"and {len(changes) - _SHOWN} more", yellow=True)
        if changes:
            id = report["workspace"]
            write(f"kept aside: `stockade diff {id}` shows it, `stockade discard {id}` deletes it")
        elif report["outcome"] != "exited":
            write(f"a worker {report['outcome']}: {ascii(report.get('reason', ''))[1:-1]}", red=True)
    if all(report is not None and not report["changes"] for report in found):
        write("tests wrote nothing outside of tmp_path")


def _report(file: Path) -> dict[str, Any] | None:
    """Return the result of a worker's sandbox, which Stockade wrote outside; None if there is none."""
    import json

    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError:
        return None
    return {"changes": [], "workspace": "", **found}


@pytest.fixture
def stockade_policy(tmp_path: Path) -> PolicyLike:
    """The policy of `stockade_sandbox` and of sandboxed tests: tmp_path is the workspace. Override it."""
    from stockade.policy.model import Policy
    from stockade.policy.values import literal

    return Policy(workspace=literal(str(tmp_path)))


@pytest.fixture
def stockade_sandbox(stockade_policy: PolicyLike) -> Iterator[Sandbox]:
    """An open sandbox, whose changes are discarded after the test."""
    _refuse_inside()
    from stockade.sandbox.sandbox import Sandbox

    with Sandbox(stockade_policy, on_exit="discard") as box:
        yield box


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give a sandboxed test the fixture that has its policy."""
    if isinstance(item, pytest.Function) and item.get_closest_marker("sandboxed") is not None:
        item.fixturenames.append("stockade_policy")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test that is marked `sandboxed` in a sandbox of its own."""
    marker = pyfuncitem.get_closest_marker("sandboxed")
    if marker is None:
        return None
    _refuse_inside()
    from stockade.functions.sandboxed_function import sandboxed

    options, values = dict[str, Any](marker.kwargs), dict[str, Any](pyfuncitem.funcargs)
    policy = options.pop("policy", None) or values["stockade_policy"]
    arguments = {name: values[name] for name in pyfuncitem._fixtureinfo.argnames}
    call = sandboxed(
        policy,
        on_exit="discard",
        on_stdout=lambda piece: sys.stdout.write(piece.decode("utf-8", "replace")),
        on_stderr=lambda piece: sys.stderr.write(piece.decode("utf-8", "replace")),
        **options,
    )
    call(pyfuncitem.obj)(**arguments)
    return True


def _refuse_inside() -> None:
    if _in_worker():
        pytest.skip(
            "has a sandbox of its own, which a worker in a sandbox cannot make: run it without --stockade"
        )
