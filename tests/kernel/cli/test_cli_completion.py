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
from stockade.cli.ui import command_spec
from stockade.runs.register import register
from support.means import need_program
from support.screen import STOCKADE, seen
from support.supervisors import ID, supervisor

Complete = Callable[..., list[list[str]]]
SHELLS = ("bash", "zsh", "fish")


@pytest.fixture
def kept(workspace: Path) -> str:
    """The id of a workspace that can be completed."""
    return stockade.run(["sh", "-c", "echo 1 > new"], Policy(workspace=str(workspace))).workspace_id


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

    def complete(*lines: str) -> list[list[str]]:
        code = f"source {scripts['bash']}; compopt() {{ :; }}\n"
        for line in lines:
            last = ' ""' if line.endswith(" ") else ""
            code += f"COMP_WORDS=({line}{last}) COMP_CWORD=$(( {len(shlex.split(line + last)) - 1} ))\n"
            code += "_stockade; echo ${COMPREPLY[@]}\n"
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, cwd="/usr")
        assert done.stderr == ""
        return [answer.split() for answer in done.stdout.splitlines()]

    return complete


class TestBash:
    def test_the_commands(self, bash: Complete) -> None:
        every, one = bash("stockade ", "stockade wor")
        assert set(every) == {*cli.COMMANDS, "--help", "--version"} and one == ["workspaces"]

    def test_every_option_of_every_command(self, bash: Complete) -> None:
        offered = bash(*(f"stockade {command} -" for command in cli.COMMANDS))
        for (module, _), options in zip(cli.COMMANDS.values(), offered, strict=True):
            parser = importlib.import_module(module).build_parser()
            known = {name for action in parser._actions for name in action.option_strings}
            assert known <= set(options)

    def test_choices_files_and_what_is_free(self, bash: Complete) -> None:
        modes, files, free, parts, shells, profiles = bash(
            "stockade run --mode ",
            "stockade run --read li",
            "stockade run --timeout ",
            "stockade policy ",
            "stockade completion ",
            "stockade profiles ",
        )
        assert modes == ["overlay", "rw", "ro"] and "lib" in files and free == []
        assert (
            {"check", "schema"} <= set(parts)
            and "lib" not in parts
            and shells == ["bash", "fish", "zsh"]
            and "strict" in profiles
        )

    def test_a_command_line_of_its_own_after_the_dashes(self, bash: Complete) -> None:
        program, file = bash("stockade run -- bas", "stockade run -- cat li")
        assert "bash" in program and "lib" in file

    def test_ids(self, bash: Complete, kept: str, stockade_home: Path) -> None:
        first, begun, continued, run = bash(
            "stockade diff ", f"stockade commit {kept[:4]}", f"stockade run -w @{kept[:2]}", "stockade logs "
        )
        assert "lib" in bash("stockade diff li")[0] and "lib" in bash("stockade commit li")[0]
        assert first[0] == kept and begun[0] == kept and continued == [f"@{kept}"] and run == [kept]
        with supervisor(stockade_home, id=ID):
            assert bash("stockade kill ") == [[ID]]
        register.sweep(str(stockade_home))


def test_bash_completes_at_a_prompt(scripts: dict[str, Path], in_path: None, kept: str) -> None:
    """Really typed: bash itself splits the words, and takes @ for a word of its own."""
    lines = [
        f"source {scripts['bash']}",
        f"stockade run --mode=ov\t -w @{kept[:6]}\t -- true </dev/null",
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
        f"stockade run --mo\tov\t -w @{kept[:6]}\t -- true </dev/null",
        f"cd {tmp_path}; touch some-new-path",
        "stockade diff --no-pager some-n\t; echo",
        f"stockade diff --no-pager --stat {kept[:6]}\t; echo",
        f"stockade disc\t{kept[:6]}\t; echo",
        "exit\n",
    ]
    _, screen = seen(
        ["zsh", "-f", "-i"], typed="\n".join(lines).encode(), columns=200, environ={"TERM": "dumb"}
    )
    assert "overlay" in screen and f"@{kept} " in screen, screen
    assert "stockade diff --no-pager some-new-path" in screen and f"--stat {kept}" in screen, screen
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
        for command in command_spec.commands():
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
