"""The policy of a sandbox of the server, and the ceiling above it."""

from __future__ import annotations

from typing import Any

import pytest

from stockade.server.config import ServerConfig, parse_config
from stockade.server.record import ServerRecord, new_id, now
from stockade.server.supervisor.sandbox_policy import MOST_TASKS, is_placeholder, policy_of
from stockade.server.wire.errors import ApiError
from stockade.server.wire.network import NetworkRule


def _record(**fields: Any) -> ServerRecord:
    return ServerRecord(id=new_id(), owner="one", token="t", created_at=now(), image="host", **fields)


def test_without_a_configuration_a_sandbox_has_no_network_and_room_for_sessions() -> None:
    policy = policy_of(_record(env={"A": "b"}), ServerConfig())
    assert policy.net == () and policy.limits.tasks == MOST_TASKS
    assert policy.env["A"] == "b" and "EXECD_ENVS" in policy.env


def test_the_request_names_another_file_for_variables_but_not_another_id() -> None:
    record = _record(env={"EXECD_ENVS": "/data/envs", "OPENSANDBOX_ID": "mine"})
    env = policy_of(record, ServerConfig()).env
    assert env["EXECD_ENVS"] == "/data/envs" and env["OPENSANDBOX_ID"] == record.id


def test_what_a_request_leaves_open_is_as_wide_as_the_ceiling() -> None:
    config = parse_config('[ceiling.limits]\nmemory = "1G"\ncpu = 2\n', "serve.toml")
    assert policy_of(_record(), config).limits.memory == 1 << 30
    assert policy_of(_record(limits={"memory": 1 << 29}), config).limits.memory == 1 << 29


def test_a_request_beyond_the_ceiling_is_refused() -> None:
    config = parse_config('[ceiling]\nnet = ["example.com"]\n[ceiling.limits]\nmemory = "1G"\n', "serve.toml")
    policy_of(_record(network=(NetworkRule("allow", "example.com"),)), config)
    policy_of(_record(network=()), config)
    for fields in ({"limits": {"memory": 2 << 30}}, {"network": (NetworkRule("allow", "example.org"),)}):
        with pytest.raises(ApiError) as caught:
            policy_of(_record(**fields), config)
        assert caught.value.status == 400 and "ceiling" in caught.value.message


def test_denials_of_the_configuration_are_added() -> None:
    policy = policy_of(_record(), parse_config('deny_syscalls = ["ptrace"]', "serve.toml"))
    assert policy.syscalls.deny == ("ptrace",)


def test_entrypoints_that_do_nothing_here_are_known() -> None:
    assert is_placeholder(("tail", "-f", "/dev/null"))
    assert is_placeholder(("/opt/opensandbox/code-interpreter.sh",))
    assert not is_placeholder(("python3", "server.py"))
