"""Real work behind the walls: builds, tests, packages, servers and browsers run as they do outside."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Result, Workspace
from support.means import need_program

GIT = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


def work(place: Path, *command: str, timeout: float = 90, **clauses: object) -> Result:
    """A command in the workspace, with the default limits."""
    policy = Policy(workspace=str(place), **{"protect": [], **clauses})  # type: ignore[arg-type]
    return stockade.run(list(command), policy, timeout=timeout)


def done(result: Result) -> Result:
    assert result.ok, (
        result.outcome,
        result.reason,
        result.hint,
        result.stderr[-2000:],
        result.stdout[-2000:],
    )
    return result


def taken_over(result: Result) -> None:
    """Commit what it changed."""
    assert Workspace.open(done(result).workspace_id).commit(allow_exec_config=True).held == ()


def test_git_submodules_are_added_updated_and_cloned(workspace: Path) -> None:
    need_program("git")
    script = (
        "git init -qb main dep; echo one > dep/file; git -C dep add .; git -C dep commit -qm one; "
        "git init -qb main top; cd top; git submodule --quiet add ../dep lib; git commit -qm with; "
        "echo two >> ../dep/file; git -C ../dep commit -qam two; "
        "git submodule --quiet update --remote; git commit -qam newer; "
        'git clone -q --recurse-submodules "$PWD" ../copy; git worktree add -q ../beside; '
        "git -C ../beside submodule --quiet update --init"
    )
    allowed = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "protocol.file.allow",
        "GIT_CONFIG_VALUE_0": "always",
    }
    taken_over(work(workspace, "sh", "-ec", script, env={**GIT, **allowed}))
    for tree in ("top", "copy", "beside"):
        assert (workspace / tree / "lib/file").read_text() == "one\ntwo\n"
    status = ["git", "submodule", "status"]
    told = subprocess.run(
        status, cwd=workspace / "copy", env=os.environ | GIT, capture_output=True, check=True
    )
    assert told.stdout.startswith(b" ") and b" lib " in told.stdout


def wheel(directory: Path, name: str, *needs: str) -> None:
    """A package with one module, as an index of files has it."""
    info = f"{name}-1.0.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        "Version: 1.0",
        *(f"Requires-Dist: {n}" for n in needs),
    ]
    files = {
        f"{name}.py": f"answer = {name!r}\n",
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)


def test_pip_installs_from_a_directory_of_packages(workspace: Path, tmp_path: Path) -> None:
    """With the Python that runs this, wherever it is installed; the packages lie outside the workspace."""
    packages = tmp_path / "packages"
    packages.mkdir()
    wheel(packages, "first", "second")
    wheel(packages, "second")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-index"]
    result = work(workspace, *pip, f"--find-links={packages}", "--target=site", "first", read=[str(packages)])
    taken_over(result)
    script = "import first, second; print(first.answer, second.answer)"
    found = work(workspace, sys.executable, "-c", script, env={"PYTHONPATH": "site"})
    assert done(found).text == "first second\n"


def test_pytest_runs_with_two_workers(workspace: Path) -> None:
    (workspace / "test_it.py").write_text(
        "import pytest\n\n\n"
        "@pytest.mark.parametrize('n', range(8))\ndef test_n(n, tmp_path, worker_id):\n"
        "    assert worker_id in ('gw0', 'gw1')\n    (tmp_path / 'x').write_text(str(n))\n"
    )
    pytest_alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = done(
        work(workspace, sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", "-q", env=pytest_alone)
    )
    assert b"8 passed" in result.stdout


def test_make_builds_a_c_project_with_two_jobs(workspace: Path) -> None:
    need_program("make")
    need_program("gcc")
    for name in ("one", "two", "three"):
        (workspace / f"{name}.c").write_text(f"int {name}(void) {{ return {len(name)}; }}\n")
    (workspace / "main.c").write_text(
        "#include <stdio.h>\nint one(void), two(void), three(void);\n"
        'int main(void) { printf("%d\\n", one() + two() + three()); }\n'
    )
    (workspace / "Makefile").write_text(
        "sum: main.o libsum.so\n\tgcc -o $@ main.o -L. -lsum -Wl,-rpath,'$$ORIGIN'\n"
        "libsum.so: one.o two.o three.o\n\tgcc -shared -o $@ $^\n"
        "%.o: %.c\n\tgcc -O1 -fPIC -g -c -o $@ $<\n"
    )
    taken_over(work(workspace, "make", "-j2"))
    assert subprocess.run([str(workspace / "sum")], capture_output=True, check=True).stdout == b"11\n"


PROCESSES = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import shared_memory


def add(guard, name, done):
    with guard:
        memory = shared_memory.SharedMemory(name=name)
        memory.buf[0] += 1
        memory.close()
    done.put(1)


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    guard, done = context.BoundedSemaphore(1), context.Queue()
    workers = [context.Process(target=add, args=(guard, memory.name, done)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        done.get(timeout=60)
    for worker in workers:
        worker.join()
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        print(memory.buf[0], sum(pool.map(abs, range(-10, 0))))
    memory.close()
    memory.unlink()
"""


@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
def test_python_shares_memory_and_semaphores_between_processes(workspace: Path, way: str) -> None:
    (workspace / "job.py").write_text(PROCESSES)
    result = done(work(workspace, "python3", "job.py", way))
    assert result.text == "4 55\n" and result.stderr == b""


def test_sqlite_writes_ahead_from_several_processes(workspace: Path) -> None:
    """The database is the host's, so that its log begins with a copy."""
    with sqlite3.connect(workspace / "data.db") as before:
        before.execute("PRAGMA journal_mode=WAL")
        before.execute("CREATE TABLE t (n INTEGER)")
    before.close()
    (workspace / "job.py").write_text(
        "import sqlite3, sys\n"
        "base = sqlite3.connect('data.db', timeout=60)\n"
        "assert base.execute('PRAGMA journal_mode').fetchone() == ('wal',)\n"
        "for n in range(50):\n    with base:\n        base.execute('INSERT INTO t VALUES (?)', (n,))\n"
    )
    script = "python3 job.py & python3 job.py & wait; python3 job.py"
    taken_over(work(workspace, "sh", "-ec", script))
    after = sqlite3.connect(workspace / "data.db")
    assert after.execute("SELECT count(*), sum(n) FROM t").fetchone() == (150, 3 * 1225)
    assert after.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    after.close()


SERVER = """
const http = require('http');
const server = http.createServer((request, response) => response.end('served ' + request.url));
server.listen(3000, async () => {
  const found = [];
  for (const host of ['127.0.0.1', 'localhost']) {
    found.push(await new Promise((resolve, reject) => http.get(`http://${host}:3000/${host}`, (response) => {
      let text = '';
      response.on('data', (part) => { text += part; }).on('end', () => resolve(text));
    }).on('error', reject)));
  }
  console.log(JSON.stringify(found));
  server.close();
});
"""


def test_a_node_server_is_used_from_inside(workspace: Path) -> None:
    need_program("node")
    (workspace / "server.js").write_text(SERVER)
    result = done(work(workspace, "node", "server.js"))
    assert json.loads(result.text) == ["served /127.0.0.1", "served /localhost"]


def test_a_browser_takes_a_picture(workspace: Path) -> None:
    """With its own sandbox off: the walls are ours, and inside them nobody makes namespaces."""
    need_program("chromium-headless-shell")
    (workspace / "page.html").write_text("<body style='background: #00f'>")
    result = work(
        workspace, "chromium-headless-shell", "--no-sandbox", "--disable-gpu", "--screenshot=page.png",
        "--window-size=64,48", f"file://{workspace}/page.html",
    )  # fmt: skip
    taken_over(result)
    picture = (workspace / "page.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n") and struct.unpack(">II", picture[16:24]) == (64, 48)


def test_ssh_keygen_makes_a_key_and_signs_with_it(workspace: Path) -> None:
    need_program("ssh-keygen")
    (workspace / "text").write_text("signed\n")
    script = (
        "ssh-keygen -q -t ed25519 -N '' -C me -f key; ssh-keygen -q -Y sign -f key -n file text; "
        "echo me $(cat key.pub) > who; ssh-keygen -Y verify -f who -I me -n file -s text.sig < text"
    )
    result = work(workspace, "sh", "-ec", script)
    assert b"Good" in done(result).stdout


def test_gpg_makes_a_key_with_its_agent_and_signs(workspace: Path) -> None:
    need_program("gpg")
    script = (
        "mkdir -m 700 keys; gpg='gpg --batch --quiet --homedir keys'; "
        "$gpg --passphrase '' --quick-gen-key me@here ed25519 sign never; "
        "echo text > file; $gpg --detach-sign file; $gpg --verify file.sig file"
    )
    done(work(workspace, "sh", "-ec", script))


def test_tar_and_rsync_carry_everything_over(workspace: Path) -> None:
    need_program("rsync")
    script = (
        "mkdir -p a/b; echo x > a/b/file; ln a/b/file a/hard; ln -s b/file a/soft; chmod 640 a/b/file; "
        "tar czf a.tgz a; mkdir t; tar xzf a.tgz -C t; rsync -aH a/ r/; diff -r a t/a; diff -r a r; "
        "test $(stat -c %h r/hard) = 2"
    )
    done(work(workspace, "sh", "-ec", script))


def test_a_tracer_is_refused_and_told_why(workspace: Path) -> None:
    need_program("strace")
    result = work(workspace, "strace", "true")
    assert not result.ok and b"Operation not permitted" in result.stderr
    assert "ptrace" in result.hint and "outside" in result.hint
