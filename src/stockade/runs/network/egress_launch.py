"""The launch of a sandbox with rules, and of its egress process.

While the walls of the sandbox come up, so do those of its egress process: both gates work at the same time.
As soon as the sandbox has its network namespace, the resident is asked for the listeners in it. When both are
up, the supervisor checks the listeners by itself, hands them to the egress process and closes its own copies.
So if the egress process ends, the kernel refuses every connection, because nothing listens any more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from stockade.errors import SetupError
from stockade.gate import client
from stockade.gate.network import NetworkListeners, NetworkRequest
from stockade.policy.net_rules import ASK, PROXY_PORT, parse_rule, ports_of
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.io.paired_steps import take_turns
from stockade.runs.launch import LaunchedSandbox, launch_with_retry
from stockade.runs.network.egress_configuration import configure, dialled_ports, egress_settings
from stockade.runs.network.egress_handle import EgressHandle
from stockade.runs.network.egress_process import EgressProcess, launch_egress
from stockade.runs.network.network_evidence import NetworkEvidence, observe_network
from stockade.runs.network.published_ports import PublishedListeners
from stockade.runs.network.trust_files import TrustFiles
from stockade.runs.prepare import RunPreparation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.runs.network.secret_values import SecretSources, SecretValues
    from stockade.runs.network.user_questions import UserQuestions

#: How long the resident may take to open the listeners.
LISTEN_SECONDS = 10.0


class NetworkSetup:
    """Opens the network of one sandbox while its walls come up."""

    def __init__(
        self,
        rules: tuple[str, ...],
        home: str,
        published: PublishedListeners | None = None,
        settings: Mapping[str, object] | None = None,
        questions: UserQuestions | None = None,
        trust: TrustFiles | None = None,
        roots: str = "",
        secrets: SecretSources | None = None,
    ) -> None:
        self._secrets = secrets
        self._values: SecretValues | None = None
        self.rules = rules
        self._settings, self._questions = settings or {}, questions
        #: With rules for requests: where programs find the authority's certificate, and by which file
        #: servers are verified, if it is not the system's.
        self._trust, self._roots = trust, roots
        parsed = [parse_rule(rule) for rule in rules]
        self.ports, self._datagrams = ports_of(parsed), ports_of(parsed, udp=True)
        self._listening = (*self.ports, *((PROXY_PORT,) if self._settings.get("proxy") else ()))
        self._home = home
        self._published = published
        self._request: NetworkRequest | None = None
        #: The sandbox's first process.
        self._pid = 0

    def begin(self, resident: client.Resident, pid: int, namespace: int) -> None:
        """Ask for listeners in the network namespace of a sandbox that was just born."""
        self._drop_request()
        self._pid = pid
        if self.rules:
            self._request = resident.open_network(namespace, self._listening, self._datagrams)

    def egress(self, events: Events) -> Steps[EgressProcess]:
        """Start the egress process."""
        ports, judges = dialled_ports(self.ports, self._settings), self._trust is not None
        udp = bool(self._datagrams)
        return (yield from launch_egress(ports, events, home=self._home, judges=judges, udp=udp))

    def finish(self, process: EgressProcess, box: LaunchedSandbox, events: Events) -> Steps[EgressHandle]:
        """Check the listeners, and hand them to the egress process. A failure ends it."""
        nudge = questions = -1
        opened: NetworkListeners | None = None
        observed: NetworkEvidence | None = None
        try:
            if self.rules:
                request, self._request = self._request, None
                opened = yield from await_listeners(request, events)
                inode = os.fstat(box.network_fd).st_ino
                observed = observe_network(opened, self._listening, self._pid, inode, self._datagrams)
            if opened is not None:
                questions = os.dup(opened.questions)
            nudge = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            settings = {**self._settings, "rules": list(self.rules)}
            records, resolver = yield from configure(
                process, box, self._home, nudge, settings, opened, self._published, events,
                questions=self._questions, trust=self._trust, roots=self._roots, secrets=self._values,
            )  # fmt: skip
            ports = () if self._published is None else self._published.ports
            handle = EgressHandle(
                process, records, nudge, self.rules, observed, self._pid, resolver, ports, questions,
                self._settings, self._questions, self._secrets,
            )  # fmt: skip
            handle.judges = self._trust is not None
            return handle
        except BaseException:
            for descriptor in (nudge, questions):
                if descriptor >= 0:
                    os.close(descriptor)
            yield from process.closed(events)
            raise
        finally:
            # Nothing else may listen: once the egress process has ended, the kernel refuses connections.
            if opened is not None:
                opened.close()
            if self._published is not None:
                self._published.close()
            self.close()

    def read_secrets(self, events: Events) -> Steps[None]:
        """Read the values of secrets, before anything is launched: a source may fail."""
        if self._secrets is not None:
            self._values = yield from self._secrets.read(events)

    def close(self) -> None:
        """Drop a request whose answer is not needed any more, and wipe what is secret."""
        self._drop_request()
        if self._values is not None:
            self._values.memory.close()

    def _drop_request(self) -> None:
        if self._request is not None:
            self._request.close()
            self._request = None


def await_listeners(request: NetworkRequest | None, events: Events) -> Steps[NetworkListeners]:
    """Wait until the resident has opened the listeners that it was asked for."""
    if request is None:
        raise SetupError("the sandbox has no network namespace of its own", stage="network")
    late = time.monotonic() + LISTEN_SECONDS
    try:
        events.watch(request.fileno())
        try:
            while True:
                yield max(0.0, late - time.monotonic())
                if request.fileno() in events.ready:
                    break
                if time.monotonic() >= late:
                    raise SetupError(
                        f"the resident gate had not opened the network after {LISTEN_SECONDS:g} s",
                        stage="network",
                    )
        finally:
            events.forget(request.fileno())
    except BaseException:
        request.close()
        raise
    return request.receive_listeners()


def launch_with_egress(
    prepared: RunPreparation, events: Events, meanwhile: Callable[[], object]
) -> Steps[LaunchedSandbox]:
    """Launch a sandbox and its egress process; a failure of either leaves nothing behind."""
    secrets = None
    if prepared.placeholders:
        from stockade.runs.network.secret_values import SecretSources

        secrets = SecretSources(prepared.resolved.policy, prepared.placeholders, prepared.resolved.caller)
    questions: UserQuestions | None = None
    if ASK in prepared.resolved.policy.net and prepared.made.on_ask is not None:
        from stockade.runs.network.user_questions import UserQuestions

        questions = UserQuestions(prepared, prepared.made.on_ask)
    network = prepared.resolved.network
    setup = NetworkSetup(
        tuple(prepared.resolved.policy.net),
        prepared.state,
        prepared.made.published,
        egress_settings(prepared),
        questions,
        prepared.made.trust,
        "" if network is None else network.roots,
        secrets,
    )
    try:
        yield from setup.read_secrets(events)
        box, process, failure = yield from take_turns(
            launch_with_retry(prepared, events, meanwhile, setup.begin), setup.egress(events)
        )
        if failure is None:
            try:
                box.egress = yield from setup.finish(process, box, events)
                if questions is not None:
                    questions.start(box, box.egress)
                if prepared.resolved.policy.on_egress_end == "end":
                    box.egress_needed = box.egress.watch_end()
                return box  # type: ignore[no-any-return]
            except BaseException as error:
                process, failure = None, error
        if questions is not None:
            questions.close()
        if process is not None:
            yield from process.closed(events)
        if box is not None:
            events.forget(box.connection.fileno())
            yield from box.closed(events)
        raise failure
    finally:
        setup.close()
