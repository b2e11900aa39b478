"""The walls of an egress process: as planned, observed from outside, and gone with the process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stockade import SetupError
from stockade.backends.egress_plan import PORTS_ABI
from stockade.backends.mechanisms import LANDLOCK_SCOPES
from stockade.backends.seccomp import egress_calls
from stockade.gate import client
from stockade.gate import operations as ops
from stockade.host import host
from stockade.linux.sha256 import sha256
from stockade.runs.io.eventloop import Events, drive
from stockade.runs.network import egress_process, egress_template
from support.egress import ANSWERING, CONFINED, ask, launched, running
from support.gatebuild import sabotaged_library
from support.means import applies
from support.paths import ROOT

#: Answers with the message itself.
ECHO = CONFINED + "answer = dict" + ANSWERING
NAMESPACES = ("user", "mnt", "pid", "ipc", "uts", "cgroup")


def test_it_answers_from_behind_its_walls() -> None:
    with running(ECHO) as process:
        assert process.alive
        assert ask(process, {"hello": [1, 2]}) == {"hello": [1, 2]}


def test_it_has_every_namespace_but_the_network_for_itself() -> None:
    with running(ECHO) as process:
        found = process.evidence.walls.namespaces
    own = {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in (*NAMESPACES, "net")}
    assert found["net"] == own["net"]
    assert {name for name in NAMESPACES if found[name] == own[name]} == set()


def test_the_evidence_names_its_walls() -> None:
    with running(ECHO, (443, 5432)) as process:
        evidence = process.evidence
    plan = egress_process.egress_plan((443, 5432), os.environ["STOCKADE_HOME"])
    assert evidence.plan == plan.hash
    assert evidence.ports == ((443, 5432) if host().landlock >= PORTS_ABI else None)
    assert evidence.filters == evidence.walls.filters + 1
    assert evidence.relay_filter == sha256(egress_calls.program("relay")).hexdigest()
    assert evidence.walls.rlimits["core"] == 0
    assert set(evidence.walls.capabilities.values()) == {"0" * 16}


def test_its_mount_table_is_one_empty_read_only_root() -> None:
    plan = egress_process.egress_plan((443,))
    assert list(plan.mounts) == ["/"]
    assert plan.mounts["/"][0] & ops.READONLY


def test_it_has_nothing_of_the_supervisors_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the user")
    code = CONFINED + "\ndef answer(given):\n    return dict(os.environ)\n" + ANSWERING
    client.shutdown()
    with running(code) as process:
        assert ask(process, {}) == {}


def test_it_has_only_its_own_descriptors() -> None:
    code = (
        CONFINED
        + """
def answer(given):
    found = []
    for number in range(256):
        try:
            os.fstat(number)
            found.append(number)
        except OSError:
            pass
    return {"found": found}
"""
        + ANSWERING
    )
    with open(os.devnull) as other:
        os.set_inheritable(other.fileno(), True)
        client.shutdown()
        with running(code) as process:
            assert ask(process, {})["found"] == [0, 1, 2, 3, 4]


def test_no_other_process_of_the_user_can_read_its_memory() -> None:
    applies(os.geteuid() != 0, "root may read everything")
    with running(ECHO) as process:
        info = Path(f"/proc/self/fdinfo/{process.pidfd}").read_text()
        first = next(line.split()[1] for line in info.splitlines() if line.startswith("Pid:"))
        (pid,) = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        with pytest.raises(PermissionError):
            os.open(f"/proc/{pid}/mem", os.O_RDONLY)


def test_closing_ends_it_at_once() -> None:
    process = launched(ECHO)
    begun = time.monotonic()
    with Events() as events:
        drive(process.closed(events), events)
        drive(process.closed(events), events)
    assert not process.alive
    assert time.monotonic() - begun < 2


def test_the_end_of_the_control_socket_ends_it() -> None:
    process = launched(ECHO)
    process._control.close()
    end = time.monotonic() + 5
    while process.alive and time.monotonic() < end:
        time.sleep(0.01)
    assert not process.alive
    with Events() as events:
        drive(process.closed(events), events)


def test_one_that_dies_is_noticed() -> None:
    code = CONFINED + "\ndef answer(given):\n    os._exit(3)\n" + ANSWERING
    with running(code) as process, pytest.raises(SetupError, match="has ended"):
        ask(process, {})


def test_one_that_ends_at_once_is_an_error_with_its_status() -> None:
    with pytest.raises(SetupError, match="ended"):
        launched("raise SystemExit(7)")


def test_one_that_only_claims_to_have_the_second_filter_is_refused() -> None:
    digest = sha256(egress_calls.program("relay", os.environ["STOCKADE_HOME"])).hexdigest()
    said = json.dumps({"filter": digest})
    liar = f"import socket\nend = socket.socket(fileno=3)\nend.send({said.encode()!r})\nend.recv(1)"
    with pytest.raises(SetupError, match="filter is not in force"):
        launched(liar + "\nwhile True: pass")


def test_one_with_another_filter_than_its_own_is_refused() -> None:
    weaker = f"import sys\nsys.argv[1] = {egress_calls.program('gate').hex()!r}\n"
    with pytest.raises(SetupError, match="another filter"):
        launched(weaker + ECHO)


def test_what_it_says_is_not_trusted() -> None:
    code = CONFINED + ANSWERING.replace("json.dumps(answer(json.loads(data))).encode()", "data[::-1]")
    with running(code) as process, pytest.raises(SetupError, match="no answer"):
        ask(process, {"x": 1})


def test_the_template_is_started_once() -> None:
    egress_template.warm_up()
    with running(ECHO), running(ECHO):
        first = client.resident_pids()
    with running(ECHO):
        assert client.resident_pids() == first


def test_a_template_outlives_the_thread_that_started_it() -> None:
    client.shutdown()
    thread = threading.Thread(target=egress_template.warm_up)
    thread.start()
    thread.join()
    with running(ECHO) as process:
        assert ask(process, {"a": 1}) == {"a": 1}


def test_it_and_its_template_end_with_a_supervisor_that_is_killed() -> None:
    code = (
        "import sys, time\n"
        "from stockade.gate import client\n"
        "from support.egress import ANSWERING, CONFINED, launched\n"
        "process = launched(CONFINED + 'answer = dict' + ANSWERING)\n"
        "print(process._connection.resident.pid, process.pidfd, flush=True)\n"
        "time.sleep(60)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-c", code]
    supervisor = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    template, pidfd = map(int, supervisor.stdout.readline().split())
    info = Path(f"/proc/{supervisor.pid}/fdinfo/{pidfd}").read_text()
    first = next(int(line.split()[1]) for line in info.splitlines() if line.startswith("Pid:"))
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    end = time.monotonic() + 10
    while time.monotonic() < end and any(_runs(pid) for pid in (template, first)):
        time.sleep(0.01)
    assert not _runs(template) and not _runs(first)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_template_that_died_is_started_again() -> None:
    with running(ECHO) as process:
        template = process._connection.resident.pid
        os.kill(template, signal.SIGKILL)
        with running(ECHO) as other:
            assert other._connection.resident.pid != template
            assert ask(other, {"a": 1}) == {"a": 1}
        # The copies of the old one go on.
        assert ask(process, {"b": 2}) == {"b": 2}


def test_a_stale_template_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(ECHO) as process:
        before = egress_template.egress_template()
        stamps = egress_template._stamps()
        monkeypatch.setattr(egress_template, "_stamps", lambda *_: (*stamps, None))
        with running(ECHO) as other:
            assert egress_template.egress_template() is not before
            assert before.retired.is_set()
            assert ask(other, {"a": 1}) == {"a": 1}
        assert ask(process, {"b": 2}) == {"b": 2}
    monkeypatch.undo()


def test_a_changed_module_makes_the_template_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "egress" / "decoders"
    room.mkdir(parents=True)
    (tmp_path / "egress" / "termination").mkdir()
    (room / "dns.py").write_text("1")
    monkeypatch.setattr(egress_template, "_PACKAGE", str(tmp_path))
    before = egress_template._stamps()
    assert egress_template._stamps() == before
    (room / "new.py").write_text("2")
    (room / "new.py").replace(room / "dns.py")
    assert egress_template._stamps() != before


def test_no_step_of_its_plan_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = sabotaged_library(tmp_path)
    monkeypatch.setattr("stockade.gate.library", lambda: str(library))
    plan = egress_process.egress_plan((443, 5432))
    orders = [f"op:{index}" for index in range(1, len(plan.ops))]
    orders += [f"flags:{ops.NAMESPACES[name]:#x}" for name in plan.namespaces.names]
    orders += ["maps", "filter", *(["scopes"] if host().landlock >= LANDLOCK_SCOPES else [])]
    unnoticed = []
    for order in ["op:9999", *orders]:
        client.shutdown()
        monkeypatch.setattr(client, "EXTRA_ARGUMENTS", (order,))
        try:
            with running(ECHO, (443, 5432)):
                unnoticed.append(order)
        except SetupError:
            continue
    client.shutdown()
    assert unnoticed == ["op:9999"]


def test_every_module_that_a_template_loads_makes_it_stale() -> None:
    code = (
        f"import sys, {', '.join(egress_template.PRELOAD)}\n"
        "print(*(one.__file__ for name, one in sys.modules.items() if name.split('.')[0] == 'stockade'))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(loaded.split()) <= set(egress_template.loaded_files())
