"""Entries in the settings of other programs, and what happens to the rest of the file."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest

from stockade.errors import ConflictError, PolicyError
from stockade.integrations import settings_files
from stockade.integrations.mcp.registration import CLIENTS, Registration, registration


def register(client: str, tmp_path: Path, *options: str, name: str = "stockade") -> Registration:
    (tmp_path / "project").mkdir(exist_ok=True)
    command = ["stockade", "mcp", *options]
    return registration(client, name, command, str(tmp_path / "project"), str(tmp_path), {})


def written(found: Registration) -> Registration:
    assert found.text is not None
    settings_files.write(found.path, found.text)
    return found


@pytest.mark.parametrize("client", CLIENTS)
def test_an_entry_is_added_to_what_is_there_and_only_once(client: str, tmp_path: Path) -> None:
    path = Path(register(client, tmp_path).path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if client == "codex":
        path.write_text('# mine\nmodel = "x"\n[mcp_servers.other]\ncommand = "other"\n')
    else:
        path.write_text('{"ä": [1, 2], "mcpServers": {"other": {"command": "other"}}}')
    path.chmod(0o640)
    written(register(client, tmp_path, "-p", 'a "b".toml'))
    text = path.read_text()
    table = tomllib.loads(text) if client == "codex" else json.loads(text)
    key = {"codex": "mcp_servers", "vscode": "servers"}.get(client, "mcpServers")
    entry = table[key]["stockade"]
    assert (entry["command"], entry["args"]) == ("stockade", ["mcp", "-p", 'a "b".toml'])
    if client == "codex":
        assert text.startswith("# mine\n") and table["model"] == "x" and "other" in table[key]
    else:
        assert table["ä"] == [1, 2] and table["mcpServers"]["other"] == {"command": "other"} and "ä" in text
    assert path.stat().st_mode & 0o777 == 0o640
    assert register(client, tmp_path, "-p", 'a "b".toml').text is None, "it is there"
    with pytest.raises(ConflictError, match="another"):
        register(client, tmp_path)
    assert path.read_text() == text and os.listdir(path.parent).count(path.name) == 1


@pytest.mark.parametrize("client", CLIENTS)
def test_a_missing_file_is_made_for_its_owner_alone(client: str, tmp_path: Path) -> None:
    found = written(register(client, tmp_path))
    assert os.stat(found.path).st_mode & 0o777 == 0o600 and register(client, tmp_path).text is None


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "content",
    [
        b"{ // a comment\n}",
        b"[1]]",
        b"= [",
        b"\xff",
        b'{"mcpServers": [], "servers": 1}',
        b"mcp_servers = 1",
        b"mcp_servers = {}",
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_an_error_and_stays(
    client: str, content: bytes, tmp_path: Path
) -> None:
    path = Path(register(client, tmp_path).path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    with pytest.raises((PolicyError, ConflictError)):
        register(client, tmp_path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("client", CLIENTS)
def test_a_link_of_the_project_leads_nowhere(client: str, tmp_path: Path) -> None:
    """A project that the user does not trust may have one, to a file that it would like to be changed."""
    path = Path(register(client, tmp_path).path)
    path.parent.mkdir(parents=True, exist_ok=True)
    (target := tmp_path / "target").write_text("{}" if client != "codex" else "")
    path.symlink_to(target)
    with pytest.raises(PolicyError, match="link"):
        register(client, tmp_path)
    path.unlink()
    if client in ("gemini", "vscode"):
        (elsewhere := tmp_path / "elsewhere").mkdir()
        path.parent.rmdir()
        path.parent.symlink_to(elsewhere)
        with pytest.raises(PolicyError, match="link"):
            register(client, tmp_path)


def test_a_pipe_in_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "settings.json")
    with pytest.raises(PolicyError, match="not a file"):
        settings_files.with_json_entry(str(tmp_path / "settings.json"), ("a",), 1)


def test_items_of_a_list_are_added_once(tmp_path: Path) -> None:
    path = str(tmp_path / "settings.json")
    text = settings_files.with_json_item(path, ("hooks", "PreToolUse"), {"a": 1})
    assert text is not None
    settings_files.write(path, text)
    assert settings_files.with_json_item(path, ("hooks", "PreToolUse"), {"a": 1}) is None
    assert json.loads(text) == {"hooks": {"PreToolUse": [{"a": 1}]}}
    (tmp_path / "settings.json").write_text('{"hooks": {"PreToolUse": {}}}')
    with pytest.raises(PolicyError, match="not a list"):
        settings_files.with_json_item(path, ("hooks", "PreToolUse"), {"a": 1})
