"""The network policy of a sandbox, in a small internet: what it allows, and how it changes while it lives."""

from __future__ import annotations

import json
import os

from stockade.linux.id_maps import IdMaps
from support.means import applies
from support.network import Internet

#: A whole session with a server, in there: it prints what happened, step by step.
SESSION = """
import json, tempfile, time
from pathlib import Path
from support.event_streams import command
from support.server import ServerUnderTest

seen = {}
directory = tempfile.TemporaryDirectory()
server = ServerUnderTest(Path(directory.name))
server.start()
try:
    def reaches(host):
        return command(box.execd, f"curl -ksS -o /dev/null --max-time 5 https://{host}/").exit_code == 0

    def within(seconds, host, wanted):
        until = time.monotonic() + seconds
        while reaches(host) is not wanted:
            if time.monotonic() > until:
                return False
        return True

    def rules(answer):
        assert answer.status_code == 200, answer.text
        return [(rule["action"], rule["target"]) for rule in answer.json()["policy"]["egress"]]

    first = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "api.good.example"}]}
    with server.sandbox(networkPolicy=first) as box:
        seen["begins"] = [reaches("api.good.example"), reaches("www.good.example")]
        flip = [{"action": "deny", "target": "api.good.example"},
                {"action": "allow", "target": "www.good.example"},
                {"action": "deny", "target": "WWW.good.example"}]
        seen["patched"] = rules(box.egress.patch("/policy", json=flip))
        seen["flipped"] = [within(2, "api.good.example", False), within(2, "www.good.example", True)]
        gone = ["www.good.example", "never.example"]
        seen["deleted"] = rules(box.egress.request("DELETE", "/policy", json=gone))
        seen["again"] = rules(box.egress.request("DELETE", "/policy", json=gone))
        seen["closed"] = within(2, "www.good.example", False)
        seen["status"] = box.egress.get("/policy").json()
    with server.sandbox(networkPolicy={"defaultAction": "deny"}) as box:
        seen["empty"] = reaches("api.good.example")
        added = box.egress.patch("/policy", json=[{"action": "allow", "target": "api.good.example"}])
        seen["added"] = [rules(added), within(2, "api.good.example", True)]
    with server.sandbox() as box:
        seen["none"] = reaches("api.good.example")
        late = box.egress.patch("/policy", json=[{"action": "allow", "target": "api.good.example"}])
        seen["late"] = [late.status_code, late.json()["code"]]
        seen["shown"] = rules(box.egress.get("/policy"))
finally:
    server.close()
    directory.cleanup()
print(json.dumps(seen))
"""


def test_a_policy_holds_and_changes_within_two_seconds(internet: Internet) -> None:
    applies(
        os.geteuid() == 0 or not IdMaps.of_caller().several, "newuidmap maps nothing in the small internet"
    )
    done = internet.python(SESSION, timeout=100)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["begins"] == [True, False]
    assert seen["patched"] == [["deny", "api.good.example"], ["allow", "www.good.example"]]
    assert seen["flipped"] == [True, True] and seen["closed"] is True
    assert seen["deleted"] == seen["again"] == [["deny", "api.good.example"]]
    status = seen["status"]
    assert status["policy"]["defaultAction"] == "deny" and status["status"] and status["mode"]
    assert seen["empty"] is False and seen["added"] == [[["allow", "api.good.example"]], True]
    assert (seen["none"], seen["late"], seen["shown"]) == (False, [409, "CONFLICT"], [])
