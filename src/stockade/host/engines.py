"""Find other ways to isolate a program on this machine: helpers, container engines, virtual machines.

Only `stockade doctor` does this, because it tries each of them and that takes time. Every try has a time
limit, after which its whole process group is killed, and touches nothing that is not its own.
"""

from __future__ import annotations

import glob
import os
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping

from stockade.host import bubblewrap
from stockade.host.capabilities import Probe


def find() -> dict[str, Probe]:
    """Try every other way now, and return the results by name."""
    means: dict[str, Callable[[], Probe]] = {
        "bwrap.links": bwrap_links,
        "runsc": runsc,
        "container": lambda: container(os.environ),
        "kvm": kvm,
    }
    return {name: mean() for name, mean in means.items()}


def bwrap_links() -> Probe:
    """Try whether bubblewrap makes directories of the host through a link (CVE-2026-87766).

    Distributions repair it under old version numbers, so only a try tells. Stockade gives bubblewrap no
    destination below a tree of the host, so its own runs do not depend on the answer.
    """
    path = next(iter(bubblewrap.candidates(os.environ)), "")
    if not path:
        return Probe(ok=False, reason=bubblewrap.NOT_FOUND, fix="apt install bubblewrap")
    with tempfile.TemporaryDirectory(prefix="stockade-probe-") as place:
        tree, victim = f"{place}/tree", f"{place}/victim"
        os.mkdir(tree)
        os.mkdir(victim)
        os.symlink(f"/oldroot{victim}", f"{tree}/link")
        flags = ["--unshare-user", "--ro-bind", "/", "/", "--bind", tree, "/mnt", "--dir"]
        code, output = run([path, *flags, "/mnt/made", "true"], seconds=bubblewrap.SECONDS)
        if code:
            return Probe(ok=False, reason=f"{path} fails: {output or code}", fix="allow user namespaces")
        run([path, *flags, "/mnt/link/made", "true"], seconds=bubblewrap.SECONDS)
        if not os.listdir(victim):
            return Probe(ok=True, detail=f"{path} makes nothing through a link")
    return Probe(
        ok=False,
        detail=path,
        reason=f"{path} makes directories of the host through a link (CVE-2026-87766); Stockade gives it no "
        "destination where it could",
        fix="for your own use of bwrap, update bubblewrap",
    )


def runsc() -> Probe:
    """Try gVisor by a run without root."""
    path = shutil.which("runsc")
    if not path:
        return Probe(
            ok=False,
            reason="runsc was not found",
            fix="install gVisor: https://gvisor.dev/docs/user_guide/install",
        )
    version = run([path, "--version"], seconds=5)[1]
    code, output = run([path, "--rootless", "--network=none", "--ignore-cgroups", "do", "true"], seconds=10)
    if code:
        return Probe(
            ok=False, detail=path, reason=f"{path} fails: {output}", fix="runsc --rootless --debug do true"
        )
    return Probe(ok=True, detail=f"{version}, {path}")


def container(environ: Mapping[str, str]) -> Probe:
    """Try container engines by asking them over their sockets."""
    runtime = environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    named = environ.get("DOCKER_HOST", "")
    paths = [
        *([named.removeprefix("unix://")] if named.startswith("unix://") else []),
        "/var/run/docker.sock",
        f"{runtime}/docker.sock",
        f"{runtime}/podman/podman.sock",
        "/run/podman/podman.sock",
    ]
    refusals = []
    for path in paths:
        try:
            with socket.socket(socket.AF_UNIX) as engine:
                engine.settimeout(2)
                engine.connect(path)
                engine.sendall(b"GET /_ping HTTP/1.0\r\nHost: engine\r\n\r\n")
                answer = engine.recv(64).split(b"\r\n")[0].decode(errors="replace")
        except FileNotFoundError:
            continue
        except OSError as error:
            refusals.append(f"{path}: {error.strerror or error}")
            continue
        if " 200 " in answer:
            return Probe(ok=True, detail=path)
        refusals.append(f"{path}: {answer or 'no answer'}")
    return Probe(
        ok=False,
        reason="; ".join(refusals) or "no socket of Docker or Podman was found",
        fix="systemctl --user start podman.socket, or join the docker group and start Docker",
    )


def kvm(device: str = "/dev/kvm", kernels: str = "/boot/vmlinuz-*", seconds: float = 10) -> Probe:
    """Try hardware virtualisation by booting a kernel: a device that opens proves nothing.

    The guest has no disk, so a kernel that has booted complains about that; one that prints only its banner
    has not booted.
    """
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return Probe(
            ok=False,
            errno=error.errno or 0,
            reason=f"{device} does not open: {error.strerror}",
            fix="switch virtualisation on in the firmware or hypervisor; sudo usermod -aG kvm $USER",
        )
    qemu = shutil.which(f"qemu-system-{platform.machine()}")
    if not qemu:
        return Probe(
            ok=False,
            reason=f"{device} opens, but without QEMU Stockade cannot try whether it works",
            fix="apt install qemu-system-x86",
        )
    kernel = next((path for path in sorted(glob.glob(kernels), reverse=True) if os.access(path, os.R_OK)), "")
    if not kernel:
        return Probe(
            ok=False,
            reason=f"{device} opens, but there is no readable kernel in {kernels} to boot",
            fix="apt install linux-image-cloud-amd64, and make it readable: sudo chmod a+r /boot/vmlinuz-*",
        )
    arguments = [
        qemu, "-accel", "kvm", "-m", "256", "-nodefaults", "-display", "none", "-serial", "stdio",
        "-no-reboot", "-kernel", kernel, "-append", "console=ttyS0 panic=-1",
    ]  # fmt: skip
    _, output = run(arguments, seconds=seconds, last=False)
    if "Linux version" in output and "Unable to mount root fs" in output:
        return Probe(ok=True, detail=f"booted {kernel}")
    how_far = "died while booting" if "Linux version" in output else "printed nothing"
    return Probe(
        ok=False,
        detail=kernel,
        reason=f"{device} opens, but a guest {how_far} within {seconds:g} s",
        fix="nothing to do here: the hypervisor of this machine does not offer virtualisation to it",
    )


def run(argv: list[str], seconds: float, last: bool = True, passed: tuple[int, ...] = ()) -> tuple[int, str]:
    """Run a helper; return its exit code and output (the last line, or all). Kills its group when time is up.

    `passed` are further descriptors for it.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=passed,
        )
    except OSError as error:
        return 127, error.strerror or str(error)
    late = False
    try:
        output = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
    text = output.decode(errors="replace").strip()
    if last:
        text = text.splitlines()[-1] if text else ""
    return (124, text or f"no answer within {seconds:g} s") if late else (process.returncode, text)
