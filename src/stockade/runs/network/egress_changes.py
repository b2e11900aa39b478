"""Other rules for the network of a living sandbox.

The egress process gets the whole list of rules and says when it decides by them. Only a port that no rule had
before takes more: the resident adds listeners to the sandbox's network, and because Landlock does not let a
process have more ports than it began with, a second egress process takes over. The first one hands its
listeners back, without which the supervisor could not pass them on: it keeps no copy, so that connections are
refused once the egress has ended. What comes back is checked like what the resident opened.

    resident ──► listeners of the new ports ──┐
    first egress process ──► its listeners ───┴─► checked ──► second egress process

Connections that arrive in between wait in the listeners' queues. Those under way stay with the first process
until they end.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping, Sequence

from stockade.egress.names import WRITTEN_SIZE
from stockade.egress.network_budget import SPENT_SIZE
from stockade.errors import PolicyError, SetupError
from stockade.gate.network import DNS_PORT, NetworkListeners
from stockade.linux import os_errors
from stockade.policy.net_comparison import covers
from stockade.policy.net_errors import NetRuleError
from stockade.policy.net_ports import without
from stockade.policy.net_rules import (
    MOST_RULES,
    NetRule,
    check_rules,
    parse_new_rule,
    parse_rule,
    ports_of,
)
from stockade.policy.network_clauses import refuse_taken_proxy_port
from stockade.receipt.statement import RuleChange
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.io.paired_steps import take_turns
from stockade.runs.launch import LaunchedSandbox
from stockade.runs.network.egress_configuration import configure, dialled_ports
from stockade.runs.network.egress_generation import EgressGeneration
from stockade.runs.network.egress_handle import EgressHandle
from stockade.runs.network.egress_launch import await_listeners
from stockade.runs.network.egress_process import EgressProcess, launch_egress
from stockade.runs.network.network_evidence import NetworkEvidence, observe_network
from stockade.runs.network.published_ports import PublishedListeners, check_listener

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.runs.network.secret_values import SecretValues

#: The rules that one sandbox may have in its life, and how many bytes they may take: one message has them.
MOST_TEXTS, MOST_BYTES = 1024, 160_000
#: With those that deny, for which there must always be room.
MOST_WITH_DENIED = 2 * MOST_RULES
#: How often a change looks whether another one is done.
LOOK_AGAIN = 0.005
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK

#: Makes the rules in force of those that were.
Edit = Callable[[tuple[str, ...]], tuple[str, ...]]


# Which rules


def with_allowed(rules: tuple[str, ...], asked: Sequence[str], own: Sequence[str]) -> tuple[str, ...]:
    """Return the rules and those that are asked for, which take back what was denied by the same words.

    `own` are the rules of the policy, which stay as they are.
    """
    found = list(rules)
    for wanted in map(_parsed, asked):
        if wanted.deny:
            raise PolicyError(
                f"net.allow: {wanted.text} is a deny rule", hint=f'write net.deny("{wanted.text[1:]}")'
            )
        denial = "!" + wanted.text.removeprefix("tcp://").removeprefix("udp://")
        if denial in found and denial not in own:
            found.remove(denial)
        if wanted.text not in found:
            found.append(wanted.text)
        _refuse_denied(wanted, [parse_rule(text) for text in found])
    return _bounded(found, MOST_RULES)


def with_denied(rules: tuple[str, ...], asked: Sequence[str]) -> tuple[str, ...]:
    """Return the rules and a deny rule for each that is asked for."""
    found = list(rules)
    for text in asked:
        if isinstance(text, str) and text.startswith("!"):
            raise PolicyError(
                f"net.deny: {text} is a deny rule already", hint=f'write net.deny("{text[1:]}")'
            )
        plain = text.removeprefix("tcp://").removeprefix("udp://") if isinstance(text, str) else text
        wanted = _parsed(f"!{plain}" if isinstance(text, str) else text)
        if wanted.text not in found:
            found.append(wanted.text)
    return _bounded(found, MOST_WITH_DENIED)


def exactly(rules: Sequence[str]) -> tuple[str, ...]:
    """Return these rules, each in its one spelling."""
    return _bounded(list(dict.fromkeys(_parsed(text).text for text in rules)), MOST_RULES)


def _parsed(text: object) -> NetRule:
    if not isinstance(text, str):
        raise PolicyError(f"net: {text!r:.200} is not a rule", hint='write "api.example.com:443"')
    try:
        return parse_new_rule(text)
    except NetRuleError as error:
        raise PolicyError(f"net: {text!r:.200} {error.problem}", hint=error.hint) from None


def _refuse_denied(wanted: NetRule, rules: list[NetRule]) -> None:
    """Refuse a rule that would allow nothing, because deny rules win."""
    for denial in rules:
        if denial.deny and covers(denial, wanted) and not without(wanted.ports, denial.ports):
            raise PolicyError(
                f"net.allow: {wanted.text} would allow nothing, because {denial.text} denies it",
                hint=f"deny rules win; one of net.deny is taken back by the same words: "
                f'net.allow("{denial.text[1:]}")',
            )


def _bounded(rules: list[str], most: int) -> tuple[str, ...]:
    if len(rules) > most:
        raise PolicyError(
            f"net: {len(rules)} rules, and a sandbox has at most {most}",
            hint="name a network, or everything below a host: *.example.com",
        )
    try:
        parsed = [parse_rule(text) for text in rules]
        ports_of(parsed)
        check_rules(parsed)
    except NetRuleError as error:
        raise PolicyError(f"net: {error.problem}", hint=error.hint) from None
    return tuple(rules)


# The change


def change_rules(
    box: LaunchedSandbox, home: str, edit: Edit, check: Callable[[tuple[str, ...]], object], events: Events
) -> Steps[None]:
    """Change the rules of a sandbox and wait until its egress decides by them.

    `check` raises PolicyError for rules that are too many. `home` is the state directory.
    """
    handle = box.egress
    if handle is None or handle.observed is None:
        raise PolicyError(
            "the sandbox has no network rules that could change",
            hint='write net = ["api.example.com"] in its policy; rules can be added to those',
        )
    with os_errors.setup_errors():
        while not handle.changing.acquire(blocking=False):
            yield LOOK_AGAIN
        try:
            yield from _to_the_end(_change(box, handle, home, edit, check, events))
        finally:
            handle.changing.release()


def _to_the_end(steps: Steps[None]) -> Steps[None]:
    """Take all steps; an exception that arrives meanwhile is raised afterwards.

    Half a change would leave the supervisor with other rules than the egress process. Each step takes
    seconds at most.
    """
    interruption: BaseException | None = None
    try:
        patience = next(steps)
        while True:
            try:
                yield patience
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:
                interruption = interruption or error
            patience = next(steps)
    except StopIteration:
        if interruption is not None:
            raise interruption from None


def _change(
    box: LaunchedSandbox,
    handle: EgressHandle,
    home: str,
    edit: Edit,
    check: Callable[[tuple[str, ...]], object],
    events: Events,
) -> Steps[None]:
    before = handle.in_force
    wanted = edit(before)
    if wanted == before:
        return
    check(wanted)
    texts = [*handle.rules, *(text for text in wanted if text not in handle.rules)]
    if len(texts) > MOST_TEXTS or sum(map(len, texts)) > MOST_BYTES:
        raise PolicyError(
            f"the rules of this sandbox have changed too often: it may have {MOST_TEXTS} in its life",
            hint="close it and open another with the rules that you need",
        )
    if handle.has_ended:
        raise _dead()
    _refuse_without_authority(handle, wanted, before)
    active = [texts.index(text) for text in wanted]
    message = {"rules": texts, "active": active}
    parsed = [parse_rule(text) for text in wanted]
    fresh = tuple(port for port in ports_of(parsed) if port not in handle.ports)
    datagrams = tuple(port for port in ports_of(parsed, udp=True) if port not in handle.datagram_ports)
    if (fresh or datagrams) and handle.judges:
        raise PolicyError(
            f"net: port {(*fresh, *datagrams)[0]} needs another egress process, and with it another "
            "certificate authority, which programs that run already would not trust",
            hint="name the port in the policy of the sandbox, because its rules judge requests",
        )
    if fresh or datagrams:
        yield from _replace_process(box, handle, home, message, fresh, datagrams, events)
    else:
        answer = yield from handle.process.ask(message, (), events)
        if answer.get("ok") is not True:
            raise _refused()
    handle.rules[:], handle.active[:] = texts, active
    _note(handle, before, wanted)
    yield from _tell_earlier(handle, message, events)


def _refuse_without_authority(handle: EgressHandle, wanted: Sequence[str], before: Sequence[str]) -> None:
    """Refuse the first rule for requests of a sandbox that began without one."""
    first = next((text for text in wanted if " " in text and text not in before), "")
    if first and not handle.judges:
        raise PolicyError(
            f"net: {first!r:.200} judges requests, and this sandbox has no certificate authority for that",
            hint="write a rule for requests in the policy of the sandbox; others can be added to it then",
        )


def _note(handle: EgressHandle, before: tuple[str, ...], after: tuple[str, ...]) -> None:
    now = round(time.time(), 3)
    handle.changes += [RuleChange(now, rule, False) for rule in before if rule not in after]
    handle.changes += [RuleChange(now, rule, True) for rule in after if rule not in before]


def _tell_earlier(handle: EgressHandle, message: Mapping[str, object], events: Events) -> Steps[None]:
    """Let the processes that have handed over decide by the new rules what they have not dialled yet."""
    for generation in handle.generations[:-1]:
        if generation.process.alive:
            try:
                yield from generation.process.ask(message, (), events)
            except SetupError:
                continue  # its last connection has just ended
        yield from _closed_if_ended(generation, events)


def _closed_if_ended(generation: EgressGeneration, events: Events) -> Steps[None]:
    if not generation.process.is_closed and not generation.process.alive:
        yield from generation.closed(events)


# Another process


def _replace_process(
    box: LaunchedSandbox,
    handle: EgressHandle,
    home: str,
    message: Mapping[str, object],
    fresh: tuple[int, ...],
    datagrams: tuple[int, ...],
    events: Events,
) -> Steps[None]:
    ports, udp = tuple(sorted({*handle.ports, *fresh})), tuple(sorted({*handle.datagram_ports, *datagrams}))
    every = [*(f"tcp://any.example:{port}" for port in ports), *(f"udp://any.example:{port}" for port in udp)]
    if handle.proxy_port:
        refuse_taken_proxy_port(every)
    try:
        ports_of([parse_rule(text) for text in every])
    except NetRuleError:
        raise PolicyError(
            f"net: with {', '.join(map(str, (*fresh, *datagrams)))} this sandbox would have had {len(every)} "
            "ports in its life, and it has at most 64",
            hint="close it and open another with the rules that you need",
        ) from None
    for one in handle.published:
        if one.port in fresh:
            raise PolicyError(
                f"port {one.port} is published, so a rule cannot let it out",
                hint="let the server inside use another port",
            )
    request = box.connection.resident.open_network(box.network_fd, fresh, datagrams, more=True)
    opened, process, failure = yield from take_turns(
        await_listeners(request, events),
        launch_egress(dialled_ports(ports, handle.settings), events, home=home, udp=bool(udp)),
    )
    try:
        if failure is not None:
            raise failure
        observed, generation = yield from _take_over(
            box, handle, home, message, (*ports, *handle.proxy_port), udp, opened, process, events
        )
    except BaseException:
        if process is not None:
            yield from process.closed(events)
        raise
    finally:
        if opened is not None:
            opened.close()
    handle.succeed(generation)
    handle.ports, handle.datagram_ports, handle.observed = ports, udp, observed


def _take_over(
    box: LaunchedSandbox,
    handle: EgressHandle,
    home: str,
    message: Mapping[str, object],
    ports: tuple[int, ...],
    udp: tuple[int, ...],
    opened: NetworkListeners,
    process: EgressProcess,
    events: Events,
) -> Steps[tuple[NetworkEvidence, EgressGeneration]]:
    """Let a process take over from the one before it; a failure leaves the sandbox without connections."""
    names = os.memfd_create("egress names", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    handed: tuple[int, ...] = ()
    published: PublishedListeners | None = None
    try:
        os.ftruncate(names, WRITTEN_SIZE + SPENT_SIZE)
        fcntl.fcntl(names, fcntl.F_ADD_SEALS, _SEALS)
        handle.expect_end(True)
        refused = False
        try:
            answer, handed = yield from handle.process.take_over(names, events)
            if "error" in answer:
                refused = True
                raise _refused()
            listeners, of_host = _joined(handle, opened, handed, (*ports, DNS_PORT), (*udp, DNS_PORT))
            inode = os.fstat(box.network_fd).st_ino
            observed = observe_network(listeners, ports, handle.pid, inode, udp)
            if of_host:
                published = PublishedListeners.again(handle.published, of_host)
            settings = {
                **handle.settings, **message, "names": _size(answer, "names", WRITTEN_SIZE),
                "spent": _size(answer, "spent", SPENT_SIZE), "budget": _budget(answer),
            }  # fmt: skip
            records, handle.resolver = yield from configure(
                process, box, home, handle.nudge, settings, listeners, published, events, (names,),
                handle.questions,
            )  # fmt: skip
        except BaseException as error:
            if refused:
                handle.expect_end(False)
            else:
                handle.cannot_accept(f"a change of its rules failed: {error}")
                # It may have kept its listeners.
                yield from handle.generations[-1].closed(events)
            raise
        return observed, EgressGeneration(process, records)
    finally:
        os.close(names)
        if published is not None:
            published.close()
        for descriptor in handed:
            os.close(descriptor)


def _joined(
    handle: EgressHandle,
    opened: NetworkListeners,
    handed: tuple[int, ...],
    ports: tuple[int, ...],
    udp: tuple[int, ...],
) -> tuple[NetworkListeners, tuple[int, ...]]:
    """Return all listeners in order, those that were handed back and the new ones, and those of the host."""
    assert handle.observed is not None
    named = handle.observed.listeners
    if len(handed) != len(named) + len(handle.published):
        raise _failed("the egress process did not hand back all listeners")
    by_name = dict(zip(named, handed, strict=False))
    by_name |= {f"tcp{family}/{port}": descriptor for port, family, descriptor in opened.tcp}
    by_name |= {f"udp{family}/{port}": descriptor for port, family, descriptor in opened.udp}
    of_host = handed[len(named) :]
    for descriptor, one in zip(of_host, handle.published, strict=True):
        if not check_listener(descriptor, one):
            raise _failed(f"the egress process handed back something else than the listener of {one.address}")
    families = (4, 6) if opened.ipv6 else (4,)
    try:
        tcp, datagrams = (
            [
                (port, family, by_name[f"{kind}{family}/{port}"])
                for family in families
                for port in sorted(some)
            ]
            for kind, some in (("tcp", ports), ("udp", udp))
        )
    except KeyError:
        raise _failed("the sandbox has IPv6 no more, or only now") from None
    return NetworkListeners(
        tcp=tcp, udp=datagrams, ipv6=opened.ipv6, namespace=opened.namespace, questions=opened.questions
    ), of_host


def refresh_secrets(box: LaunchedSandbox, events: Events) -> Steps[None]:
    """Read the values of all secrets again, and let the egress processes use them from now on."""
    handle = box.egress
    if handle is None or handle.secrets is None:
        raise PolicyError("the sandbox has no secrets", hint="write [secrets.NAME] in its policy")
    with os_errors.setup_errors():
        while not handle.changing.acquire(blocking=False):
            yield LOOK_AGAIN
        try:
            values = yield from handle.secrets.read(events)
            try:
                for generation in tuple(handle.generations):
                    if generation.process.alive:
                        yield from _to_the_end(_send_secrets(generation.process, values, events))
            finally:
                values.memory.close()
            handle.secrets.refreshed += 1
        finally:
            handle.changing.release()


def _send_secrets(process: EgressProcess, values: SecretValues, events: Events) -> Steps[None]:
    answer = yield from process.ask({"secrets": values.described}, (), events, values.view)
    if answer.get("ok") is not True:
        raise _failed("the egress process did not take the new values")
    values.observe(process.pid)


def _size(answer: dict[str, object], name: str, most: int) -> int:
    size = answer.get(name)
    return min(size, most) if isinstance(size, int) and size > 0 else 0


def _budget(answer: dict[str, object]) -> list[int]:
    """Return what was spent of the budget for names; a process that does not say so has spent it all."""
    spent = answer.get("budget")
    if isinstance(spent, list) and len(spent) == 2 and all(isinstance(one, int) for one in spent):
        return [min(max(0, one), 1 << 31) for one in spent]
    return [1 << 31, 1 << 31]


def _dead() -> SetupError:
    return SetupError(
        "the egress process has ended, so the sandbox has no network any more",
        stage="egress",
        hint="close the sandbox and open another",
    )


def _refused() -> SetupError:
    return _failed("the egress process did not take the new rules")


def _failed(what: str) -> SetupError:
    return SetupError(
        what,
        stage="egress",
        hint="this is a bug in Stockade or in this kernel; please report it with `stockade doctor --json`",
    )
