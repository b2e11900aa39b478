"""Secrets: programs have placeholders, servers get values, and nothing else does."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from support.network import Internet

VALUE = "sk-real-5f2d8a91c7e34b60"
HOST = "api.good.example"
RULE = f"* https://{HOST}/**"
#: What the tests of the library begin with; they print what they found as JSON.
BEGIN = f"""
import json, os, pathlib, stockade
def policy(more=(), **clauses):
    secret = {{"from_env": "API_KEY", "hosts": ["{HOST}"], **clauses}}
    return stockade.Policy(net=["{RULE}", *more], secrets={{"API_KEY": secret}})
def curl(*words):
    return ["curl", "-sS", *words]
"""


@pytest.fixture
def kept(internet: Internet, tmp_path: Path) -> Path:
    """Where the server keeps what it gets."""
    file = tmp_path / "kept.jsonl"
    file.touch()
    internet.handle(HOST, "support.secret_servers:keep", file=str(file))
    return file


def arrived(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def run(internet: Internet, program: str, *options: str, **more: Any) -> dict[str, Any]:
    env = {"API_KEY": VALUE, **internet.trust}
    found = internet.run(["sh", "-c", program], (), "--secret", f"API_KEY@{HOST}", *options, env=env, **more)
    assert VALUE not in json.dumps(found)
    return found


def library(internet: Internet, code: str, env: dict[str, str] | None = None, **more: Any) -> Any:
    variables = {"API_KEY": VALUE, **internet.trust, **(env or {})}
    done = internet.python(BEGIN + code, env=variables, **more)
    assert done.returncode == 0, done.stderr
    assert VALUE not in done.stderr
    return json.loads(done.stdout)


def test_the_server_gets_the_value_and_the_program_never_has_it(internet: Internet, kept: Path) -> None:
    program = f'echo "$API_KEY"; env; curl -sS -H "Authorization: Bearer $API_KEY" https://{HOST}/v1'
    found = run(internet, program)
    placeholder = found["stdout"].splitlines()[0]
    assert placeholder.startswith("stockade") and len(placeholder) == 36
    assert [one["headers"]["authorization"] for one in arrived(kept)] == [f"Bearer {VALUE}"]
    assert [(one["target"], one["verdict"]) for one in _about_secrets(found)] == [
        (f"API_KEY at {HOST}:443", "allowed")
    ]
    assert found["controls"]["secrets"]["grade"] == "read from the kernel by the parent"


def _about_secrets(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {**one, "target": f"{one['request']} at {one['name']}:{one['port']}"}
        for one in found["network"]
        if one["kind"] == "secret"
    ]


@pytest.mark.parametrize(("host", "version"), [(HOST, "1.1"), ("h2.good.example", "2")])
def test_each_form_is_replaced_where_the_policy_names_it(
    internet: Internet, kept: Path, host: str, version: str
) -> None:
    internet.handle(host, "support.secret_servers:keep", file=str(kept))
    library(
        internet,
        f"""
forms = ["bearer", "basic", "header:X-Api-Key", "query:key", "body"]
def run(words):
    box.run(["sh", "-c", 'exec curl -sS --http{version} https://{host}/v1 ' + words]).check()
rules = ["* https://h2.good.example/**"]
with stockade.Sandbox(policy(rules, **{{"as": forms, "hosts": ["{host}"]}})) as box:
    run('-H "Authorization: Bearer $API_KEY"')
    run('-u "user:$API_KEY"')
    run('-H "x-api-key: $API_KEY"')
    run('-G -d "a=1" -d "key=$API_KEY"')
    run('-d "client_secret=$API_KEY&b=2"')
    run("-H 'Content-Type: application/json' -d '{{\\"token\\": \\"'$API_KEY'\\"}}'")
print("1")
""",
    )
    bearer, basic, header, query, form, document = arrived(kept)
    assert bearer["headers"]["authorization"] == f"Bearer {VALUE}"
    assert base64.b64decode(basic["headers"]["authorization"].split()[1]) == f"user:{VALUE}".encode()
    assert header["headers"]["x-api-key"] == VALUE
    assert query["target"] == f"/v1?a=1&key={VALUE}"
    assert form["body"] == f"client_secret={VALUE}&b=2"
    assert json.loads(document["body"]) == {"token": VALUE}
    assert {one["version"] for one in arrived(kept)} == {version}


def test_a_placeholder_can_be_in_a_file_with_a_prefix(internet: Internet, kept: Path) -> None:
    found = library(
        internet,
        f"""
with stockade.Sandbox(policy(inside="file", prefix="sk-ant-")) as box:
    text = box.run(["cat", "/run/secrets/API_KEY"]).check().text
    variable = box.run(["sh", "-c", 'echo "[$API_KEY]"; echo x > /run/secrets/API_KEY']).text
    box.run(["sh", "-c", 'curl -sS -H "Authorization: Bearer $(cat /run/secrets/API_KEY)" https://{HOST}/']).check()
    print(json.dumps([text, variable, box.secrets.placeholders["API_KEY"]]))
""",
    )
    assert found[0] == found[2] and found[0].startswith("sk-ant-stockade") and found[1] == "[]\n"
    assert arrived(kept)[0]["headers"]["authorization"] == f"Bearer {VALUE}"


def test_placeholders_differ_between_sandboxes(internet: Internet) -> None:
    found = library(
        internet,
        """
found = []
for _ in range(2):
    with stockade.Sandbox(policy()) as box:
        found.append(box.run(["sh", "-c", 'echo $API_KEY; echo $API_KEY']).text.split())
print(json.dumps(found))
""",
    )
    assert found[0][0] == found[0][1] and found[0][0] != found[1][0]


def test_values_come_from_files_and_commands(internet: Internet, kept: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-a-file-0123456789\n")
    library(
        internet,
        f"""
command = ["printf", "%s\\\\n", "from a command; $(x)"]
for source in ({{"from_file": {str(tmp_path / "token")!r}}}, {{"from_command": command}}):
    with stockade.Sandbox(policy(from_env=None, **source)) as box:
        box.run(["sh", "-c", 'curl -sS -H "Authorization: Bearer $API_KEY" https://{HOST}/']).check()
print("1")
""",
    )
    assert [one["headers"]["authorization"] for one in arrived(kept)] == [
        "Bearer from-a-file-0123456789",
        "Bearer from a command; $(x)",
    ]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('from_env="NO_SUCH"', "your environment has no variable NO_SUCH"),
        ('from_env="SHORT"', "the value of SHORT has 5 bytes"),
        ('from_env="LINES"', "has control characters or several lines"),
        ('from_env=None, from_file="/nonexistent"', "cannot read /nonexistent: No such file"),
        ('from_env=None, from_file="/dev/zero"', "/dev/zero is not a regular file"),
        ('from_env=None, from_command=["no-such-command"]', "cannot run no-such-command"),
        ('from_env=None, from_command=["sh", "-c", "echo $API_KEY; exit 3"]', "sh ended with exit code 3"),
        ('from_env=None, from_command=["yes"]', "the value of yes is longer than 4096 bytes"),
    ],
)
def test_a_source_without_a_value_is_refused_before_anything_starts(
    internet: Internet, source: str, words: str
) -> None:
    found = library(
        internet,
        f"""
try:
    stockade.run(["true"], policy({source}))
except stockade.SetupError as error:
    print(json.dumps([error.stage, str(error), error.hint]))
""",
        {"SHORT": "short", "LINES": "one-line\nand-another"},
    )
    assert found[0] == "secrets" and words in found[1] and found[2]
    assert VALUE not in json.dumps(found)


def test_a_secret_that_may_be_absent_is_left_out(internet: Internet) -> None:
    found = library(
        internet,
        """
found = stockade.run(["sh", "-c", 'echo "[$API_KEY]"'], policy(from_env="NO_SUCH?"))
print(json.dumps([found.text, found.receipt.predicate.network.secrets]))
""",
    )
    assert found == ["[]\n", []]


def test_values_are_read_again_while_a_run_lives(internet: Internet, kept: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("the-first-value-1")
    refreshed = library(
        internet,
        f"""
token = pathlib.Path({str(token)!r})
with stockade.Sandbox(policy(from_env=None, from_file=str(token))) as box:
    loop = 'while read word; do curl -sS -H "Authorization: Bearer $API_KEY" https://{HOST}/$word; echo; done'
    run = box.start(["sh", "-c", loop], stdin=-1, stdout=-1)
    def ask(word):
        run.stdin.write(word + b"\\n"); run.stdin.flush()
        run.stdout.readline()
    ask(b"1")
    token.write_text("the-other-value-2")
    box.secrets.refresh()
    ask(b"2")
    token.unlink()
    try:
        box.secrets.refresh()
    except stockade.SetupError as error:
        assert "cannot read" in str(error)
    ask(b"3")
    run.stdin.close()
    result = run.wait()
    print(result.receipt.predicate.network.secrets_refreshed)
""",
    )
    values = [one["headers"]["authorization"].split()[1] for one in arrived(kept)]
    assert values == ["the-first-value-1", "the-other-value-2", "the-other-value-2"]
    assert refreshed == 1


def test_a_receipt_names_the_secret_and_what_protected_it(internet: Internet) -> None:
    found = library(
        internet,
        """
result = stockade.run(["true"], policy())
network = result.receipt.predicate.network
one = network.secrets[0]
kept = network.secrets_protection
print(json.dumps([one.name, one.hosts, one.forms, one.source, kept.sealed, kept.locked, kept.wiped,
                  os.environ["API_KEY"] in repr(result.receipt)]))
""",
    )
    assert found == [
        "API_KEY", [HOST], ["bearer", "basic"], "from_env", "absent", "observed", "observed", False,
    ]  # fmt: skip


def test_no_file_of_the_state_has_the_value(internet: Internet, kept: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    program = f'curl -sS -H "Authorization: Bearer $API_KEY" https://{HOST}/?a=$API_KEY; sleep 0.2'
    env = {"API_KEY": VALUE, "STOCKADE_HOME": str(state), "STOCKADE_LOG": "full", **internet.trust}
    done = internet.stockade(
        "run", "-v", "--secret", f"API_KEY@{HOST}", "--", "sh", "-c", program, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    shown = internet.stockade("plan", "--secret", f"API_KEY@{HOST}", "--", "true", env=env, cwd=tmp_path)
    assert shown.returncode == 0
    logs = internet.stockade("logs", env=env, cwd=tmp_path)
    everything = [done.stdout, done.stderr, shown.stdout, shown.stderr, logs.stdout]
    everything += [file.read_bytes().decode("latin-1") for file in state.rglob("*") if file.is_file()]
    assert not any(VALUE in text for text in everything)


def test_the_memory_of_the_egress_process_is_locked_and_leaves_no_core(internet: Internet) -> None:
    found = library(
        internet,
        """
with stockade.Sandbox(policy()) as box:
    pid = box._require_open()[0].egress.process.pid
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    limits = pathlib.Path(f"/proc/{pid}/limits").read_text()
    print(json.dumps([line.split()[1:] for text in (status, limits) for line in text.splitlines()
                      if line.startswith(("VmLck", "Max core"))]))
""",
    )
    assert int(found[0][0]) >= 8 and found[1][3] == "0"
