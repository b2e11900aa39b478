"""Inspect's own checks of sandbox environments, and evaluations with sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest
from inspect_ai.util import (
    ComposeConfig,
    SandboxEnvironmentSpec,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
)
from inspect_ai.util._sandbox.limits import override_max_exec_output_size
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from stockade.integrations.inspect_ai import StockadeConfig, StockadeSandboxEnvironment
from stockade.linux.id_maps import IdMaps
from support.means import applies
from support.paths import ROOT
from support.screens import stockade

PROGRAMS = Path(__file__).parent / "programs"
#: What Inspect's own local provider fails too, and why.
XFAILED = {"test_exec_as_user": "adduser cannot change /etc, which is read-only inside"}


@pytest.fixture(scope="module")
def environment(module_state: Path) -> Iterator[StockadeSandboxEnvironment]:
    """One sandbox for all checks, as Inspect's own runner has it."""
    made = asyncio.run(StockadeSandboxEnvironment.sample_init("self-check", None, {}))
    yield made["default"].as_type(StockadeSandboxEnvironment)
    asyncio.run(StockadeSandboxEnvironment.sample_cleanup("self-check", None, made, interrupted=False))


@pytest.fixture
def sandbox_env(
    environment: StockadeSandboxEnvironment, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> StockadeSandboxEnvironment:
    # What has to end has five seconds for that in the checks; here it has a tenth of one.
    sleep = anyio.sleep
    monkeypatch.setattr(anyio, "sleep", lambda seconds: sleep(min(seconds, 0.1)))
    if why := XFAILED.get(request.node.originalname):
        request.node.add_marker(pytest.mark.xfail(reason=why, strict=True))
    return environment


class TestExec:
    """What the self checks do not ask."""

    async def test_the_end_of_a_long_output_is_kept(self, environment: StockadeSandboxEnvironment) -> None:
        with override_max_exec_output_size(1000):
            done = await environment.exec(["sh", "-c", "seq 100000; seq 200000 >&2"])
        assert done.stdout == "".join(f"{n}\n" for n in range(1, 100001))[-1000:]
        assert done.stderr == "".join(f"{n}\n" for n in range(1, 200001))[-1000:]

    async def test_the_user_may_be_the_one_that_it_is(self, environment: StockadeSandboxEnvironment) -> None:
        for user in (str(os.geteuid()), pwd.getpwuid(os.geteuid()).pw_name):
            assert (await environment.exec(["id", "-u"], user=user)).stdout == f"{os.geteuid()}\n"

    async def test_another_user_is_unsupported(self, environment: StockadeSandboxEnvironment) -> None:
        for user in ("nobody", "12345", "", "root\n"):
            with pytest.raises(SandboxUserUnsupportedError):
                await environment.exec(["id"], user=user)

    async def test_a_missing_program_or_directory_is_a_result(
        self, environment: StockadeSandboxEnvironment
    ) -> None:
        missing = await environment.exec(["no-such-program"])
        assert (missing.success, missing.returncode) == (False, 127)
        assert "no-such-program" in missing.stderr
        assert not (await environment.exec(["true"], cwd="/nowhere")).success

    async def test_a_cancelled_call_ends_its_command(self, environment: StockadeSandboxEnvironment) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await environment.exec(["sh", "-c", "echo $$ > /tmp/cancelled; exec sleep 60"])
        alive = await environment.exec(["sh", "-c", "kill -0 $(cat /tmp/cancelled)"])
        assert not alive.success

    async def test_a_sandbox_that_has_ended_is_unavailable(self) -> None:
        made = await StockadeSandboxEnvironment.sample_init("x" * 200, None, {})
        await StockadeSandboxEnvironment.cli_cleanup(made["default"].as_type(StockadeSandboxEnvironment).id)
        with pytest.raises(SandboxUnavailableError):
            await made["default"].exec(["true"])
        await StockadeSandboxEnvironment.sample_cleanup("x", None, made, interrupted=True)
        with pytest.raises(SandboxUnavailableError):
            await made["default"].exec(["true"])


class TestConnection:
    """A person looks into the sandbox of a sample."""

    async def test_its_command_opens_a_shell_inside_and_returns_to_it(
        self, module_state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STOCKADE_HOME", str(module_state))
        made = await StockadeSandboxEnvironment.sample_init("look", None, {})
        own = made["default"]
        await own.write_file("made-by-the-agent", "")
        words = (await own.connection()).command.split()
        assert (await own.connection()).command.split() == words

        def visit() -> None:
            with stockade(tmp_path, *words[1:]) as terminal:
                terminal.type("ls; echo $((6 * 7))\n")
                terminal.until("42")
                assert "made-by-the-agent" in terminal.text
                terminal.type(b"\x1d\x1d\x1d")  # detaches
                assert terminal.code() == 0
            with stockade(tmp_path, *words[1:]) as terminal:
                terminal.until("42")
                terminal.type("exit 3\n")
                assert terminal.code() == 3

        await asyncio.to_thread(visit)
        with pytest.raises(SandboxUserUnsupportedError):
            await own.connection(user="nobody")
        await StockadeSandboxEnvironment.sample_cleanup("look", None, made, interrupted=False)
        with pytest.raises(ConnectionError):
            await own.connection()


class TestUsers:
    """A private environment with users of its own."""

    @pytest.fixture
    async def several(self) -> AsyncIterator[StockadeSandboxEnvironment]:
        made = await StockadeSandboxEnvironment.sample_init("users", StockadeConfig(users=True), {})
        yield made["default"].as_type(StockadeSandboxEnvironment)
        await StockadeSandboxEnvironment.sample_cleanup("users", None, made, interrupted=False)

    async def test_programs_are_root_inside_and_nobody_outside(
        self, several: StockadeSandboxEnvironment
    ) -> None:
        assert (await several.exec(["id", "-u"])).stdout == "0\n"
        assert (await several.exec(["id", "-u"], user="root")).stdout == "0\n"
        outside = (await several.exec(["cat", "/proc/self/uid_map"])).stdout.split()
        assert outside[:2] == ["0", str(os.geteuid())]
        for user in ("nonexistent", "70000", "-1", "٣", "1" * 5000):
            with pytest.raises(SandboxUserUnsupportedError, match="no user"):
                await several.exec(["id"], user=user)

    async def test_other_users_run_commands_without_the_rights_of_root(
        self, several: StockadeSandboxEnvironment
    ) -> None:
        maps = IdMaps.of_caller()
        if not maps.several:
            with pytest.raises(SandboxUserUnsupportedError, match=re.escape(maps.reason)):
                await several.exec(["id"], user="1000")
        applies(maps.several, maps.reason)
        await several.write_file("secret", "of root")
        await several.exec(["chmod", "600", "secret"])
        for user, uid in (("1000", 1000), ("nobody", 65534)):
            done = await several.exec(["sh", "-c", "id -u; cat secret; touch ~/mine-$(id -u)"], user=user)
            assert (done.stdout, done.returncode) == (f"{uid}\n", 0)
            assert "Permission denied" in done.stderr
            owner = await several.exec(["stat", "-c", "%u", f"/tmp/mine-{uid}"])
            assert owner.stdout == f"{uid}\n"
        caps = await several.exec(["grep", "CapEff", "/proc/self/status"], user="1000")
        assert int(caps.stdout.split()[1], 16) == 0


class TestConfig:
    """Policies of tasks and samples."""

    def test_it_survives_a_log_and_groups_samples(self) -> None:
        config = StockadeConfig(policy={"limits": {"tasks": 8}, "read": ["/opt"]})
        spec = SandboxEnvironmentSpec("stockade", config)
        again = SandboxEnvironmentSpec.model_validate(json.loads(spec.model_dump_json()))
        assert again == spec
        assert hash(again) == hash(spec)

    async def test_a_policy_file_decides_what_is_inside(self, tmp_path: Path) -> None:
        (tmp_path / "shown").mkdir()
        (tmp_path / "policy.toml").write_text('read = ["./shown"]\nenv = { HUE = "blue" }\n')
        made = await StockadeSandboxEnvironment.sample_init("t", str(tmp_path / "policy.toml"), {})
        done = await made["default"].exec(["sh", "-c", f"echo $HUE; ls -d {tmp_path}/*"])
        await StockadeSandboxEnvironment.sample_cleanup("t", None, made, interrupted=False)
        assert done.stdout == f"blue\n{tmp_path}/shown\n"

    async def test_another_providers_configuration_is_refused(self) -> None:
        with pytest.raises(TypeError, match="StockadeConfig, not ComposeConfig"):
            await StockadeSandboxEnvironment.sample_init("t", ComposeConfig(services={}), {})
        with pytest.raises(ValueError, match="extra"):
            StockadeSandboxEnvironment.config_deserialize({"policies": {}})


def test_evaluations_run_in_sandboxes_and_so_do_inspects_own_tools(tmp_path: Path) -> None:
    """Found by its entry point. The tools put a program of 50 MB into /var/tmp, whose server serves them."""
    example = ROOT / "examples" / "frameworks" / "inspect_eval.py"
    done = subprocess.run(
        [sys.executable, PROGRAMS / "inspect_evaluations.py", example, tmp_path / "logs"],
        env={**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"example": 1, "tools": [3, "out\n", "err\n", "given"]}
