"""Our own client against the living server, and the examples of its documentation."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import time
from collections.abc import Iterator

import pytest

import stockade
from stockade import Change, Outcome
from stockade.client import AsyncClient, Client, RemoteDeniedError, RemoteSandbox, ServerError


@pytest.fixture(scope="module")
def client(address: tuple[str, str]) -> Iterator[Client]:
    domain, key = address
    with Client(domain, key=key) as found:
        yield found


@pytest.fixture(scope="module")
def box(client: Client) -> Iterator[RemoteSandbox]:
    with client.create(timeout=600, metadata={"by": "client"}) as found:
        yield found


MODULES = ["client", "async_client", "remote_sandbox", "remote_files", "remote_session"]


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_the_documentation_are_true(
    module: str, client: Client, box: RemoteSandbox, address: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPEN_SANDBOX_DOMAIN", address[0])
    monkeypatch.setenv("STOCKADE_API_KEY", address[1])
    loaded = importlib.import_module(f"stockade.client.{module}")
    done = doctest.testmod(loaded, extraglobs={"client": client, "box": box})
    assert done.attempted > 0 and done.failed == 0


def test_a_sandbox_is_made_found_listed_and_deleted(client: Client) -> None:
    with client.create(timeout=300, metadata={"kind": "short"}) as one:
        assert client.get(one.id).info().metadata == {"kind": "short"}
        assert [info.id for info in client.list(metadata={"kind": "short"})] == [one.id]
        one.patch_metadata({"kind": None})
        assert list(client.list(metadata={"kind": "short"})) == []
        end = one.renew(1000)
        assert one.info().expires_at == end
        assert one.endpoint(44772).headers
    with pytest.raises(stockade.NotFoundError):
        one.info()
    one.close()


def test_a_lost_answer_makes_one_sandbox(client: Client) -> None:
    from stockade.client import sandbox_calls

    call = sandbox_calls.create("host", {"metadata": {"twice": "yes"}})
    first, second = client._transport.send(call), client._transport.send(call)
    assert first.id == second.id
    client.get(first.id).delete()


def test_results_are_those_of_the_library(box: RemoteSandbox) -> None:
    result = box.run("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.outcome, result.stdout, result.stderr) == (
        3,
        Outcome.EXITED,
        b"out\n",
        b"err\n",
    )
    with pytest.raises(stockade.CommandError, match="err"):
        result.check()
    assert box.run(["printf", "%s", "$HOME"]).check().text == "$HOME"


def test_options_of_a_run(box: RemoteSandbox) -> None:
    texts: list[str] = []
    result = box.run("echo $A in $PWD; printf more", env={"A": "1"}, cwd="/var", on_stdout=texts.append)
    assert result.text == "1 in /var\nmore" and "".join(texts) == result.text


def test_time_that_is_over_is_that_outcome(box: RemoteSandbox) -> None:
    result = box.run("sleep 30", timeout=0.3)
    assert result.outcome is Outcome.TIMED_OUT and not result.ok
    with pytest.raises(stockade.TimeoutError):
        result.check()
    with box.session("/workspace") as session:
        assert session.run("sleep 30", timeout=1).outcome is Outcome.TIMED_OUT


def test_background_commands(box: RemoteSandbox) -> None:
    job = box.background("echo started; sleep 60")
    with pytest.raises(stockade.TimeoutError):
        job.wait(0.1)
    job.kill()
    assert not job.wait(10).ok
    piece = job.logs()
    assert piece.text == "started\n" and job.logs(piece.cursor).data == b""


def test_an_interpreter_reports_what_went_wrong(box: RemoteSandbox) -> None:
    with box.python() as python:
        result = python.run("print('x')\n1/0")
        assert result.text == "x\n" and result.error is not None and result.error.type == "ZeroDivisionError"
        with pytest.raises(stockade.CommandError, match="ZeroDivisionError"):
            result.check()


def test_an_isolated_session_shows_and_commits_its_changes(box: RemoteSandbox) -> None:
    box.run("mkdir -p /workspace/p; echo one > /workspace/p/a; echo two > /workspace/p/b")
    with box.session("/workspace/p", mode="overlay") as session:
        session.run("echo more >> a; rm b; echo new > c", env={"X": "1"})
        assert set(session.changes()) == {
            Change("/workspace/p/a", "modified"),
            Change("/workspace/p/b", "deleted"),
            Change("/workspace/p/c", "added"),
        }
        assert "+more" in session.diff() and session.archive()[:2] == b"\x1f\x8b"
        assert box.files.read("/workspace/p/a") == b"one\n"
        session.commit()
    assert box.run("cat /workspace/p/*").text == "one\nmore\nnew\n"


def test_a_commit_with_a_conflict_writes_nothing(box: RemoteSandbox) -> None:
    box.run("mkdir -p /workspace/q; echo one > /workspace/q/a")
    with box.session("/workspace/q", mode="overlay") as session:
        session.run("echo mine > a")
        box.run("echo theirs > /workspace/q/a")
        with pytest.raises(stockade.ConflictError) as caught:
            session.commit()
        assert isinstance(caught.value, ServerError) and caught.value.status == 409
    assert box.files.read("/workspace/q/a") == b"theirs\n"


def test_a_background_run_of_a_session(box: RemoteSandbox) -> None:
    with box.session("/workspace") as session:
        job = session.background("echo one; sleep 60")
        while not job.logs().text:
            time.sleep(0.02)
        job.kill()
        assert not job.wait(10).ok


def test_files(box: RemoteSandbox) -> None:
    files = box.files
    files.write("/tmp/f/a", b"\0\xff" * 1000, mode=0o640)
    assert (files.info("/tmp/f/a").mode, files.info("/tmp/f/a").size) == (0o640, 2000)
    assert files.read("/tmp/f/a", offset=1, length=2) == b"\xff\0" and files.read("/tmp/f/a", length=0) == b""
    files.write("/tmp/f/b.txt", "x y x")
    assert files.replace("/tmp/f/b.txt", "x", "z") == 2
    files.mkdir("/tmp/f/d/e")
    files.move("/tmp/f/b.txt", "/tmp/f/d/c.txt")
    files.chmod("/tmp/f/d/c.txt", 0o600)
    assert [one.path for one in files.search("*.txt", "/tmp/f")] == ["/tmp/f/d/c.txt"]
    assert [one.kind for one in files.list("/tmp/f")] == ["file", "directory"]
    files.remove("/tmp/f/a")
    files.remove("/tmp/f/d", recursive=True)
    assert files.list("/tmp/f") == ()
    with pytest.raises(FileNotFoundError) as caught:
        files.read("/tmp/f/a")
    assert caught.value.code == "FILE_NOT_FOUND"


def test_pause_and_resume(client: Client) -> None:
    with client.create() as one:
        one.pause()
        assert one.info().status.state == "Paused"
        with pytest.raises(stockade.StockadeError):
            one.run("true")
        one.resume()
        assert one.run("true").ok


def test_every_run_has_a_receipt(box: RemoteSandbox) -> None:
    before = len(box.receipts())
    box.run(["true"])
    found = box.receipts()
    assert len(found) == before + 1 and found[-1].outcome == "exited"
    receipt = box.receipt(found[-1].id)
    assert receipt.id == found[-1].id and receipt.predicate.who.agent == box.id


def test_a_wrong_key_is_denied(address: tuple[str, str]) -> None:
    with Client(address[0], key="wrong") as client, pytest.raises(RemoteDeniedError) as caught:
        client.create()
    assert caught.value.status == 401 and isinstance(caught.value, PermissionError)


def test_the_network_of_the_request(client: Client) -> None:
    with client.create(net=["good.example"]) as one:
        assert one.run("true").ok


def test_many_at_once_with_await(address: tuple[str, str]) -> None:
    async def main() -> list[str]:
        domain, key = address
        async with AsyncClient(domain, key=key) as client, await client.create(timeout=300) as box:
            await box.files.write("/tmp/x", "file")
            shell, python = await box.shell(cwd="/tmp"), await box.python()
            session = await box.session("/workspace")
            done = await asyncio.gather(
                box.run("echo command"), shell.run("pwd"), python.run("print(7)"), session.run("echo session")
            )
            await asyncio.gather(shell.close(), python.close(), session.close())
            job = await box.background("echo job")
            await job.wait(10)
            texts = [one.text for one in done]
            texts += [(await job.logs()).text, (await box.files.read("/tmp/x")).decode()]
            assert box.id in [one.id async for one in client.list()]
        return texts

    assert asyncio.run(main()) == ["command\n", "/tmp\n", "7\n", "session\n", "job\n", "file"]
