"""The plan of one pretend caller on one pretend host, word for word.

Compiling is pure, so the plan can be read here without running it. After a
change that is meant, write the files anew and read the difference:

    STOCKADE_REGENERATE=1 .venv/bin/python -m pytest tests/unit/backends/test_plan_golden.py
    git diff tests/fixtures/golden
"""

from __future__ import annotations

import os

import msgspec
import pytest

from stockade.backends import bwrap, egress_plan, landlock, native
from stockade.backends.native import NativeInputs
from stockade.backends.observed_plan import observed
from stockade.backends.plan_parts import SystemPath
from stockade.gate import operations as ops
from stockade.gate.bwrap_operations import Helper, Placement
from support.paths import ROOT

GOLDEN = ROOT / "tests" / "fixtures" / "golden"

STRICT = NativeInputs(
    uid=1000,
    gid=1000,
    user="ada",
    group="ada",
    home="/home/ada",
    own_network=True,
    tasks=256,
    files=1024,
    landlock=6,
    program=bytes(80),
    system=(
        SystemPath("/usr", source="/usr"),
        SystemPath("/bin", link="usr/bin"),
        SystemPath("/lib", source="/lib"),
        SystemPath("/etc/alternatives", source="/etc/alternatives"),
        SystemPath("/etc/localtime", link="/usr/share/zoneinfo/Etc/UTC"),
        SystemPath("/etc/os-release", source="/usr/lib/os-release", is_dir=False),
    ),
    grants=(),
    protected=(),
    sockets=False,
    layer="",
    policy_files=(("/run/stockade/policy.txt", b"words\n"), ("/run/stockade/policy.json", b"{}\n")),
)
PROJECT = "/home/ada/project"


def changed(**fields: object) -> NativeInputs:
    return msgspec.structs.replace(STRICT, **fields)


CASES = {
    "strict": STRICT,
    "overlay": changed(
        grants=(
            ("/opt/data", "read", True, 'read = "/opt/data"'),
            ("/srv/one.txt", "write", False, 'write = "/srv/one.txt"'),
            (PROJECT, "overlay", True, 'workspace = "."'),
        ),
        layer="/state/workspaces/0123456789ab",
    ),
    "rw": changed(
        grants=(
            (f"{PROJECT}/vendor", "read", True, 'read = "vendor"'),
            ("/usr/share/dict", "read", True, 'read = "/usr/share/dict"'),
            (PROJECT, "write", True, 'workspace = "."'),
        ),
        protected=(f"{PROJECT}/.git/hooks", f"{PROJECT}/.git/config"),
    ),
    "root-open-network": changed(
        uid=0, gid=0, user="root", group="root", home="/root", own_network=False, tasks=0
    ),
    "deny": changed(
        grants=(
            ("/opt/data", "read", True, 'read = "/opt/data"'),
            (PROJECT, "overlay", True, 'workspace = "."'),
        ),
        layer="/state/workspaces/0123456789ab",
        denied=(
            f"{PROJECT}/.env",
            "/etc/alternatives/vi",
            "/etc/hosts",
            "/opt/data/key",
            "/srv/none",
            "/usr/bin/su",
        ),
    ),
    "exec": changed(
        grants=(
            ("/opt/tools", "read", True, 'read = "/opt/tools"'),
            ("/srv/out", "write", True, 'write = "/srv/out"'),
            (PROJECT, "overlay", True, 'workspace = "."'),
        ),
        layer="/state/workspaces/0123456789ab",
        programs=(("/lib/ld.so", False, "exec"), ("/usr/bin", True, 'exec = "/usr/bin/*"')),
    ),
    "network-rules": changed(
        resolv_conf=b"nameserver 198.18.0.1\nsearch corp.example\noptions timeout:5 attempts:2\n"
    ),
    "disk": changed(disk=1 << 30),
    "old-landlock": changed(landlock=1),
    "limits-by-process": changed(memory=64 << 20, cpu_time=10),
    "sockets-accepted": changed(grants=(("/opt/data", "read", True, 'read = "/opt/data"'),), sockets=True),
}


#: Without namespaces.
PLAIN = landlock.LandlockInputs(
    files=1024,
    landlock=7,
    program=bytes(80),
    own_network=True,
    system=(
        SystemPath("/usr", source="/usr"),
        SystemPath("/etc/alternatives", source="/etc/alternatives"),
        SystemPath("/etc/os-release", source="/usr/lib/os-release", is_dir=False),
    ),
    devices=("/dev/null", "/dev/tty"),
    terminals=("/dev/ptmx", "/dev/pts"),
    figures=(SystemPath("/proc/cpuinfo", is_dir=False), SystemPath("/proc/sys")),
    grants=(),
)
PLAIN_CASES = {
    "landlock": PLAIN,
    "landlock-grants": msgspec.structs.replace(
        PLAIN,
        own_network=False,
        grants=(
            ("/opt/data", "read", True, 'read = "/opt/data"'),
            ("/srv/one.txt", "write", False, 'write = "/srv/one.txt"'),
            (PROJECT, "write", True, 'workspace = "."'),
        ),
        memory=64 << 20,
        cpu_time=10,
        groups=((1, 2), "tasks to 8"),
    ),
}
#: By bubblewrap.
HELPED_CASES = {
    "bwrap": STRICT,
    "bwrap-overlay": msgspec.structs.replace(
        CASES["overlay"], groups=((1, 2), "tasks to 8"), links=(("/home/ada/bin/tool", "/opt/data/tool"),)
    ),
    "bwrap-rw": CASES["rw"],
    "bwrap-root-open-network": CASES["root-open-network"],
}
#: Of an egress process, and of the resolver.
EGRESS = egress_plan.EgressInputs(root=False, landlock=7, ports=(80, 443), files=8192, program=bytes(80))
EGRESS_CASES = {
    "egress": EGRESS,
    "egress-root": msgspec.structs.replace(EGRESS, root=True),
    "egress-old-landlock": msgspec.structs.replace(EGRESS, landlock=3),
}
PLANS = {
    **{name: egress_plan.compile_egress_plan(inputs) for name, inputs in EGRESS_CASES.items()},
    "resolver": egress_plan.compile_resolver_plan(7, ("/etc", "/usr"), 4096, bytes(80)),
    **{name: native.compile_plan(inputs) for name, inputs in CASES.items()},
    "observed": observed(native.compile_plan(STRICT), everything=False),
    "observed-landlock": observed(landlock.compile_plan(PLAIN), everything=True),
    **{name: landlock.compile_plan(inputs) for name, inputs in PLAIN_CASES.items()},
    **{
        name: bwrap.compile_plan(
            bwrap.BwrapInputs(inputs, "/usr/bin/bwrap", "bubblewrap 0.11.0", "/state/empty")
        )
        for name, inputs in HELPED_CASES.items()
    },
}


def described(plan: ops.Plan) -> str:
    lines = [f"backend {plan.backend}, {plan.base} operations of the base"]
    for number, op in enumerate(plan.ops):
        first, second = op.numbers()
        lines.append(f"{number:3} {op.describe()}  [{op.clause}] {first:#x} {second:#x}")
    for op in plan.ops:
        if isinstance(op, Helper):
            told = op.data().decode().split("\0")[:-1]
            lines += ["told:", *(f"    {line}" for line in " ".join(told).replace(" --", "\n--").split("\n"))]
    lines.append("mounts:")
    for path, (attributes, kind) in plan.mounts.items():
        words = [word.decode() for bit, word in ops.ATTRIBUTES.items() if attributes & bit]
        lines.append(f"    {path} {','.join(words) or 'rw'} {kind}".rstrip())
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_is_as_written_down(name: str) -> None:
    file = GOLDEN / f"plan-{name}.txt"
    found = described(PLANS[name])
    if os.environ.get("STOCKADE_REGENERATE"):
        file.write_text(found)
    assert found == file.read_text()


def test_there_is_no_file_for_a_plan_that_is_not_compiled() -> None:
    assert {file.stem for file in GOLDEN.glob("plan-*.txt")} == {f"plan-{name}" for name in PLANS}


def test_bubblewrap_gets_no_destination_in_a_tree_of_the_host() -> None:
    """It follows links, and would change the host where another program swaps one in."""
    nested = changed(
        grants=(
            (PROJECT, "overlay", True, 'workspace = "."'),
            (f"{PROJECT}/out", "write", True, 'write = "out"'),
            (f"{PROJECT}/out/deep/in", "read", True, 'read = "out/deep/in"'),
            ("/home/ada/lib", "read", True, 'read = "~/lib"'),
            ("/home/ada/lib/file", "read", False, 'read = "~/lib/file"'),
        ),
        protected=(f"{PROJECT}/out/.git/hooks",),
        layer="/state/workspaces/0123456789ab",
        trust=("/state/trust", ("/usr/share/bundle.pem",)),
    )
    for inputs in (nested, CASES["rw"]):
        plan = bwrap.compile_plan(bwrap.BwrapInputs(inputs, "/usr/bin/bwrap", "bubblewrap 0.11.0", "/empty"))
        trees = {op.path for op in plan.ops if isinstance(op, bwrap.HOST_TREES)}
        inner = {path for path in trees for tree in trees if path.startswith(f"{tree}/")}
        assert len(inner) >= 5 and inner == {op.path for op in plan.ops if isinstance(op, Placement)}
        helper = next(op for op in plan.ops if isinstance(op, Helper))
        told = set(helper.arguments) - {op.target for op in plan.ops if isinstance(op, ops.Symlink)}
        assert not [word for word in told for tree in trees if word.startswith(f"{tree}/")]


def test_compiling_does_not_look_at_the_host() -> None:
    def look(*_: object, **__: object) -> None:
        raise AssertionError("compiling looked at the host")

    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "stat",
            "lstat",
            "open",
            "listdir",
            "scandir",
            "readlink",
            "getuid",
            "geteuid",
            "getcwd",
        ):
            patch.setattr(os, name, look)
        assert native.compile_plan(changed(uid=4242, user="nobody-else")).ops
        assert landlock.compile_plan(msgspec.structs.replace(PLAIN, files=4242)).ops


def test_an_equal_value_compiles_to_an_equal_plan() -> None:
    native.compile_plan.cache_clear()
    first = native.compile_plan(STRICT)
    native.compile_plan.cache_clear()
    second = native.compile_plan(changed())
    assert first is not second
    assert (first.encoded, first.hash) == (second.encoded, second.hash)


@pytest.mark.parametrize("name", PLANS)
def test_the_filter_comes_last_and_the_namespaces_first(name: str) -> None:
    plan = PLANS[name]
    assert isinstance(plan.ops[0], ops.Namespaces) and isinstance(plan.ops[-1], ops.Seccomp)


@pytest.mark.parametrize("name", CASES)
def test_nothing_but_what_was_granted_is_writable_on_the_host(name: str) -> None:
    inputs = CASES[name]
    granted = [path for path, access, *_ in inputs.grants if access == "write"]
    for op in native.compile_plan(inputs).ops:
        if isinstance(op, ops.Bind) and op.writable:
            assert any(op.path == path or op.path.startswith(f"{path}/") for path in granted), op.path


@pytest.mark.parametrize("name", PLAIN_CASES)
def test_without_namespaces_nothing_but_what_was_granted_is_writable(name: str) -> None:
    changing = landlock.handled_rights(7) & ~(landlock.READING | landlock.WRITE_FILE | landlock.IOCTL_DEVICE)
    for op in PLANS[name].ops:
        if isinstance(op, ops.BindGrant) and op.rights & (changing | landlock.WRITE_FILE):
            device = op.path.startswith("/dev/") and not op.rights & changing
            assert op.grant or device, op.path
