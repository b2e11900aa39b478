"""Jupyter kernels in sandboxes: Jupyter's own tests of kernels, notebooks, and what a kernel reaches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stockade import PolicyError, Workspace, run
from support import leaks
from support.means import need

try:
    import jupyter_kernel_test
    import nbclient
    import nbformat
except ModuleNotFoundError as error:
    need(False, f"{error.name} is not installed")
from jupyter_client import BlockingKernelClient, KernelManager
from jupyter_client.manager import start_new_kernel
from jupyter_core.utils import ensure_event_loop

from stockade.integrations import jupyter
from stockade.integrations.jupyter_relay import PLAIN_TYPES

Said = list[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module", autouse=True)
def jupyter_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A machine on which two kernels of Stockade are installed; one of them filters what it shows."""
    home = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOCKADE_HOME", str(home / "state"))
        run(["true"])  # what the library keeps after its first run is no leak
        leaks.let_go_of_register()
        before = leaks.snapshot()
        patch.setenv("JUPYTER_PATH", str(home / "share/jupyter"))
        patch.setenv("JUPYTER_DATA_DIR", str(home / "data"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(home / "runtime"))
        patch.setenv("IPYTHONDIR", str(home / "ipython"))
        patch.delenv("XDG_RUNTIME_DIR", raising=False)
        (home / "work").mkdir()
        patch.chdir(home / "work")
        jupyter.install(["install", "--prefix", str(home)])
        jupyter.install(["install", "--prefix", str(home), "--name", "shows-all", "--display", "all"])
        without_jedi(home / "share/jupyter/kernels/stockade/kernel.json")
        yield home
        ensure_event_loop().close()  # the one that Jupyter runs its coroutines in
        leaks.let_go_of_register()
    left = leaks.settled(lambda: sorted(leaks.snapshot() - before))
    if left:
        pytest.fail("the module left behind:\n  " + "\n  ".join(left), pytrace=False)


def without_jedi(spec: Path) -> None:
    """Complete without jedi, which would first spend seconds on reading Python's own library."""
    content = json.loads(spec.read_text())
    content["argv"].append("--IPCompleter.use_jedi=False")
    spec.write_text(json.dumps(content))


@pytest.fixture(autouse=True)
def stockade_home(jupyter_home: Path) -> Path:
    """The state directory that the kernels of all tests share."""
    return jupyter_home / "state"


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Leave the check to the module's end: tests share kernels."""


class TestKernel(jupyter_kernel_test.KernelTests):  # type: ignore[misc]
    """Jupyter's tests of a kernel; samples of what IPython does."""

    kernel_name = "stockade"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples = ({"text": "zi", "matches": {"zip"}},)
    complete_code_samples = ("1", "print('hello, world')", "def f(x):\n  return x*2\n\n\n")
    incomplete_code_samples = ("print('''hello", "def f(x):\n  x*2")
    invalid_code_samples = ("import = 7q",)
    code_page_something = "zip?"
    code_generate_error = "raise"
    code_execute_result = ({"code": "1+2+3", "result": "6"},)
    code_display_data = (
        {
            "code": "from IPython.display import Image, display; display(Image(data=b'GIF89a'))",
            "mime": "image/gif",
        },
    )
    supported_history_operations = ("tail", "search")
    code_history_pattern = "1?2*"
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"


class TestIopubWelcome(jupyter_kernel_test.IopubWelcomeTests):  # type: ignore[misc]
    """A client that comes later gets the kernel's welcome through the relay."""

    kernel_name = "stockade"
    support_iopub_welcome = True


class Kernel:
    """A kernel and a client of it."""

    def __init__(self, name: str, directory: Path) -> None:
        self.manager: KernelManager
        self.client: BlockingKernelClient
        self.manager, self.client = start_new_kernel(kernel_name=name, cwd=str(directory))

    def run(self, code: str, **options: Any) -> Said:
        """Execute a cell and return what the client got, but for states and the cell itself."""
        said: Said = []
        reply = self.client.execute_interactive(
            code,
            timeout=60,
            output_hook=lambda message: said.append((message["msg_type"], message["content"])),
            **options,
        )
        said.append(("execute_reply", reply["content"]))
        return [one for one in said if one[0] not in ("status", "execute_input")]

    def text(self, code: str) -> str:
        """Execute a cell and return what it printed."""
        return "".join(content["text"] for kind, content in self.run(code) if kind == "stream")

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel()


@pytest.fixture(scope="module")
def kernel(jupyter_home: Path) -> Iterator[Kernel]:
    made = Kernel("stockade", jupyter_home / "work")
    yield made
    made.close()


#: Reports what the page would run, and, last, an ordinary value.
ACTIVE = """
from IPython.display import HTML, Javascript, SVG, display
from comm import create_comm
display(HTML("<script>steal()</script>"))
display(Javascript("steal()"))
display({"text/plain": "plain", "text/html": "<b>", "image/png": {"a": 1}, "application/x": "y"}, raw=True,
        metadata={"text/html": {"isolated": False}})
create_comm(target_name="jupyter.widget", data={"_esm": "steal()"})
get_ipython().payload_manager.write_payload(
    {"source": "page", "data": {"text/plain": "page", "text/html": "<script>steal()</script>"}})
41 + 1
"""


def kinds(said: Said) -> list[tuple[str, set[str]]]:
    return [(kind, set(content["data"])) for kind, content in said if "data" in content]


def test_html_javascript_and_widgets_do_not_reach_the_page(kernel: Kernel) -> None:
    said = kernel.run(ACTIVE, user_expressions={"made": "HTML('<script>steal()</script>')"})
    assert "steal()" not in json.dumps(said, default=str)
    assert kinds(said) == [("display_data", {"text/plain"})] * 3 + [("execute_result", {"text/plain"})]
    assert said[-1][1]["payload"] == [{"source": "page", "data": {"text/plain": "page"}}]
    assert {kind for kind, _ in said} == {"display_data", "execute_result", "execute_reply"}


def test_they_do_where_the_user_lets_everything_pass(jupyter_home: Path) -> None:
    shows_all = Kernel("shows-all", jupyter_home / "work")
    try:
        said = shows_all.run(ACTIVE)
    finally:
        shows_all.close()
    assert ("display_data", {"text/plain", "text/html"}) in kinds(said)
    assert ("display_data", {"text/plain", "application/javascript"}) in kinds(said)
    assert "comm_open" in {kind for kind, _ in said}


def test_a_kernel_has_no_network_no_home_of_yours_and_no_socket_of_its_clients(
    kernel: Kernel, jupyter_home: Path
) -> None:
    clients = os.path.dirname(kernel.manager.ip)
    assert os.path.exists(f"{clients}/k-{kernel.manager.shell_port}")
    said = kernel.text(
        "import os, socket\n"
        f"print(os.path.exists({clients!r}), os.path.exists({kernel.manager.connection_file!r}))\n"
        f"print(os.path.exists({str(jupyter_home / 'state')!r}))\n"
        "home = os.listdir(os.path.expanduser('~'))\n"
        "print([name for _, name in socket.if_nameindex()], home == ['.ipython'])\n"
        "print('JPY_PARENT_PID' in os.environ, 'STOCKADE_HOME' in os.environ)"
    )
    assert said.split("\n") == ["False False", "False", "['lo'] True", "False False", ""]


def test_a_cell_can_ask_for_input(kernel: Kernel) -> None:
    answers: list[dict[str, Any]] = []

    def answer(message: dict[str, Any]) -> None:
        answers.append(message["content"])
        kernel.client.input("ada")

    said = kernel.run("print('hello', input('who? '))", allow_stdin=True, stdin_hook=answer)
    assert answers == [{"prompt": "who? ", "password": False}]
    assert said[0] == ("stream", {"name": "stdout", "text": "hello ada\n"})


def test_an_interrupt_reaches_the_cell_and_what_it_started(kernel: Kernel) -> None:
    interrupt = threading.Timer(1, kernel.manager.interrupt_kernel)
    interrupt.start()
    said = kernel.run("import subprocess; subprocess.run(['sleep', '600'])")
    interrupt.join()
    assert said[-1][1]["ename"] == "KeyboardInterrupt"
    assert (
        kernel.text("print(subprocess.run(['pgrep', '-c', 'sleep'], capture_output=True).stdout)")
        == "b'0\\n'\n"
    )


def test_a_restarted_kernel_finds_the_files_of_the_one_before(kernel: Kernel, jupyter_home: Path) -> None:
    kernel.text("open('made', 'w').write('1'); open('/tmp/made', 'w').write('2'); import subprocess;"
                "subprocess.Popen(['sleep', '600'])")  # fmt: skip
    kernel.manager.restart_kernel()
    kernel.client.wait_for_ready(timeout=60)
    said = kernel.text(
        "import os, subprocess; print(open('made').read(), open('/tmp/made').read(), 'Popen' in globals(),"
        "subprocess.run(['pgrep', '-c', 'sleep'], capture_output=True).stdout)"
    )
    assert said == "1 2 False b'0\\n'\n"
    assert not (jupyter_home / "work/made").exists()
    assert kernel.manager.is_alive()


#: A kernel that sends what it likes instead of a protocol.
HOSTILE = """
import json, sys, time, zmq
info = json.load(open(sys.argv[1]))
context = zmq.Context()
def bound(kind, name):
    socket = context.socket(kind)
    socket.bind(f"ipc://{info['ip']}-{info[name + '_port']}")
    return socket
shell, iopub = bound(zmq.ROUTER, "shell"), bound(zmq.XPUB, "iopub")
for socket in (bound(zmq.ROUTER, "control"), bound(zmq.ROUTER, "stdin"), bound(zmq.REP, "hb")):
    pass
while True:
    relay, *request = shell.recv_multipart()
    for answer in ([], [b""], [b"", b""], [b"nobody", b"x"], [request[0]], [request[0], b"<IDS|MSG>"],
                   [request[0], b"<IDS|MSG>", b"", b"{", b"{}", b"{}", b"{}"],
                   [request[0], b"<IDS|MSG>", b"", b'{"msg_type": "stream"}', b"{}", b"{}", b"{}"],
                   request[:1] + [b"x" * 10] * 999):
        shell.send_multipart([relay, *answer])
        iopub.send_multipart(answer or [b"x"])
    header = json.dumps({"msg_id": str(time.time()), "msg_type": "is_complete_reply"}).encode()
    shell.send_multipart(
        [relay, request[0], b"<IDS|MSG>", b"forged", header, b"{}", b"{}", b'{"status": "complete"}'])
"""


def test_a_kernel_that_breaks_the_protocol_does_not_stop_the_relay(
    jupyter_home: Path, kernel_with: Callable[[dict[str, Any]], str]
) -> None:
    name = kernel_with({})
    place = jupyter_home / "share/jupyter/kernels" / name / "kernel.json"
    spec = json.loads(place.read_text())
    place.write_text(json.dumps(spec | {"argv": [sys.executable, "-c", HOSTILE, "{connection_file}"]}))
    manager = KernelManager(kernel_name=name)
    manager.start_kernel()
    client = manager.client()
    client.start_channels(stdin=False, hb=False)
    try:
        for _ in range(2):
            asked = client.is_complete("1")
            reply = client.get_shell_msg(timeout=60)
            assert reply["content"] == {"status": "complete"} and asked
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def notebook(*cells: str) -> Any:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    return nbformat.from_dict(made)


@pytest.fixture
def kernel_with(jupyter_home: Path) -> Callable[[dict[str, Any]], str]:
    """Makes a kernel with this configuration of its provisioner, and returns its name."""

    def make(config: dict[str, Any]) -> str:
        place = jupyter_home / "share/jupyter/kernels/stockade/kernel.json"
        spec = json.loads(place.read_text())
        spec["metadata"]["kernel_provisioner"]["config"] = config
        made = jupyter_home / "share/jupyter/kernels/made/kernel.json"
        made.parent.mkdir(exist_ok=True)
        made.write_text(json.dumps(spec))
        return "made"

    return make


def test_nbclient_executes_a_notebook_with_the_policy_of_its_kernel(
    kernel_with: Callable[[dict[str, Any]], str], jupyter_home: Path, tmp_path: Path
) -> None:
    data, work = tmp_path / "data", tmp_path / "work"
    data.mkdir(), work.mkdir()
    (data / "numbers").write_text("1 2 3")
    policy = tmp_path / "policy.toml"
    policy.write_text(f'read = ["{data}"]\nenv = {{ COLOUR = "green" }}\n[workspace]\npath = "{work}"\n')
    made = notebook(
        f"numbers = [int(n) for n in open('{data}/numbers').read().split()]",
        "import os; open('sum', 'w').write(str(sum(numbers))); print(os.environ['COLOUR'], os.getcwd())",
        "sum(numbers)",
    )
    name = kernel_with({"policy": str(policy)})
    nbclient.NotebookClient(
        made, kernel_name=name, timeout=60, resources={"metadata": {"path": str(work)}}
    ).execute()
    assert [cell.outputs for cell in made.cells[1:]] == [
        [{"output_type": "stream", "name": "stdout", "text": f"green {work}\n"}],
        [
            {
                "output_type": "execute_result",
                "metadata": {},
                "data": {"text/plain": "6"},
                "execution_count": 3,
            }
        ],
    ]
    assert list(work.iterdir()) == []
    kept = next(one for one in Workspace.list() if one.path == str(work))
    assert [change.path for change in kept.diff()] == ["sum"]
    kept.discard()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"policy": "policy.toml"}, "is relative"),
        ({"policy": {"wrokspace": "."}}, "wrokspace"),
        ({"policy": {"limits": {"memory": "1K"}}}, "memory"),
    ],
)
def test_a_kernel_whose_policy_cannot_be_kept_does_not_start(
    kernel_with: Callable[[dict[str, Any]], str], config: dict[str, Any], why: str
) -> None:
    manager = KernelManager(kernel_name=kernel_with(config))
    with pytest.raises(PolicyError, match=why):
        manager.start_kernel()
    assert not manager.has_kernel
    manager.cleanup_resources()


def test_a_directory_of_sockets_whose_process_was_killed_goes_with_the_next() -> None:
    code = "import os, signal; from stockade.integrations.jupyter import *; made = SocketDirectory()\n"
    code += (
        "os.mkdir(made.kernel + '/deep'); print(made.path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    left = killed.stdout.strip()
    assert os.path.isdir(left), killed.stderr
    living = jupyter.SocketDirectory()
    other = jupyter.SocketDirectory()
    assert not os.path.exists(left)
    assert os.path.isdir(living.clients), "the directory of a living process stays"
    assert max(len(f"{place}/k-65535") for place in (living.kernel, living.clients)) < 107
    living.close(), other.close()


def test_the_installed_kernel_is_what_jupyter_lists(jupyter_home: Path) -> None:
    from jupyter_client.kernelspec import KernelSpecManager

    spec = KernelSpecManager().get_kernel_spec("stockade")
    assert spec.display_name == "Python 3 (sandboxed)" and spec.argv[0] == sys.executable
    assert spec.metadata["kernel_provisioner"] == {
        "provisioner_name": "stockade-provisioner",
        "config": {"display": list(PLAIN_TYPES)},
    }
