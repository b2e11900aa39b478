"""Answers about hosts, sockets and system calls, from policies alone."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from stockade import Policy
from stockade.backends.seccomp import bpf, syscalls
from stockade.linux.user import Caller
from stockade.observe.access import Access, Action
from stockade.observe.answer_values import Answer
from stockade.observe.answers import answer
from stockade.observe.network_answers import split_target
from stockade.observe.view import Walls
from stockade.resolve.resolution import resolve


class _Asker:
    def __init__(self, state: str) -> None:
        self._state = state
        self._known: dict[tuple[Policy, str], Walls] = {}

    def __call__(
        self, policy: Policy, action: str, target: str, error: int = 0, backend: str = "native"
    ) -> Answer:
        walls = self._known.get((policy, backend))
        if walls is None:
            walls = Walls(resolve(policy, Caller.current(), self._state), backend)
            self._known[policy, backend] = walls
        return answer(Access(action=Action(action), target=target, error=error), walls)

    def close(self) -> None:
        for walls in self._known.values():
            walls.resolved.close()


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Asker]:
    asker = _Asker(str(tmp_path_factory.mktemp("asker") / "state"))
    yield asker
    asker.close()


RULES = Policy(net=["api.example.com", "*.example.org:8443", "!bad.example.org:8443", "10.1.2.3:5432"])


@pytest.mark.parametrize(
    ("target", "allowed", "clause", "flag"),
    [
        ("api.example.com:443", True, 'net = "api.example.com"', ""),
        ("API.Example.com:443", True, 'net = "api.example.com"', ""),
        ("api.example.com", True, 'net = "api.example.com"', ""),
        ("api.example.com:22", False, "net", "--net api.example.com:22"),
        ("a.example.org:8443", True, 'net = "*.example.org:8443"', ""),
        ("bad.example.org:8443", False, 'net = "!bad.example.org:8443"', ""),
        ("10.1.2.3:5432", True, 'net = "10.1.2.3:5432"', ""),
        ("10.1.2.4:5432", False, "net", "--net 10.1.2.4:5432"),
        ("[2001:db8::1]:22", False, "net", "--net '[2001:db8::1]:22'"),
    ],
)
def test_rules_decide_about_hosts(ask: _Asker, target: str, allowed: bool, clause: str, flag: str) -> None:
    found = ask(RULES, "connect", target)
    assert (found.allowed, found.clause, found.wall) == (allowed, clause, "network.rules")
    assert ("" if found.change is None else found.change.flag) == flag


def test_a_name_that_the_user_is_asked_about_is_neither_allowed_nor_without_a_way(ask: _Asker) -> None:
    policy = Policy(net=["ask", "api.example.com:8443"])
    found = ask(policy, "connect", "other.example.com:8443")
    assert (found.allowed, found.clause) == (False, 'net = "ask"')
    assert "unless you allow it when Stockade asks you" in found.reason
    assert found.change is not None and found.change.flag == "--net other.example.com:8443"
    for never in "other.example.com:22", "10.1.2.3:443":
        assert "asks" not in ask(policy, "connect", never).reason


def test_rules_for_requests_and_the_secrets_in_them_are_named(ask: _Asker) -> None:
    rules = [
        "GET https://api.example.com/v1/**",
        "!GET https://api.example.com/v1/x",
        "* https://b.example/**",
    ]
    secrets = {"API_KEY": {"from_env": "API_KEY", "hosts": ["api.example.com"]}}
    policy = Policy(net=[*rules, "ask"], secrets=secrets)
    found = ask(policy, "connect", "api.example.com:443")
    assert found.allowed
    assert found.reason == (
        "for requests to api.example.com:443 that these rules allow, and for no others: "
        f"{rules[0]}, {rules[1]}; Stockade replaces the placeholder of API_KEY in them by the value"
    )
    assert "API_KEY" not in ask(policy, "connect", "b.example").reason


def test_a_rule_that_denies_must_go(ask: _Asker) -> None:
    change = ask(RULES, "connect", "bad.example.org:8443").change
    assert change is not None
    assert change.remove == 'net = "!bad.example.org:8443"'


@pytest.mark.parametrize(
    ("target", "word"),
    [
        ("169.254.169.254:80", "metadata"),
        ("127.0.0.1:5432", ""),
        ("192.168.1.1:80", "your own network"),
        ("example.com:443", ""),
    ],
)
def test_a_dangerous_host_comes_with_a_warning(ask: _Asker, target: str, word: str) -> None:
    found = ask(Policy(), "connect", target)
    danger = "" if found.change is None else found.change.danger
    assert word in danger
    assert bool(word) == bool(danger)


def test_without_a_network_the_loopback_is_the_sandbox_itself(ask: _Asker) -> None:
    assert ask(Policy(), "connect", "127.0.0.1:8080", errno.ECONNREFUSED).allowed
    assert not ask(Policy(), "connect", "8.8.8.8:53", errno.ENETUNREACH).allowed
    assert ask(Policy(), "bind", "127.0.0.1:8080").allowed
    assert ask(Policy(net="open"), "connect", "8.8.8.8:53", errno.ENETUNREACH).allowed


def test_an_error_that_no_wall_gives_is_no_denial(ask: _Asker) -> None:
    assert ask(Policy(), "connect", "8.8.8.8:53", errno.EINTR).allowed
    assert ask(RULES, "connect", "api.example.com:443", errno.ECONNREFUSED).allowed
    assert ask(Policy(), "call", "ptrace", errno.ESRCH).allowed


def test_the_ports_that_rules_take_cannot_be_listened_on(ask: _Asker) -> None:
    found = ask(RULES, "bind", "0.0.0.0:443", errno.EADDRINUSE)
    assert (found.allowed, found.change) == (False, None)
    assert ask(RULES, "bind", "0.0.0.0:8080").allowed


def test_without_namespaces_only_the_whole_network_can_be_given(ask: _Asker) -> None:
    found = ask(Policy(), "connect", "example.com:443", backend="landlock")
    assert found.change is not None
    assert found.change.flag == "--net open"
    assert found.change.danger


@pytest.mark.parametrize("name", sorted(syscalls.REFUSED | syscalls.ABSENT))
def test_no_change_allows_what_is_refused_on_principle(ask: _Asker, name: str) -> None:
    found = ask(Policy(), "call", name, errno.EPERM)
    assert (found.allowed, found.change) == (False, None)


def test_calls_of_the_list_are_allowed_and_bounded_ones_within_bounds(ask: _Asker) -> None:
    assert all(ask(Policy(), "call", name).allowed for name in ("openat", *bpf.BOUNDED))
    assert not ask(Policy(), "call", "socket", errno.EAFNOSUPPORT).allowed


def test_a_call_that_the_list_leaves_out_can_be_added_with_a_warning(ask: _Asker) -> None:
    change = ask(Policy(), "call", "seccomp", errno.ENOSYS).change
    assert change is not None
    assert change.toml == 'syscalls.allow = ["seccomp"]'
    assert change.danger
    assert ask(Policy(syscalls={"allow": ["seccomp"]}), "call", "seccomp").allowed  # type: ignore[arg-type]


def test_a_closed_socket_option_names_what_opens_it(ask: _Asker) -> None:
    for name, clause in (("IP_ADD_MEMBERSHIP", "multicast"), ("UDP_CORK", "UDP_CORK")):
        found = ask(Policy(), "call", name, errno.ENOPROTOOPT)
        assert not found.allowed and found.change is not None and found.change.danger
        assert found.change.toml == f'syscalls.allow = ["{clause}"]'
        assert ask(Policy(syscalls={"allow": [clause]}), "call", name).allowed  # type: ignore[arg-type]
    assert ask(Policy(), "call", "TCP_NODELAY").allowed
    found = ask(Policy(net="open"), "call", "IP_ADD_MEMBERSHIP", errno.ENOPROTOOPT)
    assert (found.allowed, found.change) == (False, None)
    for name in ("setsockopt 263, 1", "SO_ATTACH_FILTER"):
        found = ask(Policy(), "call", name, errno.ENOPROTOOPT)
        assert (found.allowed, found.change) == (False, None)
        assert f"no policy can open the socket option {name}" in found.reason


def test_a_call_that_the_policy_denies_names_its_clause(ask: _Asker) -> None:
    found = ask(Policy(syscalls={"deny": ["unlink"]}), "call", "unlink", errno.EPERM)  # type: ignore[arg-type]
    assert found.clause == 'syscalls.deny = "unlink"'
    assert found.change is not None
    assert found.change.remove == found.clause


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:443", ("host", 443)),
        ("[::1]:80", ("::1", 80)),
        ("::1", ("::1", 0)),
        ("host", ("host", 0)),
        ("host:port", ("host:port", 0)),
        ("host:999999", ("host:999999", 0)),
        (":1", ("", 1)),
        ("host:\u0661", ("host:\u0661", 0)),
    ],
)
def test_a_target_is_a_host_and_a_port(text: str, expected: tuple[str, int]) -> None:
    assert split_target(text) == expected


@pytest.mark.parametrize(
    "target", ["", ":", "[", "]:1", "\0", "a" * 5000, "unix:", "unix:\0x", "\udcff:1", "[:1"]
)
@pytest.mark.parametrize("action", list(Action))
def test_a_hostile_target_gets_an_answer(ask: _Asker, action: Action, target: str) -> None:
    for policy in (Policy(), RULES):
        for error in (0, errno.ENOENT, errno.EACCES, errno.ECONNREFUSED, errno.EXDEV):
            assert ask(policy, action.value, target, error).reason
