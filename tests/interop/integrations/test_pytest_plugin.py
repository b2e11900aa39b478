"""pytest with the plugin: workers and tests in sandboxes, a report of what they wrote, no cost without."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from stockade import Workspace

pytest_plugins = ["pytester"]

PLUGINS = ("-p", "no:cacheprovider", "-p", "xdist", "-p", "stockade.integrations.pytest_plugin")
#: Tests of a project: some write where they should not, and all say where they are.
TESTS = """
    import os, pathlib

    def test_writes_beside_itself():
        pathlib.Path("stray.txt").write_text("1")
        pathlib.Path("data/golden.txt").write_text("changed")

    def test_writes_to_tmp_path(tmp_path):
        (tmp_path / "fine").write_text("1")
        assert str(tmp_path).startswith("/tmp/pytest-of-") or "STOCKADE_PYTEST_WORKER" not in os.environ

    def test_sees_no_home(ready):
        assert ready == "by conftest"
        assert not os.path.exists({secret!r})
        print(os.environ.get("SECRET_OF_THE_HOST"))
        assert "SECRET_OF_THE_HOST" not in os.environ
"""
CONFTEST = """
    import os, pathlib, pytest
    print("imported by", os.getpid())
    {act}

    @pytest.fixture
    def ready():
        return "by conftest"
"""


@pytest.fixture(autouse=True)
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load only the plugins that a test names: the others here take longer to import than tests to run."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


@pytest.fixture
def project(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, stockade_home: Path
) -> pytest.Pytester:
    """A project in a directory of its own, and a secret beside it."""
    monkeypatch.setenv("SECRET_OF_THE_HOST", "a-key")
    monkeypatch.setenv("HOME", str(stockade_home.parent))  # pytester makes the project itself the home
    secret = stockade_home.parent / "secret"
    secret.write_text("of the host")
    pytester.mkdir("data").joinpath("golden.txt").write_text("as it was")
    pytester.makepyfile(TESTS.format(secret=str(secret)))
    pytester.makeconftest(CONFTEST.format(act=""))
    return pytester


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run pytest in a process of its own, as a user would."""
    return pytester.runpytest_subprocess(*PLUGINS, *arguments)


def test_workers_run_in_sandboxes_and_what_tests_wrote_is_reported(project: pytest.Pytester) -> None:
    ran = run(project, "--stockade", "-n", "2", "--dist", "loadfile")
    ran.assert_outcomes(passed=3)
    ran.stdout.fnmatch_lines(
        [
            "*= stockade =*",
            "modified data/golden.txt",
            "added stray.txt",
            "kept aside: `stockade diff *` shows it*",
        ]
    )
    assert not (project.path / "stray.txt").exists()
    assert (project.path / "data/golden.txt").read_text() == "as it was"
    assert not list(project.path.rglob("__pycache__"))
    (kept,) = Workspace.list()
    assert kept.id in ran.stdout.str()
    kept.discard()


def test_tests_that_keep_to_tmp_path_leave_nothing(project: pytest.Pytester) -> None:
    ran = run(project, "--stockade", "-k", "writes_to")
    ran.assert_outcomes(passed=1)
    ran.stdout.fnmatch_lines(["tests wrote nothing outside of tmp_path"])
    assert Workspace.list() == []


def test_a_policy_file_says_what_workers_may_do(project: pytest.Pytester, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(f'env = {{ COLOUR = "green" }}\n[workspace]\npath = "{project.path}"\nmode = "ro"\n')
    project.makepyfile(
        "import os, pathlib, pytest\n"
        "def test_policy():\n"
        "    assert os.environ['COLOUR'] == 'green'\n"
        "    with pytest.raises(OSError):\n"
        "        pathlib.Path('stray.txt').write_text('1')\n"
    )
    run(project, f"--stockade={policy}").assert_outcomes(passed=1)


def test_a_failing_test_and_a_crashing_worker_are_reported_as_ever(project: pytest.Pytester) -> None:
    project.makepyfile(
        "import os\n"
        "def test_fails():\n    x = 1\n    assert x == 2\n"
        "def test_crashes():\n    open('before', 'w').close()\n    os._exit(3)\n"
        "def test_passes():\n    pass\n"
    )
    ran = run(project, "--stockade")
    ran.assert_outcomes(passed=1, failed=2)
    ran.stdout.fnmatch_lines(
        ["*assert 1 == 2", "*worker*crashed*test_crashes*", "*= stockade =*", "added before"]
    )
    for kept in Workspace.list():
        kept.discard()


class TestOutside:
    """The pytest outside runs nothing of the project."""

    ACT = "pathlib.Path('{place}').write_text('outside')"

    @pytest.mark.parametrize(("options", "escaped"), [((), True), (("--stockade",), False)])
    def test_a_conftest_runs_only_inside(
        self, project: pytest.Pytester, tmp_path: Path, options: tuple[str, ...], escaped: bool
    ) -> None:
        place = tmp_path / "escaped"
        act = f"try: {self.ACT.format(place=place)}\n    except OSError: pass"
        project.makeconftest(CONFTEST.format(act=act))
        run(project, *options, "-k", "writes_to").assert_outcomes(passed=1)
        assert place.exists() is escaped

    def test_a_module_of_the_project_with_our_name_runs_only_inside(
        self, project: pytest.Pytester, tmp_path: Path
    ) -> None:
        place = tmp_path / "escaped"
        act = f"import pathlib\ntry: {self.ACT.format(place=place)}\nexcept OSError: pass\n"
        (project.path / "stockade.py").write_text(act)
        words = [sys.executable, "-P", "-m", "pytest", *PLUGINS, "--stockade", "-k", "writes_to"]
        done = subprocess.run(words, cwd=project.path, capture_output=True, text=True, check=False)
        assert not place.exists()
        assert "= 1 passed" in done.stdout, done.stdout + done.stderr

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            (["--collect-only"], "--collect-only would run the project's code outside"),
            (["--pdb"], "--pdb would run the project's code outside"),
            (["-n", "0"], "-n 0 means no workers"),
            (["--fixtures"], "--fixtures would run the project's code outside"),
            (["--tx", "popen//python=python3", "-d"], "--tx names workers that are not Stockade's"),
            (["without xdist"], "needs pytest-xdist"),
        ],
    )  # fmt: skip
    def test_what_would_run_the_project_outside_is_refused(
        self, project: pytest.Pytester, tmp_path: Path, options: list[str], why: str
    ) -> None:
        place, plugins = tmp_path / "escaped", PLUGINS
        if options == ["without xdist"]:
            plugins, options = PLUGINS[:2] + PLUGINS[4:], []
        project.makepyfile(f"import pathlib\n{self.ACT.format(place=place)}\ndef test_it(): pass\n")
        ran = project.runpytest_inprocess(*plugins, "--stockade", *options)
        assert ran.ret != 0 and why in ran.stdout.str() + ran.stderr.str()
        assert not place.exists()


def test_a_path_after_the_option_is_not_taken_for_a_policy(project: pytest.Pytester) -> None:
    ran = project.runpytest_inprocess(*PLUGINS, "--stockade", "data")
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    ran.stderr.fnmatch_lines(["*--stockade data: is not a policy file; write `pytest data --stockade`*"])


def test_a_policy_that_cannot_be_kept_is_refused_before_a_worker_starts(
    project: pytest.Pytester, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("nett = []\n")
    ran = project.runpytest_inprocess(*PLUGINS, f"--stockade={policy}")
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    ran.stderr.fnmatch_lines(["*--stockade: no worker could start", "stockade: error:*nett*"])


def test_the_fixture_is_an_open_sandbox_over_tmp_path(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_box(stockade_sandbox, tmp_path):
            (tmp_path / "in").write_text("from outside")
            assert stockade_sandbox.run(["sh", "-c", "cat in; echo 1 > out"]).text == "from outside"
            assert [change.path for change in stockade_sandbox.workspace.diff()] == ["out"]
            assert not (tmp_path / "out").exists()
        """
    )
    run(pytester).assert_outcomes(passed=1)
    assert Workspace.list() == []


def test_the_body_of_a_marked_test_runs_in_a_sandbox_of_its_own(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    pytester.makepyfile(
        f"""
        import os, pathlib, pytest

        @pytest.mark.sandboxed
        @pytest.mark.parametrize("n", [1, 2])
        def test_inside(tmp_path, n):
            print("inside, number", n)
            assert not os.path.exists({str(secret)!r})
            (tmp_path / "file").write_text("1")
            assert os.getcwd() == str(tmp_path)

        @pytest.mark.sandboxed(policy={{"read": [{str(secret)!r}]}}, timeout=30)
        def test_its_own_policy():
            assert pathlib.Path({str(secret)!r}).read_text() == "of the host"

        @pytest.mark.sandboxed
        def test_fails():
            print("printed before")
            assert 1 + 1 == 3, "the sum is wrong"

        def test_outside():
            assert os.path.exists({str(secret)!r})
        """
    )
    ran = run(pytester, "--strict-markers")
    ran.assert_outcomes(passed=4, failed=1)
    ran.stdout.fnmatch_lines(["*the sum is wrong*", "*printed before*"])


def test_without_its_options_the_plugin_loads_nothing_and_changes_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_modules():
            loaded = {name for name in sys.modules if name.split(".")[0] == "stockade"}
            assert loaded <= {
                "stockade", "stockade._version", "stockade.errors", "stockade.integrations",
                "stockade.integrations.pytest_plugin",
            }

        def test_assertions_of_the_library_are_not_rewritten():
            import stockade.sandbox.sandbox
            assert type(stockade.sandbox.sandbox.__loader__).__name__ == "SourceFileLoader"
        """
    )
    run(pytester).assert_outcomes(passed=2)


def test_every_pytest_of_the_environment_has_the_plugin(request: pytest.FixtureRequest) -> None:
    (found,) = importlib.metadata.entry_points(group="pytest11", name="stockade")
    assert found.value == "stockade.integrations.pytest_plugin"
    assert request.config.pluginmanager.get_plugin("stockade") is not None, "and so has this one"
    assert request.config.option.stockade is None
