"""Images: root file systems that sandboxes have instead of the host's."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stockade import Sandbox, cli
from stockade.errors import NotFoundError, PolicyError, SetupError
from stockade.images import store
from stockade.linux.id_maps import BASE
from stockade.sandbox.private_tree import PrivateTree
from support.environments import POLICY, environment, private_tree, sh
from support.means import applies
from support.roots import archive, busybox_root, entry, host_root

STOCKADE = str(Path(sys.executable).with_name("stockade"))


@pytest.fixture
def tree(stockade_home: Path) -> Iterator[PrivateTree]:
    with private_tree(stockade_home) as made:
        yield made


@pytest.fixture(scope="module")
def busybox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return busybox_root(tmp_path_factory.mktemp("busybox") / "root")


def test_a_directory_becomes_the_system_of_a_sandbox(busybox: Path, tree: PrivateTree) -> None:
    image = store.import_image(str(busybox), "tools:1")
    with Sandbox(POLICY, _environment=environment(tree, image=image.root)) as box:
        assert sh(box, "cat /usr/share/mark") == "of the image\n"
        top = "bin data dev etc home media mnt proc root run tmp usr var workspace"
        assert sh(box, "ls /").split() == top.split()
        assert sh(box, "id -un; pwd; cat /etc/conf.d/own; ls -d /home/somebody") == (
            "root\n/workspace\ncontent\n/home/somebody\n"
        )


def test_an_image_without_a_shell_is_imported_with_a_warning(
    stockade_home: Path, busybox: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare" / "etc").mkdir(parents=True)
    assert cli.main(["images", "import", str(tmp_path / "bare"), "bare"]) == 0
    assert "warning: it has no /bin/sh" in capsys.readouterr().err
    assert cli.main(["images", "import", str(busybox), "tools"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_hosts_and_resolv_conf_are_the_sandboxs(busybox: Path, tree: PrivateTree) -> None:
    image = store.import_image(str(busybox), "tools")
    with Sandbox(POLICY, _environment=environment(tree, image=image.root)) as box:
        assert "the-images-own" not in sh(box, "cat /etc/hosts")
        assert "203.0.113.1" not in sh(box, "cat /etc/resolv.conf")
        assert "games" in sh(box, "cat /etc/passwd")


def test_the_image_is_read_only(busybox: Path, tree: PrivateTree) -> None:
    image = store.import_image(str(busybox), "tools")
    with Sandbox(POLICY, _environment=environment(tree, image=image.root)) as box:
        for path in ("/bin/new", "/usr/share/mark", "/etc/conf.d/new", "/home/somebody/new"):
            assert not box.run(["touch", path]).ok, path
        sh(box, "touch /workspace/new /var/tmp/new /root/new")


def test_an_image_of_parts_of_the_host(tmp_path: Path, tree: PrivateTree) -> None:
    image = store.import_image(str(host_root(tmp_path / "root")), "parts")
    with Sandbox(POLICY, _environment=environment(tree, image=image.root)) as box:
        assert sh(box, "echo ran; cat /workspace/none || echo none") == "ran\nnone\n"


@pytest.mark.parametrize("packed", ["", "gz", "bz2", "xz"])
def test_an_archive_has_the_digest_of_its_directory(busybox: Path, tmp_path: Path, packed: str) -> None:
    with tarfile.open(tmp_path / "root.tar", f"w:{packed}") as made:  # type: ignore[call-overload]
        made.add(busybox, ".")
    one, two = store.import_image(str(busybox), "one"), store.import_image(str(tmp_path / "root.tar"), "two")
    assert one.record.digest == two.record.digest and one.record.bytes == two.record.bytes > 100_000


def test_setuid_bits_are_dropped_and_devices_left_out(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.tar",
        [
            (entry("bin/su", mode=0o6755), b"x"),
            entry("dev/sda", tarfile.BLKTYPE),
            entry("pipe", tarfile.FIFOTYPE),
            entry("dir", tarfile.DIRTYPE, mode=0o3777),
        ],
    )
    image = store.import_image(path, "a")
    assert stat.S_IMODE(os.stat(f"{image.root}/bin/su").st_mode) == 0o755
    assert stat.S_IMODE(os.stat(f"{image.root}/dir").st_mode) == 0o1777
    assert image.record.skipped == 2 and not os.path.lexists(f"{image.root}/dev/sda")


def test_hard_links_stay_one_file(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.tar", [(entry("bin/a"), b"content"), entry("lib/b", tarfile.LNKTYPE, "bin/a")]
    )
    image = store.import_image(path, "a")
    assert os.path.samefile(f"{image.root}/bin/a", f"{image.root}/lib/b") and image.record.bytes == 7


def test_owners_are_those_of_the_environments_range(tmp_path: Path, tree: PrivateTree, busybox: Path) -> None:
    applies(os.geteuid() == 0, "files of an ordinary user's images all belong to that user")
    owned = entry("owned")
    owned.uid, owned.gid = 1000, 70000
    path = archive(tmp_path / "a.tar", [(owned, b"x"), (entry("roots"), b"x")])
    image = store.import_image(path, "a")
    found = os.stat(f"{image.root}/owned")
    assert (found.st_uid, found.st_gid) == (BASE + 1000, BASE + 65534)
    assert os.stat(f"{image.root}/roots").st_uid == 0


def test_closed_directories_can_be_imported_and_removed(tmp_path: Path, stockade_home: Path) -> None:
    path = archive(
        tmp_path / "a.tar",
        [entry(".", tarfile.DIRTYPE, mode=0), entry("a", tarfile.DIRTYPE, mode=0), (entry("a/b"), b"x")],
    )
    store.import_image(path, "a")
    store.remove_image("a")
    assert os.listdir(stockade_home / "images") == [] and store.list_images() == []


def test_a_name_is_taken_until_its_image_is_removed(busybox: Path) -> None:
    store.import_image(str(busybox), "library/tools:1.0")
    with pytest.raises(SetupError, match="already"):
        store.import_image(str(busybox), "library/tools:1.0")
    assert [image.name for image in store.list_images()] == ["library/tools:1.0"]
    store.remove_image("library/tools:1.0")
    with pytest.raises(NotFoundError, match=r"library/tools:1\.0"):
        store.find("library/tools:1.0")


def test_an_image_that_a_sandbox_uses_is_not_removed(busybox: Path, tree: PrivateTree) -> None:
    image = store.import_image(str(busybox), "tools")
    with (
        Sandbox(POLICY, _environment=environment(tree, image=image.root)),
        pytest.raises(SetupError, match="uses the image"),
    ):
        store.remove_image("tools")
    store.remove_image("tools")
    with pytest.raises(SetupError, match="removed"):
        Sandbox(POLICY, _environment=environment(tree, image=image.root)).open()


def test_an_image_of_the_same_name_is_not_mistaken_for_the_removed_one(
    tmp_path: Path, busybox: Path, tree: PrivateTree
) -> None:
    for content in ("first", "second"):
        (busybox / "usr/share/version").write_text(content)
        image = store.import_image(str(busybox), "tools")
        with Sandbox(POLICY, _environment=environment(tree, image=image.root)) as box:
            assert sh(box, "cat /usr/share/version") == content
        store.remove_image("tools")
    (busybox / "usr/share/version").unlink()


def test_what_a_killed_import_left_is_removed_by_the_next(busybox: Path, stockade_home: Path) -> None:
    store.import_image(str(busybox), "first")
    left = stockade_home / "images/.import-abc"
    (left / "root-x/a").mkdir(parents=True)
    store.import_image(str(busybox), "second")
    assert not left.exists()


@pytest.mark.parametrize(
    "name", ["", "A", "/a", "a//b", "a/../b", "../a", "a b", "a\n", "-a", "a" * 300, "a/"]
)
def test_names_that_are_refused(busybox: Path, name: str) -> None:
    with pytest.raises(PolicyError, match="not a name"):
        store.import_image(str(busybox), name)


def test_a_source_that_does_not_exist(tmp_path: Path, stockade_home: Path) -> None:
    with pytest.raises(SetupError, match="No such file"):
        store.import_image(str(tmp_path / "none"), "a")
    assert os.listdir(stockade_home / "images") == []


class TestCommand:
    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([STOCKADE, "images", *words], capture_output=True, text=True, check=False)

    def test_import_list_and_remove(self, busybox: Path) -> None:
        assert self.run("list").stdout == "there are no images\n"
        done = self.run("import", str(busybox), "tools:1")
        assert done.returncode == 0 and "image tools:1 is registered" in done.stderr
        assert "tools:1" in self.run("list").stdout
        (about,) = msgspec.json.decode(self.run("list", "--json").stdout)
        assert about["name"] == "tools:1" and os.path.isdir(about["root"])
        assert self.run("remove", "tools:1").returncode == 0
        gone = self.run("remove", "tools:1")
        assert gone.returncode == 125 and "there is no image tools:1" in gone.stderr

    def test_limits(self, busybox: Path, stockade_home: Path) -> None:
        done = self.run("import", str(busybox), "a", "--most-bytes", "100K")
        assert done.returncode == 125 and "--most-bytes" in done.stderr
        done = self.run("import", str(busybox), "a", "--most-entries", "3")
        assert done.returncode == 125 and "more than 3" in done.stderr
        assert os.listdir(stockade_home / "images") == []
