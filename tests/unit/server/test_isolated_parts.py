"""The parts of isolated sessions that need no sandbox: logs, states, mounts, archives, capabilities."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stockade.controls import Grade
from stockade.resolve.environment import IdMaps
from stockade.result import Enforcement, Outcome, Result
from stockade.server.isolated.capabilities import capabilities, unavailable
from stockade.server.isolated.layer_archive import LayerArchive, end_archive
from stockade.server.isolated.session import EXITED, run_end
from stockade.server.isolated.session_mounts import session_mounts
from stockade.server.isolated.session_request import (
    BindSpec,
    CreateSession,
    InvalidFieldError,
    OverlaySpec,
    Profile,
    session_spec,
)
from stockade.server.isolated.shell_state import without_own
from stockade.server.isolated.with_ids import TooLargeError


def test_the_variables_of_the_shells_driver_are_not_copied() -> None:
    state = b'declare -- _stockade="123"\ndeclare -- X="_stockade"\ndeclare -x _stockade_n\n'
    assert without_own(state) == b'declare -- X="_stockade"\n'


class TestEndsOfRuns:
    def test_defect_15_a_failure_has_the_exit_code_as_its_value(self) -> None:
        end = run_end(Result(outcome=Outcome.EXITED, exit_code=3), 1.0, died=False)
        assert (end.ename, end.evalue) == ("ExitError", "3")

    def test_success_has_no_error(self) -> None:
        assert run_end(Result(outcome=Outcome.EXITED, exit_code=0), 1.0, died=False).ename == ""

    def test_a_timeout_has_no_exit_code(self) -> None:
        end = run_end(Result(outcome=Outcome.TIMED_OUT, exit_code=124, reason="too long"), 1.0, died=False)
        assert (end.ename, end.evalue) == ("TimeoutError", "too long")

    def test_a_dead_shell_says_so(self) -> None:
        end = run_end(Result(outcome=Outcome.SIGNALLED, exit_code=137), 1.0, died=True)
        assert end.evalue == EXITED


class TestMounts:
    ALLOWED = ("/workspace", "/data")

    @pytest.fixture
    def trees(self, tmp_path: Path) -> Iterator[dict[str, int]]:
        found = {}
        for name in ("workspace", "data", "tmp"):
            (tmp_path / name).mkdir()
            found[f"/{name}"] = os.open(tmp_path / name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        yield found
        for descriptor in found.values():
            os.close(descriptor)

    def accesses(
        self,
        trees: dict[str, int],
        *overlays: OverlaySpec,
        profile: Profile = "strict",
        extra: tuple[str, ...] = (),
        binds: tuple[BindSpec, ...] = (),
    ) -> dict[str, str]:
        request = CreateSession(overlays=overlays, profile=profile, extra_writable=extra, binds=binds)
        found = session_mounts(session_spec(request, 0), trees, self.ALLOWED)
        found.close()
        return {mount.path: mount.access for mount in found.mounts}

    def test_everything_is_read_only_but_what_the_request_names(self, trees: dict[str, int]) -> None:
        found = self.accesses(trees, OverlaySpec("/workspace"), OverlaySpec("/data", "rw"))
        assert found == {"/workspace": "overlay", "/data": "write"}

    def test_strict_has_a_private_tmp_and_balanced_the_sandboxs(self, trees: dict[str, int]) -> None:
        assert "/tmp" not in self.accesses(trees, OverlaySpec("/workspace"))
        found = self.accesses(trees, OverlaySpec("/workspace"), profile="balanced")
        assert found["/tmp"] == "write"

    def test_a_session_that_names_tmp_gets_the_sandboxs(self, trees: dict[str, int]) -> None:
        assert self.accesses(trees, OverlaySpec("/tmp", "rw"))["/tmp"] == "write"

    def test_defect_15_a_missing_workspace_is_made(self, trees: dict[str, int], tmp_path: Path) -> None:
        found = self.accesses(trees, OverlaySpec("/workspace/a/b", "rw"))
        assert found["/workspace/a/b"] == "write"
        assert (tmp_path / "workspace/a/b").is_dir()

    def test_a_bind_shows_its_source_at_another_place(self, trees: dict[str, int], tmp_path: Path) -> None:
        (tmp_path / "data/in").mkdir()
        found = self.accesses(
            trees, OverlaySpec("/workspace"), binds=(BindSpec("/data/in", "/workspace/in", True),)
        )
        assert found["/workspace/in"] == "read"
        assert (tmp_path / "workspace/in").is_dir()

    @pytest.mark.parametrize("path", ["/usr/a", "/etcetera", "/workspaces"])
    def test_a_path_outside_of_the_trees_is_refused(self, trees: dict[str, int], path: str) -> None:
        with pytest.raises(InvalidFieldError, match="does not lie below"):
            self.accesses(trees, OverlaySpec(path))

    def test_sources_lie_below_the_configured_paths(self, trees: dict[str, int]) -> None:
        with pytest.raises(InvalidFieldError, match=r"binds\[0\]\.source"):
            self.accesses(trees, OverlaySpec("/workspace"), binds=(BindSpec("/tmp"),))
        with pytest.raises(InvalidFieldError, match=r"extra_writable\[0\]"):
            self.accesses(trees, OverlaySpec("/workspace"), extra=("/tmp/a",))

    def test_a_source_that_is_missing_is_refused(self, trees: dict[str, int]) -> None:
        with pytest.raises(InvalidFieldError, match="does not exist"):
            self.accesses(trees, OverlaySpec("/workspace"), binds=(BindSpec("/data/none"),))

    @pytest.mark.parametrize("target", ["/etc", "../../../../../../../etc", "../tmp"])
    def test_defect_9_a_link_that_leads_out_of_its_tree_is_refused_by_the_kernel(
        self, trees: dict[str, int], tmp_path: Path, target: str
    ) -> None:
        (tmp_path / "data/link").symlink_to(target)
        for overlays, binds in (
            ((OverlaySpec("/workspace"),), (BindSpec("/data/link"),)),
            ((OverlaySpec("/data/link"),), ()),
            ((OverlaySpec("/data/link/below"),), ()),
            ((OverlaySpec("/workspace"),), (BindSpec("/workspace", "/data/link/x"),)),
        ):
            with pytest.raises(InvalidFieldError, match="link"):
                self.accesses(trees, *overlays, binds=binds)

    def test_a_link_within_its_tree_is_followed(self, trees: dict[str, int], tmp_path: Path) -> None:
        (tmp_path / "data/real").mkdir()
        (tmp_path / "data/link").symlink_to("real")
        assert "/data/link" in self.accesses(trees, OverlaySpec("/data/link"))

    def test_a_pipe_is_no_source(self, trees: dict[str, int], tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "data/pipe")
        with pytest.raises(InvalidFieldError, match="neither"):
            self.accesses(trees, OverlaySpec("/workspace"), binds=(BindSpec("/data/pipe"),))


class TestArchives:
    IDS = IdMaps(((0, os.geteuid(), 1),), ((0, os.getegid(), 1),))

    def test_it_holds_files_links_and_owners_inside(self, tmp_path: Path) -> None:
        (tmp_path / "d").mkdir()
        (tmp_path / "d/file").write_bytes(b"content")
        os.link(tmp_path / "d/file", tmp_path / "d/same")
        (tmp_path / "link").symlink_to("/etc/passwd")
        (tmp_path / "d/file").chmod(0o640)
        found = self.members(tmp_path, "")
        assert sorted(found) == ["d", "d/file", "d/same", "link"]
        assert (found["d/file"].mode, found["d/file"].uid) == (0o640, 0)
        assert (found["d/same"].linkname, found["link"].linkname) == ("d/file", "/etc/passwd")

    def test_names_can_have_a_prefix(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert list(self.members(tmp_path, "workspace")) == ["workspace/file"]

    def test_more_than_the_limit_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(5000))
        with pytest.raises(TooLargeError):
            self.members(tmp_path, "", most=4000)

    def members(self, layer: Path, prefix: str, most: int = 0) -> dict[str, tarfile.TarInfo]:
        file, upper = io.BytesIO(), os.open(layer, os.O_PATH | os.O_CLOEXEC)
        try:
            archive = LayerArchive(file, self.IDS, most)
            archive.add_layer(upper, prefix)
            archive.close()
            end_archive(file)
        finally:
            os.close(upper)
        file.seek(0)
        with tarfile.open(fileobj=file) as read:
            return {member.name: member for member in read}


class TestCapabilities:
    @staticmethod
    def control(mechanism: str, grade: Grade = Grade.KERNEL) -> Enforcement:
        return Enforcement("default", mechanism, "seen", grade)

    def test_states_come_from_evidence(self) -> None:
        found = capabilities(
            {
                "files": self.control("mount namespace, Landlock ABI 7"),
                "syscalls": self.control("seccomp filter", Grade.WEAKER),
                "privileges": self.control("user namespace, seven capabilities"),
                "processes": self.control("pid namespace"),
            },
            "1",
            identities=True,
        ).hardening
        assert found is not None
        assert (found.init_mode, found.signal_shield) == ("pid1", True)
        assert (found.landlock.state, found.seccomp.state) == ("active", "degraded")
        assert (found.cap_drop.state, found.ebpf.state) == ("active", "disabled")

    def test_without_landlock_the_layer_says_so(self) -> None:
        found = capabilities({"files": self.control("mount namespace")}, "1", identities=True).hardening
        assert found is not None
        assert (found.landlock.state, found.seccomp.state) == ("unsupported", "unsupported")

    def test_an_unavailable_machine_says_why(self) -> None:
        found = unavailable("no user namespaces", "1")
        assert (found.available, found.diff_supported, found.message) == (False, False, "no user namespaces")
