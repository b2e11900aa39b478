"""Trust: the exact bytes of one file at one path, and how the command line tells it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import msgspec
import pytest

from stockade import cli
from stockade.errors import PolicyError, SetupError
from stockade.policy import Discovered, discover, trust
from stockade.policy.load import find_project


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return path


@pytest.fixture
def project(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = home / "project"
    path.mkdir()
    (path / "stockade.toml").write_text('net = "open"\n')
    monkeypatch.chdir(path)
    return path


def found(project: Path, state: Path) -> Discovered:
    return discover(str(project), {"STOCKADE_HOME": str(state)}, str(project.parent))


def agree(project: Path, state: Path) -> None:
    policy = find_project(str(project), str(project.parent))
    assert policy is not None
    trust.record(policy, str(state))


def test_a_trusted_policy_may_widen(project: Path, stockade_home: Path) -> None:
    with pytest.raises(PolicyError, match="asks for more"):
        found(project, stockade_home)
    agree(project, stockade_home)
    assert found(project, stockade_home).policy.net == "open"


@pytest.mark.parametrize("change", [b'net = "open"\n\n', b'net = "open"', b'net =  "open"\n'])
def test_a_byte_of_difference_ends_trust(project: Path, stockade_home: Path, change: bytes) -> None:
    agree(project, stockade_home)
    (project / "stockade.toml").write_bytes(change)
    with pytest.raises(PolicyError, match="asks for more"):
        found(project, stockade_home)


def test_trust_is_for_one_place_only(project: Path, stockade_home: Path) -> None:
    agree(project, stockade_home)
    for name, make in (("copy", Path.write_text), ("link", Path.symlink_to)):
        other = project.parent / name
        other.mkdir()
        source = (project / "stockade.toml").read_text() if name == "copy" else project / "stockade.toml"
        make(other / "stockade.toml", source)
        with pytest.raises(PolicyError, match="asks for more"):
            found(other, stockade_home)


def test_the_same_project_through_a_link_is_the_same_place(project: Path, stockade_home: Path) -> None:
    agree(project, stockade_home)
    (project.parent / "alias").symlink_to("project")
    assert found(project.parent / "alias", stockade_home).policy.net == "open"


def test_trust_taken_back_is_gone(project: Path, stockade_home: Path) -> None:
    agree(project, stockade_home)
    path = str(project / "stockade.toml")
    assert trust.revoke(path, str(stockade_home))
    assert not trust.revoke(path, str(stockade_home))
    with pytest.raises(PolicyError, match="asks for more"):
        found(project, stockade_home)


def test_records_of_a_state_that_others_can_write_are_refused(project: Path, stockade_home: Path) -> None:
    agree(project, stockade_home)
    stockade_home.chmod(0o777)
    with pytest.raises(SetupError, match="open to others"):
        found(project, stockade_home)


def test_the_record_is_private_and_complete(project: Path, stockade_home: Path) -> None:
    agree(project, stockade_home)
    names = sorted(path.name for path in stockade_home.iterdir())
    assert names == ["schema", "trust"]
    assert (stockade_home / "trust").stat().st_mode & 0o077 == 0


def test_any_path_can_be_recorded(home: Path, stockade_home: Path) -> None:
    for name in ("line\nbreak", "sp ace", b"\xff\xfe".decode(errors="surrogateescape")):
        directory = home / name
        directory.mkdir()
        (directory / "stockade.toml").write_text('net = "open"')
        agree(directory, stockade_home)
        assert found(directory, stockade_home).policy.net == "open"
    assert len(trust.recorded(str(stockade_home))) == 3


def _agree_often(directory: Path, state: Path) -> None:
    for _ in range(5):
        agree(directory, state)


def test_two_at_once_lose_no_record(home: Path, stockade_home: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = []
    for name in ("a", "b", "c"):
        (home / name).mkdir()
        (home / name / "stockade.toml").write_text('net = "open"')
        processes.append(context.Process(target=_agree_often, args=(home / name, stockade_home)))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
        process.close()
    assert len(trust.recorded(str(stockade_home))) == 3


def test_the_command_shows_what_it_trusts(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["policy", "check"]) == cli.REFUSED
    assert "stockade trust" in capsys.readouterr().err
    assert cli.main(["trust"]) == 0
    shown = capsys.readouterr().out
    assert 'net = "open"' in shown
    assert f"{project}/stockade.toml is trusted" in shown
    assert cli.main(["policy", "check"]) == 0
    assert "network.none" not in capsys.readouterr().out
    assert cli.main(["trust", "--list"]) == 0
    assert f"trusted  {project}/stockade.toml" in capsys.readouterr().out


@pytest.mark.parametrize("path", [".", "stockade.toml", "../project", "../project/stockade.toml"])
def test_the_command_takes_a_file_or_its_directory(project: Path, path: str, stockade_home: Path) -> None:
    assert cli.main(["trust", path]) == 0
    assert list(trust.recorded(str(stockade_home))) == [f"{project}/stockade.toml"]
    assert cli.main(["trust", "--revoke", path]) == 0
    assert trust.recorded(str(stockade_home)) == {}


def test_the_list_tells_changed_and_missing_files(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trust"]) == 0
    (project / "stockade.toml").write_text("")
    cli.main(["trust", "--list"])
    assert "changed" in capsys.readouterr().out
    (project / "stockade.toml").unlink()
    cli.main(["trust", "--list"])
    assert "gone" in capsys.readouterr().out
    assert cli.main(["trust", "--revoke", "stockade.toml"]) == 0
    cli.main(["trust", "--list"])
    assert "nothing is trusted" in capsys.readouterr().out


def test_there_must_be_something_to_trust(
    home: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "stockade.toml").unlink()
    for arguments in ([], ["stockade.toml"], ["none/stockade.toml"], ["--revoke"]):
        assert cli.main(["trust", *arguments]) == cli.REFUSED
    assert "there is no policy" in capsys.readouterr().err


def test_what_a_hostile_file_says_does_not_reach_the_terminal_raw(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "stockade.toml").write_text(
        'env = { A = "\N{RIGHT-TO-LEFT OVERRIDE}" }\nnet = "open" # \x9b2J\n'
    )
    assert cli.main(["trust"]) == 0
    shown = capsys.readouterr().out
    assert "\x9b" not in shown
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in shown


def test_the_schema_and_profiles_are_printed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["policy", "schema"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["$ref"] == "#/$defs/Policy"
    assert cli.main(["profiles"]) == 0
    assert {"strict", "dev", "net-client"} <= set(capsys.readouterr().out.split())
    assert cli.main(["profiles", "dev"]) == 0
    assert 'extends = "strict"' in capsys.readouterr().out
    assert cli.main(["profiles", "--json"]) == 0
    assert [one["name"] for one in msgspec.json.decode(capsys.readouterr().out)] == [
        "strict",
        "dev",
        "net-client",
    ]
    assert cli.main(["profiles", "devv"]) == cli.REFUSED
    assert "did you mean dev?" in capsys.readouterr().err


def test_checking_a_file_says_what_is_wrong_or_what_it_needs(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = project / "p.toml"
    file.write_text('[limits]\nwall = "30 parsecs"\n')
    assert cli.main(["policy", "check", "p.toml"]) == cli.REFUSED
    assert 'p.toml:2: limits.wall = "30 parsecs": is not a time' in capsys.readouterr().err
    file.write_text('[limits]\nwall = "30s"\n')
    assert cli.main(["policy", "check", "p.toml", "--json"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out)
    assert told["controls"]["limits.wall"] == {"clause": 'limits.wall = "30s"', "required": True}
    assert told["sources"] == ["p.toml"]


@pytest.mark.parametrize(
    "command", [["trust"], ["profiles"], ["policy"], ["policy", "check"], ["policy", "schema"]]
)
def test_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    assert "example" in capsys.readouterr().out
