"""What a request for an isolated session may say, and what it means in effect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stockade.errors import PolicyError
from stockade.server.isolated.secret_names import is_secret, passed_variables
from stockade.server.isolated.session_request import (
    CreateSession,
    EnvPassthrough,
    RunRequest,
    SessionSpec,
    checked_run,
    session_spec,
)

DEFAULT_IDLE = 1800


def spec(**fields: Any) -> SessionSpec:
    request = msgspec.json.decode(msgspec.json.encode(fields), type=CreateSession)
    return session_spec(request, DEFAULT_IDLE)


def refusal(**fields: Any) -> str:
    with pytest.raises((PolicyError, msgspec.ValidationError)) as caught:
        spec(**fields)
    return str(caught.value)


def run_refusal(**fields: Any) -> str:
    with pytest.raises((PolicyError, msgspec.ValidationError)) as caught:
        checked_run(msgspec.json.decode(msgspec.json.encode(fields), type=RunRequest))
    return str(caught.value)


WORKSPACE = {"path": "/workspace"}


class TestDefaults:
    def test_a_session_is_strict_and_its_workspace_an_overlay_that_is_kept(self) -> None:
        found = spec(workspace=WORKSPACE)
        assert (found.profile, found.share_net, found.uid_mode) == ("strict", True, "setpriv")
        assert msgspec.to_builtins(found.overlays) == (
            {"path": "/workspace", "mode": "overlay", "persist": True},
        )

    def test_defect_10_an_omitted_idle_timeout_is_the_servers_and_not_never(self) -> None:
        assert spec(workspace=WORKSPACE).idle_timeout_seconds == DEFAULT_IDLE
        assert spec(workspace=WORKSPACE, idle_timeout_seconds=0).idle_timeout_seconds == 0

    def test_the_workspace_comes_before_the_overlays(self) -> None:
        found = spec(workspace=WORKSPACE, overlays=[{"path": "/data", "mode": "ro"}])
        assert [one.path for one in found.overlays] == ["/workspace", "/data"]
        assert found.directory == "/workspace"

    def test_the_workspace_is_echoed_only_if_it_is_the_only_mount(self) -> None:
        assert spec(workspace=WORKSPACE).workspace is not None
        assert spec(overlays=[WORKSPACE]).workspace is not None
        assert spec(overlays=[WORKSPACE, {"path": "/data"}]).workspace is None

    def test_persist_means_nothing_without_a_layer(self) -> None:
        assert spec(workspace={"path": "/a", "mode": "rw"}).overlays[0].persist is None

    def test_nested_mounts_are_allowed(self) -> None:
        assert len(spec(overlays=[WORKSPACE, {"path": "/workspace/a"}]).overlays) == 2

    def test_a_bind_is_at_its_source_and_writable_unless_it_says_otherwise(self) -> None:
        (bind,) = spec(workspace=WORKSPACE, binds=[{"source": "/data/a"}]).binds
        assert (bind.dest, bind.readonly) == ("/data/a", False)


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({}, "workspace"),
            ({"overlays": []}, "workspace"),
            ({"workspace": {"path": "workspace"}}, "workspace.path"),
            ({"workspace": {"path": "/"}}, "path"),
            ({"workspace": {"path": "/a/../b"}}, "path"),
            ({"workspace": {"path": "/a/"}}, "path"),
            ({"workspace": {"path": "//a"}}, "path"),
            ({"workspace": {"path": "/a//b"}}, "path"),
            ({"workspace": {"path": "/a\0b"}}, "path"),
            ({"workspace": {"path": "/" + "a" * 256}}, "path"),
            ({"workspace": {"path": "/proc/1"}}, "path"),
            ({"workspace": {"path": "/a", "mode": "rwx"}}, "mode"),
            ({"workspace": {"path": "/a", "persist": True}}, "persist"),
            ({"workspace": {"path": 3}}, "path"),
            ({"workspace": WORKSPACE, "overlays": [WORKSPACE]}, "overlays[0].path"),
            ({"overlays": [{"path": "/a", "mode": "rw", "persist": True}]}, "overlays[0].persist"),
            ({"overlays": [{"path": "/a", "mode": "ro", "persist": False}]}, "overlays[0].persist"),
            ({"overlays": [{"path": f"/a{n}"} for n in range(17)]}, "overlays"),
            ({"workspace": WORKSPACE, "profile": "loose"}, "profile"),
            ({"workspace": WORKSPACE, "uid": -1}, "uid"),
            ({"workspace": WORKSPACE, "uid": 70000}, "uid"),
            ({"workspace": WORKSPACE, "uid": 1, "gid": 1 << 32}, "gid"),
            ({"workspace": WORKSPACE, "gid": 1}, "gid"),
            ({"workspace": WORKSPACE, "uid": "root"}, "uid"),
            ({"workspace": WORKSPACE, "uid_mode": "sudo"}, "uid_mode"),
            ({"workspace": WORKSPACE, "idle_timeout_seconds": -1}, "idle_timeout_seconds"),
            ({"workspace": WORKSPACE, "idle_timeout_seconds": 10**12}, "idle_timeout_seconds"),
            ({"workspace": WORKSPACE, "idle_timeout_seconds": 1.5}, "idle_timeout_seconds"),
            ({"workspace": WORKSPACE, "env_passthrough": {"mode": "some"}}, "env_passthrough"),
            ({"workspace": WORKSPACE, "env_passthrough": {"keys": ["A=B"]}}, "env_passthrough.keys[0]"),
            ({"workspace": WORKSPACE, "extra_writable": ["data"]}, "extra_writable[0]"),
            ({"workspace": WORKSPACE, "extra_writable": ["/workspace"]}, "extra_writable[0]"),
            ({"workspace": WORKSPACE, "binds": [{"source": "/etc"}]}, "binds[0].source"),
            ({"workspace": WORKSPACE, "binds": [{"source": "/data", "dest": "/proc"}]}, "binds[0].dest"),
            ({"workspace": WORKSPACE, "binds": [{"source": "/data", "dest": "/usr/bin"}]}, "binds[0].dest"),
            ({"workspace": WORKSPACE, "binds": [{"source": "/data", "dest": "/workspace"}]}, "binds[0].dest"),
            ({"workspace": WORKSPACE, "share_net": "yes"}, "share_net"),
            ({"workspace": WORKSPACE, "privileged": True}, "privileged"),
        ],
    )
    def test_defect_15_what_cannot_be_taken_is_refused_with_the_name_of_its_field(
        self, fields: dict[str, Any], field: str
    ) -> None:
        assert field.partition("[")[0] in refusal(**fields)

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({}, "code"),
            ({"code": ""}, "code"),
            ({"code": " \n"}, "code"),
            ({"code": "a\0b"}, "code"),
            ({"code": 1}, "code"),
            ({"code": "ls", "envs": {"A-B": "1"}}, "envs"),
            ({"code": "ls", "envs": {"A": "\0"}}, "envs"),
            ({"code": "ls", "envs": {"A": 1}}, "envs"),
            ({"code": "ls", "timeout_seconds": -1}, "timeout_seconds"),
            ({"code": "ls", "timeout_seconds": 367 * 86400}, "timeout_seconds"),
            ({"code": "ls", "timeout": 1}, "timeout"),
        ],
    )
    def test_defect_15_an_empty_or_wrong_run_is_refused(self, fields: dict[str, Any], field: str) -> None:
        assert field in run_refusal(**fields)


VARIABLES = {
    "PLAIN": "1",
    "OTHER": "2",
    "OPENAI_API_KEY": "s",
    "GITHUB_TOKEN": "s",
    "DB_PASSWORD": "s",
    "MY_SECRET": "s",
    "AWS_REGION": "s",
    "ALI_X": "s",
    "ALIYUN_X": "s",
    "K8S_NODE": "s",
    "kube_config": "s",
}


class TestVariables:
    @pytest.mark.parametrize(
        "rule",
        [
            EnvPassthrough(),
            EnvPassthrough("deny", ("OTHER",)),
            EnvPassthrough("deny", ()),
            EnvPassthrough("allow", tuple(VARIABLES)),
        ],
    )
    def test_defect_10_a_list_of_keys_never_switches_the_secret_blacklist_off(
        self, rule: EnvPassthrough
    ) -> None:
        passed = passed_variables(VARIABLES, rule)
        assert "s" not in passed.values()
        assert passed["PLAIN"] == "1"

    def test_deny_leaves_out_and_allow_picks(self) -> None:
        assert passed_variables(VARIABLES, EnvPassthrough("deny", ("OTHER",))) == {"PLAIN": "1"}
        assert passed_variables(VARIABLES, EnvPassthrough("allow", ("OTHER",))) == {"OTHER": "2"}

    def test_names_that_only_look_similar_pass(self) -> None:
        assert not any(map(is_secret, ("TOKENIZER", "KEYBOARD", "MONKEY", "SECRETARY", "LAWS_X")))
