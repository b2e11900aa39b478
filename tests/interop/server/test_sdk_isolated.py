"""The published Python SDK, unmodified: isolated sessions, with the overlays that upstream lacks."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator

import pytest
from opensandbox import SandboxSync
from opensandbox.exceptions import SandboxApiException, SandboxException
from opensandbox.models.filesystem import MoveEntry, SearchEntry, SetPermissionEntry, WriteEntry
from opensandbox.models.isolated import (
    BindMount,
    CreateIsolatedSessionRequest,
    EnvPassthroughSpec,
    IsolatedOverlaySpec,
    IsolatedRunOpts,
    IsolatedWorkspaceSpec,
)
from opensandbox.sync.services.isolated import IsolationSessionSync

NOBODY = 65534


def request(
    path: str = "/workspace", mode: str | None = None, **options: object
) -> CreateIsolatedSessionRequest:
    workspace = IsolatedWorkspaceSpec(path=path, mode=mode)
    return CreateIsolatedSessionRequest(workspace=workspace, **options)


def shell(sandbox: SandboxSync, command: str) -> str:
    return sandbox.commands.run(command).text


@pytest.fixture
def overlay(sandbox: SandboxSync) -> Iterator[IsolationSessionSync]:
    shell(sandbox, "rm -rf /workspace/* && mkdir -p /workspace/dir && echo base > /workspace/lower")
    with sandbox.isolation.session(request(mode="overlay")) as session:
        yield session


def test_what_upstream_does_not_have_is_reported_as_there(sandbox: SandboxSync) -> None:
    found = sandbox.isolation.capabilities()
    assert found.available and found.diff_supported and found.commit_supported and found.isolator


def test_a_session_lives_from_create_to_delete(sandbox: SandboxSync) -> None:
    session = sandbox.isolation.create(request(mode="rw"))
    assert uuid.UUID(session.session_id) and session.info.created_at is not None
    assert session.get().status == "active"
    assert session.session_id in [one.session_id for one in sandbox.isolation.list()]
    session.delete()
    for call in (session.delete, session.get, lambda: session.run("true")):
        with pytest.raises(SandboxApiException) as caught:
            call()
        assert caught.value.status_code == 404
    assert session.session_id not in [one.session_id for one in sandbox.isolation.list()]


def test_the_shell_is_the_first_process(sandbox: SandboxSync) -> None:
    assert sandbox.isolation.run_once("echo $$", workspace="/workspace").text in ("1", "2")


def test_state_stays_between_runs(overlay: IsolationSessionSync) -> None:
    overlay.run("cd dir; export NAME=ada; f() { echo $NAME in $PWD; }")
    assert overlay.run("f").text == "ada in /workspace/dir"


def test_directory_and_variables_stay_also_with_an_environment_of_the_run(
    overlay: IsolationSessionSync,
) -> None:
    overlay.run("cd dir; kept=1", opts=IsolatedRunOpts(envs={"ONCE": "x"}))
    assert overlay.run("echo $PWD $kept ${ONCE:-gone}").text == "/workspace/dir 1 gone"


def test_streams_are_apart_and_blank_lines_stay(overlay: IsolationSessionSync) -> None:
    done = overlay.run("echo a; echo; echo b; echo err >&2")
    assert "".join(one.text for one in done.logs.stdout) == "a\n\nb\n"
    assert "".join(one.text for one in done.logs.stderr) == "err\n"


def test_a_failure_is_an_exit_error(overlay: IsolationSessionSync) -> None:
    done = overlay.run("(exit 9)")
    assert done.exit_code == 9 and done.complete is None
    assert done.error is not None and done.error.name == "ExitError"


@pytest.mark.parametrize("code", ["exit 5", "set -e; false", "cat", "echo 'unclosed", "cat <<EOF"])
def test_no_code_ends_or_hangs_the_session(overlay: IsolationSessionSync, code: str) -> None:
    overlay.run("export STILL=here")
    overlay.run(code, opts=IsolatedRunOpts(timeout_seconds=10))
    assert overlay.get().status == "active"
    assert overlay.run("echo alive").text == "alive"


def test_a_run_whose_time_is_over_leaves_the_session(overlay: IsolationSessionSync) -> None:
    overlay.run("export STILL=here")
    start = time.monotonic()
    done = overlay.run("trap '' INT; sleep 30", opts=IsolatedRunOpts(timeout_seconds=1))
    assert done.error is not None and time.monotonic() - start < 10
    assert overlay.run("echo $STILL").text == "here"


def test_an_empty_run_is_refused(overlay: IsolationSessionSync) -> None:
    with pytest.raises(SandboxException):
        overlay.run("")


def test_runs_of_one_session_wait_for_each_other(overlay: IsolationSessionSync) -> None:
    def run() -> None:
        overlay.run("n=$(cat count 2>/dev/null || echo 0); sleep 0.1; echo $((n + 1)) > count")

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlay.run("cat count").text == "3"


def test_a_read_write_session_shares_the_sandboxes_files(sandbox: SandboxSync) -> None:
    shell(sandbox, "mkdir -p /workspace/shared && echo outside > /workspace/shared/seen")
    with sandbox.isolation.session(request("/workspace/shared", "rw")) as session:
        assert session.run("cat seen; echo inside > written").text == "outside"
    assert shell(sandbox, "cat /workspace/shared/written") == "inside"


def test_a_read_only_session_writes_nothing(sandbox: SandboxSync) -> None:
    with sandbox.isolation.session(request(mode="ro")) as session:
        assert session.run("touch /workspace/no").exit_code != 0
        with pytest.raises(SandboxException):
            session.files.write_file("/workspace/no", "x")


def test_an_overlay_changes_nothing_outside(sandbox: SandboxSync, overlay: IsolationSessionSync) -> None:
    overlay.run("echo changed > lower; echo new > new; rm -r dir")
    assert shell(sandbox, "cat /workspace/lower; ls /workspace") == "base\ndir\nlower"


def test_overlay_is_the_mode_that_is_left_out(sandbox: SandboxSync) -> None:
    with sandbox.isolation.session(request()) as session:
        session.run("echo x > /workspace/only-here")
        state = session.get()
        assert state.overlays is not None and state.overlays[0].mode == "overlay"
        assert state.profile == "strict"
    assert shell(sandbox, "test -e /workspace/only-here || echo none") == "none"


def test_a_strict_session_has_its_own_tmp_and_a_balanced_one_the_sandboxes(sandbox: SandboxSync) -> None:
    shell(sandbox, "echo shared > /tmp/of-the-sandbox")
    with sandbox.isolation.session(request(profile="strict")) as session:
        assert session.run("ls /tmp").text == ""
        session.run("echo private > /tmp/of-the-session")
    assert shell(sandbox, "test -e /tmp/of-the-session || echo none") == "none"
    with sandbox.isolation.session(request(profile="balanced")) as session:
        assert session.run("cat /tmp/of-the-sandbox").text == "shared"


def test_a_session_whose_workspace_is_tmp_has_the_sandboxes(sandbox: SandboxSync) -> None:
    shell(sandbox, "echo shared > /tmp/of-the-sandbox")
    with sandbox.isolation.session(request("/tmp", "rw")) as session:
        assert session.run("cat /tmp/of-the-sandbox; echo back > /tmp/back").text == "shared"
    assert shell(sandbox, "cat /tmp/back") == "back"


def test_a_missing_workspace_is_made(sandbox: SandboxSync) -> None:
    with sandbox.isolation.session(request("/workspace/not/yet", "rw")) as session:
        assert session.run("pwd").text == "/workspace/not/yet"


# Upstream runs the next ones only where diff or commit is supported, which is nowhere of its own.


def test_the_files_api_and_the_shell_see_the_same_overlay(overlay: IsolationSessionSync) -> None:
    overlay.files.write_file("/workspace/api", "from api", mode=640)
    assert overlay.run("cat api; stat -c ' %a' api").text == "from api 640"
    overlay.run("echo shell > from-shell; echo more >> lower")
    assert overlay.files.read_file("/workspace/from-shell") == "shell\n"
    assert overlay.files.read_file("lower") == "base\nmore\n"


def test_deletions_are_seen_by_both(overlay: IsolationSessionSync) -> None:
    overlay.files.delete_files(["/workspace/lower"])
    assert overlay.run("ls").text == "dir"
    overlay.run("rmdir dir")
    with pytest.raises(SandboxException):
        overlay.files.get_file_info(["/workspace/dir"])
    assert overlay.files.search(SearchEntry(path="/workspace", pattern="*")) == []


def test_what_only_the_lower_has_can_be_moved_changed_and_made_again(
    sandbox: SandboxSync, overlay: IsolationSessionSync
) -> None:
    overlay.files.set_permissions([SetPermissionEntry(path="/workspace/lower", mode=600)])
    overlay.files.move_files([MoveEntry(src="/workspace/lower", dest="/workspace/dir/moved")])
    assert overlay.run("cat dir/moved; stat -c %a dir/moved; ls").text == "base\n600\ndir"
    overlay.files.create_directories([WriteEntry(path="/workspace/lower", mode=755)])
    assert overlay.run("ls -A lower | wc -l").text == "0"
    assert shell(sandbox, "cat /workspace/lower; stat -c %a /workspace/lower") == "base\n644"


def test_a_deleted_directory_that_is_made_again_is_empty(overlay: IsolationSessionSync) -> None:
    overlay.run("touch dir/old")
    overlay.files.delete_directories(["/workspace/dir"])
    overlay.run("mkdir dir")
    assert [one.path for one in overlay.files.search(SearchEntry(path="/workspace/dir", pattern="*"))] == []


def test_a_replaced_file_keeps_its_mode(overlay: IsolationSessionSync) -> None:
    from opensandbox.models.filesystem import ContentReplaceEntry

    overlay.run("chmod 751 lower")
    overlay.files.replace_contents(
        [ContentReplaceEntry(path="/workspace/lower", old_content="base", new_content="new")]
    )
    assert overlay.run("cat lower; stat -c %a lower").text == "new\n751"


def test_several_overlays_and_one_that_does_not_last(sandbox: SandboxSync) -> None:
    shell(sandbox, "mkdir -p /workspace/a /data/b && echo 1 > /workspace/a/x && echo 2 > /data/b/x")
    given = CreateIsolatedSessionRequest(
        overlays=[
            IsolatedOverlaySpec(path="/workspace/a", mode="overlay"),
            IsolatedOverlaySpec(path="/data/b", mode="overlay", persist=False),
        ]
    )
    with sandbox.isolation.session(given) as session:
        assert session.run("cat /workspace/a/x /data/b/x").text == "1\n2"
        session.run("echo 3 > /workspace/a/x; echo 4 > /data/b/x")
        assert session.run("cat /workspace/a/x /data/b/x").text == "3\n4"
    assert shell(sandbox, "cat /workspace/a/x /data/b/x") == "1\n2"


def test_binds_and_extra_writable_directories(sandbox: SandboxSync) -> None:
    shell(sandbox, "mkdir -p /data/source /data/extra && echo bound > /data/source/x")
    given = request(
        binds=[BindMount(source="/data/source", dest="/mnt/target", readonly=True)],
        extra_writable=["/data/extra"],
    )
    with sandbox.isolation.session(given) as session:
        assert session.run("cat /mnt/target/x; echo w > /data/extra/w").text == "bound"
        assert session.run("touch /mnt/target/no").exit_code != 0
    assert shell(sandbox, "cat /data/extra/w") == "w"


@pytest.mark.parametrize(
    "given",
    [
        request(binds=[BindMount(source="/etc")]),
        request(extra_writable=["/usr"]),
        request(mode="sideways"),
        request(profile="loose"),
        request("relative"),
        request("/workspace/../etc"),
        CreateIsolatedSessionRequest(),
        CreateIsolatedSessionRequest(
            overlays=[IsolatedOverlaySpec(path="/workspace"), IsolatedOverlaySpec(path="/workspace")]
        ),
        CreateIsolatedSessionRequest(
            overlays=[IsolatedOverlaySpec(path="/workspace", mode="rw", persist=False)]
        ),
        CreateIsolatedSessionRequest(
            overlays=[IsolatedOverlaySpec(path=f"/workspace/{number}") for number in range(17)]
        ),
    ],
    ids=["bind", "writable", "mode", "profile", "relative", "dots", "nothing", "twice", "persist", "many"],
)
def test_what_a_session_may_not_have_is_refused(
    sandbox: SandboxSync, given: CreateIsolatedSessionRequest
) -> None:
    with pytest.raises(SandboxApiException) as caught:
        sandbox.isolation.create(given)
    assert caught.value.status_code == 400


def test_secrets_of_the_environment_never_pass(sandbox: SandboxSync) -> None:
    sandbox.commands.set_env("MY_API_KEY", "secret")
    sandbox.commands.set_env("PLAIN", "seen")
    for given in (None, EnvPassthroughSpec(mode="deny", keys=["OTHER"])):
        with sandbox.isolation.session(request(env_passthrough=given)) as session:
            assert session.run("echo ${MY_API_KEY:-none} ${PLAIN:-none}").text == "none seen"


def test_a_session_may_run_as_another_user(sandbox: SandboxSync, other_ids: None) -> None:
    shell(sandbox, "mkdir -p /workspace/open && chmod 777 /workspace/open")
    with sandbox.isolation.session(request("/workspace/open", "rw", uid=4321, gid=4321)) as session:
        assert session.run("id -u; id -g").text == "4321\n4321"
        session.files.write_file("/workspace/open/theirs", "x", mode=644)
    assert shell(sandbox, "stat -c %u:%g /workspace/open/theirs") == "4321:4321"


def test_a_session_can_be_attached_to(sandbox: SandboxSync) -> None:
    with sandbox.isolation.session(request(mode="rw", idle_timeout_seconds=600)) as session:
        session.run("export NAME=ada")
        again = sandbox.isolation.attach(session.session_id)
        assert again.run("echo $NAME").text == "ada"
        assert (again.info.idle_timeout_seconds, again.info.profile) == (600, "strict")
        assert again.info.workspace is not None and again.info.workspace.path == "/workspace"
    with pytest.raises(SandboxException):
        sandbox.isolation.attach(str(uuid.uuid4()))


def test_an_idle_session_goes_and_says_when(sandbox: SandboxSync) -> None:
    session = sandbox.isolation.create(request(mode="rw", idle_timeout_seconds=1))
    remaining = session.get().idle_remaining_seconds
    assert remaining is not None and remaining <= 1
    session.run("sleep 1.5")
    assert session.get().status == "active"
    end = time.monotonic() + 10
    while session.session_id in [one.session_id for one in sandbox.isolation.list()]:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_background_run_has_status_and_logs(overlay: IsolationSessionSync) -> None:
    run = overlay.run_background("echo one; sleep 0.5; echo two >&2; exit 6")
    assert overlay.run_status(run.run_id).running
    assert overlay.run("echo meanwhile").text == "meanwhile"
    while (status := overlay.run_status(run.run_id)).running:
        time.sleep(0.05)
    assert status.exit_code == 6 and status.finished_at is not None
    logs = overlay.run_logs(run.run_id)
    assert logs.text == "one\ntwo\n" and logs.cursor == 8
    assert overlay.run_logs(run.run_id, cursor=4).text == "two\n"


@pytest.mark.parametrize("unknown", ["6f1f5c1e-4d8b-4b8e-9a56-0d5a5a1c2b3d", "nonsense"])
def test_an_unknown_background_run_is_a_404(overlay: IsolationSessionSync, unknown: str) -> None:
    for call in (overlay.run_status, overlay.run_logs):
        with pytest.raises(SandboxApiException) as caught:
            call(unknown)
        assert caught.value.status_code == 404


def test_a_background_run_needs_a_place_for_its_log(sandbox: SandboxSync) -> None:
    with (
        sandbox.isolation.session(request(mode="ro")) as session,
        pytest.raises(SandboxApiException) as caught,
    ):
        session.run_background("true")
    assert caught.value.status_code == 400


def test_the_network_is_the_sandboxes_or_none(sandbox: SandboxSync) -> None:
    listening = (
        "python3 -c \"import socket,time; s=socket.create_server(('127.0.0.1',4567)); time.sleep(20)\""
    )
    from opensandbox.models.execd import RunCommandOpts

    server = sandbox.commands.run(listening, opts=RunCommandOpts(background=True))
    reach = "for i in $(seq 50); do (exec 3<>/dev/tcp/127.0.0.1/4567) 2>/dev/null && break; sleep 0.1; done"
    assert sandbox.commands.run(reach).exit_code == 0
    connect = "(exec 3<>/dev/tcp/127.0.0.1/4567) 2>/dev/null && echo yes || echo no"
    with sandbox.isolation.session(request()) as session:
        assert session.run(connect).text == "yes"
    with sandbox.isolation.session(request(share_net=False)) as session:
        assert session.run(connect).text == "no"
    assert server.id
    sandbox.commands.interrupt(server.id)


def test_nobody_inside_reaches_the_servers_own_port(sandbox: SandboxSync, port: int) -> None:
    connect = f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo reached || echo none"
    assert shell(sandbox, f"bash -c '{connect}'") == "none"
    with sandbox.isolation.session(request()) as session:
        assert session.run(connect).text == "none"
