"""Completion in the shells themselves, and the manual page: both from the parsers of `--help`."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import stockade
from stockade import Policy, cli
from stockade.cli import words
from support.means import need_program
from support.screen import STOCKADE, seen
from support.supervisors import ID, supervisor

Complete = Callable[[str], list[str]]
SHELLS = ("bash", "zsh", "fish")


@pytest.fixture
def kept(workspace: Path) -> str:
    """The id of a workspace that can be completed."""
    return stockade.run(["sh", "-c", "echo 1 > new"], Policy(workspace=str(workspace))).workspace


@pytest.fixture
def in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stockade` is found by its name."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/stockade").symlink_to(STOCKADE)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What `stockade completion` prints, by shell."""
    directory = tmp_path_factory.mktemp("completion")
    found = {}
    for shell in SHELLS:
        done = subprocess.run([STOCKADE, "completion", shell], capture_output=True, text=True, check=True)
        found[shell] = directory / shell
        found[shell].write_text(done.stdout)
    return found


@pytest.fixture
def bash(scripts: dict[str, Path], in_path: None) -> Complete:
    """What bash's completion makes of a line, split into words as bash does."""

    def complete(line: str) -> list[str]:
        code = f"""source {scripts["bash"]}
        compopt() {{ :; }}
        COMP_WORDS=({line}{' ""' if line.endswith(" ") else ""})
        COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
        _stockade; printf '%s\\n' "${{COMPREPLY[@]}}" """
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, cwd="/usr")
        assert done.stderr == ""
        return done.stdout.split()

    return complete


class TestBash:
    def test_the_commands(self, bash: Complete) -> None:
        assert set(bash("stockade ")) == {*cli.COMMANDS, "--help", "--version"}
        assert bash("stockade wor") == ["workspaces"]

    @pytest.mark.parametrize("command", cli.COMMANDS)
    def test_every_option_of_every_command(self, bash: Complete, command: str) -> None:
        offered = set(bash(f"stockade {command} -"))
        parser = importlib.import_module(cli.COMMANDS[command][0]).parser()
        assert {name for action in parser._actions for name in action.option_strings} <= offered

    def test_choices_files_and_what_is_free(self, bash: Complete) -> None:
        assert bash("stockade run --mode ") == ["overlay", "rw", "ro"]
        assert bash("stockade run --read li") and "lib" in bash("stockade run --read li")
        assert bash("stockade run --timeout ") == []
        assert bash("stockade policy ") == ["check", "schema"]
        assert bash("stockade completion ") == ["bash", "fish", "zsh"]
        assert "strict" in bash("stockade profiles ")

    def test_a_command_line_of_its_own_after_the_dashes(self, bash: Complete) -> None:
        assert "bash" in bash("stockade run -- bas")
        assert "lib" in bash("stockade run -- cat li")

    def test_ids(self, bash: Complete, kept: str, stockade_home: Path) -> None:
        assert bash("stockade diff ")[0] == kept and bash(f"stockade commit {kept[:4]}")[0] == kept
        assert bash(f"stockade run -w @{kept[:2]}") == [f"@{kept}"]
        with supervisor(stockade_home, id=ID):
            assert bash("stockade kill ") == [ID]
        from stockade.sandbox import register

        register.sweep(str(stockade_home))


def test_bash_completes_at_a_prompt(scripts: dict[str, Path], in_path: None, kept: str) -> None:
    """Really typed: bash itself splits the words, and takes @ for a word of its own."""
    lines = [
        f"source {scripts['bash']}",
        f"stockade run --mode=ov\t -w @{kept[:6]}\t -- true",
        f"stockade disc\t{kept[:6]}\t; echo",
        "exit\n",
    ]
    _, screen = seen(["bash", "--norc", "--noprofile", "-i"], typed="\n".join(lines).encode(), columns=200)
    assert re.search(rf"run --mode=overlay +-w @{kept} +-- true", screen), screen
    assert f"stockade discard {kept} ; echo" in screen and "is discarded" in screen, screen


def test_zsh_completes_at_a_prompt(
    scripts: dict[str, Path], in_path: None, kept: str, tmp_path: Path
) -> None:
    need_program("zsh")
    setup = f'autoload -U compinit; compinit -u -d {tmp_path}/dump; eval "$(cat {scripts["zsh"]})"'
    lines = [
        setup,
        f"stockade run --mo\tov\t -w @{kept[:6]}\t -- true",
        f"stockade disc\t{kept[:6]}\t; echo",
        "exit\n",
    ]
    _, screen = seen(
        ["zsh", "-f", "-i"], typed="\n".join(lines).encode(), columns=200, environ={"TERM": "dumb"}
    )
    assert "overlay" in screen and f"@{kept} " in screen, screen
    assert f"workspace {kept} of" in screen and "is discarded" in screen, screen


def test_fish_completes(scripts: dict[str, Path], in_path: None, kept: str, tmp_path: Path) -> None:
    need_program("fish")

    def fish(line: str) -> list[str]:
        code = f"source {scripts['fish']}; complete -C {shlex.quote(line)}"
        environ = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
        done = subprocess.run(
            ["fish", "--no-config", "-c", code],
            capture_output=True, text=True, check=True, env={**os.environ, **environ}, cwd="/usr",
        )  # fmt: skip
        assert done.stderr == ""
        return [line.split("\t")[0] for line in done.stdout.splitlines()]

    assert set(fish("stockade ")) >= set(cli.COMMANDS)
    assert fish("stockade run --mode ") == ["overlay", "ro", "rw"]
    assert "--discard" in fish("stockade run --d")
    assert fish(f"stockade discard {kept[:4]}") == [kept]
    assert f"@{kept}" in fish("stockade run -w @")
    assert "bash" in fish("stockade run -- bas")


def test_no_shell_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ([], ["tcsh"], ["bash", "--list", "profiles"]):
        with pytest.raises(SystemExit) as end:
            cli.main(["completion", *wrong])
        assert end.value.code == 2


def test_ids_are_asked_for_in_the_middle_of_a_line_so_nothing_goes_wrong(
    stockade_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stockade_home.mkdir(mode=0o755)
    assert cli.main(["completion", "--list", "sandboxes"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.fixture(scope="module")
def page() -> str:
    """The source of the manual page."""
    return subprocess.run([STOCKADE, "man"], capture_output=True, text=True, check=True).stdout


class TestManual:
    def test_it_tells_of_every_command_and_option(self, page: str) -> None:
        plain = re.sub(r"\\f[BIR]", "", page).replace("\\-", "-")
        for command in words.commands():
            assert f'.SS "stockade {command.name}"' in page
            for option in command.options:
                assert ", ".join(option.names) in plain

    def test_groff_has_nothing_to_complain_of(self, page: str) -> None:
        groff = [need_program("groff"), "-man", "-ww", "-Tutf8", "-P-cbou"]
        done = subprocess.run(groff, input=page, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        shown = done.stdout
        assert "STOCKADE(1)" in shown and "stockade run -- python3 job.py" in shown

    def test_mandoc_finds_no_error(self, page: str) -> None:
        mandoc = [need_program("mandoc"), "-T", "lint", "-W", "warning"]
        done = subprocess.run(mandoc, input=page, capture_output=True, text=True, check=False)
        assert [line for line in done.stdout.splitlines() if "TH" not in line] == []
