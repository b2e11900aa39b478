"""The published Python SDK, unmodified: sandboxes from create to kill."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from opensandbox import SandboxManagerSync, SandboxSync
from opensandbox.config import ConnectionConfigSync
from opensandbox.exceptions import SandboxApiException, SandboxException
from opensandbox.models.sandboxes import SandboxFilter

MINUTE = timedelta(minutes=1)


def test_a_sandbox_is_made_described_and_killed(connection: ConnectionConfigSync) -> None:
    before = datetime.now(UTC)
    box = SandboxSync.create("host", connection_config=connection, timeout=5 * MINUTE, metadata={"team": "a"})
    info = box.get_info()
    assert (info.id, info.status.state, info.metadata) == (box.id, "Running", {"team": "a"})
    assert info.entrypoint == ["tail", "-f", "/dev/null"]
    assert info.expires_at is not None and before + 4 * MINUTE < info.expires_at <= before + 6 * MINUTE
    assert before - MINUTE < info.created_at < before + MINUTE
    assert box.is_healthy()
    box.kill()
    with pytest.raises(SandboxApiException) as caught:
        box.get_info()
    assert caught.value.status_code == 404
    box.close()


def test_without_a_timeout_a_sandbox_never_expires(connection: ConnectionConfigSync) -> None:
    box = SandboxSync.create("host", connection_config=connection, timeout=None)
    try:
        assert box.get_info().expires_at is None
        with pytest.raises(SandboxApiException) as caught:
            box.renew(MINUTE)
        assert caught.value.status_code == 409
    finally:
        box.destroy()


def test_connect_finds_a_living_sandbox(sandbox: SandboxSync, connection: ConnectionConfigSync) -> None:
    sandbox.commands.run("echo kept > /tmp/connected")
    again = SandboxSync.connect(sandbox.id, connection_config=connection)
    assert again.commands.run("cat /tmp/connected").text == "kept"
    again.close()


def test_renew_moves_the_end_both_ways(sandbox: SandboxSync) -> None:
    for minutes in (30, 10):
        end = sandbox.renew(timedelta(minutes=minutes)).expires_at
        assert abs(end - datetime.now(UTC) - timedelta(minutes=minutes)) < MINUTE
        info = sandbox.get_info()
        assert info.expires_at is not None and abs(info.expires_at - end) < timedelta(seconds=1)


def test_metadata_is_merged_and_none_deletes(sandbox: SandboxSync) -> None:
    assert sandbox.patch_metadata({"a": "1", "b": "2"}).metadata is not None
    changed = sandbox.patch_metadata({"a": None, "c": "3"})
    assert changed.metadata is not None and changed.metadata.get("c") == "3"
    assert "a" not in (sandbox.get_info().metadata or {})


def test_reserved_metadata_is_refused(sandbox: SandboxSync) -> None:
    with pytest.raises(SandboxApiException) as caught:
        sandbox.patch_metadata({"opensandbox.io/id": "x"})
    assert caught.value.status_code == 400


def test_extensions_come_back(connection: ConnectionConfigSync) -> None:
    given = {"bootstrap.execd.isolation": "enable", "opensandbox.extensions.colour": "red"}
    box = SandboxSync.create("host", connection_config=connection, extensions=given)
    try:
        assert given.items() <= (box.get_info().extensions or {}).items()
    finally:
        box.destroy()


def test_the_list_is_filtered_by_state_and_metadata(
    sandbox: SandboxSync, manager: SandboxManagerSync, connection: ConnectionConfigSync
) -> None:
    other = SandboxSync.create(
        "host", connection_config=connection, metadata={"kind": "listed", "name": "a.b_c"}
    )
    try:
        found = manager.list_sandbox_infos(
            SandboxFilter(states=["Running"], metadata={"kind": "listed", "name": "a.b_c"})
        )
        assert [one.id for one in found.sandbox_infos] == [other.id]
        assert found.pagination.total_items == 1 and not found.pagination.has_next_page
        everyone = manager.list_sandbox_infos(SandboxFilter(page=1, page_size=1))
        assert len(everyone.sandbox_infos) == 1 and everyone.pagination.has_next_page
        assert manager.list_sandbox_infos(SandboxFilter(states=["Paused"])).sandbox_infos == []
    finally:
        other.destroy()


def test_a_paused_sandbox_does_not_answer_and_its_processes_stand_still(
    connection: ConnectionConfigSync,
) -> None:
    box = SandboxSync.create("host", connection_config=connection)
    try:
        count = "while :; do echo >> /tmp/count; sleep 0.01; done"
        from opensandbox.models.execd import RunCommandOpts

        box.commands.run(count, opts=RunCommandOpts(background=True))
        box.pause()
        assert box.get_info().status.state == "Paused"
        assert not box.is_healthy()
        resumed = SandboxSync.resume(box.id, connection_config=connection)
        assert resumed.get_info().status.state == "Running"
        counted = resumed.commands.run("until [ -s /tmp/count ]; do sleep 0.01; done; wc -l < /tmp/count")
        assert int(counted.text) > 0
        with pytest.raises(SandboxException):
            SandboxSync.resume(box.id, connection_config=connection)
        resumed.close()
    finally:
        box.destroy()


def test_the_endpoint_is_on_the_servers_own_port(
    sandbox: SandboxSync, connection: ConnectionConfigSync
) -> None:
    endpoint = sandbox.get_endpoint(44772)
    assert "://" not in endpoint.endpoint and endpoint.endpoint.startswith(f"{connection.domain}/")
    assert endpoint.endpoint.endswith(f"/sandboxes/{sandbox.id}/proxy/44772")
    assert endpoint.headers


def test_everything_works_through_the_servers_proxy(connection: ConnectionConfigSync) -> None:
    proxied = ConnectionConfigSync(
        domain=connection.domain, api_key=connection.api_key, use_server_proxy=True, disable_metrics=True
    )
    box = SandboxSync.create("host", connection_config=proxied)
    try:
        box.files.write_file("/tmp/through", "proxy")
        assert box.commands.run("cat /tmp/through").text == "proxy"
    finally:
        box.destroy()


def test_metrics_are_possible_numbers(sandbox: SandboxSync) -> None:
    metrics = sandbox.get_metrics()
    assert metrics.cpu_count > 0 and 0 <= metrics.cpu_used_percentage <= 100
    assert 0 < metrics.memory_used_in_mib <= metrics.memory_total_in_mib
    assert abs(metrics.timestamp / 1000 - datetime.now(UTC).timestamp()) < 60


@pytest.mark.parametrize(
    "options",
    [{"resource": {"gpu": "1"}}, {"extensions": {"access.renew.extend.seconds": "1"}}],
    ids=["gpu", "renewal"],
)
def test_what_cannot_be_kept_is_refused(
    connection: ConnectionConfigSync, options: dict[str, dict[str, str]]
) -> None:
    with pytest.raises(SandboxApiException) as caught:
        SandboxSync.create("host", connection_config=connection, **options)
    assert caught.value.status_code == 400
    key = next(iter(next(iter(options.values()))))
    assert key in str(caught.value)


def test_an_unknown_image_is_an_error_that_names_it(connection: ConnectionConfigSync) -> None:
    with pytest.raises(SandboxApiException, match="nobody/knows:this") as caught:
        SandboxSync.create("nobody/knows:this", connection_config=connection)
    assert caught.value.status_code == 400


def test_a_wrong_key_opens_nothing(sandbox: SandboxSync, connection: ConnectionConfigSync) -> None:
    wrong = ConnectionConfigSync(domain=connection.domain, api_key="wrong", disable_metrics=True)
    with pytest.raises(SandboxApiException) as caught:
        SandboxSync.connect(sandbox.id, connection_config=wrong)
    assert caught.value.status_code == 401


@pytest.mark.parametrize("call", ["create_snapshot", "credential_vault"])
def test_what_is_not_there_says_so(sandbox: SandboxSync, call: str) -> None:
    with pytest.raises(SandboxException) as caught:
        sandbox.create_snapshot() if call == "create_snapshot" else sandbox.credential_vault.get()
    assert getattr(caught.value, "status_code", 501) == 501


def test_the_request_id_of_the_caller_comes_back(connection: ConnectionConfigSync) -> None:
    named = ConnectionConfigSync(
        domain=connection.domain, api_key=connection.api_key, headers={"X-Request-ID": "mine-7"}
    )
    with pytest.raises(SandboxApiException) as caught:
        SandboxSync.connect("00000000-0000-4000-8000-000000000000", connection_config=named)
    assert caught.value.request_id == "mine-7"
