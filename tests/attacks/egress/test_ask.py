"""The rule `ask`: connections that no rule covers wait for an answer, which nothing inside can give."""

from __future__ import annotations

import json
from typing import Any

from attacks.egress.reach import Reach
from support.internet_layout import ECHO

PYTHON = "/usr/bin/python3"
#: Fetches from each host in turn over HTTP, and says what came back.
FETCH = """
import json, socket, sys
found = []
for place in sys.argv[1:]:
    name, _, port = place.rpartition(":")
    try:
        with socket.create_connection((name, int(port)), timeout=30) as one:
            one.sendall(f"GET / HTTP/1.1\\r\\nHost: {name}\\r\\nConnection: close\\r\\n\\r\\n".encode())
            found.append(one.recv(12).decode())
    except OSError as error:
        found.append(type(error).__name__)
print(json.dumps(found))
"""
OK = "HTTP/1.1 200"
#: In the supervisor: answers by the name, and notes what was asked.
ASKER = """
asked = []
def answer_with(answers):
    def on_ask(question):
        asked.append([question.target, question.process])
        return answers.get(question.name, "no")
    return on_ask
"""


def ask(reach: Reach, answers: dict[str, str], *places: str, net: list[str], **policy: Any) -> Any:
    """Let a program fetch from places in turn; return what it got, what was asked, and the result."""
    reach.internet.clear()
    words = [PYTHON, "-c", FETCH, *places]
    found = reach.supervisor.do(
        f"{ASKER}\nPOLICY, ANSWERS, WORDS = {dict(net=net, **policy)!r}, {answers!r}, {words!r}\n"
        "import msgspec\non_ask, policy = answer_with(ANSWERS), stockade.Policy(**POLICY)\n"
        "result = stockade.run(WORDS, policy, on_ask=on_ask, timeout=60)\n"
        "answer = [summary(result), asked, msgspec.to_builtins(result.receipt.predicate.network)]\n"
    )
    result, asked, network = found
    assert result["ended"][:2] == ["exited", 0], (result["ended"], result["stderr"])
    return json.loads(result["stdout"]), asked, result, network


def test_a_name_that_no_rule_covers_waits_for_the_answer(reach: Reach) -> None:
    places = ["api.good.example:80", "www.good.example:80", "web.good.example:80"]
    got, asked, result, network = ask(
        reach, {"api.good.example": "once", "www.good.example": "run"}, *places, *places,
        net=["ask", "db.good.example"],
    )  # fmt: skip
    assert got == [OK, OK, "ConnectionResetError"] * 2
    # Once is once, a rule needs no second question, and a refusal is remembered.
    assert [target for target, _ in asked] == [*places, places[0]]
    assert all(process.startswith("python3 (") for _, process in asked)
    assert network["asked"] == [
        "api.good.example:80 once", "www.good.example:80 run", "web.good.example:80 no",
        "api.good.example:80 once",
    ]  # fmt: skip
    assert "ask" in network["rules"]
    answers = [one for one in result["network"] if one["kind"] == "ask"]
    assert [one["verdict"] for one in answers] == ["allowed", "allowed", "denied", "allowed"]
    (denial,) = [one for one in result["denials"] if one["what"] == "connection"]
    assert denial["target"] == "web.good.example:80" and "was no" in denial["reason"]
    assert "web.good.example" not in reach.internet.asked()


def test_deny_rules_and_private_addresses_need_no_question_to_be_refused(reach: Reach) -> None:
    got, asked, result, _ = ask(
        reach, dict.fromkeys(["evil.example", "metadata.evil.example", "private.evil.example"], "run"),
        "evil.example:80", "metadata.evil.example:80", "private.evil.example:80", "169.254.169.254:80",
        net=["ask", "!evil.example"],
    )  # fmt: skip
    assert OK not in got
    # A name that leads to a private address is asked about, because nobody knows where it leads before that.
    assert [target for target, _ in asked] == ["metadata.evil.example:80", "private.evil.example:80"]
    reasons = {one["target"]: one["reason"] for one in result["denials"]}
    assert "metadata address" in reasons["metadata.evil.example:80"]
    assert not reach.internet.events("connection")


def test_requests_that_a_rule_denies_cannot_be_allowed_unseen(reach: Reach) -> None:
    # Nobody looks into a connection that the user has allowed, so the denied request would pass.
    for rule in ("!GET http://api.good.example/**", "!DELETE http://*.good.example/**"):
        got, asked, result, _ = ask(
            reach, {"api.good.example": "once"}, "api.good.example:80",
            net=["ask", "GET http://web.evil.example/**", rule],
        )  # fmt: skip
        assert (got, asked) == (["ConnectionResetError"], [])
        assert not reach.internet.events("connection")
        assert [one["target"] for one in result["denials"]] == ["api.good.example:80"]


def test_only_the_ports_of_rules_and_of_the_web_are_asked_about(reach: Reach) -> None:
    got, asked, _, _ = ask(
        reach, {"echo.good.example": "run"}, f"echo.good.example:{ECHO}", "echo.good.example:9009",
        net=["ask", f"tcp://db.good.example:{ECHO}"],
    )  # fmt: skip
    assert got == ["GET / HTTP/1", "ConnectionRefusedError"]
    assert [target for target, _ in asked] == [f"echo.good.example:{ECHO}"]


def test_without_anyone_to_ask_nothing_is_held_and_nothing_is_allowed(reach: Reach) -> None:
    inside = reach.supervisor.run([PYTHON, "-c", FETCH, "api.good.example:80"], ["ask"])
    assert json.loads(inside["stdout"]) == ["gaierror"]
    assert any("no terminal" in one for one in inside["warnings"])
    assert not reach.internet.asked()


def test_a_flood_of_names_asks_a_bounded_number_of_times(reach: Reach) -> None:
    flood = (
        "import json, socket, threading\n"
        "def go(number):\n"
        "    try:\n"
        "        socket.create_connection((f'n{number}.wild.good.example', 80), timeout=50).recv(1)\n"
        "    except OSError:\n"
        "        pass\n"
        "threads = [threading.Thread(target=go, args=(n,)) for n in range(300)]\n"
        "[one.start() for one in threads]; [one.join() for one in threads]\n"
        "print(json.dumps('done'))\n"
    )
    asked, reasons = reach.supervisor.do(
        f"{ASKER}\nWORDS = {[PYTHON, '-c', flood]!r}\n"
        "policy = stockade.Policy(net=['ask'], limits={'tasks': 400})\n"
        "result = stockade.run(WORDS, policy, on_ask=answer_with({}), timeout=60)\n"
        "answer = [len(asked), sorted({one.reason for one in result.network if one.kind == 'connect'})]\n"
    )
    assert 1 <= asked <= 100 and reasons == ["refused when asked", "too many questions"]
    assert not reach.internet.events("connection") and not reach.internet.asked()


def test_a_function_that_fails_or_says_something_else_has_refused(reach: Reach) -> None:
    found = reach.supervisor.do(
        f"WORDS = {[PYTHON, '-c', FETCH, 'api.good.example:80']!r}\n"
        "def broken(question): raise ValueError('oh')\n"
        "answer = []\n"
        "for on_ask in (broken, lambda question: True):\n"
        "    result = stockade.run(WORDS, stockade.Policy(net=['ask']), on_ask=on_ask, timeout=60)\n"
        "    answer.append([result.text, list(result.warnings)])\n"
    )
    assert [json.loads(text) for text, _ in found] == [["ConnectionResetError"]] * 2
    assert "on_ask raised ValueError: oh" in found[0][1] and "on_ask returned True" in found[1][1][0]


def test_a_living_sandbox_remembers_and_a_ceiling_is_not_exceeded(reach: Reach, tmp_path: Any) -> None:
    layers = tmp_path / "stockade"
    layers.mkdir()
    (layers / "policies.toml").write_text('[ceiling]\nnet = ["ask", "!www.good.example"]\n')
    found = reach.supervisor.do(
        f"{ASKER}\nimport os, json\nFETCH = {FETCH!r}\n"
        f"os.environ['XDG_CONFIG_HOME'] = {str(tmp_path)!r}\n"
        "try:\n"
        "    policy = stockade.Policy(net=['ask', '!www.good.example'])\n"
        "    with stockade.Sandbox(policy, on_ask=answer_with({'api.good.example': 'run'})) as box:\n"
        "        def fetch(*places):\n"
        f"            return json.loads(box.run(['{PYTHON}', '-c', FETCH, *places]).text)\n"
        "        got = [fetch('api.good.example:80', 'www.good.example:80'), fetch('api.good.example:80')]\n"
        "        rules = list(box.net.rules)\n"
        "        try:\n"
        "            box.net.allow('db.good.example:443')\n"
        "        except stockade.PolicyError as error:\n"
        "            got.append('ceiling' in error.message)\n"
        "finally:\n"
        "    del os.environ['XDG_CONFIG_HOME']\n"
        "answer = [got, asked, rules]\n"
    )
    got, asked, rules = found
    assert got == [[OK, "gaierror"], [OK], True]
    assert [target for target, _ in asked] == ["api.good.example:80"]
    assert rules == ["ask", "!www.good.example", "api.good.example:80"]
