"""The GitHub Action: its steps, run as a runner runs them, and what hostile commands can do to the runner."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

import pytest
import yaml

from stockade.host import advice
from support import wheelhouse
from support.means import applies
from support.paths import ROOT
from support.wheel import call

applies(os.geteuid() != 0, "the jobs of a runner are an ordinary user's")

ACTION = ROOT / "action.yml"
INPUT = re.compile(r"\$\{\{ inputs\.([a-z-]+) \}\}")
STOP = re.compile(r"^::stop-commands::([0-9a-f]{32})$", re.MULTILINE)

Job = Callable[..., "Finished"]


def definition() -> dict[str, Any]:
    """The action as the runner reads it."""
    return dict(yaml.safe_load(ACTION.read_text()))


class Finished:
    """What a step left: its output, and the files through which it talks to the runner."""

    def __init__(self, done: CompletedProcess[str], files: Path) -> None:
        self.code, self.printed = done.returncode, done.stdout
        self.summary = (files / "GITHUB_STEP_SUMMARY").read_text()
        self.outputs = dict(
            line.split("=", 1) for line in (files / "GITHUB_OUTPUT").read_text().splitlines() if line
        )


def step(name: str, place: Path, project: Path, inputs: dict[str, str], **environment: str) -> Finished:
    """Run one step of the action, in the environment that a runner gives it."""
    action = definition()
    given = {key: str(one.get("default", "")) for key, one in action["inputs"].items()} | inputs
    (found,) = (one for one in action["runs"]["steps"] if one["name"] == name)
    files = {key: place / key for key in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT", "GITHUB_PATH")}
    for file in files.values():
        file.write_text("")
    own = {
        key: INPUT.sub(lambda match: given[match[1]], value) for key, value in found.get("env", {}).items()
    }
    own |= {key: str(file) for key, file in files.items()} | environment
    own |= {"GITHUB_ACTION_PATH": str(ROOT), "RUNNER_TEMP": str(place / "temp"), "HOME": str(place / "home")}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", found["run"]],
        cwd=project,
        env=os.environ | own | {"STOCKADE_HOME": "", "XDG_STATE_HOME": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Finished(done, place)


@pytest.fixture(scope="module")
def place(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runner on which the first steps have succeeded."""
    place = tmp_path_factory.mktemp("runner")
    for name in ("temp", "home", "project"):
        (place / name).mkdir()
    wheels = wheelhouse.fill(place / "wheels", wheelhouse.STOCKADE)
    (wheel,) = dist.glob("*.whl")
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    installed = step("Install Stockade", place, place, {"package": str(wheel)}, PATH=path, **offline)
    assert installed.code == 0, installed.printed
    assert (place / "GITHUB_PATH").read_text() == f"{place}/temp/stockade/bin\n"
    checked = step("Check the walls", place, place, {})
    assert checked.code == 0 and "can enforce the default policy" in checked.printed, checked.printed
    return place


@pytest.fixture
def job(place: Path, tmp_path: Path) -> Job:
    """Runs commands in a checkout, as the action does."""
    project = tmp_path / "checkout"
    (project / ".git").mkdir(parents=True)
    (project / ".git/config").write_text("the token\n")

    def run(commands: str, **inputs: str) -> Finished:
        return step("Run in a sandbox", place, project, {"run": commands, **inputs})

    return run


def test_the_schema_of_actions_knows_every_key() -> None:
    scripts = Path(sysconfig.get_path("scripts"))
    done = call([str(scripts / "check-jsonschema"), "--builtin-schema", "vendor.github-actions", str(ACTION)])
    assert done.returncode == 0, done.stdout


def test_no_input_is_part_of_a_script() -> None:
    action = definition()
    scripts = [one["run"] for one in action["runs"]["steps"] if "run" in one]
    assert len(scripts) == 3 and not any("${{" in script for script in scripts)
    used = set(INPUT.findall(ACTION.read_text())) | {"artifact"}
    assert used == set(action["inputs"]), "an input that no step reads"


def test_a_run_has_its_exit_code_a_summary_and_a_receipt_that_verifies(job: Job, place: Path) -> None:
    done = job("echo inside\ncat .git/config || true\necho new > made.txt\nexit 3")
    assert done.code == 3 and "inside" in done.printed
    assert "the token" not in done.printed
    assert (done.outputs["outcome"], done.outputs["exit-code"]) == ("exited", "3")
    assert "### Stockade: exited with 3" in done.summary
    assert "| network.none | own network namespace |" in done.summary
    assert "<code>added made.txt</code>" in done.summary
    receipts = Path(done.outputs["receipts"])
    assert {file.name for file in receipts.iterdir()} == {"receipt.json", "key.pem", "result.json"}
    stockade = str(place / "temp/stockade/bin/stockade")
    verify = [stockade, "verify", str(receipts / "receipt.json"), "--key", str(receipts / "key.pem")]
    verified = call([*verify, "--require", "network.none"])
    assert verified.returncode == 0, verified.stdout


def test_a_policy_that_cannot_be_enforced_runs_nothing(job: Job, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[workspace]\npath = "checkout"\n[limits]\nfiles = 99999999\n')
    done = job("echo never", policy=str(policy))
    assert done.code == 125 and "never" not in done.printed.splitlines(), done.printed
    assert "::error title=Stockade::nothing was run: " in done.printed
    assert done.outputs["outcome"] == "setup-failed"
    assert "### Stockade: " in done.summary


def test_what_the_commands_print_is_shown_and_not_obeyed(job: Job) -> None:
    done = job("printf '::add-mask::a\\n::error::planted\\n'; printf 'no line end' >&2; env")
    (token,) = STOP.findall(done.printed)
    before, between = done.printed.split(f"::stop-commands::{token}\n")
    inside, after = between.split(f"\n::{token}::\n")
    assert "::error::planted" in inside and "::" not in before + after
    assert token not in inside, "the commands could switch the runner on again"
    assert "GITHUB_" not in inside and "RUNNER_" not in inside


def test_names_of_files_are_text_on_the_page_of_the_job(job: Job) -> None:
    name = "<img src=x onerror=alert(1)>|`[a](b)\\n# heading"
    done = job(f"touch \"$(printf '{name}')\"")
    assert done.code == 0, done.printed
    (shown,) = re.findall(r"<code>added (.*?)</code>", done.summary)
    assert not set("<>|`[]()\n#") - {"#"} & set(shown)
    assert "#" not in shown.replace("&#", "") and "&#60;img src=x onerror=alert" in shown


@pytest.fixture
def script() -> ModuleType:
    """The steps as a module."""
    spec = importlib.util.spec_from_file_location("github_action", ROOT / "scripts/github_action.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_where_apparmor_restricts_user_namespaces_the_gate_alone_gets_a_profile(
    script: ModuleType, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no AppArmor here: a setting and a `sudo` that notes what it was asked for stand in for it.
    (tmp_path / "restriction").write_text("1\n")
    sudo = tmp_path / "sudo"
    sudo.write_text('#!/bin/sh\necho "$@" >> "$NOTES"\n[ "$1" = tee ] && cat >> "$NOTES"\nexit 0\n')
    sudo.chmod(0o755)
    notes = tmp_path / "notes"
    monkeypatch.setenv("NOTES", str(notes))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("RUNNER_TEMP", str(place / "temp"))
    monkeypatch.setattr(script, "RESTRICTION", tmp_path / "restriction")
    assert script.check() == 0
    (gate,) = (place / "temp/stockade").glob("lib/*/site-packages/stockade/gate/bin/stockade-gate")
    tee, *profile, parser = notes.read_text().splitlines()
    assert tee == "tee /etc/apparmor.d/stockade-gate"
    assert "\n".join(profile).strip() == advice.apparmor_profile(str(gate)).strip()
    assert parser == "apparmor_parser -r /etc/apparmor.d/stockade-gate"
