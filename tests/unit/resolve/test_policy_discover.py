"""Where a policy comes from, and that a hostile project cannot widen its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stockade.errors import PolicyError
from stockade.linux.user import Caller
from stockade.policy import Policy
from stockade.policy.merging import merge
from stockade.policy.toml import LARGEST
from stockade.resolve.discovery import PolicySource, discover
from stockade.resolve.resolution import resolve


class Place:
    """A home with a user's policy, and a project in it."""

    def __init__(self, root: Path) -> None:
        self.home = root / "home"
        self.project = self.home / "project"
        self.project.mkdir(parents=True)
        self.environ = {"STOCKADE_HOME": str(root / "state"), "TOKEN": "t"}

    def own(self, text: str) -> None:
        path = self.home / ".config" / "stockade" / "config.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def write(self, text: str, name: str = "stockade.toml") -> Path:
        path = self.project / name
        path.write_text(text)
        return path

    def discover(self, cwd: Path | None = None, **options: Any) -> PolicySource:
        return discover(str(cwd or self.project), self.environ, str(self.home), **options)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_without_any_file_the_default_policy_applies(place: Place) -> None:
    assert place.discover() == PolicySource(Policy(), ())


def test_flags_lie_over_the_users_own_policy(place: Place) -> None:
    place.own('read = ["/opt"]\nnet = "open"\n[limits]\ntasks = 5\n')
    found = place.discover(flags={"read": ["/srv"], "net": [], "limits": {"wall": "3s"}, "profile": None})
    assert found.policy.read == ("/opt", "/srv")
    assert found.policy.net == ()
    assert (found.policy.limits.tasks, found.policy.limits.wall) == (5, 3.0)
    assert found.sources == (f"{place.home}/.config/stockade/config.toml",)


def test_rules_of_the_network_grow_by_flags(place: Place) -> None:
    place.own('net = ["a.example:443", "!b.example"]')
    assert place.discover(flags={"net": ["c.example"]}).policy.net == (
        "a.example:443",
        "!b.example",
        "c.example",
    )
    assert place.discover(flags={"net": "open"}).policy.net == "open"
    assert place.discover(flags={"net": "none"}).policy.net == ()
    place.own('net = "open"')
    assert place.discover(flags={"net": ["c.example"]}).policy.net == ("c.example",)


def test_a_project_may_name_fewer_hosts_and_no_others(place: Place) -> None:
    place.own('net = ["*.example", "!ads.example"]')
    place.write('net = ["a.example:443"]')
    assert place.discover().policy.net == ("a.example:443", "!ads.example")
    place.write('net = "none"')
    assert place.discover().policy.net == ()
    for text, words in (
        ('net = ["a.other"]', 'net = "a.other"'),
        ('net = ["tcp://a.example:443"]', 'net = "tcp://a.example:443"'),
        ('net = "open"', "the host's network"),
    ):
        place.write(text)
        with pytest.raises(PolicyError, match="asks for more") as caught:
            place.discover()
        assert words in caught.value.message


def test_the_users_policy_is_found_where_xdg_says(place: Place, tmp_path: Path) -> None:
    (tmp_path / "xdg" / "stockade").mkdir(parents=True)
    (tmp_path / "xdg" / "stockade" / "config.toml").write_text('profile = "dev"')
    place.environ["XDG_CONFIG_HOME"] = str(tmp_path / "xdg")
    assert place.discover().policy.profile == "dev"


def test_a_file_that_was_named_is_the_whole_policy_but_for_flags(place: Place) -> None:
    place.own('profile = "dev"')
    place.write('net = "open"')
    file = place.write('read = ["x"]', "named.toml")
    found = place.discover(file=str(file), flags={"read": ["y"]}, workspace="/w")
    assert found.policy == Policy(read=[f"{place.project}/./x", "y"], workspace="/w")
    assert found.sources == (str(file),)


def test_a_project_may_hide_more_and_never_less(place: Place) -> None:
    (place.project / "data").mkdir()
    place.own(f'read = ["{place.project}"]\ndeny = ["{place.project}/.env"]')
    place.write('deny = ["data/key"]')
    found = place.discover(flags={"deny": ["/srv"]}).policy
    assert found.deny == (f"{place.project}/.env", "data/key", "/srv", f"{place.project}/data/key")
    place.write("deny = []")
    assert place.discover().policy.deny == (f"{place.project}/.env",)


def test_a_denied_link_is_hidden_by_its_own_name_and_by_what_it_leads_to(place: Place) -> None:
    (place.project / "link").symlink_to("../target$")
    place.write('deny = ["link"]')
    found = place.discover(workspace=str(place.project)).policy
    assert found.deny == (f"{place.project}/link", f"{place.home}/target$$")


def test_a_project_may_list_fewer_programs_and_no_other(place: Place) -> None:
    place.own('exec = ["/usr/bin/*"]')
    place.write('exec = ["/usr/bin/env"]')
    assert place.discover().policy.exec == (os.path.realpath("/usr/bin/env"),)
    place.write('exec = ["/usr/bin/env", "tool"]')
    with pytest.raises(PolicyError, match=r"execute /.*/tool"):
        place.discover()


def test_merging_flags_grows_lists_merges_tables_and_replaces_the_rest() -> None:
    policy = Policy(read=["/a"], env={"A": "1"}, workspace={"path": "/w", "mode": "ro"}, backend="native")
    merged = merge(policy, {"read": ["/b"], "env": {"B": "2"}, "workspace": "/v", "backend": "auto"})
    assert merged == Policy(
        read=["/a", "/b"], env={"A": "1", "B": "2"}, workspace={"path": "/v", "mode": "ro"}
    )
    assert (
        merge(Policy(), {"workspace": {"mode": "rw"}}).workspace
        == merge(Policy(), {"workspace": {"path": ".", "mode": "rw"}}).workspace
    )
    assert merge(Policy(), {"protect": ["x"]}).protect == (*Policy().protect, "x")
    with pytest.raises(PolicyError, match="reed"):
        merge(policy, {"reed": ["/b"]})


def test_a_project_may_narrow(place: Place) -> None:
    place.own('read = ["/opt"]\nnet = "open"')
    file = place.write('read = []\nnet = []\n[limits]\nwall = "5s"\n[workspace]\nmode = "ro"\n')
    found = place.discover(workspace=str(place.project))
    assert (found.policy.read, found.policy.net, found.policy.limits.wall) == ((), (), 5.0)
    assert found.policy.workspace is not None
    assert (found.policy.workspace.path, found.policy.workspace.mode) == (str(place.project), "ro")
    assert found.sources[-1] == str(file)
    assert found.pinned


def test_a_project_keeps_what_it_does_not_mention(place: Place) -> None:
    place.own('[limits]\nwall = "30s"\n')
    place.write("[limits]\ntasks = 9\n")
    assert place.discover().policy.limits.wall == 30.0


def test_flags_win_over_the_project(place: Place) -> None:
    place.write("net = []\n[limits]\nwall = 5\n")
    found = place.discover(flags={"net": "open", "limits": {"wall": 60}})
    assert (found.policy.net, found.policy.limits.wall) == ("open", 60.0)


WIDER = [
    ('net = "open"', "network"),
    ('read = ["/etc"]', "read /etc"),
    ('read = ["~"]', "read "),
    ('read = ["../secret"]', "secret"),
    ('write = ["."]', "write "),
    ('pass_env = ["TOKEN"]', "TOKEN"),
    ('profile = "dev"', 'profile = "dev": strict, and your toolchains'),
    ("[limits]\ntasks = 9999", "limits.tasks"),
    ('accept = ["files"]', "files"),
    ('[syscalls]\nallow = ["ptrace"]', "ptrace"),
    ('[workspace]\npath = ".."', "change a copy of"),
    ('[workspace]\nmode = "rw"', "write "),
    ("protect = []", ".git/hooks"),
]


@pytest.mark.parametrize(("text", "words"), WIDER)
def test_a_project_that_widens_is_refused_with_the_difference(place: Place, text: str, words: str) -> None:
    (place.home / "secret").mkdir()
    file = place.write(text)
    with pytest.raises(PolicyError) as caught:
        place.discover(workspace=str(place.project))
    assert words in caught.value.message
    assert f"stockade trust {file}" in caught.value.hint


def test_a_project_cannot_widen_through_its_own_links(place: Place) -> None:
    (place.home / "secret").mkdir()
    (place.project / "docs").symlink_to("../secret")
    place.own(f'read = ["{place.project}"]')
    place.write('read = ["docs"]')
    with pytest.raises(PolicyError, match=f"the link {place.project}/docs leads to {place.home}/secret"):
        place.discover()


def test_a_link_made_after_the_comparison_is_refused(place: Place, stockade_home: Path) -> None:
    (place.home / "secret").mkdir()
    (place.project / "docs").mkdir()
    place.own(f'read = ["{place.project}"]')
    place.write('read = ["docs"]')
    found = place.discover()
    (place.project / "docs").rmdir()
    (place.project / "docs").symlink_to("../secret")
    with pytest.raises(PolicyError, match="replaced"):
        resolve(found.policy, Caller.current(), str(stockade_home), pinned=found.pinned)


def test_a_project_cannot_borrow_a_policy_through_a_link(place: Place) -> None:
    elsewhere = place.home / "elsewhere.toml"
    elsewhere.write_text('net = "open"')
    (place.project / "stockade.toml").symlink_to(elsewhere)
    with pytest.raises(PolicyError, match="network"):
        place.discover()


def test_two_policies_in_one_project_are_refused(place: Place) -> None:
    place.write("[limits]\nwall = 3")
    place.write('[tool.stockade]\nnet = "open"', "pyproject.toml")
    with pytest.raises(PolicyError, match="two policies"):
        place.discover()


def test_pyproject_is_a_project_policy_too(place: Place) -> None:
    place.write('[tool.stockade]\nnet = "open"', "pyproject.toml")
    with pytest.raises(PolicyError, match=r"pyproject\.toml asks for more"):
        place.discover()


def test_a_pyproject_without_our_table_is_nobodys_business(place: Place) -> None:
    place.write("this is not TOML", "pyproject.toml")
    assert place.discover().sources == ()
    place.write('[project]\nname = "uses-stockade"', "pyproject.toml")
    assert place.discover().sources == ()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    path.write_bytes(b"#" * (LARGEST + 1))


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def directory(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def binary(path: Path) -> None:
    path.write_bytes(b"stockade = \xff")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", ["stockade.toml", "pyproject.toml"])
@pytest.mark.parametrize("make", [pipe, huge, endless, directory, loop, binary])
def test_a_strange_file_is_refused_at_once(place: Place, make: Callable[[Path], None], name: str) -> None:
    make(place.project / name)
    with pytest.raises(PolicyError, match=name):
        place.discover()


def test_a_link_to_nothing_is_refused(place: Place) -> None:
    """What it led to may have been narrower than the default."""
    (place.project / "stockade.toml").symlink_to("none")
    with pytest.raises(PolicyError, match=r"stockade\.toml: it is a link to none, which is not there"):
        place.discover()


def test_a_repository_in_between_ends_the_search(place: Place) -> None:
    place.write('[workspace]\npath = "."\n')
    below = place.project / "a"
    below.mkdir()
    (place.home / ".git").mkdir()
    (place.home / ".git" / "HEAD").touch()
    with pytest.raises(PolicyError, match="as the workspace"):
        place.discover(below, workspace=str(below))
    (below / ".git").mkdir()
    (below / ".git" / "HEAD").touch()
    found = place.discover(below, workspace=str(below)).policy.workspace
    assert found is not None and found.path == str(below)


def test_what_else_a_project_asks_for_is_listed_also_below_it(place: Place) -> None:
    place.write('net = "open"\n[workspace]\npath = "."\n')
    below = place.project / "a"
    below.mkdir()
    with pytest.raises(PolicyError, match="net"):
        place.discover(below, workspace=str(below))


def test_a_workspace_elsewhere_needs_trust_also_in_a_repository(place: Place) -> None:
    (place.project / ".git").mkdir()
    (place.project / ".git" / "HEAD").touch()
    (place.home / "other").mkdir()
    below = place.project / "a"
    below.mkdir()
    for path in ("..", "../other"):
        place.write(f'[workspace]\npath = "{path}"\n')
        with pytest.raises(PolicyError, match="asks for more"):
            place.discover(below, workspace=str(below))


def test_the_nearest_policy_above_counts_up_to_the_repository(place: Place) -> None:
    below = place.project / "a" / "b"
    below.mkdir(parents=True)
    file = place.write("[limits]\nwall = 3")
    assert place.discover(below).sources == (str(file),)
    (place.project / "a" / ".git").mkdir()
    assert place.discover(below).sources == (str(file),), "which is no repository"
    (place.project / "a" / ".git" / "HEAD").touch()
    assert place.discover(below).sources == ()


def test_the_home_and_shared_directories_of_others_are_no_projects(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.home / "stockade.toml").write_text('net = "open"')
    assert place.discover().sources == ()
    assert place.discover(place.home).sources == ()
    place.write('net = "open"')
    place.project.chmod(0o1777)
    (place.project / "mine").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert place.discover(place.project / "mine").sources == ()


def test_the_projects_policy_file_is_protected_inside(place: Place) -> None:
    place.write("[limits]\nwall = 3")
    found = place.discover(workspace=str(place.project))
    assert found.policy.protect[-1] == "stockade.toml"
    assert place.discover().policy.protect == Policy().protect


def test_a_project_in_a_directory_with_odd_characters_works(place: Place, stockade_home: Path) -> None:
    odd = place.home / "a$TOKEN ~b?"
    odd.mkdir()
    (odd / "data").mkdir()
    (odd / "stockade.toml").write_text('read = ["data"]\n[limits]\nwall = 3')
    place.own('read = ["~"]')
    found = place.discover(odd, workspace=str(odd))
    policy = msgspec.structs.replace(found.policy, toolchain=False)
    with resolve(policy, Caller.current(), str(stockade_home), pinned=found.pinned) as resolved:
        assert resolved.workspace is not None
        assert resolved.workspace.path == str(odd)
        assert [grant.path for grant in resolved.grants] == [f"{odd}/data"]
        assert resolved.protected[-1] == ("stockade.toml", True)


def test_a_contradiction_between_the_layers_names_the_project(place: Place) -> None:
    place.own('[syscalls]\nallow = ["ptrace"]')
    file = place.write('[syscalls]\ndeny = ["ptrace"]')
    with pytest.raises(PolicyError, match="conflicts with your own policy") as caught:
        place.discover()
    assert str(file) in caught.value.message
