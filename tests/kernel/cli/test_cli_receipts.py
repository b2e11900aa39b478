"""`stockade run --receipt`, `receipts`, `verify` and `keys`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stockade import cli, state
from stockade.receipt import builder, chain, ed25519, keys
from stockade.receipt.statement import Receipt, Signature
from stockade.runs.register import sandbox_record
from support.made_receipts import append, log, public

Captured = pytest.CaptureFixture[str]
SEED = bytes(range(32))


@pytest.fixture(autouse=True)
def elsewhere(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)


@pytest.fixture
def key(stockade_home: Path, tmp_path: Path) -> str:
    """The public key in a file."""
    append(stockade_home)
    file = tmp_path / "stockade.pem"
    file.write_bytes(ed25519.public_pem(public(stockade_home)))
    return str(file)


def test_a_run_writes_its_receipt_to_a_file(stockade_home: Path, capfd: Captured) -> None:
    words = ["run", "-q", "--receipt", "../run.json", "--who", "agent=coder", "--who", "action=test"]
    assert cli.main([*words, "--", "true"]) == 0
    receipt = Receipt.decode(Path("../run.json").read_bytes())
    assert (receipt.predicate.who.agent, receipt.predicate.who.action) == ("coder", "test")
    assert cli.main(["verify", "../run.json", "--require", "files", "ipc", "--require", "network.none"]) == 0
    said = capfd.readouterr().out
    assert receipt.id in said and "read from the kernel by the parent" in said and "coder" in said
    assert cli.main(["run", "--json", "--receipt", "../run.json", "--", "false"]) == 1
    told = json.loads(capfd.readouterr().out)["receipt"]
    again = Receipt.decode(Path("../run.json").read_bytes())
    assert told == {"id": again.id, "hash": again.hash, "key": again.predicate.key}


def test_a_refused_run_writes_one_too(capsys: Captured) -> None:
    assert cli.main(["run", "--receipt", "../run.json", "--read", "/no/such", "--", "true"]) == 125
    receipt = Receipt.decode(Path("../run.json").read_bytes())
    assert receipt.predicate.ending.outcome == "setup-failed"
    assert cli.main(["verify", "../run.json"]) == 0
    assert "nothing was started" in capsys.readouterr().out


def test_what_is_no_run_leaves_no_receipt_that_could_be_taken_for_its(capsys: Captured) -> None:
    assert cli.main(["run", "--receipt", "../run.json", "-p", "no-such-policy", "--", "true"]) == 125
    assert not Path("../run.json").exists()
    Path("../run.json").write_text("of another run\n")
    assert cli.main(["run", "--receipt", "../run.json", "-p", "no-such-policy", "--", "true"]) == 125
    assert not Path("../run.json").exists()


def test_the_program_cannot_put_another_receipt_in_the_place_of_its_own(
    tmp_path: Path, capfd: Captured
) -> None:
    """The file lies in what it may write: it takes it away and leaves an older one, which is genuine."""
    place = tmp_path / "granted"
    (place / "out").mkdir(parents=True)

    def run(file: str, script: str, *more: str) -> int:
        words = ["run", "-q", *more, "--write", str(place), "--receipt", f"{place}/{file}", "--", "sh", "-c"]
        return cli.main([*words, f"cd {place} && {script}"])

    def ended() -> int:
        return Receipt.decode((place / "run.json").read_bytes()).predicate.ending.exit_code

    assert run("old.json", "true") == 0
    old = (place / "old.json").read_bytes()
    assert run("run.json", "cp old.json run.json; exit 3") == ended() == 3
    assert run("run.json", "ln -s old.json run.json; exit 4") == ended() == 4
    assert (place / "old.json").read_bytes() == old
    assert run("out/run.json", "mv out away; mkdir out; cp old.json out/run.json") == 125
    assert "not the same directory" in capfd.readouterr().err
    assert run("run.json", "mkdir run.json", "--json") == 125
    told = json.loads(capfd.readouterr().out)
    assert told["outcome"] == "exited" and "cannot write the receipt" in told["receipt_error"]
    assert sorted(os.listdir(place)) == ["away", "old.json", "out", "run.json"]


def test_a_link_in_the_place_of_the_receipt_is_not_followed(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine").write_text("precious")
    Path("run.json").symlink_to(tmp_path / "mine")
    for place, what in (
        ("run.json", "link"),
        ("/dev/null", "device"),
        (".", "directory"),
        ("./", "directory"),
    ):
        assert cli.main(["run", "--receipt", place, "--", "true"]) == 125
        assert what in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_link_on_the_way_does_not_lead_the_receipt_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Whoever wrote the repository, or a program that ran there, lays a link to a directory of yours."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    precious = tmp_path / "mine/config.json"
    precious.write_text("precious")
    places = [tmp_path / name for name in ("current", "repository/sub", "granted", "worked-in")]
    for place in places:
        place.mkdir(parents=True)
        (place / "out").symlink_to(tmp_path / "mine")
    current, repository, granted, worked_in = places
    (repository.parent / ".git").mkdir()
    (repository.parent / "out").symlink_to("../mine")

    def refused(here: Path, receipt: str, *more: str) -> bool:
        monkeypatch.chdir(here)
        assert cli.main(["run", "-q", "--mode", "ro", *more, "--receipt", receipt, "--", "true"]) == 125
        told = capsys.readouterr().err
        return "/out leads to " in told and f"name that: --receipt {precious}" in told

    assert refused(current, "out/config.json")
    assert refused(current, f"{current}/out/../mine/config.json")
    assert refused(repository, "../out/config.json")
    assert refused(tmp_path, "repository/sub/out/config.json")
    assert refused(tmp_path / "mine", f"{granted}/out/config.json", "-w", str(current), f"--write={granted}")
    assert refused(tmp_path / "mine", f"{worked_in}/out/config.json", "-w", str(worked_in))
    assert precious.read_text() == "precious"


def test_links_that_stay_inside_or_are_the_users_own_lead_to_the_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk/reports").mkdir(parents=True)
    (tmp_path / "disk/project/reports").mkdir(parents=True)
    (tmp_path / "home").symlink_to("disk")
    (tmp_path / "reports").symlink_to("disk/reports")
    (tmp_path / "disk/project/.git").mkdir()
    (tmp_path / "disk/project/latest").symlink_to("reports")
    monkeypatch.chdir(tmp_path / "home/project")
    for name, lands in (
        ("latest/run.json", "disk/project/reports/run.json"),
        (f"{tmp_path}/home/project/other.json", "disk/project/other.json"),
        (f"{tmp_path}/home/reports/run.json", "disk/reports/run.json"),
        ("../../reports/other.json", "disk/reports/other.json"),
    ):
        assert cli.main(["run", "-q", "--mode", "ro", "--receipt", name, "--", "true"]) == 0
        assert Receipt.decode((tmp_path / lands).read_bytes()).predicate.ending.exit_code == 0


def test_a_run_without_a_receipt_says_how_it_ended_and_fails(
    stockade_home: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(stockade_home)
    monkeypatch.setattr(chain.Chain, "ready", lambda self: keys._signers.clear())
    (stockade_home / "keys" / keys.SIGNING).chmod(0o644)
    assert cli.main(["run", "--json", "--", "echo", "x"]) == 125
    told = json.loads(capfd.readouterr().out)
    assert (told["outcome"], told["ok"], told["stdout"]) == ("exited", False, "x\n")
    assert "has no receipt" in told["receipt_error"]
    assert cli.main(["run", "--", "true"]) == 125
    assert "has no receipt" in capfd.readouterr().err


def test_a_place_that_cannot_be_written_is_noticed_before_the_run(capsys: Captured) -> None:
    Path("here").mkdir()
    assert cli.main(["run", "--receipt", "here", "--", "touch", "made"]) == 125
    assert "here" in capsys.readouterr().err
    assert cli.main(["run", "--who", "agent", "--", "true"]) == 125
    assert "--who" in capsys.readouterr().err


def test_the_list_can_be_narrowed(stockade_home: Path, capsys: Captured) -> None:
    assert cli.main(["receipts"]) == 0
    assert "there are no receipts yet" in capsys.readouterr().out
    assert not (stockade_home / "receipts.db").exists()
    append(stockade_home, "a", started="2026-05-01T12:00:00.000000Z")
    append(stockade_home, "b\x1b[31m", "timed-out", started="2026-05-02T12:00:00.000000Z")

    def listed(*words: str) -> list[int]:
        assert cli.main(["receipts", "list", "--json", *words]) == 0
        return [row["sequence"] for row in json.loads(capsys.readouterr().out)]

    assert listed() == [1, 2]
    assert listed("--agent", "a") == [1]
    assert listed("--outcome", "timed-out") == [2]
    assert listed("--since", "2026-05-02") == [2]
    assert listed("--until", "2026-05-01T13:00Z") == [1]
    assert listed("--since", "1h") == []
    assert listed("-n", "1") == [2]
    assert cli.main(["receipts"]) == 0
    table = capsys.readouterr().out
    assert "timed-out" in table and "\x1b[31m" not in table
    assert cli.main(["receipts", "--since", "yesterday"]) == 125
    assert "yesterday" in capsys.readouterr().err


def test_show_prints_the_statement(stockade_home: Path, capsys: Captured) -> None:
    receipt = append(stockade_home)
    for id in ("1", receipt.id, "last"):
        assert cli.main(["receipts", "show", id]) == 0
        assert json.loads(capsys.readouterr().out)["predicate"]["sequence"] == 1
    assert cli.main(["receipts", "show", "2"]) == 125
    assert cli.main(["receipts", "show"]) == 125
    assert cli.main(["receipts", "list", "1"]) == 125


def test_an_export_is_a_chain_for_others(
    stockade_home: Path, key: str, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    for name in ("a", "b", "a", "a"):
        append(stockade_home, name)

    def exported(*words: str) -> list[bytes]:
        assert cli.main(["receipts", "export", *words]) == 0
        return capsysbinary.readouterr().out.splitlines(keepends=True)

    def verified(lines: list[bytes]) -> tuple[int, str]:
        file = tmp_path / "all.jsonl"
        file.write_bytes(b"".join(lines))
        code = cli.main(["verify", str(file), "--chain", "--key", key, "--json"])
        return code, json.loads(capsysbinary.readouterr().out).get("failure", "")

    lines = exported()
    assert len(lines) == 5 and exported("2") == [lines[1]]
    assert verified(lines) == verified(lines[2:]) == (0, "")
    assert verified(lines[:2] + lines[3:]) == (1, "missing-link")
    assert verified([lines[1], lines[0]]) == (1, "swapped")
    assert verified([lines[0], lines[0]]) == (1, "swapped")
    assert verified([]) == (1, "malformed")
    assert len(exported("--agent", "a")) == 3


def test_verify_names_what_is_wrong(stockade_home: Path, key: str, tmp_path: Path, capsys: Captured) -> None:
    def verified(*words: str) -> tuple[int, str]:
        code = cli.main(["verify", "--json", *words])
        return code, json.loads(capsys.readouterr().out).get("failure", "")

    file = tmp_path / "run.json"
    file.write_bytes(log(stockade_home).get(1).encode())
    assert verified(str(file)) == verified(str(file), "--key", key) == verified("1", "--chain") == (0, "")
    assert verified(str(file), "--require", "processes") == (0, "")
    assert verified(str(file), "--require", "limits.memory") == (1, "weaker")
    policy = tmp_path / "policy.toml"
    policy.write_text("")
    assert verified(str(file), "--policy", str(policy)) == (1, "policy")
    other = tmp_path / "other.pem"
    other.write_bytes(ed25519.public_pem(ed25519.Signer(SEED).public))
    assert verified(str(file), "--key", str(other)) == (1, "unknown-key")
    assert verified(str(file), "--key", key, "--key", str(other)) == (1, "unknown-key")
    file.write_bytes(file.read_bytes()[:-9])
    assert verified(str(file)) == (1, "malformed")
    assert cli.main(["verify"]) == cli.main(["verify", "no-such-file"]) == 125
    assert cli.main(["verify", "--chain", "--require", "files"]) == 125
    assert cli.main(["verify", str(file)]) == 1
    assert "not verified" in capsys.readouterr().err


def test_a_second_key_signs_and_is_kept(
    stockade_home: Path, key: str, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    second, its = tmp_path / "second.pem", tmp_path / "second.pub"
    second.write_bytes(ed25519.private_pem(SEED))
    second.chmod(0o600)
    its.write_bytes(ed25519.public_pem(ed25519.Signer(SEED).public))
    assert cli.main(["receipts", "cosign", "1", "--key", str(second)]) == 0
    made = capsysbinary.readouterr().out
    assert len(Receipt.decode(made).signatures) == 2
    assert log(stockade_home).get(1).encode() + b"\n" == made
    assert cli.main(["verify", "1", "--chain", "--key", key, "--key", str(its)]) == 0
    assert cli.main(["receipts", "cosign", "1"]) == cli.main(["receipts", "list", "--key", "x"]) == 125


def test_only_what_was_checked_is_shown_as_signed(
    stockade_home: Path, key: str, tmp_path: Path, capsys: Captured
) -> None:
    """A cosigner's key says nothing about what stands in the place of the maker's signature."""
    both = log(stockade_home).get(1).cosigned(ed25519.private_pem(SEED))
    maker, second = both.signatures
    file, its = tmp_path / "run.json", tmp_path / "second.pub"
    its.write_bytes(ed25519.public_pem(ed25519.Signer(SEED).public))
    file.write_bytes(Receipt(both.payload, (Signature(maker.keyid, bytes(64)), second)).encode())
    assert cli.main(["verify", str(file), "--key", str(its)]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("signed by"))
    assert row.split(maxsplit=2)[2] == f"{second.keyid[:16]} (not checked: {maker.keyid[:16]})"
    assert cli.main(["verify", str(file), "--key", str(its), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["signed_by"], told["not_checked"]) == ([second.keyid], [maker.keyid])
    assert cli.main(["verify", str(file), "--key", str(its), "--key", key]) == 1


def test_a_file_does_not_answer_for_the_log(stockade_home: Path, key: str, capsys: Captured) -> None:
    append(stockade_home)
    for name in ("last", "2"):
        Path(name).write_bytes(log(stockade_home).get(1).encode())
        assert cli.main(["verify", name, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["id"].startswith("2-")
        assert cli.main(["verify", f"./{name}", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["id"].startswith("1-")
    Path("2-run.json").write_bytes(log(stockade_home).get(1).encode())
    assert cli.main(["verify", "2-run.json"]) == 0


def test_a_killed_supervisors_run_is_not_said_to_have_started_nothing(
    stockade_home: Path, capsys: Captured
) -> None:
    record = sandbox_record.SandboxRecord(id="0123", command=("true",), started="2026-05-01T12:00:00Z")
    builder.orphaned(state.ensure(str(stockade_home)), record)
    assert cli.main(["verify", "last"]) == 0
    said = capsys.readouterr().out
    assert "the program may have run" in said and "nothing was started" not in said
    assert cli.main(["verify", "last", "--require", "files"]) == 1
    assert "the program may have run" in capsys.readouterr().err


def test_the_receipt_names_the_agent_that_the_policy_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "config/stockade").mkdir(parents=True)
    (tmp_path / "config/stockade/policies.toml").write_text("[global]\n[agent.linter]\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    words = ["run", "-q", "--receipt", "../run.json", "--agent", "linter", "--who"]
    assert cli.main([*words, "agent=admin", "--", "true"]) == 125
    assert "--agent linter" in capsys.readouterr().err
    assert cli.main([*words, "agent=linter", "--", "true"]) == 0


def test_keys_are_shown_exported_and_rotated(stockade_home: Path, tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["keys"]) == 0
    (first,) = keys.known(str(stockade_home))
    assert first.id in capsys.readouterr().out
    assert cli.main(["keys", "export"]) == 0
    assert capsys.readouterr().out.encode() == ed25519.public_pem(first.public)
    word = tmp_path / "word"
    word.write_text("")
    word.chmod(0o600)
    assert cli.main(["keys", "rotate", "--passphrase-file", str(word)]) == 125
    word.write_text("secret\n")
    assert cli.main(["keys", "rotate", "--passphrase-file", str(word)]) == 0
    assert "passphrase_file" in capsys.readouterr().err
    assert cli.main(["keys", "rotate"]) == 0
    newest = capsys.readouterr().out.strip()
    assert cli.main(["keys", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown) == 3 and shown[0]["id"] == newest and shown[0]["current"]
    assert cli.main(["keys", "export", first.id[:12]]) == 0
    assert capsys.readouterr().out.encode() == ed25519.public_pem(first.public)
    assert cli.main(["keys", "show", "x"]) == cli.main(["keys", "--passphrase-file", "x"]) == 125


def test_the_settings_do_not_disturb_the_policy_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    (tmp_path / "config/stockade").mkdir(parents=True)
    (tmp_path / "config/stockade/config.toml").write_text('env = { X = "1" }\n[receipts]\nfsync = true\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert cli.main(["run", "--json", "--", "sh", "-c", "echo $X"]) == 0
    assert json.loads(capfd.readouterr().out)["stdout"] == "1\n"
    assert os.listdir(".") == []


def test_a_chain_must_be_signed_by_every_key_that_is_given(
    stockade_home: Path, key: str, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    second, its, newer = tmp_path / "second.pem", tmp_path / "second.pub", tmp_path / "newer.pub"
    second.write_bytes(ed25519.private_pem(SEED))
    second.chmod(0o600)
    its.write_bytes(ed25519.public_pem(ed25519.Signer(SEED).public))
    log(stockade_home).rotate()
    append(stockade_home)
    newer.write_bytes(ed25519.public_pem(public(stockade_home)))
    file = tmp_path / "all.jsonl"

    def verified(*words: str) -> list[int]:
        """Of an export and of the log."""
        assert cli.main(["receipts", "export"]) == 0
        file.write_bytes(capsysbinary.readouterr().out)
        given = ["--chain", "--key", key, "--key", str(newer), *words]
        return [cli.main(["verify", str(file), *given]), cli.main(["verify", *given])]

    both = ("--key", str(its))
    assert verified() == [0, 0]
    assert verified(*both) == [1, 1]
    assert cli.main(["receipts", "cosign", "1", "--key", str(second)]) == 0
    capsysbinary.readouterr()
    assert verified(*both) == [1, 1]
    assert b"receipt 2 is not signed" in capsysbinary.readouterr().err
    for place in ("2", "3"):
        assert cli.main(["receipts", "cosign", place, "--key", str(second)]) == 0
    capsysbinary.readouterr()
    assert verified(*both) == [0, 0]


def test_what_is_required_is_never_left_out_because_a_chain_is_checked(
    stockade_home: Path, key: str, tmp_path: Path
) -> None:
    file = tmp_path / "all.jsonl"
    file.write_bytes(log(stockade_home).get(1).encode() + b"\n")
    (tmp_path / "policy.toml").write_text("")
    for asked in (["--require", "limits.memory"], ["--policy", str(tmp_path / "policy.toml")]):
        assert cli.main(["verify", str(file), "--chain", *asked]) == 125
        assert cli.main(["verify", "1", "--chain", *asked]) == 1
