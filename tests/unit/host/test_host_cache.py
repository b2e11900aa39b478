"""What was found out is kept, and no longer than it holds."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stockade import host
from stockade.host import CGROUP_PROBES, GATE_PROBES, Host, Probe, probe_cache


class Spy:
    """Stands between the library and the gate, counting what is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.refused: dict[str, int] = {}
        self.monkeypatch = monkeypatch
        self.groups: list[tuple[str, ...]] = []
        monkeypatch.setattr(host, "_ask", self.ask)
        monkeypatch.setattr("stockade.host.cgroup_probe.probe", self.group)

    def ask(self, gate: str, names: tuple[str, ...]) -> dict[str, tuple[bool, int, str]]:
        self.asked.append(names)
        return {
            name: (name not in self.refused, self.refused.get(name, 0), "7" if name == "landlock" else "step")
            for name in names
        }

    def group(self, names: tuple[str, ...], _: object) -> dict[str, tuple[bool, int, str]]:
        self.groups.append(names)
        return {name: (name not in self.refused, self.refused.get(name, 0), "mkdir") for name in names}

    def new_process(self) -> Host:
        """What a process started now would find."""
        self.monkeypatch.setattr(host, "_known", {})
        return host.host()


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def the_file(home: Path) -> Path:
    return home / "cache" / f"host-{os.geteuid()}.json"


def test_a_second_process_does_not_probe(spy: Spy) -> None:
    first = spy.new_process()
    assert spy.new_process() == first
    assert spy.asked == [GATE_PROBES]


def test_one_process_reads_the_file_once(spy: Spy, stockade_home: Path) -> None:
    first = spy.new_process()
    the_file(stockade_home).unlink()
    assert host.host() is first


def test_asking_for_fresh_answers_probes_again(spy: Spy) -> None:
    spy.new_process()
    host.host(fresh=True)
    assert spy.asked == [GATE_PROBES, GATE_PROBES]


def test_the_file_is_private_and_nothing_lies_beside_it(spy: Spy, stockade_home: Path) -> None:
    spy.new_process()
    assert the_file(stockade_home).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in stockade_home.glob("cache/host-*")] == [the_file(stockade_home).name]


@pytest.mark.parametrize(
    "rubbish", [b"", b"{", b"\xff\xfe", b"[]", b'{"key": {}, "host": {}}', b'{"key": 1}', b"\0" * 4096]
)
def test_a_corrupt_file_is_probed_over(spy: Spy, stockade_home: Path, rubbish: bytes) -> None:
    first = spy.new_process()
    the_file(stockade_home).write_bytes(rubbish)
    assert spy.new_process() == first
    assert spy.new_process() == first
    assert spy.asked == [GATE_PROBES, GATE_PROBES]


def test_a_truncated_file_is_probed_over(spy: Spy, stockade_home: Path) -> None:
    first = spy.new_process()
    whole = the_file(stockade_home).read_bytes()
    the_file(stockade_home).write_bytes(whole[: len(whole) // 2])
    assert spy.new_process() == first


def test_a_state_directory_that_cannot_be_written_is_no_failure(
    spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOCKADE_HOME", "/proc/nowhere")
    assert spy.new_process().has("userns")
    assert spy.new_process().has("userns")
    assert spy.asked == [GATE_PROBES, GATE_PROBES]


def test_a_refusal_is_tried_again_because_it_may_have_been_lifted(spy: Spy) -> None:
    spy.refused = {"userns": errno.EPERM}
    assert not spy.new_process().has("userns")
    spy.refused = {}
    assert spy.new_process().has("userns")
    spy.new_process()
    assert spy.asked == [GATE_PROBES, ("userns",)]


def test_a_cgroup_may_be_delegated_later_and_only_that_is_tried_again(spy: Spy) -> None:
    spy.refused = {"cgroup.memory": errno.EACCES}
    assert not spy.new_process().has("cgroup.memory")
    spy.refused = {}
    assert spy.new_process().has("cgroup.memory")
    spy.new_process()
    assert (spy.asked, spy.groups) == ([GATE_PROBES], [CGROUP_PROBES, ("cgroup.memory",)])


def test_in_another_cgroup_only_cgroups_are_tried_again(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    first = spy.new_process()
    monkeypatch.setattr(probe_cache, "membership", lambda: "4:memory:/elsewhere")
    assert spy.new_process() == first
    assert spy.new_process() == first
    assert (spy.asked, spy.groups) == ([GATE_PROBES], [CGROUP_PROBES, CGROUP_PROBES])


def test_what_the_kernel_lacks_is_not_tried_again(spy: Spy) -> None:
    spy.refused = {"landlock": errno.ENOSYS, "nproc": 0}
    spy.new_process()
    assert not spy.new_process().has("landlock")
    assert spy.asked == [GATE_PROBES]


def test_a_rebuilt_gate_is_asked_anew(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.write_bytes(b"one")
    first = probe_cache.key(host.facts(), str(gate))
    gate.write_bytes(b"other")
    assert probe_cache.key(host.facts(), str(gate)) != first


@pytest.mark.parametrize(
    "change", [{"kernel": "7.0"}, {"uid": 4711}, {"container": "podman"}, {"sysctls": {"user.x": "0"}}]
)
def test_the_key_holds_what_the_answers_depend_on(change: dict[str, Any]) -> None:
    facts = host.facts()
    gate = os.path.realpath("/proc/self/exe")
    assert probe_cache.key(facts, gate) != probe_cache.key(msgspec.structs.replace(facts, **change), gate)


def test_the_file_of_another_key_is_not_believed(tmp_path: Path) -> None:
    file = str(tmp_path / "state" / "cache" / "host.json")
    lie = Host.pretend()
    probe_cache.save(file, {"boot": "yesterday"}, lie)
    assert probe_cache.load(file, {"boot": "yesterday"}) == lie
    assert probe_cache.load(file, {"boot": "today"}) is None
    assert probe_cache.load(file, {}) is None


def test_a_file_that_others_could_have_written_is_not_believed(spy: Spy, stockade_home: Path) -> None:
    spy.new_process()
    stockade_home.chmod(0o777)
    spy.new_process()
    assert spy.asked == [GATE_PROBES, GATE_PROBES]


def test_answers_survive_the_file(tmp_path: Path) -> None:
    file = str(tmp_path / "state" / "cache" / "host.json")
    told = msgspec.structs.replace(
        Host.pretend(), probes={"userns": Probe(ok=False, errno=1, detail="d", reason="r", fix="f")}
    )
    probe_cache.save(file, {"boot": "b"}, told)
    assert probe_cache.load(file, {"boot": "b"}) == told
