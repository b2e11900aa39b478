"""One server for each module of clients, and one sandbox of it that the module's tests share.

The clients keep connections open, and the sandbox's supervisor starts what its calls need, so what a test
leaves is looked for when the module has ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from opensandbox import SandboxManagerSync, SandboxSync
from opensandbox.config import ConnectionConfigSync

import stockade
from stockade import backends
from stockade.linux.id_maps import IdMaps
from support import leaks
from support.means import applies
from support.server import ServerUnderTest, module_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    before = leaks.snapshot()
    # The SDKs ask for limits of memory and processor, which an ordinary user without cgroups has in part.
    offers = backends.load("native").offers(stockade.Host.current())
    weaker = [str(control) for control, one in offers.items() if not one.available and one.waivable]
    yield from module_server(tmp_path_factory, f"accept = {json.dumps(weaker)}\n")
    left = leaks.settled(lambda: sorted(leaks.snapshot() - before))
    if left:
        pytest.fail("the module left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Leave the check to the module's end."""


@pytest.fixture(autouse=True)
def no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no SDK report how long a create took, from a thread that outlives the test."""
    monkeypatch.setenv("OPENSANDBOX_DISABLE_METRICS", "1")


@pytest.fixture(scope="module")
def address(server: ServerUnderTest) -> tuple[str, str]:
    """The server's domain and its key."""
    return f"127.0.0.1:{server.port}", server.key


@pytest.fixture(scope="module")
def connection(address: tuple[str, str]) -> ConnectionConfigSync:
    domain, key = address
    return ConnectionConfigSync(domain=domain, api_key=key, disable_metrics=True)


@pytest.fixture(scope="module")
def key(server: ServerUnderTest) -> str:
    return server.key


@pytest.fixture(scope="module")
def port(server: ServerUnderTest) -> int:
    return server.port


@pytest.fixture(scope="module")
def sandbox(connection: ConnectionConfigSync) -> Iterator[SandboxSync]:
    """A sandbox that the tests of the module share."""
    box = SandboxSync.create("host", connection_config=connection)
    yield box
    box.destroy()


@pytest.fixture(scope="module")
def manager(connection: ConnectionConfigSync) -> Iterator[SandboxManagerSync]:
    with SandboxManagerSync.create(connection_config=connection) as found:
        yield found


@pytest.fixture(scope="session")
def other_ids() -> None:
    """For tests of other users inside: an ordinary user needs subordinate ids for them."""
    maps = IdMaps.of_caller()
    applies(maps.several, maps.reason)
