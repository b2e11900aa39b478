"""What the client sends, and what it makes of answers."""

from __future__ import annotations

import builtins
import sys
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

import stockade
from stockade.client import Client, ServerError
from stockade.client import file_calls as files
from stockade.client import run_calls as runs
from stockade.client import sandbox_calls as sandboxes
from stockade.client.event_stream import EventCollector
from stockade.client.remote_errors import error_of
from stockade.client.transport import ServerAddress


def test_a_create_without_options_sends_the_image_alone() -> None:
    assert sandboxes.create("host", {}).json == {"image": {"uri": "host"}}


def test_a_lifetime_is_rounded_up_to_whole_seconds() -> None:
    call = sandboxes.create("host", {"timeout": 1.5})
    assert call.json == {"image": {"uri": "host"}, "timeout": 2}


def test_clauses_of_a_policy_are_sent_as_they_are() -> None:
    policy = {"limits": {"tasks": 32}}
    assert sandboxes.create("host", {"policy": policy}).json == {"image": {"uri": "host"}, "policy": policy}


def test_an_option_that_does_not_exist_is_an_error() -> None:
    wrong: Any = {"timout": 5}
    for call in (
        lambda: sandboxes.create("host", wrong),
        lambda: runs.collector(wrong),
        lambda: runs.open_session("i", None, wrong),
    ):
        with pytest.raises(TypeError, match="timout"):
            call()


def test_a_session_without_options_sends_no_mode_and_no_profile() -> None:
    assert runs.open_session("i", "/workspace", {}).json == {"workspace": {"path": "/workspace"}}


def test_a_command_without_options_is_its_words_alone() -> None:
    assert runs.command("i", ["echo", "1"], {}, EventCollector()).json == {"argv": ["echo", "1"]}
    assert runs.command("i", "echo 1", {}, EventCollector()).json == {"command": "echo 1"}


def test_what_is_given_is_sent() -> None:
    given = {"timeout": 60, "env": {"A": "1"}, "limits": {"cpu": 2}, "net": ["example.com"]}
    body = sandboxes.create("host", given).json
    assert body["resourceLimits"] == {"cpu": "2"} and (body["timeout"], body["env"]) == (60, {"A": "1"})
    allowed = {"action": "allow", "target": "example.com"}
    assert body["networkPolicy"] == {"defaultAction": "deny", "egress": [allowed]}


def test_no_hosts_is_a_policy_that_denies_all_and_not_the_servers_default() -> None:
    body = sandboxes.create("host", {"net": []}).json
    assert body["networkPolicy"] == {"defaultAction": "deny", "egress": []}


@pytest.mark.parametrize(("seconds", "sent"), [(1.5, 1500), (0, 1), (0.0001, 1)])
def test_a_timeout_of_nothing_is_not_no_timeout(seconds: float, sent: int) -> None:
    assert runs.command("i", "x", {"timeout": seconds}, EventCollector()).json["timeout"] == sent


def test_modes_are_octal_digits_on_the_wire() -> None:
    assert files.chmod("", "/f", 0o640, None, None).json == {"/f": {"mode": 640}}
    wire = {
        "path": "/f", "type": "file", "size": 1, "mode": 4755, "owner": "root", "group": "root",
        "modified_at": "2026-01-01T00:00:00Z", "created_at": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    assert files.info("", "/f").read(httpx.Response(200, json={"/f": wire})).mode == 0o4755


def test_an_id_cannot_leave_its_place_in_the_path() -> None:
    assert sandboxes.get("../keys?x").path == "/v1/sandboxes/..%2Fkeys%3Fx"


def test_a_create_may_be_repeated_because_it_has_a_key() -> None:
    first, second = sandboxes.create("host", {}), sandboxes.create("host", {})
    assert first.repeatable and first.headers != second.headers
    assert not runs.command("i", "x", {}, EventCollector()).repeatable


def test_metadata_of_a_filter_is_one_value() -> None:
    assert ("metadata", "a=1&b=x+y") in sandboxes.page(1, (), {"a": "1", "b": "x y"}).query


def test_an_end_in_seconds_counts_from_now() -> None:
    end = datetime.fromisoformat(sandboxes.renew("i", 60).json["expiresAt"])
    assert 50 < (end - datetime.now(UTC)).total_seconds() <= 60


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, stockade.PolicyError),
        (401, stockade.DeniedError),
        (404, stockade.NotFoundError),
        (404, FileNotFoundError),
        (409, stockade.ConflictError),
        (413, stockade.LimitError),
        (501, stockade.UnsupportedError),
        (503, stockade.UnsupportedError),
        (500, ServerError),
    ],
)
def test_an_error_is_the_librarys_with_the_servers_code(status: int, kind: type[Exception]) -> None:
    error = error_of(status, b'{"code": "X::Y", "message": "why"}', "r1")
    assert isinstance(error, kind) and isinstance(error, ServerError)
    assert (error.code, str(error), error.status, error.request_id) == ("X::Y", "why", status, "r1")


def test_an_answer_of_something_else_is_quoted() -> None:
    assert "gateway" in str(error_of(502, b"<html>bad gateway", ""))
    assert str(error_of(502, b"", "")) == "the server answered with status 502"


def test_the_environment_names_server_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPEN_SANDBOX_DOMAIN", "box.example:1234")
    monkeypatch.setenv("OPEN_SANDBOX_API_KEY", "second")
    monkeypatch.delenv("STOCKADE_API_KEY", raising=False)
    assert ServerAddress.find(None, None, 1.0).key == "second"
    monkeypatch.setenv("STOCKADE_API_KEY", "first")
    found = ServerAddress.find(None, None, 1.0)
    assert (found.url, found.key) == ("http://box.example:1234", "first")
    assert ServerAddress.find("https://a.example/", "k", 1.0) == ServerAddress("https://a.example", "k", 1.0)


def test_the_version_in_an_address_is_not_sent_twice() -> None:
    assert ServerAddress.find("http://localhost:8080/v1/", "k", 1.0).url == "http://localhost:8080"
    assert ServerAddress.find("https://a.example/boxes/v1", "k", 1.0).url == "https://a.example/boxes"


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(stockade.PolicyError, match="not the address"):
        Client("ftp://box.example")


def test_a_proxy_of_the_environment_never_sees_the_key_of_a_local_server() -> None:
    assert ServerAddress.find("localhost:8080", "k", 1.0).options()["trust_env"] is False
    assert ServerAddress.find("box.example", "k", 1.0).options()["trust_env"] is True


def test_the_key_is_not_in_the_repr() -> None:
    assert "secret" not in repr(ServerAddress.find("localhost", "secret", 1.0))


def test_without_httpx_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(stockade.SetupError, match="httpx") as caught:
        Client("localhost:1", key="k")
    assert caught.value.hint == "pip install 'stockade[client]'"


def test_a_server_that_is_not_there_is_an_error_with_a_hint() -> None:
    with Client("127.0.0.1:1", key="k") as client, pytest.raises(builtins.ConnectionError) as caught:
        client.create()
    assert isinstance(caught.value, stockade.StockadeError) and "stockade serve" in caught.value.hint
