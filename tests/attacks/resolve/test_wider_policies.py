"""A policy of somebody else's never widens yours by a clause that nobody compared.

The somebody is a project's file that was not trusted, a policy under a ceiling, or a program that asks for
a sandbox. Each test shows first what the clause would do if it were agreed to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stockade
from stockade import Policy
from stockade.host import host
from support.cli import stockade_command
from support.means import need
from support.paths import ROOT

CLIENT = (ROOT / "src/stockade/inside/delegate_request.py").read_text()
ACCEPTED = '["files", "processes", "devices", "protect"]'
#: Prints the variables of the program, and those of a child that it asks for.
ASKS = (
    CLIENT
    + """
import os, sys
asked, names = json.loads(sys.argv[1]), sys.argv[2:]
prints = "import json, os, sys; print(json.dumps({name: os.environ.get(name) for name in sys.argv[1:]}))"
try:
    told = delegate(["python3", "-c", prints, *names], asked)
    theirs = json.loads(told.stdout)
except PermissionError as error:
    theirs = {"refused": str(error)}
print(json.dumps([{name: os.environ.get(name) for name in names}, theirs]))
"""
)


class Place:
    """A home with the user's policy, and a project in it that somebody else wrote."""

    def __init__(self, home: Path) -> None:
        self.home, self.project = home, home / "project"
        self.project.mkdir(parents=True)

    def own(self, text: str, name: str = "config") -> None:
        path = self.home / f".config/stockade/{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def theirs(self, text: str) -> None:
        (self.project / "stockade.toml").write_text(text)

    def run(self, *command: str, **variables: str) -> tuple[int, str, str]:
        return self._stockade("run", "-q", *command, **variables)

    def trusted(self, *command: str, **variables: str) -> tuple[int, str, str]:
        """The control: what becomes of it once the user has agreed."""
        code, _, problem = self._stockade("trust", str(self.project / "stockade.toml"))
        assert code == 0, problem
        try:
            return self.run(*command, **variables)
        finally:
            self._stockade("trust", "--revoke", str(self.project / "stockade.toml"))

    def _stockade(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        clean = {"HOME": str(self.home), "XDG_CONFIG_HOME": str(self.home / ".config")}
        done = stockade_command(*arguments, cwd=self.project, env={**clean, **variables})
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "home")


class TestProject:
    def test_it_does_not_use_up_what_the_user_accepts_where_nothing_better_exists(self, place: Place) -> None:
        """The user's accept is for machines without namespaces. This is none."""
        need(host().has("userns") and host().has("scopes"), "namespaces and Landlock's scopes on one machine")
        place.own(f'accept = {ACCEPTED}\n[workspace]\npath = "{place.project}"\nmode = "ro"\n')
        place.theirs('backend = "landlock"\n')
        # Without namespaces the program learns how large a file is that it may not open.
        looks = ("--", "stat", "-c", "%s", "/etc/shadow")
        code, out, _ = place.trusted(*looks)
        assert (code, bool(out)) == (0, True), "the control: the weaker walls show it"
        code, out, problem = place.run(*looks)
        assert (code, out) == (125, "")
        assert "asks for more than your own policy allows" in problem
        assert 'backend = "landlock"' in problem and "files" in problem and "native" in problem
        place.theirs('backend = ["landlock", "native"]\n')
        assert place.run("--", "true")[0] == 125
        place.theirs('backend = ["landlock", "bwrap", "native"]\n')
        assert place.run(*looks)[1] == "", "the best of all of them is what auto takes"
        place.theirs('backend = "native"\n')
        assert place.run("--", "true")[0] == 0

    def test_it_does_not_change_a_variable_of_the_users(self, place: Place) -> None:
        place.own('env = { REGISTRY = "https://mine" }\npass_env = ["PROXY"]\n')
        show = ("--", "sh", "-c", "echo $REGISTRY $PROXY $OWN")
        place.theirs('env = { REGISTRY = "https://theirs" }\n')
        assert place.trusted(*show)[1] == "https://theirs\n"
        code, out, problem = place.run(*show)
        assert (code, out) == (125, "") and 'env.REGISTRY = "https://theirs"' in problem
        place.theirs('env = { PROXY = "theirs" }\n')
        assert place.trusted(*show, PROXY="mine")[1] == "https://mine theirs\n"
        code, out, problem = place.run(*show, PROXY="mine")
        assert (code, out) == (125, "") and 'env.PROXY = "theirs"' in problem
        # Variables that the user says nothing about are the project's to set, and flags are the user's.
        place.theirs('env = { OWN = "theirs", REGISTRY = "https://mine" }\n')
        assert place.run(*show, PROXY="mine")[1] == "https://mine mine theirs\n"
        assert place.run("--env", "REGISTRY=flag", *show)[1] == "flag theirs\n"

    def test_it_does_not_get_the_hosts_value_of_what_the_user_sets(self, place: Place) -> None:
        place.own('env = { TOKEN = "none" }\n')
        place.theirs('pass_env = ["TOKEN"]\n')
        code, out, problem = place.run("--", "sh", "-c", "echo $TOKEN", TOKEN="secret")
        assert "secret" not in out and (code == 125) == ("pass_env" in problem)

    def test_it_does_not_give_up_that_changes_are_kept(self, place: Place) -> None:
        place.own(f'[workspace]\npath = "{place.project}"\ndurable = true\n')
        place.theirs("[workspace]\ndurable = false\n")
        assert place.trusted("--", "true")[0] == 0
        code, _, problem = place.run("--", "true")
        assert code == 125 and "workspace.durable = false" in problem

    def test_it_does_not_write_what_the_users_profile_shows_read_only(self, place: Place) -> None:
        """`dev` shows ~/go/bin read-only also inside a writable ~/go; `strict` says nothing about it."""
        (place.home / "go/bin").mkdir(parents=True)
        place.own(f'profile = "dev"\nwrite = ["{place.home}/go"]\n')
        puts = ("--", "sh", "-c", f"echo >{place.home}/go/bin/ls")
        assert place.run(*puts)[0] != 0
        place.theirs('profile = "strict"\n')
        assert place.trusted(*puts)[0] == 0
        (place.home / "go/bin/ls").unlink()
        code, _, problem = place.run(*puts)
        assert code == 125 and f"write {place.home}/go/bin" in problem
        assert not (place.home / "go/bin/ls").exists()

    def test_it_does_not_make_optional_what_keeps_a_name_from_being_written(self, place: Place) -> None:
        """The user's run is refused while the read-only directory is missing; theirs would let it be made."""
        out = place.home / "out"
        out.mkdir()
        place.own(f'write = ["{out}"]\nread = ["{out}/keys"]\n')
        place.theirs(f'read = ["{out}/keys?"]\n')
        puts = ("--", "sh", "-c", f"mkdir {out}/keys && echo >{out}/keys/mine")
        assert place.trusted(*puts)[0] == 0
        (out / "keys/mine").unlink()
        (out / "keys").rmdir()
        code, _, problem = place.run(*puts)
        assert code == 125 and f"write {out}/keys" in problem
        assert not (out / "keys").exists()


class TestCeiling:
    def test_a_named_backend_is_not_weaker_than_those_the_ceiling_allows(self, place: Place) -> None:
        place.own(f'[ceiling]\naccept = {ACCEPTED}\nworkspace = {{ path = "~", mode = "rw" }}\n', "policies")
        place.own(f'accept = {ACCEPTED}\nworkspace = {{ path = "{place.project}", mode = "ro" }}\n')
        code, _, problem = place.run("--backend", "landlock", "--", "true")
        assert code == 125 and "exceeds the ceiling" in problem and 'backend = "landlock"' in problem
        assert place.run("--backend", "native", "--", "true")[0] == 0

    def test_a_variable_that_the_ceiling_sets_has_no_other_value(self, place: Place) -> None:
        place.own(
            '[ceiling]\nworkspace = "~/project"\nenv = { REGISTRY = "mine" }\npass_env = ["TOKEN"]\n',
            "policies",
        )
        bare = ["run", "-q", "-p", str(place.project / "own.toml")]
        for text, fits in {
            'env = { REGISTRY = "mine", TOKEN = "less" }': True,
            'env = { REGISTRY = "mine" }\npass_env = ["TOKEN"]': True,
            'pass_env = ["TOKEN"]': False,
            'env = { REGISTRY = "other" }': False,
            'pass_env = ["REGISTRY"]': False,
        }.items():
            (place.project / "own.toml").write_text(text + "\n")
            code, _, problem = place._stockade(*bare, "--", "true")
            assert (code == 0) == fits and fits != ("exceeds the ceiling" in problem), (text, problem)


def variables(policy: Policy, asked: dict[str, Any], *names: str, **options: Any) -> tuple[Any, Any]:
    """What the program has, and what its child has."""
    result = stockade.run(["python3", "-c", ASKS, json.dumps(asked), *names], policy, **options)
    assert result.ok, result.stderr.decode()
    own, theirs = json.loads(result.text)
    return own, theirs


class TestChild:
    """What a program never saw of the host's environment, no sandbox that it asks for sees either."""

    def test_it_gets_the_values_of_its_parent_and_never_the_hosts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("TOKEN", "TERM", "OTHER"):
            monkeypatch.setenv(name, "the host's")
        policy = Policy(delegate=True, env={"TOKEN": "masked", "TERM": "dumb"}, pass_env=["TOKEN", "OTHER"])
        names = ("TOKEN", "TERM", "OTHER")
        own, theirs = variables(policy, {"pass_env": ["TOKEN", "OTHER"]}, *names)
        assert own == {"TOKEN": "masked", "TERM": "dumb", "OTHER": "the host's"}
        assert theirs == own
        assert variables(policy, {}, *names)[1] == {"TOKEN": None, "TERM": "dumb", "OTHER": None}
        # Its own words are its own, as they are for any command that the program starts.
        _, theirs = variables(policy, {"env": {"TOKEN": "mine"}, "pass_env": ["TOKEN"]}, *names)
        assert theirs == {"TOKEN": "mine", "TERM": "dumb", "OTHER": None}

    def test_a_variable_that_only_the_run_was_given_covers_the_hosts_too(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TOKEN", "the host's")
        policy = Policy(delegate=True, pass_env=["TOKEN"])
        own, theirs = variables(policy, {"pass_env": ["TOKEN"]}, "TOKEN", env={"TOKEN": "masked"})
        assert own == theirs == {"TOKEN": "masked"}

    def test_a_variable_of_the_host_that_is_new_since_refuses_the_child(
        self, monkeypatch: pytest.MonkeyPatch, workspace: Path
    ) -> None:
        names = ("LATE", "TZ")
        for name in names:
            monkeypatch.delenv(name, raising=False)
        policy = Policy(delegate=True, pass_env=["LATE"], write=[str(workspace)])
        sign = workspace / "go"
        waits = f"import time; print(flush=True)\nwhile not os.path.exists({str(sign)!r}): time.sleep(0.01)\n"

        def begun(_: bytes) -> None:
            for name in names:
                monkeypatch.setenv(name, "the host's")
            sign.touch()

        script = ASKS.replace("asked, names", f"{waits}asked, names")
        asks = ["python3", "-c", script, json.dumps({"pass_env": ["LATE"]}), *names]
        result = stockade.run(asks, policy, on_stdout=begun, timeout=30)
        assert result.ok, result
        own, theirs = json.loads(result.text)
        assert own == {"LATE": None, "TZ": None}
        assert "TZ" in theirs["refused"] and "the host's" not in theirs["refused"]

    def test_it_asks_for_no_variable_that_its_parent_does_not_have(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SECRET", "the host's")
        _, theirs = variables(Policy(delegate=True), {"pass_env": ["SECRET"]}, "SECRET")
        assert "SECRET" in theirs["refused"] and "the host's" not in theirs["refused"]
