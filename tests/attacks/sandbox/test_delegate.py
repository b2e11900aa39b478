"""A program that may ask for sandboxes gets none with more than it has itself, and none that outlives it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import stockade
from stockade import Policy, PolicyError, Sandbox
from stockade.host import host
from stockade.linux.user import Caller
from stockade.receipt import chain, keys
from stockade.receipt.statement import Parent
from stockade.receipt.verify import check_log
from stockade.resolve.child_policy import child, confirm
from stockade.resolve.resolution import resolve
from stockade.runs.register import register
from support.certificates import CERTIFICATE
from support.means import applies
from support.paths import ROOT

CLIENT = (ROOT / "src/stockade/inside/delegate_request.py").read_text()
#: Asks for each line of its input, and prints the answers or why there was none.
ASKER = (
    CLIENT
    + """
import sys
for line in sys.stdin:
    asked = json.loads(line)
    try:
        given = delegate(asked["command"], asked.get("policy"), input=asked.get("input", "").encode(),
                         cwd=asked.get("cwd", ""), timeout=asked.get("timeout"))
        given = {**vars(given), "stdout": given.text, "stderr": given.stderr_text}
    except (PermissionError, ConnectionError) as error:
        given = {"refused": str(error)}
    print(json.dumps(given), flush=True)
"""
)


def ask(policy: Policy, *requests: dict[str, Any]) -> tuple[list[dict[str, Any]], stockade.Result]:
    """What a program under the policy is told when it asks, one request after the other."""
    lines = "".join(json.dumps(one) + "\n" for one in requests)
    result = stockade.run(["python3", "-c", ASKER], policy, input=lines.encode())
    assert result.ok, result.stderr.decode()
    return [json.loads(line) for line in result.text.splitlines()], result


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """Readable and writable grants, and a secret beside them."""
    for name in ("open", "open/sub", "out", "out/dir", "vault"):
        (tmp_path / name).mkdir()
    (tmp_path / "open/sub/file").write_text("shown")
    (tmp_path / "open/hidden").write_text("hidden")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "vault/secret").write_text("secret")
    return tmp_path


def having(places: Path, **more: Any) -> Policy:
    fields: dict[str, Any] = {"read": [f"{places}/open"], "write": [f"{places}/out"], "delegate": True}
    return Policy(**(fields | more))


def test_a_child_runs_and_both_receipts_name_each_other(places: Path, stockade_home: Path) -> None:
    policy = having(places, env={"A": "parent"}, limits={"tasks": 20})
    cat = {"command": ["sh", "-c", f"cat - {places}/open/sub/file; echo $A $B; pwd"], "input": "given "}
    answers, result = ask(
        policy,
        cat | {"policy": {"read": [f"{places}/open/sub"], "env": {"B": "child"}}, "cwd": "/tmp"},
        {"command": ["sh", "-c", f"echo made > {places}/out/made"], "policy": {"write": [f"{places}/out"]}},
        {"command": ["sh", "-c", f"cat {places}/open/sub/file"]},
    )
    first, second, third = answers
    assert (first["outcome"], first["stdout"]) == ("exited", "given shownchild\n/tmp\n")
    assert second["exit_code"] == 0 and (places / "out/made").read_text() == "made\n"
    assert third["exit_code"] == 1 and "No such file" in third["stderr"]
    log = chain.of(str(stockade_home))
    assert result.receipt is not None
    said = result.receipt.predicate
    children = [log.get(place).predicate for place in (1, 2, 3)]
    assert said.children == tuple(log.get(place).hash for place in (1, 2, 3))
    assert {one.parent.sandbox for one in children if one.parent} == {said.sandbox}
    assert {one.parent.plan for one in children if one.parent} == {said.plan}
    assert said.parent is None and all(one.controls["files"].grade.startswith("read") for one in children)
    assert check_log(log, {key.id: key.public for key in keys.known(str(stockade_home))}) == 4


def test_a_child_has_the_walls_of_its_parent_whatever_made_them(places: Path) -> None:
    """Also without namespaces, where the policy accepts what is weaker there; and in an event loop."""
    policy = having(places, backend="landlock", accept=["files", "processes", "devices"])
    read = {"command": ["cat", f"{places}/secret"]}
    (answer,), _ = ask(policy, read | {"policy": {"read": [f"{places}/open"]}})
    assert answer["exit_code"] == 1 and "Permission denied" in answer["stderr"]

    async def later() -> stockade.Result:
        async with stockade.AsyncSandbox(having(places)) as box:
            return await box.run(["python3", "-c", ASKER], input=json.dumps(read).encode())

    told = json.loads(asyncio.run(later()).text)
    assert told["exit_code"] == 1 and "No such file" in told["stderr"]


def test_a_child_with_the_network_gets_the_certificates_of_its_parent_and_no_others(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (places / "ca.pem").write_text(CERTIFICATE)
    monkeypatch.setenv("SSL_CERT_FILE", str(places / "ca.pem"))
    monkeypatch.setenv("https_proxy", "http://me:hunter2@proxy:3128")
    show = {"command": ["sh", "-c", 'cat "$SSL_CERT_FILE"; echo "$https_proxy"'], "policy": {"net": "open"}}
    (given,), _ = ask(having(places, net="open"), show)
    assert given["stdout"] == f"{CERTIFICATE}http://proxy:3128\n"
    (without,), _ = ask(having(places, net="open"), show | {"policy": {}})
    assert without["stdout"] == "\n"
    own = having(places, net="open", env={"SSL_CERT_FILE": "/own.pem"})
    (other,), _ = ask(own, show)
    assert other["stdout"] == "http://proxy:3128\n" and "/own.pem" in other["stderr"]
    hidden = having(places, net="open", read=[f"{places}/open"], deny=[f"{places}/ca.pem"])
    (none,), _ = ask(hidden, show)
    assert "BEGIN" not in str(none)


def test_nothing_can_be_asked_for_without_the_right(places: Path) -> None:
    (answer,), _ = ask(having(places, delegate=False), {"command": ["true"]})
    assert "needs delegate = true" in answer["refused"]
    done = stockade.run(
        ["python3", "-c", "import os; print(os.listdir('/proc/self/fd'))"], having(places, delegate=False)
    )
    assert done.text.count(",") == 3  # 0, 1, 2 and the directory itself


def test_a_child_is_given_no_more_than_its_parent_has(places: Path) -> None:
    """Wider clauses, other spellings of a path, links, what is hidden, what is not the program's to say."""
    (places / "out/link").symlink_to(places)
    (places / "out/file").symlink_to(places / "secret")
    (places / "open/link").symlink_to(places)
    policies: list[dict[str, Any]] = [
        {"net": "open"},
        {"read": [str(places / "secret")]},
        {"read": [str(places)]},
        {"read": ["/"]},
        {"read": [f"{places}/open/../secret"]},
        {"read": [f"{places}/open/./sub"]},
        {"read": [f"/{places}/open"]},
        {"read": ["open"]},
        {"read": ["~/.ssh"]},
        {"read": ["$HOME"]},
        {"read": [f"{places}/opened"]},
        {"read": [f"{places}/out/link/secret"]},
        {"read": [f"{places}/out/file"]},
        {"read": [f"{places}/open/link"]},
        {"read": [f"{places}/open/hidden"]},
        {"read": [f"{places}/open/none?"]},
        {"write": [f"{places}/open"]},
        {"write": [f"{places}/open/sub"]},
        {"read": [7]},
        {"read": [f"{places}/open/sub"] * 101},
        {"pass_env": ["SECRET"]},
        {"syscalls": {"allow": ["ptrace"]}},
        {"limits": {"tasks": 400}},
        {"limits": {"wall": "2m"}},
        {"profile": "dev"},
        {"workspace": str(places / "out")},
        {"deny": []},
        {"exec": ["/usr/bin/*"]},
        {"backend": "landlock"},
        {"accept": ["files"]},
        {"toolchain": ["node"]},
        {"parent": "0123456789ab"},
        {"who": {"agent": "somebody"}},
    ]
    policy = having(places, deny=[f"{places}/open/hidden"], limits={"tasks": 50, "wall": "1m"})
    answers, result = ask(policy, *({"command": ["true"], "policy": one} for one in policies))
    assert [one for one, answer in zip(policies, answers, strict=True) if "refused" not in answer] == []
    assert result.receipt is not None and result.receipt.predicate.children == ()
    # What is left out is the parent's: what is hidden stays so, and its limits hold.
    (seen,), _ = ask(policy, {"command": ["ls", f"{places}/open"], "policy": {"read": [f"{places}/open"]}})
    assert seen["stdout"].split() == ["link", "sub"]


def test_a_child_of_a_worker_has_the_budget_of_a_worker() -> None:
    applies(host().has("cgroup.memory") and host().has("cgroup.cpuacct"), "no cgroups for this user")
    allocate = {"command": ["python3", "-c", "x = bytearray(200 << 20)"]}
    asks = [allocate, allocate | {"policy": {"profile": "strict"}}]
    answers, _ = ask(Policy(profile="worker", delegate=True), *asks)
    assert answers[0]["outcome"] == "out-of-memory"
    assert 'limits.memory: none where "64M" is allowed' in answers[1]["refused"]


def test_what_a_pattern_hides_from_a_program_is_hidden_from_its_children(places: Path) -> None:
    for name in ("a.pem", "sub/b.pem", "what?.pem", "a*b.pem"):
        (places / "open" / name).write_text("the secret\n")
    policy = having(places, deny=[f"{places}/open/**/*.pem"])
    listing = {
        "command": ["find", f"{places}/open", "-name", "*.pem"],
        "policy": {"read": [f"{places}/open"]},
    }
    (seen,), _ = ask(policy, listing)
    assert (seen["exit_code"], seen["stdout"]) == (0, ""), seen
    (shown,), _ = ask(having(places), listing)
    assert len(shown["stdout"].split()) == 4
    alone = {"command": ["true"], "policy": {"read": [f"{places}/open/sub/b.pem"]}}
    (answer,), _ = ask(policy, alone)
    assert "refused" in answer


def test_a_link_put_in_the_place_of_a_directory_leads_nowhere(places: Path, stockade_home: Path) -> None:
    """The program swaps what it has asked for between the look at it and its being shown."""
    caller = Caller.current()
    with resolve(having(places), caller, str(stockade_home)) as parent:
        found = child({"read": [f"{places}/out/dir"]}, parent, "native", parent.environ)
        (places / "out/dir").rename(places / "out/moved")
        (places / "out/dir").symlink_to(places)
        with pytest.raises(PolicyError, match="replaced"):
            resolve(found.policy, caller, str(stockade_home), pinned=True)
        (places / "out/dir").unlink()
        (places / "out/dir").mkdir()
        with (
            resolve(found.policy, caller, str(stockade_home), pinned=True) as made,
            pytest.raises(PolicyError, match="replaced"),
        ):
            confirm(made, found, parent)


def test_a_program_that_swaps_what_it_asks_for_wins_nothing(places: Path) -> None:
    """It exchanges a directory of its own for a link to the secret's, over and over, while it asks."""
    there, away = f"{places}/out/dir", f"{places}/out/away"
    swaps = (
        "import os, threading\n"
        "stop = threading.Event()\n"
        "def swap():\n"
        "    while not stop.is_set():\n"
        f"        os.rename({there!r}, {away!r}); os.symlink('{places}/vault', {there!r})\n"
        f"        os.unlink({there!r}); os.rename({away!r}, {there!r})\n"
        "threading.Thread(target=swap).start()\n"
    )
    asks = (
        f"told, reads = [], ['cat', '{there}/secret', '{places}/vault/secret']\n"
        "for number in range(40):\n"
        f"    try: told.append(delegate(reads, {{'read': ['{there}']}}).stdout)\n"
        "    except PermissionError as error: told.append(b'refused')\n"
        "stop.set()\n"
        "print(sorted(set(told)))\n"
    )
    result = stockade.run(["python3", "-c", CLIENT + swaps + asks], having(places), timeout=60)
    assert result.ok and "secret" not in result.text and "refused" in result.text, result.stderr


def test_what_a_pattern_names_by_now_is_not_executed(places: Path, stockade_home: Path) -> None:
    """A link that the exec clause goes through is turned elsewhere while the program runs."""
    for name in ("good", "other"):
        (places / "open" / name).mkdir()
        shutil.copy("/bin/echo", places / "open" / name / "program")
    link = places / "tools"
    link.symlink_to(places / "open/good")
    policy = having(places, exec=["/usr/bin/*", "/bin/*", f"{link}/*"])
    caller = Caller.current()
    with resolve(policy, caller, str(stockade_home)) as parent:
        asked = child({"read": [str(places / "open")]}, parent, "native", caller.environ)
        with resolve(asked.policy, caller, str(stockade_home), pinned=True) as made:
            confirm(made, asked, parent)
        link.unlink()
        link.symlink_to(places / "open/other")
        with (
            resolve(asked.policy, caller, str(stockade_home), pinned=True) as made,
            pytest.raises(PolicyError, match="exec: its patterns name other files than"),
        ):
            confirm(made, asked, parent)


def test_a_program_has_no_link_of_its_own_on_the_way_to_what_may_be_executed(places: Path) -> None:
    (places / "out/tools").symlink_to("/usr/bin")
    with pytest.raises(PolicyError, match="where programs may write"):
        stockade.run(["true"], having(places, exec=["/bin/true", f"{places}/out/tools/*"]))


def test_a_child_sees_nothing_of_an_overlay_and_the_host_is_not_looked_at_for_it(
    places: Path, workspace: Path
) -> None:
    (workspace / "file").write_text("the host's")
    policy = Policy(workspace=str(workspace), delegate=True)
    there, absent = places / "secret", places / "no-such"
    answers, _ = ask(
        policy,
        {"command": ["cat", "file"], "policy": {"read": [f"{workspace}/file"]}},
        *({"command": [str(path)]} for path in (there, absent)),
        *({"command": ["cat", str(path)]} for path in (there, absent)),
        *({"command": ["true"], "cwd": str(path)} for path in (places, absent)),
    )
    assert "only the program sees" in answers[0]["refused"]
    for one, other in zip(answers[1::2], answers[2::2], strict=True):
        plain = [
            {
                key: str(value).replace("no-such", "secret")
                for key, value in answer.items()
                if key != "receipt_hash"
            }
            for answer in (one, other)
        ]
        assert plain[0] == plain[1]


def test_no_file_of_the_host_is_read_to_explain_a_failure(places: Path) -> None:
    """For a command of the caller's own it is: the time of its last reading tells."""
    program = places / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)

    def was_read(*, inside: bool) -> bool:
        os.utime(program, (1, 1))
        if inside:
            ask(having(places), {"command": [str(program)]}, {"command": ["false", str(program)]})
        else:
            stockade.run([str(program)], having(places))
        return program.stat().st_atime != 1

    applies(was_read(inside=False), "this file system does not note when a file is read")
    assert not was_read(inside=True)


def test_protected_paths_are_not_writable_by_way_of_a_child(workspace: Path) -> None:
    (workspace / ".git/hooks").mkdir(parents=True)
    (workspace / ".git/config").touch()
    policy = Policy(
        workspace={"path": str(workspace), "mode": "rw"}, protect=[".git/hooks", ".git/config"], delegate=True
    )
    plant = {"command": ["sh", "-c", f"echo evil > {workspace}/.git/hooks/pre-commit"]}
    answers, _ = ask(
        policy,
        *(plant | {"policy": {"write": [f"{workspace}{part}"]}} for part in ("", "/.git", "/.git/hooks")),
    )
    # The first is granted the directory, in which the repository is as read-only as for its parent.
    assert all("refused" in answer for answer in answers[1:]) and "refused" not in answers[0]
    assert list((workspace / ".git/hooks").iterdir()) == []


RAW = (
    CLIENT
    + """
import sys
asks, answers = 3, 4
def told():
    try:
        return json.loads(_read(answers, struct.unpack("<I", _read(answers, 4))[0])).get("refused", "ran")
    except ConnectionError:
        return "nobody"
def say(data, size=None):
    try:
        os.write(asks, struct.pack("<I", len(data) if size is None else size) + data)
    except BrokenPipeError:
        return "closed"
    return told()
"""
)


MALFORMED = "the request is malformed"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            'for one in (b\'{\', b\'[\' * 60000, b\'{"command":["true"],"parent":"0123456789ab"}\',\n'
            "    b'{\"command\":[],\"policy\":{\"read\":[' + b'[' * 900 + b']' * 900 + b']}}',\n"
            '    b\'{"command":[]}\', b\'{"command":["true"],"timeout":1e300}\'): print(say(one))\n'
            "print(say(b'', 0xFFFFFFFF), told())",
            [
                *[MALFORMED] * 4,
                "command: must be a list",
                "timeout: must be",
                "a request may have at most",
            ],
        ),
        # A flood of requests ends, and soon; what is refused costs no receipt.
        ("print([say(b'{}') for _ in range(400)].count('closed') > 100)", ["True"]),
        # Nobody waits for a reader that never comes.
        ("[os.write(asks, struct.pack('<I', 2) + b'{}') for _ in range(200)]; print('done')", ["done"]),
    ],
)
def test_hostile_requests_are_refused(script: str, expected: list[str]) -> None:
    result = stockade.run(["python3", "-c", RAW + script], Policy(delegate=True), timeout=30)
    told = result.text.splitlines()
    assert result.ok and len(told) == len(expected), (told, result.stderr)
    assert all(line.startswith(words) for line, words in zip(told, expected, strict=True)), told
    assert result.receipt is not None and result.receipt.predicate.sequence == 1


def test_the_supervisor_cannot_be_reached_through_what_it_gave(places: Path) -> None:
    """On a socket the kernel would hand out a pidfd of it."""
    script = (
        "import os, socket, stat\n"
        "for end in (3, 4):\n"
        "    assert stat.S_ISFIFO(os.fstat(end).st_mode)\n"
        "    try: socket.socket(fileno=os.dup(end)).getsockopt(socket.SOL_SOCKET, 77, 4)\n"
        "    except OSError: print('no')\n"
    )
    assert stockade.run(["python3", "-c", script], Policy(delegate=True)).text == "no\nno\n"


def test_a_child_ends_with_the_run_that_asked_for_it(places: Path, stockade_home: Path) -> None:
    """Also where nobody waits for it, and in a living sandbox that goes on."""
    lives = f"touch {places}/out/lives; sleep 600"
    request = json.dumps({"command": ["sh", "-c", lives], "policy": {"write": [f"{places}/out"]}}).encode()
    script = RAW + (
        "import time\n"
        f"data = {request!r}\n"
        "os.write(asks, struct.pack('<I', len(data)) + data)\n"
        f"while not os.path.exists({str(places / 'out/lives')!r}): time.sleep(0.01)\n"
    )
    with Sandbox(having(places)) as box:
        began = time.monotonic()
        result = box.run(["python3", "-c", script])
        assert result.ok and time.monotonic() - began < 30
        assert box.run(["true"]).ok
    assert result.receipt is not None
    (made,) = result.receipt.predicate.children
    ended = chain.of(str(stockade_home)).get(1)
    assert ended.hash == made and ended.predicate.ending.outcome == "cancelled"


def test_a_child_ends_with_a_killed_supervisor(places: Path, stockade_home: Path, swept: None) -> None:
    code = (
        "import stockade, sys\n"
        f"policy = stockade.Policy(write=['{places}/out'], delegate=True)\n"
        "stockade.run(['python3', '-c', sys.argv[1]], policy)"
    )
    child = ["sh", "-c", f"while :; do date +%s%N > {places}/out/beat; sleep 0.02; done"]
    inside = CLIENT + f"\ndelegate({child!r}, {{'write': ['{places}/out']}})\n"
    supervisor = subprocess.Popen([sys.executable, "-c", code, inside])
    try:
        beat = places / "out/beat"
        while not beat.exists():
            assert supervisor.poll() is None
            time.sleep(0.02)
    finally:
        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor.wait()
    until = time.monotonic() + 10
    while time.monotonic() < until:
        before = beat.stat().st_mtime_ns
        time.sleep(0.3)
        if beat.stat().st_mtime_ns == before:
            break
    else:
        pytest.fail("the child lives on")
    register.sweep(str(stockade_home))
    said = [entry.receipt.predicate for entry in chain.of(str(stockade_home)).all()]
    assert {one.ending.error for one in said} == {"SupervisorDied"}
    ((inner, outer),) = [(a, b) for a in said for b in said if a.parent and not b.parent]
    assert inner.parent == Parent(outer.sandbox, outer.plan)


def test_children_have_children_only_so_deep() -> None:
    """Each asks for one like itself, until it is refused."""
    boot = "import sys; source = sys.stdin.read(); exec(source)"
    asks = (
        "own = ['python3', '-c', boot, boot, sys.argv[2] + 'I']\n"
        "try: print(delegate(own, {'delegate': True}, input=source).text)\n"
        "except PermissionError as error: print(sys.argv[2], error)\n"
    )
    source = CLIENT + "\nboot = sys.argv[1]\n" + asks
    result = stockade.run(["python3", "-c", boot, boot, "I"], Policy(delegate=True), input=source.encode())
    assert result.text.split("\n")[0] == "III delegate: sandboxes nest at most 3 deep", result.stderr


def test_the_time_of_children_is_counted_together() -> None:
    """Also that of a child's own children."""
    busy = ["sh", "-c", "while :; do :; done"]
    source = f"{CLIENT}\nprint(delegate({busy!r}).outcome)"
    asks = {"command": ["python3", "-c", source], "policy": {"delegate": True}}
    applies(host().has("cgroup.cpuacct"), "no cgroup counts processor time here")
    answers, _ = ask(Policy(delegate=True, limits={"cpu_time": "500ms"}), asks, {"command": busy})
    assert answers[0]["stdout"] == "limit-exceeded\n", answers
    assert answers[1]["refused"] == "limits.cpu_time: the program has used up its own"
