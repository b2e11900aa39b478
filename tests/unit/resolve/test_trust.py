"""Trust: the exact bytes of one file at one path, and how the command line tells it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from stockade import cli
from stockade.errors import PolicyError, SetupError
from stockade.resolve import trust
from stockade.resolve.discovery import PolicySource, discover, find_project


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


def found(project: Path, state: Path) -> PolicySource:
    return discover(str(project), {"STOCKADE_HOME": str(state)}, str(project.parent))


def agree(project: Path, state: Path) -> None:
    policy = find_project(str(project), str(project.parent))
    assert policy is not None
    trust.record(policy, policy.lookups(str(project.parent), str(project), {}), str(state))


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


@pytest.fixture
def paths(project: Path, home: Path) -> Path:
    """A project that is trusted with paths of its own and of its user's, and the user's directory."""
    for name in ("data", "other"):
        (project / name).mkdir()
    (home / "disk").mkdir()
    (home / "mine").symlink_to("disk")
    (project / "stockade.toml").write_text('read = ["data", "~/mine", "none?"]\nnet = "open"\n')
    return home


def test_trust_records_what_each_path_means(paths: Path, project: Path, stockade_home: Path) -> None:
    agree(project, stockade_home)
    (agreed,) = trust.recorded(str(stockade_home)).values()
    assert agreed.paths is not None
    assert [(one.key, str(one)) for one in agreed.paths] == [
        ("read", f"the directory {project}/data"),
        ("read", f"the directory {paths}/disk"),
        ("read", f"{project}/none, which is absent"),
    ]
    assert found(project, stockade_home).policy.net == "open"


def replace_by_link(path: Path, target: str) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        path.rmdir()
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("path", "target", "words"),
    [
        ("project/data", "other", 'data" was the directory .*/data, and is now the directory .*/other'),
        ("mine", "elsewhere", '"~/mine" was the directory .*/disk, and is now the directory .*/elsewhere'),
        ("project/none", "other", 'none[?]" was .*/none, which is absent, and is now the directory .*/other'),
        ("disk", "elsewhere", '"~/mine" was the directory .*/disk, and is now the directory .*/elsewhere'),
    ],
)
def test_a_path_that_means_something_else_ends_trust(
    paths: Path, project: Path, stockade_home: Path, path: str, target: str, words: str
) -> None:
    (paths / "elsewhere").mkdir()
    agree(project, stockade_home)
    replace_by_link(paths / path, target)
    with pytest.raises(PolicyError, match=words) as caught:
        found(project, stockade_home)
    assert "is no longer trusted" in caught.value.message
    assert f"stockade trust {project}/stockade.toml" in caught.value.hint
    agree(project, stockade_home)
    assert found(project, stockade_home).policy.net == "open"


def test_a_link_out_of_the_project_is_not_followed_by_trust(
    paths: Path, project: Path, stockade_home: Path
) -> None:
    agree(project, stockade_home)
    replace_by_link(project / "data", "../disk/key")
    (paths / "disk" / "key").mkdir()
    (project / "stockade.toml").write_text('read = ["data"]\nnet = "open"\n')
    for _ in range(2):
        with pytest.raises(PolicyError, match=f"the link {project}/data leads to {paths}/disk/key"):
            found(project, stockade_home)
        agree(project, stockade_home)


def test_another_kind_ends_trust_and_absence_does_not(
    paths: Path, project: Path, stockade_home: Path
) -> None:
    agree(project, stockade_home)
    (project / "data").rmdir()
    assert found(project, stockade_home).policy.net == "open"
    (project / "data").mkdir()
    assert found(project, stockade_home).policy.net == "open"
    (project / "data").rmdir()
    (project / "data").write_text("")
    with pytest.raises(PolicyError, match="is now the file"):
        found(project, stockade_home)
    (project / "data").unlink()
    (project / "none").mkdir()
    with pytest.raises(PolicyError, match=r"which is absent, and is now the directory .*/none"):
        found(project, stockade_home)


def test_the_workspace_and_programs_are_paths_too(home: Path, project: Path, stockade_home: Path) -> None:
    for name in ("one", "two", "bin"):
        (project / name).mkdir()
    (project / "stockade.toml").write_text('net = "open"\nexec = ["bin/*"]\n[workspace]\npath = "ws"\n')
    (project / "ws").symlink_to("one")
    agree(project, stockade_home)
    assert found(project, stockade_home).policy.net == "open"
    replace_by_link(project / "ws", "two")
    with pytest.raises(PolicyError, match=r"workspace = .* is now the directory .*/two"):
        found(project, stockade_home)
    replace_by_link(project / "ws", "one")
    replace_by_link(project / "bin", "two")
    with pytest.raises(PolicyError, match=r"exec = .* is now .*/two/\*"):
        found(project, stockade_home)


def test_what_was_agreed_to_before_paths_were_recorded_is_to_be_agreed_to_again(
    project: Path, stockade_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agree(project, stockade_home)
    (path, agreed), *_ = trust.recorded(str(stockade_home)).items()
    (stockade_home / "trust").write_bytes(agreed.hash.encode() + b" " + path.encode() + b"\0")
    (stockade_home / "schema").write_text("2\n")
    with pytest.raises(PolicyError, match="earlier version of Stockade") as caught:
        found(project, stockade_home)
    assert f"stockade trust {path}" in caught.value.hint
    assert cli.main(["trust", "--list"]) == 0
    assert "must be trusted again" in capsys.readouterr().out
    assert cli.main(["trust"]) == 0
    assert found(project, stockade_home).policy.net == "open"
    assert cli.main(["trust", "--list"]) == 0
    assert f"trusted  {path}" in capsys.readouterr().out


def test_the_command_says_what_the_paths_mean(
    paths: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trust"]) == 0
    shown = capsys.readouterr().out
    assert f'read = "~/mine" is the directory {paths}/disk' in shown
    replace_by_link(project / "data", "other")
    assert cli.main(["trust", "--list"]) == 0
    assert "paths changed" in capsys.readouterr().out


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
    assert "has no policy" in capsys.readouterr().err


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
    assert {"strict", "dev", "net-client", "worker"} <= set(capsys.readouterr().out.split())
    assert cli.main(["profiles", "dev"]) == 0
    assert 'extends = "strict"' in capsys.readouterr().out
    assert cli.main(["profiles", "--json"]) == 0
    assert [one["name"] for one in msgspec.json.decode(capsys.readouterr().out)] == [
        "strict",
        "dev",
        "net-client",
        "worker",
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
