"""Programs that make it hard to find who made a connection: the supervisor looks no harder than it may."""

from __future__ import annotations

import json

from support.network import Internet

#: Processes and descriptors without end, and behind them one program that connects again and again.
CROWD = """
import os, resource, socket, time
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
address = socket.getaddrinfo("echo.good.example", 7007, socket.AF_INET, socket.SOCK_STREAM)[0][4]
for _ in range(40):
    if os.fork() == 0:
        try:
            spare = [os.dup(0) for _ in range(500)]
        except OSError:
            pass
        time.sleep(4); os._exit(0)
time.sleep(0.3)
if os.fork() == 0:
    end, made, held = time.monotonic() + 2, 0, []
    while time.monotonic() < end:
        try:
            held.append(socket.create_connection(address, timeout=5))
            made += 1
        except OSError:
            pass
        time.sleep(0.005)
        if len(held) > 40:
            held.pop(0).close()
    print(made, flush=True)
    os._exit(0)
os.wait()
"""


def test_a_crowd_with_many_descriptors_does_not_keep_the_supervisor_busy(internet: Internet) -> None:
    done = internet.python(f"""
import json, resource, stockade, time
from stockade.linux import socket_holders
searches = []
search = socket_holders.find_holders
def find_holders(pid, inodes, steps):
    began = time.monotonic()
    try:
        return search(pid, inodes, steps)
    finally:
        searches.append((began, time.monotonic() - began, steps.left))
socket_holders.find_holders = find_holders
policy = stockade.Policy(net=["echo.good.example:7007"], limits={{"files": 1024}})
stockade.run(["true"], policy)
def used():
    now = resource.getrusage(resource.RUSAGE_SELF)
    return now.ru_utime + now.ru_stime
before, began = used(), time.monotonic()
result = stockade.run(["python3", "-c", {CROWD!r}], policy)
took = time.monotonic() - began
print(json.dumps([result.text, used() - before, took, searches, result.stderr.decode()[-300:]]))
""")
    assert done.returncode == 0, done.stderr
    made, used, took, searches, problem = json.loads(done.stdout)
    assert int(made or 0) > 100, problem
    print(made, used, took, [round(took, 4) for _, took, _ in searches])
    assert used < took / 3
    assert 0 < len(searches) <= 20 * took + 2
    assert min(left for _, _, left in searches) == 0, "the crowd is larger than a search may be"
