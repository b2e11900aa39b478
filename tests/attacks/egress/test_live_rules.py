"""Programs, and an egress process, that want more than changed rules let them have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.network import Internet

BEGIN = '''
import json, os, signal, stockade, sys, time
from stockade.policy import Policy
def started(box, code, *words):
    """A program that has printed its first line, and that line."""
    program = box.start(["python3", "-c", code, *words], stdin=-1)
    return program, program.stdout.readline().decode().strip()
def go_on(program):
    """Let it go on, and return what it prints then."""
    program.stdin.write(b"go on\\n"); program.stdin.close()
    program.wait()
    return program.stdout.read().decode().strip()
def refused(call, *rules):
    try:
        call(*rules)
    except stockade.StockadeError as error:
        return [type(error).__name__, error.message]
    return None
GET = """
import socket, sys, errno
LINES = (b"GET / HTTP/1.1", b"Host: www.good.example", b"Connection: close", b"", b"")
REQUEST = bytes((13, 10)).join(LINES)
def get(address, port=80):
    try:
        with socket.create_connection((address, port), 5) as end:
            end.sendall(REQUEST)
            return "reached" if end.recv(100) else "closed"
    except OSError as error:
        return errno.errorcode.get(error.errno, "no such name")
"""
'''


def library(internet: Internet, code: str, **more: Any) -> Any:
    done = internet.python(BEGIN + code, **more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "11.0.0.66", "198.18.0.2"])
@pytest.mark.parametrize("option", ["0", "SO_REUSEADDR", "SO_REUSEPORT"])
def test_a_program_that_has_taken_a_port_keeps_it_and_no_rule_lets_it_out(
    internet: Internet, address: str, option: str
) -> None:
    found = library(
        internet,
        f'''
TAKE = """
import socket, sys
listener = socket.socket()
if "{option}" != "0":
    listener.setsockopt(socket.SOL_SOCKET, getattr(socket, "{option}"), 1)
listener.bind(("{address}", 8080)); listener.listen()
print("taken", flush=True)
sys.stdin.read()
"""
with stockade.Sandbox(Policy(net=["www.good.example:80"])) as box:
    program, said = started(box, TAKE)
    error = refused(box.net.allow, "www.good.example:8080")
    rules = box.net.rules
    still = box.run(["python3", "-c", GET + "print(get('www.good.example'))"]).text.strip()
    go_on(program)
    box.net.allow("www.good.example:8080")
    after = box.run(["python3", "-c", GET + "print(get('www.good.example', 8080))"]).text.strip()
    print(json.dumps([said, error, rules, still, after]))
''',
    )
    said, error, rules, still, after = found
    assert said == "taken" and rules == ["www.good.example:80"]
    assert error == [
        "PolicyError",
        "port 8080 is taken by a program in the sandbox, so no rule can let it out",
    ]
    assert (still, after) == ("reached", "reached")


def test_an_address_that_was_looked_up_before_the_denial_is_refused_after_it(internet: Internet) -> None:
    found = library(
        internet,
        '''
CACHE = GET + """
address = socket.gethostbyname("www.good.example")
print(get(address), flush=True)
sys.stdin.readline()
print(get(address))
"""
with stockade.Sandbox(Policy(net=["www.good.example:80"])) as box:
    program, before = started(box, CACHE)
    box.net.deny("www.good.example")
    print(json.dumps([before, go_on(program)]))
''',
    )
    assert found == ["reached", "ECONNRESET"]
    assert len(internet.events("connection", port=80)) == 1


def test_a_connection_from_before_the_denial_that_has_sent_nothing_is_refused(internet: Internet) -> None:
    found = library(
        internet,
        '''
HOLD = GET + """
ends = [socket.create_connection(("www.good.example", 80), 5) for _ in range(3)]
print("connected", flush=True)
sys.stdin.readline()
for end in ends:
    try:
        end.sendall(REQUEST)
        print("reached" if end.recv(100) else "closed")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
with stockade.Sandbox(Policy(net=["www.good.example:80"])) as box:
    allowed, _ = started(box, HOLD)
    control = go_on(allowed).split()
    program, before = started(box, HOLD)
    # Another port first: the connections are then with the egress process that has handed over.
    box.net.allow("www.good.example:8080")
    box.net.deny("www.good.example")
    print(json.dumps([control, go_on(program).split()]))
''',
    )
    control, after = found
    assert control == ["reached"] * 3 and after == ["ECONNRESET"] * 3
    assert len(internet.events("connection", port=80)) == 3


def test_a_child_does_not_get_what_its_parent_was_denied(internet: Internet) -> None:
    found = library(
        internet,
        '''
ASK = GET + """
import json, os, struct, time
asks, answers = (int(word) for word in os.environ["STOCKADE_DELEGATE"].split(","))
def child():
    code = open("/proc/self/cmdline", "rb").read().split(bytes(1))[2].decode().partition("import json")[0]
    request = json.dumps({"command": ["python3", "-c", code + "print(get('www.good.example'))"],
        "policy": {"net": ["www.good.example:80"]}}).encode()
    os.write(asks, struct.pack("<I", len(request)) + request)
    (size,) = struct.unpack("<I", os.read(answers, 4))
    answer = json.loads(os.read(answers, size))
    return answer.get("refused") or __import__("base64").b64decode(answer["stdout"]).decode().strip()
print(child(), flush=True)
for _ in range(30):
    time.sleep(0.1)
    answer = child()
    if answer != "reached":
        break
print(answer)
"""
import threading
with stockade.Sandbox(Policy(net=["www.good.example:80"], delegate=True)) as box:
    begun, results = threading.Event(), []
    def run():
        results.append(box.run(["python3", "-c", ASK], on_stdout=lambda data: begun.set()))
        begun.set()
    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    box.net.deny("www.good.example")
    thread.join()
    print(json.dumps(results[0].text.split("\\n", 1)))
''',
    )
    before, after = found
    assert before == "reached"
    assert "asks for more than the program itself has" in after and "!www.good.example" in after


#: An egress process that hands over something else than its listeners.
HOSTILE = """
import json, socket, sys, os
from stockade.egress import confined
confined.confine(3, sys.argv[1])
control = socket.socket(fileno=3)
text, handed, _, _ = socket.recv_fds(control, 1 << 20, 253)
count = len(json.loads(text)["tcp"]) + len(json.loads(text)["udp"])
listeners = handed[3:3 + count]
control.send(b'{"ready": true}')
while True:
    text, names, _, _ = socket.recv_fds(control, 1 << 20, 1)
    if not text:
        break
    if b"handover" not in text:
        control.send(b'{"ok": true}')
        continue
    answer = {"names": 10 ** 12, "budget": ["x", None]}
    KIND
    socket.send_fds(control, [json.dumps(answer).encode()], give)
"""
KINDS = {
    "control": "give = listeners",
    "fewer": "give = listeners[1:]",
    "more": "give = listeners * 2",
    "another order": "give = listeners[1:] + listeners[:1]",
    "sockets of the host": "give = [socket.socket().detach() for _ in listeners]",
    "files": "give = [handed[0]] * len(listeners)",
    "itself": "give = [3] * len(listeners)",
    "no listeners": "give = listeners[-1:] * len(listeners)",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_egress_process_cannot_pass_other_descriptors_for_its_listeners(
    internet: Internet, kind: str
) -> None:
    code = HOSTILE.replace("KIND", KINDS[kind])
    found = library(
        internet,
        f"""
from stockade.runs.network import egress_process
genuine, egress_process.CODE = egress_process.CODE, {code!r}
with stockade.Sandbox(Policy(net=["www.good.example:80"])) as box:
    egress_process.CODE = genuine
    error = refused(box.net.allow, "www.good.example:8080")
    result = box.run(["python3", "-c", GET + "print(get('198.18.0.3')); print(get('11.0.0.66', 8080))"])
    print(json.dumps([error, result.text.split(), list(result.warnings), len(box._box.egress.generations),
        refused(box.net.allow, "www.good.example:443")]))
""",
    )
    error, reached, warnings, generations, again = found
    if kind == "control":
        assert error is None and generations == 2 and not warnings
        return
    assert error is not None and error[0] == "SetupError" and generations == 1
    assert reached == ["ECONNREFUSED", "ECONNREFUSED"]
    assert any("a change of its rules failed" in one for one in warnings)
    assert again is not None and "has ended" in again[1]


def test_a_ceiling_holds_for_rules_that_come_later(internet: Internet) -> None:
    home = internet.directory / "config"
    code = """
with stockade.Sandbox(Policy(net=["www.good.example:80"])) as box:
    print(json.dumps([refused(box.net.allow, "evil.example:80"), box.net.rules,
        box.run(["python3", "-c", GET + "print(get('evil.example'))"]).text.strip()]))
"""
    assert library(internet, code, env={"XDG_CONFIG_HOME": str(home)})[0] is None, "without a ceiling it can"
    (home / "stockade").mkdir(parents=True)
    (home / "stockade" / "policies.toml").write_text('[ceiling]\nnet = ["*.good.example:80"]\n')
    error, rules, reached = library(internet, code, env={"XDG_CONFIG_HOME": str(home)})
    assert error[0] == "PolicyError" and 'net = "evil.example:80"' in error[1]
    assert rules == ["www.good.example:80"] and reached == "no such name"


def test_a_connection_that_began_before_its_requests_are_judged_is_not_dialled_unjudged(
    internet: Internet,
) -> None:
    found = library(
        internet,
        '''
WAIT = GET + """
end = socket.create_connection(("www.good.example", 80), 5)
print("connected", flush=True)
sys.stdin.read()
try:
    end.sendall(REQUEST)
    print("reached" if end.recv(100) else "closed")
except OSError as error:
    print(errno.errorcode[error.errno])
"""
with stockade.Sandbox(Policy(net=["www.good.example:80", "GET http://api.good.example/**"])) as box:
    program, said = started(box, WAIT)
    box.net.replace("GET http://www.good.example/allowed")
    print(json.dumps([said, go_on(program)]))
''',
    )
    assert found == ["connected", "ECONNRESET"]
    assert not internet.events("request")
