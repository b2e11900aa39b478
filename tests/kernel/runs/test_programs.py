"""Real programs live in a sandbox as they do outside: shells, compilers, interpreters, databases."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stockade import Policy, Result, Sandbox
from support.means import need, need_program

PYTHON = "/usr/bin/python3"


@pytest.fixture
def box(workspace: Path) -> Iterator[Sandbox]:
    """A sandbox with an overlay workspace, whose changes are forgotten."""
    with Sandbox(Policy(workspace=str(workspace)), on_exit="discard") as made:
        yield made


def sh(box: Sandbox, script: str, **options: object) -> str:
    result = box.run(["bash", "-euc", script], timeout=90, **options)  # type: ignore[arg-type]
    assert result.ok, f"{result.reason}\n{result.text}\n{result.stderr.decode(errors='replace')}"
    return result.text


def python(box: Sandbox, script: str) -> str:
    need_program("python3")
    result = box.run([PYTHON, "-c", script], timeout=90)
    assert result.ok, f"{result.reason}\n{result.text}\n{result.stderr.decode(errors='replace')}"
    return result.text


class TestShell:
    def test_pipes_substitutions_jobs_and_traps(self, box: Sandbox) -> None:
        script = """
            diff <(printf 'a\\nb\\n') <(printf 'a\\nb\\n') && echo same
            sleep 0.1 & wait $! && echo waited
            set -m; (exit 3) & wait %1 || echo "code $?"
            trap 'echo trapped' USR1; kill -USR1 $$
            cat <<< "here" | tee >(cat >&2) | tr a-z A-Z
            coproc cat; echo through >&"${COPROC[1]}"; read -r x <&"${COPROC[0]}"; echo "$x"
        """
        assert sh(box, script).split() == ["same", "waited", "code", "3", "trapped", "HERE", "through"]

    def test_coreutils_on_many_files(self, box: Sandbox) -> None:
        script = """
            mkdir -p a/b/c && for n in $(seq 1 200); do echo $n > a/b/c/$n; done
            cp -a a copy && mv copy moved && ln -s moved link && du -s link >/dev/null
            find moved -type f -name '1*' | wc -l
            grep -rl '^77$' moved
            cat moved/b/c/* | sort -n | tail -1
            chmod -R go-rwx moved && touch -d 2001-02-03 moved/b/c/1 && stat -c %y moved/b/c/1 | cut -c1-10
            ls moved/b/c | xargs -P4 -I{} cat moved/b/c/{} | awk '{s+=$1} END {print s}'
            rm -r a moved link && ls
        """
        expected = ["111", "moved/b/c/77", "200", "2001-02-03", "20100"]
        assert sh(box, script).split() == expected

    def test_sort_with_temporary_files(self, box: Sandbox) -> None:
        script = (
            "seq 200000 -1 1 > n && sort -n -S 100K -T /tmp n | head -1 && sort -n -S 100K -T . n | tail -1"
        )
        assert sh(box, script).split() == ["1", "200000"]

    def test_tar_and_compression(self, box: Sandbox) -> None:
        script = """
            mkdir -p d/e && echo x > d/e/x && ln -s e/x d/l && mkfifo d/p && chmod 750 d/e
            tar czf a.tgz d && rm -r d && tar xzf a.tgz
            stat -c '%a %F' d/e d/l d/p && cat d/l
        """
        assert sh(box, script).splitlines() == ["750 directory", "777 symbolic link", "644 fifo", "x"]


class TestGit:
    @pytest.fixture(autouse=True)
    def program(self) -> None:
        need_program("git")

    NAMED = (
        "export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b; "
        "git config --global init.defaultBranch main; "
    )

    def test_a_repository_is_made_cloned_branched_and_merged(self, box: Sandbox) -> None:
        script = """
            git init -q one && cd one && echo 1 > f && git add f && git commit -qm first
            git checkout -qb side && echo 2 >> f && git commit -qam second
            git checkout -q main && git merge -q side
            git worktree add -q ../tree side && cat ../tree/f
            cd .. && git clone -q one two && cd two && git log --format=%s
            git gc -q && git fsck --strict 2>&1 | grep -c error || true
            git stash list && git status --porcelain
        """
        assert sh(box, self.NAMED + script).split() == ["1", "2", "second", "first", "0"]

    def test_a_repository_of_the_hosts_can_be_worked_on_without_touching_it(
        self, workspace: Path, box: Sandbox
    ) -> None:
        import subprocess

        names = [f"GIT_{who}_{what}" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")]
        environment = os.environ | dict.fromkeys(names, "a@b")

        def git(*arguments: str) -> str:
            return subprocess.run(
                ["git", *arguments],
                cwd=workspace,
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout

        git("init", "-q")
        (workspace / "f").write_text("1\n")
        git("add", "f")
        git("commit", "-qm", "first")
        before = git("rev-parse", "HEAD"), sorted(path.name for path in (workspace / ".git").iterdir())
        commit = "echo 2 > f; git add -A; git commit -qm second; "
        script = commit + "git reset -q --hard HEAD~1; git log --format=%s"
        assert sh(box, self.NAMED + script) == "first\n"
        assert before == (
            git("rev-parse", "HEAD"),
            sorted(path.name for path in (workspace / ".git").iterdir()),
        )
        assert (workspace / "f").read_text() == "1\n"


def test_a_c_program_is_built_by_make_and_run(box: Sandbox, workspace: Path) -> None:
    need_program("gcc")
    need_program("make")
    (workspace / "Makefile").write_text("all: a b\n%: %.c\n\tgcc -O1 -pthread -o $@ $<\n")
    program = """
        #include <pthread.h>
        #include <stdio.h>
        static void *work(void *n) { return (char *)n + 1; }
        int main(void) {
            pthread_t t; void *r;
            pthread_create(&t, 0, work, (void *)41);
            pthread_join(t, &r);
            printf("%ld\\n", (long)r);
            return 0;
        }
    """
    for name in ("a.c", "b.c"):
        (workspace / name).write_text(program)
    assert sh(box, "make -s -j4 && ./a && ./b").split() == ["42", "42"]
    assert not (workspace / "a").exists()


class TestPython:
    def test_threads_and_locks(self, box: Sandbox) -> None:
        script = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(16) as pool:
    print(sum(pool.map(lambda n: n * n, range(1000))))
"""
        assert python(box, script) == "332833500\n"

    def test_a_pool_of_processes(self, box: Sandbox) -> None:
        script = """
import multiprocessing as m
def square(n): return n * n
if __name__ == "__main__":
    for method in ("fork", "forkserver", "spawn"):
        with m.get_context(method).Pool(3) as pool:
            print(sum(pool.map(square, range(100))))
"""
        # spawn imports the main module, so it has to be a file.
        sh(box, "cat > job.py", input=script.encode())
        assert sh(box, f"{PYTHON} job.py").split() == ["328350"] * 3

    def test_semaphores_queues_and_shared_memory(self, box: Sandbox) -> None:
        script = """
import multiprocessing as m
from multiprocessing import shared_memory
def work(lock, value, queue, name):
    block = shared_memory.SharedMemory(name)
    for _ in range(500):
        with lock: value.value += 1
    block.buf[0] = 7
    block.close()
    queue.put("done")
lock, value, queue = m.Lock(), m.Value("i", 0, lock=False), m.Queue()
block = shared_memory.SharedMemory(create=True, size=4096)
many = [m.Process(target=work, args=(lock, value, queue, block.name)) for _ in range(4)]
for one in many: one.start()
print([queue.get(timeout=30) for _ in many])
for one in many: one.join()
print(value.value, block.buf[0])
block.close(); block.unlink()
"""
        assert python(box, script) == "['done', 'done', 'done', 'done']\n2000 7\n"

    def test_asyncio_with_subprocesses_and_sockets(self, box: Sandbox) -> None:
        script = """
import asyncio
async def answer(reader, writer):
    writer.write((await reader.readline()).upper()); await writer.drain(); writer.close()
async def main():
    start = asyncio.create_subprocess_exec
    many = [await start("echo", str(n), stdout=asyncio.subprocess.PIPE) for n in range(10)]
    print(b"".join([(await one.communicate())[0] for one in many]).split())
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"hello\\n"); print(await reader.readline()); writer.close()
    unix = await asyncio.start_unix_server(answer, "/tmp/s")
    reader, writer = await asyncio.open_unix_connection("/tmp/s")
    writer.write(b"unix\\n"); print(await reader.readline()); writer.close()
asyncio.run(main())
"""
        expected = f"{[str(n).encode() for n in range(10)]}\nb'HELLO\\n'\nb'UNIX\\n'\n"
        assert python(box, script) == expected

    def test_mapped_files_temporary_files_and_time(self, box: Sandbox) -> None:
        script = """
import mmap, os, tempfile, time, resource, fcntl, random, uuid, secrets, getpass, pwd
with tempfile.TemporaryFile() as file:
    file.truncate(1 << 20)
    with mmap.mmap(file.fileno(), 0) as map: map[5] = 7; map.flush()
with tempfile.NamedTemporaryFile(dir=".") as file:
    fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX)
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
fd = os.memfd_create("x"); os.write(fd, b"x")
assert time.monotonic() > 0 and secrets.token_bytes(8) and uuid.uuid4() and os.cpu_count()
assert getpass.getuser() == pwd.getpwuid(os.getuid()).pw_name
os.sched_setaffinity(0, os.sched_getaffinity(0)); os.nice(1)
print("fine")
"""
        assert python(box, script) == "fine\n"

    def test_a_virtual_environment_can_be_made_and_used(self, box: Sandbox) -> None:
        sh(box, f"{PYTHON} -m venv --without-pip v")
        assert sh(box, "v/bin/python -c 'import sys; print(sys.prefix != sys.base_prefix)'") == "True\n"

    def test_a_database_in_write_ahead_mode(self, box: Sandbox) -> None:
        script = """
import sqlite3, threading
first = sqlite3.connect("d.sqlite")
print(first.execute("pragma journal_mode=wal").fetchone()[0])
first.execute("create table t (n)"); first.commit()
def insert(start):
    with sqlite3.connect("d.sqlite", timeout=30) as own:
        for n in range(50):
            own.execute("insert into t values (?)", (start + n,)); own.commit()
    own.close()
many = [threading.Thread(target=insert, args=(n * 100,)) for n in range(3)]
for one in many: one.start()
for one in many: one.join()
print(first.execute("select count(*), sum(n) from t").fetchone())
"""
        assert python(box, script) == "wal\n(150, 18675)\n"


def test_the_sqlite_shell(box: Sandbox) -> None:
    need_program("sqlite3")
    assert sh(box, "sqlite3 d.db 'create table t(x); insert into t values (6*7); select x from t'") == "42\n"


class TestNode:
    @pytest.fixture
    def node(self, box: Sandbox, workspace: Path) -> Iterator[tuple[Sandbox, str]]:
        program = os.path.realpath(need_program("node"))
        if program.startswith("/usr/"):
            yield box, program
            return
        # One that was installed elsewhere brings its libraries beside it.
        prefix = Path(program).parent.parent
        need(
            prefix != Path("/") and not str(Path.home()).startswith(str(prefix)),
            f"node lies loose in {prefix}",
        )
        with Sandbox(Policy(workspace=str(workspace), read=[str(prefix)]), on_exit="discard") as other:
            yield other, program

    def test_workers_children_servers_and_files(self, node: tuple[Sandbox, str]) -> None:
        box, program = node
        script = """
const { Worker, isMainThread, parentPort } = require('worker_threads');
const { execFileSync } = require('child_process');
const fs = require('fs'), http = require('http'), crypto = require('crypto');
fs.writeFileSync('x', 'hello');
console.log(fs.readFileSync('x', 'utf8'), execFileSync('echo', ['child']).toString().trim());
console.log(crypto.createHash('sha256').update('x').digest('hex').slice(0, 8));
const worker = new Worker("require('worker_threads').parentPort.postMessage(6 * 7)", { eval: true });
worker.on('message', n => console.log(n));
worker.on('exit', () => {
  const server = http.createServer((q, r) => r.end('served')).listen(0, '127.0.0.1', () =>
    http.get({ port: server.address().port, host: '127.0.0.1' }, r => {
      r.on('data', d => console.log(d.toString())); r.on('end', () => server.close());
    }));
});
"""
        assert run(box, [program, "-e", script]).split() == ["hello", "child", "2d711642", "42", "served"]


def run(box: Sandbox, command: list[str]) -> str:
    result: Result = box.run(command, timeout=90)
    assert result.ok, f"{result.reason}\n{result.text}\n{result.stderr.decode(errors='replace')}"
    return result.text


def test_openssl_makes_keys_certificates_and_a_connection(box: Sandbox) -> None:
    need_program("openssl")
    script = """
        openssl req -x509 -newkey rsa:2048 -nodes -keyout k -out c -days 1 -subj /CN=localhost 2>/dev/null
        openssl x509 -in c -noout -subject
        openssl s_server -accept 127.0.0.1:4433 -key k -cert c -www >/dev/null 2>&1 &
        for i in $(seq 50); do
            openssl s_client -connect 127.0.0.1:4433 -CAfile c </dev/null 2>/dev/null > said || true
            grep 'Verify return' said && break
            sleep 0.1
        done | head -1
        kill %1
        echo secret | openssl enc -aes-256-cbc -pbkdf2 -k p | openssl enc -d -aes-256-cbc -pbkdf2 -k p
    """
    lines = sh(box, script).splitlines()
    assert "localhost" in lines[0] and "0 (ok)" in lines[1] and lines[2] == "secret"


def test_perl_and_awk(box: Sandbox) -> None:
    need_program("perl")
    assert sh(box, "perl -e 'print join(q( ), map { $_ ** 2 } 1..4), qq(\\n)'") == "1 4 9 16\n"
    assert sh(box, "seq 10 | awk '{ s += $1 } END { print s }'") == "55\n"


def test_the_same_in_a_writable_workspace(workspace: Path) -> None:
    policy = Policy(workspace={"path": str(workspace), "mode": "rw"}, protect=[])
    with Sandbox(policy) as box:
        sh(box, "mkdir d && echo x > d/x && mv d e && ln e/x e/y && rename=$(mktemp -p .) && mv $rename z")
    assert sorted(path.name for path in workspace.rglob("*")) == ["e", "x", "y", "z"]
