"""Rules of a living sandbox that change: what programs reach from then on, and what is recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stockade import Policy, PolicyError, Sandbox
from stockade.host import bubblewrap
from support import bubblewraps
from support.network import Internet

#: What each test begins with. Tests print what they found, as JSON.
BEGIN = '''
import json, os, signal, stockade, threading, time
FETCH = """
import sys, urllib.request as u
for url in sys.argv[1:]:
    try:
        print(u.urlopen(url, timeout=10).status)
    except OSError as error:
        print(error.reason if hasattr(error, "reason") else error)
"""
API, WEB, HIGH = "https://api.good.example/", "http://www.good.example/", "https://api.good.example:8443/"
def fetch(*urls):
    return ["python3", "-c", FETCH, *urls]
def tried(box, *urls):
    """For each URL, whether it was reached."""
    return [line == "200" for line in box.run(fetch(*urls)).check().text.splitlines()]
def refused(call, *rules):
    try:
        call(*rules)
    except stockade.StockadeError as error:
        return [type(error).__name__, error.message, error.hint]
    return None
'''


def library(internet: Internet, code: str, **more: Any) -> Any:
    done = internet.python(BEGIN + code, **more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_datagrams_are_allowed_and_denied_in_a_living_sandbox(internet: Internet) -> None:
    """The first port for datagrams needs another egress process, which may have sockets for them."""
    found = library(
        internet,
        '''
TALK = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    one.connect(("11.0.0.30", 7008)); one.settimeout(float(sys.argv[1]))
    try:
        one.send(b"x"); print(one.recv(9).decode())
    except OSError as error:
        print(type(error).__name__)
"""
def talk(box, seconds):
    return box.run(["python3", "-c", TALK, str(seconds)]).check().text.strip()
with stockade.Sandbox(stockade.Policy(net=["api.good.example"])) as box:
    said = [talk(box, 20)]
    box.net.allow("udp://11.0.0.30:7008")
    said.append(talk(box, 20))
    box.net.allow("udp://8.8.8.8:1,2")
    said += [talk(box, 20), *tried(box, API)]
    box.net.deny("udp://11.0.0.30:7008")
    said.append(talk(box, 0.5))
    result = box.run(["true"])
    print(json.dumps([said, box.net.rules, result.receipt.predicate.network.listeners]))
''',
    )
    rules = ["api.good.example", "udp://11.0.0.30:7008", "udp://8.8.8.8:1-2", "!11.0.0.30:7008"]
    assert found[:2] == [["ConnectionRefusedError", "x", "x", True, "TimeoutError"], rules]
    assert {"udp4/53", "udp4/7008", "udp4/1", "udp4/2", "tcp4/443"} <= set(found[2])


def test_what_is_allowed_is_reached_at_once(internet: Internet) -> None:
    found = library(
        internet,
        """
with stockade.Sandbox(stockade.Policy(net=["api.good.example"])) as box:
    before = tried(box, API, WEB)
    box.net.allow("www.good.example:80", "tcp://echo.good.example:443")
    print(json.dumps([before, tried(box, API, WEB), box.net.rules]))
""",
    )
    rules = ["api.good.example", "www.good.example:80", "tcp://echo.good.example:443"]
    assert found == [[True, False], [True, True], rules]


def test_what_is_denied_is_refused_at_once_and_its_name_is_unknown(internet: Internet) -> None:
    found = library(
        internet,
        """
LOOK_UP = "import socket, sys; print(socket.getaddrinfo(sys.argv[1], 443)[0][4][0])"
with stockade.Sandbox(stockade.Policy(net=["*.good.example"])) as box:
    before = tried(box, API, WEB)
    name = ["python3", "-c", LOOK_UP, "api.good.example"]
    known = box.run(name).ok
    box.net.deny("api.good.example")
    after = box.run(name)
    print(json.dumps([before, tried(box, API, WEB), known, after.ok, "not known" in after.stderr.decode(),
        [(one.target, one.clause) for one in after.denials], box.net.rules]))
""",
    )
    before, after, known, still, unknown, denials, rules = found
    assert (before, after, known, still, unknown) == ([True, True], [False, True], True, False, True)
    assert denials == [["api.good.example", 'net = "!api.good.example"']]
    assert rules == ["*.good.example", "!api.good.example"]


def test_a_denial_is_taken_back_by_the_same_words(internet: Internet) -> None:
    found = library(
        internet,
        """
with stockade.Sandbox(stockade.Policy(net=["api.good.example"])) as box:
    box.net.deny("api.good.example")
    denied = tried(box, API)
    box.net.allow("api.good.example")
    print(json.dumps([denied, tried(box, API), box.net.rules]))
""",
    )
    assert found == [[False], [True], ["api.good.example"]]


def test_a_new_port(internet: Internet) -> None:
    found = library(
        internet,
        """
with stockade.Sandbox(stockade.Policy(net=["api.good.example:443"])) as box:
    before = tried(box, API, HIGH)
    first = box._box.egress.process
    box.net.allow("api.good.example:8443", "www.good.example:80")
    after = tried(box, API, HIGH, WEB)
    walls = box.run(["true"]).receipt.predicate.network.egress
    print(json.dumps([before, after, walls.ports, first.alive, len(box._box.egress.generations)]))
""",
    )
    before, after, ports, alive, generations = found
    assert before == [True, False] and after == [True, True, True]
    assert ports in ([80, 443, 8443], None) and not alive and generations == 2


def test_connections_under_way_survive_a_new_port(internet: Internet) -> None:
    found = library(
        internet,
        '''
TALK = """
import socket, sys
end = socket.create_connection((socket.gethostbyname("echo.good.example"), 7007), 10)
for line in sys.stdin:
    end.sendall(line.encode())
    print(end.recv(100).decode(), end="", flush=True)
print(end.getpeername()[0])
"""
with stockade.Sandbox(stockade.Policy(net=["echo.good.example:7007"])) as box:
    talk = box.start(["python3", "-c", TALK], stdin=-1)
    def say(words):
        talk.stdin.write(words); talk.stdin.flush()
        return talk.stdout.readline().decode()
    said = [say(b"one\\n")]
    box.net.allow("api.good.example:8443")
    said.append(say(b"two\\n"))
    reached = tried(box, HIGH)
    LOOK_UP = "import socket; print(socket.gethostbyname('echo.good.example'))"
    address = box.run(["python3", "-c", LOOK_UP]).text.strip()
    box.net.deny("echo.good.example")
    said.append(say(b"three\\n"))
    talk.stdin.close()
    result = talk.wait()
    last = talk.stdout.read().decode().strip()
    first = box._box.egress.generations[0].process
    ended = time.monotonic() + 10
    while first.alive and time.monotonic() < ended:
        time.sleep(0.01)
    echo = [one for one in result.network if one.name == "echo.good.example" and one.kind == "connect"]
    print(json.dumps([said, reached, last == address, first.alive, [one.sent for one in echo],
        result.usage.bytes_sent]))
''',
    )
    said, reached, same, alive, sent, total = found
    assert said == ["one\n", "two\n", "three\n"] and reached == [True]
    assert same, "the name has another address after the handover"
    assert not alive, "the first process outlives its last connection"
    assert sent == [14] and total > 14


def test_many_new_ports_one_after_the_other(internet: Internet) -> None:
    found = library(
        internet,
        """
with stockade.Sandbox(stockade.Policy(net=["api.good.example:443"])) as box:
    for port in range(9000, 9012):
        box.net.allow(f"api.good.example:{port}")
    box.net.allow("api.good.example:8443")
    print(json.dumps([tried(box, API, HIGH), len(box.net.rules)]))
""",
    )
    assert found == [[True, True], 14]


def test_at_most_64_ports(internet: Internet) -> None:
    found = library(
        internet,
        """
with stockade.Sandbox(stockade.Policy(net=["api.good.example:443"])) as box:
    too_many = refused(box.net.allow, "www.good.example:9000-9063")
    box.net.allow("www.good.example:9000-9062")
    one_more = refused(box.net.allow, "www.good.example:80")
    print(json.dumps([too_many, one_more, tried(box, API)]))
""",
    )
    too_many, one_more, reached = found
    assert too_many[0] == one_more[0] == "PolicyError" and "at most 64" in too_many[1] + one_more[1]
    assert reached == [True]


def test_changes_are_in_the_result_the_receipt_and_the_log(internet: Internet) -> None:
    found = library(
        internet,
        """
policy = stockade.Policy(net=["api.good.example"])
with stockade.Sandbox(policy, name="changing") as box:
    waiting = box.start(["cat"], stdin=-1)
    box.net.allow("www.good.example:80")
    box.net.deny("api.good.example")
    waiting.stdin.close()
    result = waiting.wait()
    later = box.run(["true"])
stockade.verify(result.receipt, stockade.receipt.public_key(), require=["network.rules"], result=result)
network, after = result.receipt.predicate.network, later.receipt.predicate.network
from stockade.runs.register import runlog
line = next(one for one in runlog.read(os.environ["STOCKADE_HOME"])[0] if one.name == "changing")
print(json.dumps([
    [(one.kind, one.rule, one.verdict, one.reason) for one in result.network],
    network.rules, [(one.rule, one.in_force) for one in network.changes],
    after.rules, len(after.changes), [one for one in result.denials], list(line.network_first),
    line.reached, line.refused]))
""",
    )
    decisions, rules, changes, after, none, denials, logged, reached, refused = found
    assert decisions == [
        ["rule", "www.good.example:80", "allowed", "added"],
        ["rule", "!api.good.example", "denied", "added"],
    ]
    assert rules == ["api.good.example"] and none == 0 and denials == []
    assert changes == [["www.good.example:80", True], ["!api.good.example", True]]
    assert after == ["api.good.example", "www.good.example:80", "!api.good.example"]
    assert logged[0] == "allowed: rule www.good.example:80 (added)" and (reached, refused) == (0, 0)


def test_a_ceiling_bounds_what_can_be_allowed(internet: Internet) -> None:
    found = library(
        internet,
        """
from stockade.linux.user import Caller
from stockade.resolve.config_files import config_dir
caller = Caller.current()
place = config_dir(caller.environ, caller.home)
os.makedirs(place, exist_ok=True)
with open(f"{place}/policies.toml", "w") as file:
    print('[ceiling]', 'net = ["*.good.example", "!www.good.example"]', sep=chr(10), file=file)
try:
    with stockade.Sandbox(stockade.Policy(net=["api.good.example", "!www.good.example"])) as box:
        beyond = refused(box.net.allow, "evil.example")
        box.net.allow("h2.good.example")
        box.net.deny("api.good.example")
        print(json.dumps([beyond, box.net.rules]))
finally:
    os.unlink(f"{place}/policies.toml")
""",
        env={"XDG_CONFIG_HOME": str(internet.directory / "config")},
    )
    beyond, rules = found
    assert beyond[0] == "PolicyError" and 'net = "evil.example"' in beyond[1] and "ceiling" in beyond[1]
    assert rules == ["api.good.example", "!www.good.example", "h2.good.example", "!api.good.example"]


def test_rules_that_cannot_be(internet: Internet) -> None:
    found = library(
        internet,
        """
with stockade.Sandbox(stockade.Policy(net=["api.good.example", "!*.evil.example"])) as box:
    print(json.dumps([
        refused(box.net.allow, "https://api.good.example/"),
        refused(box.net.allow, "!api.good.example"),
        refused(box.net.deny, "!api.good.example"),
        refused(box.net.allow, "www.evil.example"),
        refused(box.net.allow, 443),
        box.net.rules]))
""",
    )
    url, denial, twice, denied, number, rules = found
    assert "not a URL" in url[1] and url[2].startswith("write api.good.example:443")
    assert denial[2] == 'write net.deny("api.good.example")' == twice[2]
    assert "!*.evil.example denies it" in denied[1] and "is not a rule" in number[1]
    assert rules == ["api.good.example", "!*.evil.example"]


def test_with_a_dead_egress_and_after_the_end(internet: Internet) -> None:
    found = library(
        internet,
        """
with stockade.Sandbox(stockade.Policy(net=["api.good.example"])) as box:
    process = box._box.egress.process
    signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
    while process.alive:
        time.sleep(0.01)
    dead = [refused(box.net.allow, "www.good.example"), refused(box.net.allow, "api.good.example:8443")]
print(json.dumps([dead, refused(box.net.deny, "api.good.example"), refused(lambda: box.net.rules)]))
""",
    )
    dead, closed, rules = found
    assert all("the egress process has ended" in one[1] for one in dead)
    assert closed[1] == rules[1] == "the sandbox is not open"


def test_changes_from_many_threads(internet: Internet) -> None:
    found = library(
        internet,
        """
from concurrent.futures import ThreadPoolExecutor
with stockade.Sandbox(stockade.Policy(net=["api.good.example"])) as box, ThreadPoolExecutor(8) as threads:
    runs = [threads.submit(tried, box, API) for _ in range(4)]
    rules = [f"n{n}.good.example:{443 if n % 2 else 9000 + n}" for n in range(8)]
    changes = [threads.submit(box.net.allow, rule) for rule in rules]
    [one.result() for one in changes]
    print(json.dumps([[one.result() for one in runs], len(box.net.rules), len(box._box.egress.changes)]))
""",
    )
    assert found == [[[True]] * 4, 9, 8]


def test_an_async_sandbox(internet: Internet) -> None:
    found = library(
        internet,
        """
import asyncio
async def main():
    async with stockade.AsyncSandbox(stockade.Policy(net=["api.good.example:443"])) as box:
        await asyncio.gather(*(box.net.allow(f"api.good.example:{port}") for port in (8443, 9001, 9002)))
        await box.net.deny("api.good.example:443")
        result = await box.run(fetch(API, HIGH))
        return result.text.splitlines()[1], len(box.net.rules)
print(json.dumps(asyncio.run(main())))
""",
    )
    assert found == ["200", 5]


@pytest.mark.parametrize("version", [bubblewraps.OLD, bubblewraps.NEW])
def test_bubblewrap(internet: Internet, version: str) -> None:
    found = library(
        internet,
        """
rules = ["api.good.example:443"]
policy = stockade.Policy(net=rules, backend="bwrap", accept=["ipc", "deny"], toolchain=False)
with stockade.Sandbox(policy) as box:
    box.net.allow("api.good.example:8443")
    print(json.dumps(tried(box, API, HIGH)))
""",
        env={bubblewrap.NAMED: bubblewraps.program(version)},
    )
    assert found == [True, True]


def test_without_rules_there_is_nothing_to_change() -> None:
    with Sandbox(Policy()) as box:
        assert box.net.rules == ()
        with pytest.raises(PolicyError) as raised:
            box.net.allow("api.good.example")
    assert "has no network rules" in raised.value.message and 'net = ["' in raised.value.hint


def test_the_hosts_network_has_no_rules() -> None:
    with Sandbox(Policy(net="open")) as box, pytest.raises(PolicyError) as raised:
        box.net.deny("api.good.example")
    assert "the host's whole network" in raised.value.message


def test_a_run_that_ends_with_its_egress_survives_the_handover(internet: Internet) -> None:
    found = library(
        internet,
        """
policy = stockade.Policy(net=["api.good.example:443"], on_egress_end="end")
with stockade.Sandbox(policy) as box:
    waiting = box.start(["cat"], stdin=-1)
    box.net.allow("api.good.example:8443")
    while box._box.egress.generations[0].process.alive:
        time.sleep(0.01)
    reached = tried(box, API, HIGH)
    waiting.stdin.close()
    first = waiting.wait().outcome
    threading.Timer(0.5, lambda: signal.pidfd_send_signal(box._box.egress.process.pidfd, 9)).start()
    second = box.run(["sleep", "60"])
    print(json.dumps([reached, first, second.outcome, second.reason]))
""",
    )
    reached, first, second, reason = found
    assert reached == [True, True] and first == "exited"
    assert second != "exited" and "its egress process had ended" in reason


def test_an_earlier_egress_process_that_is_killed_is_in_the_result(internet: Internet) -> None:
    found = library(
        internet,
        """
HOLD = "import socket, sys; end = socket.create_connection(('echo.good.example', 7007)); print(flush=True); "
with stockade.Sandbox(stockade.Policy(net=["echo.good.example:7007"])) as box:
    holding = box.start(["python3", "-c", HOLD + "print(repr(end.recv(1)))"], stdin=-1)
    holding.stdout.readline()
    box.net.allow("api.good.example:8443")
    quiet = box.run(["true"]).warnings
    first = box._box.egress.generations[0].process
    signal.pidfd_send_signal(first.pidfd, signal.SIGKILL)
    while first.alive:
        time.sleep(0.01)
    result = box.run(fetch(HIGH))
    print(json.dumps([quiet, result.text.strip(), list(result.warnings), holding.wait().text]))
""",
    )
    quiet, reached, warnings, _ = found
    assert quiet == [] and reached == "200"
    assert len(warnings) == 1 and warnings[0].startswith("an earlier egress process ended at ")


def test_a_change_that_is_interrupted_is_made_all_the_same(internet: Internet) -> None:
    found = library(
        internet,
        """
import asyncio
async def main():
    async with stockade.AsyncSandbox(stockade.Policy(net=["api.good.example:443"])) as box:
        found = []
        for rule in ("www.good.example:443", "api.good.example:8443"):
            task = asyncio.create_task(box.net.allow(rule))
            await asyncio.sleep(0)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                found.append(rule in box.net.rules)
        result = await box.run(fetch(API, HIGH))
        return found, result.text.split()
print(json.dumps(asyncio.run(main())))
""",
    )
    assert found == [[True, True], ["200", "200"]]
