"""The changes of isolated sessions: read, commit, reset; and file calls that see what the shell sees."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.isolated import SessionUnderTest, create, isolated, until, warm_sandbox
from support.means import applies
from support.server import ServedSandbox, ServerUnderTest, module_server

CONFIG = f"diff_max_bytes = {1 << 20}\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    yield from module_server(tmp_path_factory, CONFIG)


@pytest.fixture(scope="module")
def sandbox(server: ServerUnderTest) -> Iterator[ServedSandbox]:
    with warm_sandbox(server) as found:
        yield found


@pytest.fixture
def rw(sandbox: ServedSandbox) -> Iterator[SessionUnderTest]:
    """A session that writes to the sandbox's own /workspace, which is emptied for each test."""
    with isolated(sandbox, workspace={"path": "/workspace", "mode": "rw"}) as found:
        found.text(
            "cd /workspace; find . -mindepth 1 -delete; mkdir d; echo old > a; echo in > d/b; echo x > gone"
        )
        yield found


@pytest.fixture
def session(sandbox: ServedSandbox, rw: SessionUnderTest) -> Iterator[SessionUnderTest]:
    with isolated(sandbox) as found:
        yield found


CHANGES = "echo new > n; echo changed > a; rm gone; chmod 600 d/b; ln -s a link"


class TestDiff:
    def test_defect_13_the_archive_is_the_layer_with_whiteouts(self, session: SessionUnderTest) -> None:
        session.text(CHANGES)
        found = session.archive()
        assert (found["a"], found["n"], found["d/b"]) == (b"changed\n", b"new\n", b"in\n")
        assert found[".wh.gone"] == b""
        assert set(found) == {"a", "n", "d", "d/b", ".wh.gone", "link"}

    def test_an_opaque_directory_is_marked(self, session: SessionUnderTest) -> None:
        session.text("rm -r d; mkdir d; touch d/fresh")
        assert {"d", "d/.wh..wh..opq", "d/fresh"} <= set(session.archive())

    def test_a_list_says_what_changed(self, session: SessionUnderTest) -> None:
        session.text(CHANGES)
        assert session.changes() == {
            "a": "modified",
            "d/b": "modified",
            "gone": "deleted",
            "link": "added",
            "n": "added",
        }

    def test_a_patch_applies(self, session: SessionUnderTest, tmp_path: Path) -> None:
        session.text("echo new > n; echo changed > a; rm gone")
        answer = session.http.get(f"{session.path}/diff", params={"format": "patch"})
        for name, content in (("a", "old\n"), ("gone", "x\n")):
            (tmp_path / name).write_text(content)
        subprocess.run(["git", "apply"], cwd=tmp_path, input=answer.content, check=True)
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["a", "n"]
        assert (tmp_path / "a").read_text() == "changed\n"

    def test_more_than_the_limit_is_a_413(self, session: SessionUnderTest) -> None:
        session.text("head -c 2M /dev/urandom > big")
        answer = session.http.get(f"{session.path}/diff")
        assert (answer.status_code, answer.json()["code"]) == (413, "TOO_LARGE")
        assert session.changes() == {"big": "added"}

    def test_names_of_several_overlays_begin_with_their_paths(self, sandbox: ServedSandbox) -> None:
        overlays = [
            {"path": "/workspace/one"},
            {"path": "/workspace/two"},
            {"path": "/data", "persist": False},
        ]
        with isolated(sandbox, overlays=overlays) as session:
            session.text("echo 1 > /workspace/one/f; echo 2 > /workspace/two/f; echo 3 > /data/f")
            assert session.archive() == {"workspace/one/f": b"1\n", "workspace/two/f": b"2\n"}
            assert session.archive(path="/workspace/two") == {"f": b"2\n"}
            for query in ({"format": "patch"}, {"path": "/data"}, {"path": "/none"}, {"format": "zip"}):
                assert session.http.get(f"{session.path}/diff", params=query).status_code == 400

    @pytest.mark.parametrize("mode", [{"mode": "rw"}, {"mode": "ro"}, {"persist": False}])
    def test_a_session_that_keeps_no_changes_has_no_diff(
        self, sandbox: ServedSandbox, mode: dict[str, Any]
    ) -> None:
        with isolated(sandbox, overlays=[{"path": "/workspace", **mode}]) as session:
            assert session.http.get(f"{session.path}/diff").status_code == 400
            assert session.commit().status_code == 400

    def test_the_changes_of_a_dead_session_can_be_read(self, session: SessionUnderTest) -> None:
        session.run("echo last > words; kill -9 $$")
        assert session.archive() == {"words": b"last\n"}

    def test_a_running_session_is_frozen_for_a_moment_only(self, session: SessionUnderTest) -> None:
        run = session.background("for n in $(seq 100); do echo $n >> log; sleep 0.01; done; echo done")
        for _ in range(3):
            session.archive()
        until(lambda: b"done" in session.http.get(f"{run}/logs").content, "the run did not go on")
        assert session.text("wc -l < log") == "100\n"


class TestCommit:
    def test_defect_13_changes_land_in_the_sandbox(
        self, session: SessionUnderTest, rw: SessionUnderTest
    ) -> None:
        session.text(CHANGES)
        answer = session.commit()
        assert answer.status_code == 200, answer.text
        (overlay,) = answer.json()["overlays"]
        assert (overlay["path"], answer.json()["reset"]) == ("/workspace", False)
        assert {one["path"] for one in overlay["changes"]} == {"a", "d/b", "gone", "link", "n"}
        assert (
            rw.text("cat a n; ls; stat -c %a d/b; readlink link") == "changed\nnew\na\nd\nlink\nn\n600\na\n"
        )

    def test_the_session_goes_on_and_commits_again(
        self, session: SessionUnderTest, rw: SessionUnderTest
    ) -> None:
        session.text("echo 1 > n; X=1")
        assert session.commit().status_code == 200
        assert session.changes() == {}
        assert session.text("echo 2 > n; cat n; echo $X") == "2\n1\n"
        assert session.commit().status_code == 200
        assert rw.text("cat n") == "2\n"

    def test_what_the_sandbox_changed_too_is_a_conflict_and_nothing_lands(
        self, session: SessionUnderTest, rw: SessionUnderTest
    ) -> None:
        session.text("echo session > a; echo new > n")
        rw.text("echo sandbox > a")
        answer = session.commit()
        assert (answer.status_code, answer.json()["code"]) == (409, "CONFLICT")
        assert answer.json()["conflicts"] == ["/workspace/a"]
        assert "/workspace/a" in answer.json()["message"]
        assert rw.text("cat a; ls") == "sandbox\na\nd\ngone\n"
        assert session.commit(strategy="overwrite").status_code == 200
        assert rw.text("cat a n") == "session\nnew\n"

    def test_files_that_tools_obey_land_too(self, session: SessionUnderTest, rw: SessionUnderTest) -> None:
        session.text("mkdir -p .git/hooks .github/workflows; echo x > .git/hooks/pre-commit; echo y > .envrc")
        assert session.commit().status_code == 200
        assert rw.text("cat .git/hooks/pre-commit .envrc") == "x\ny\n"

    def test_owners_land_as_they_are(
        self, sandbox: ServedSandbox, session: SessionUnderTest, rw: Any
    ) -> None:
        several = "message" not in sandbox.execd.get("/v1/isolated/capabilities").json()
        applies(several, "this user has no subordinate ids")
        session.text("touch mine root; chown 1234:2345 mine; chmod 640 mine")
        content = session.http.get(f"{session.path}/diff").content
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            owners = {one.name: (one.uid, one.gid) for one in tar}
        assert owners == {"mine": (1234, 2345), "root": (0, 0)}
        assert session.commit().status_code == 200
        assert rw.text("stat -c '%u:%g %a' mine") == "1234:2345 640\n"

    def test_reset_upper_after_empties_the_layer_and_keeps_the_shells_state(
        self, session: SessionUnderTest, rw: SessionUnderTest
    ) -> None:
        session.text("mkdir -p deep; cd deep; X='a b'; f() { echo f; }; echo new > n")
        answer = session.commit(reset_upper_after=True)
        assert (answer.status_code, answer.json()["reset"]) == (200, True)
        assert session.archive() == {}
        assert session.text('pwd; echo "$X"; f; cat n; echo $$') == "/workspace/deep\na b\nf\nnew\n2\n"
        rw.text("echo later > later")
        assert session.text("cat ../later") == "later\n"

    def test_a_reset_drops_the_changes_and_revives_a_dead_session(
        self, session: SessionUnderTest, rw: SessionUnderTest
    ) -> None:
        session.text("echo new > n; rm a; X=1; cd d")
        assert session.http.post(f"{session.path}/reset").status_code == 200
        assert session.text("pwd; ls ..; echo $X") == "/workspace/d\na\nd\ngone\n1\n"
        session.run("echo again > n; kill -9 $$")
        assert session.state()["status"] == "dead"
        answer = session.http.post(f"{session.path}/reset")
        assert (answer.status_code, answer.headers["content-length"]) == (200, "0")
        assert session.text("pwd; ls; echo ${X-unset}") == "/workspace\na\nd\ngone\nunset\n"

    def test_a_background_run_prevents_a_reset(self, session: SessionUnderTest) -> None:
        session.background("sleep 60")
        answer = session.commit(reset_upper_after=True)
        assert (answer.status_code, answer.json()["code"]) == (409, "CONFLICT")

    @pytest.mark.parametrize(
        "body", [{"unknown": 1}, {"strategy": "merge"}, {"reset_upper_after": "yes"}, []]
    )
    def test_a_wrong_body_is_a_400(self, session: SessionUnderTest, body: object) -> None:
        answer = session.http.post(f"{session.path}/commit", json=body)
        assert answer.status_code == 400, answer.text


class TestFileCalls:
    def files(self, session: SessionUnderTest, call: str, **query: Any) -> Any:
        return session.http.get(f"{session.path}/files/{call}", params=query)

    def upload(self, session: SessionUnderTest, path: str, content: bytes, **metadata: Any) -> None:
        body: dict[str, tuple[str, str | bytes, str]] = {
            "metadata": ("metadata", json.dumps({"path": path, **metadata}), "application/json"),
            "file": ("file", content, "application/octet-stream"),
        }
        answer = session.http.post(f"{session.path}/files/upload", files=body)
        assert (answer.status_code, answer.headers.get("content-length")) == (200, "0"), answer.text

    def test_defect_1_a_file_that_the_session_deleted_stays_deleted(self, session: SessionUnderTest) -> None:
        session.text("rm gone; rm -r d; mkdir d")
        assert self.files(session, "info", path="gone").status_code == 404
        assert self.files(session, "download", path="/workspace/d/b").status_code == 404
        names = {one["path"] for one in self.files(session, "search", path=".", pattern="*").json()}
        assert names == {"/workspace/a"}

    def test_defect_2_calls_and_the_shell_see_each_others_changes_at_once(
        self, session: SessionUnderTest
    ) -> None:
        self.upload(session, "up/loaded", b"by call\n")
        assert session.text("cat up/loaded; echo shell >> up/loaded") == "by call\n"
        assert self.files(session, "download", path="up/loaded").content == b"by call\nshell\n"
        session.http.request("DELETE", f"{session.path}/files", params={"path": "up/loaded"})
        assert session.text("ls up") == ""
        session.http.post(f"{session.path}/files/permissions", json={"a": {"mode": 600}})
        assert session.text("stat -c %a a") == "600\n"

    def test_defect_15_files_of_the_lower_layer_only_are_moved_and_removed(
        self, session: SessionUnderTest, rw: SessionUnderTest
    ) -> None:
        moved = session.http.post(f"{session.path}/files/mv", json=[{"src": "a", "dest": "d/moved"}])
        assert moved.status_code == 200, moved.text
        removed = session.http.request("DELETE", f"{session.path}/files", params={"path": "/workspace/gone"})
        assert removed.status_code == 200
        assert session.text("ls; cat d/moved") == "d\nold\n"
        assert rw.text("ls") == "a\nd\ngone\n"

    def test_defect_15_absolute_paths_are_not_resolved_twice(self, session: SessionUnderTest) -> None:
        for path in ("a", "./a", "/workspace/a"):
            assert list(self.files(session, "info", path=path).json()) == [path]
            assert self.files(session, "download", path=path).content == b"old\n"
        self.upload(session, "/workspace/abs", b"1")
        assert (
            session.text("ls /workspace/abs; ls /workspace/workspace 2>/dev/null || true")
            == "/workspace/abs\n"
        )

    def test_defect_15_uploads_belong_to_the_sessions_user(self, sandbox: ServedSandbox, rw: Any) -> None:
        several = "message" not in sandbox.execd.get("/v1/isolated/capabilities").json()
        applies(several, "this user has no subordinate ids")
        rw.text("mkdir of; chmod 777 of")
        with isolated(sandbox, workspace={"path": "/workspace/of"}, uid=1234, gid=2345) as session:
            self.upload(session, "mine", b"1")
            assert session.text("stat -c %u:%g mine") == "1234:2345\n"
            assert self.files(session, "info", path="mine").json()["mine"]["owner"] == "1234"

    def test_a_call_to_a_session_that_is_not_there_is_a_404(self, sandbox: ServedSandbox) -> None:
        answer = sandbox.execd.get("/v1/isolated/session/none/files/info", params={"path": "a"})
        assert (answer.status_code, answer.json()["code"]) == (404, "SESSION_NOT_FOUND")

    def test_a_commit_takes_what_calls_have_written(
        self, session: SessionUnderTest, rw: SessionUnderTest
    ) -> None:
        self.upload(session, "up", b"1\n", mode=640)
        assert session.commit().status_code == 200
        assert rw.text("cat up; stat -c %a up") == "1\n640\n"


def test_a_commit_of_changes_in_memory_lands(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With a disk limit the layer is in memory until it is read."""
    for server in module_server(tmp_path_factory, "upper_max_bytes = 1048576\n"):
        with server.sandbox() as sandbox, isolated(sandbox) as session:
            session.text("echo new > n; chmod 751 n")
            assert session.archive() == {"n": b"new\n"}
            assert session.commit().status_code == 200
            assert create(sandbox).status_code == 201
            with isolated(sandbox) as other:
                assert other.text("cat n; stat -c %a n") == "new\n751\n"
