"""The checks of `[secrets.NAME]`: what a secret is called, where it may go, and how it is written there.

A policy never holds a value. It says where the supervisor finds it, and which hosts may get it. So that a
value that was written here by mistake is not repeated, errors about a source do not show what was written.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from stockade.policy.net_errors import NetRuleError
from stockade.policy.net_names import ANY_HOST
from stockade.policy.net_ports import ports_text, without
from stockade.policy.net_rules import NetRule, covers_name, parse_rule
from stockade.policy.values import FrozenMap, InvalidValueError, nearest, show

#: The secrets of one policy, and the hosts of one secret.
MOST_SECRETS, MOST_HOSTS = 32, 32
#: The words and the length of a command.
MOST_WORDS, MOST_WORD = 64, 4096
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{0,32}")
_FIELD = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_PARAMETER = re.compile(r"[A-Za-z0-9_.~-]{1,64}")
#: Headers that say where a request goes, how long it is, or what the connection does.
_FRAMING = frozenset(
    (
        "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect",
        "host", "keep-alive", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    )
)  # fmt: skip
_PLAIN_FORMS = ("bearer", "basic", "body")
_FORM_HINT = 'write "bearer", "basic", "header:X-Api-Key", "query:key" or "body", or a list of these'
#: What programs inside never get from a secret: they would run, or look for things, somewhere else.
_NOT_NAMES = frozenset(("HOME", "PATH", "SHELL", "USER", "LOGNAME", "PWD", "IFS", "TMPDIR"))


class SecretHost(NamedTuple):
    """A host that may get the value."""

    scheme: str
    name: str
    port: int


def host_of(text: str) -> SecretHost:
    """Return the host that `hosts` names: `api.example.com`, with `:8443` or with `http://` before it."""
    rule = _host_rule(text)
    assert rule.http is not None
    return SecretHost(rule.http.scheme, rule.name, rule.ports[0][0])


def _host_rule(text: str) -> NetRule:
    scheme, has_scheme, place = text.rpartition("://")
    return parse_rule(f"* {scheme if has_scheme else 'https'}://{place.removesuffix('/')}/**")


def hosts(key: str, value: Any) -> tuple[str, ...]:
    """Check the hosts that may get the value, and return each in its one spelling."""
    if isinstance(value, str):
        raise InvalidValueError(key, value, "must be a list", f"write {key} = [{show(value)}]")
    if not isinstance(value, list | tuple | set | frozenset) or not value:
        raise InvalidValueError(key, value or None, "names no host", f'write {key} = ["api.example.com"]')
    if len(value) > MOST_HOSTS:
        raise InvalidValueError(key, None, f"names more than {MOST_HOSTS} hosts", "use several secrets")
    found: dict[str, None] = {}
    for text in sorted(value, key=str) if isinstance(value, set | frozenset) else value:
        if not isinstance(text, str):
            raise InvalidValueError(key, text, "must be a host as text", 'such as "api.example.com"')
        try:
            rule = _host_rule(text)
        except NetRuleError as error:
            raise InvalidValueError(key, text, error.problem, error.hint) from None
        if rule.wildcard or "/" in text.rpartition("://")[2].removesuffix("/") or " " in text:
            raise InvalidValueError(
                key, text, "is not one host", "name each host by itself, without a path: api.example.com"
            )
        scheme, name, port = host_of(text)
        usual = port == {"https": 443, "http": 80}[scheme]
        found[("http://" if scheme == "http" else "") + name + ("" if usual else f":{port}")] = None
    return tuple(found)


def forms(key: str, value: Any) -> tuple[str, ...]:
    """Check where in a request the value may stand."""
    written = (value,) if isinstance(value, str) else value
    if not isinstance(written, list | tuple) or not written:
        raise InvalidValueError(key, value, "is not a form", _FORM_HINT)
    return tuple(dict.fromkeys(_form(key, one) for one in written))


def _form(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidValueError(key, value, "is not a form", _FORM_HINT)
    kind, colon, name = value.partition(":")
    if value in _PLAIN_FORMS:
        return value
    if kind == "header" and colon:
        lower = name.strip().lower()
        if not _FIELD.fullmatch(lower):
            raise InvalidValueError(key, value, "is not the name of a header", 'write "header:X-Api-Key"')
        if lower in _FRAMING:
            raise InvalidValueError(key, value, "no secret can be in this header", 'write "bearer"')
        if lower == "authorization":
            raise InvalidValueError(
                key, value, "this header has a scheme before the value", 'write "bearer" or "basic"'
            )
        return f"header:{lower}"
    if kind == "query" and colon:
        if not _PARAMETER.fullmatch(name):
            raise InvalidValueError(key, value, "is not the name of a parameter", 'write "query:key"')
        return value
    known = (*_PLAIN_FORMS, "header:X-Api-Key", "query:key")
    raise InvalidValueError(key, value, "is not a form", nearest(value, known) or _FORM_HINT)


def variable(key: str, value: Any) -> str | None:
    """Check the variable of the user's environment that has the value."""
    if value is None:
        return None
    if not isinstance(value, str) or not _NAME.fullmatch(value.removesuffix("?")):
        raise InvalidValueError(
            key,
            None,
            "is not the name of a variable",
            f'write {key} = "GITHUB_TOKEN", never the value itself',
        )
    return value


def command(key: str, value: Any) -> tuple[str, ...] | None:
    """Check the command that prints the value; no shell reads it."""
    if value is None:
        return None
    if isinstance(value, str):
        import shlex

        try:
            words = shlex.split(value)
        except ValueError:
            words = value.split()
        raise InvalidValueError(key, value, "must be a list of words", f"write {key} = {show(words)}")
    if (
        not isinstance(value, list | tuple)
        or not 0 < len(value) <= MOST_WORDS
        or not all(isinstance(word, str) and "\0" not in word and len(word) <= MOST_WORD for word in value)
        or not value[0]
    ):
        raise InvalidValueError(
            key, None, "must be a list of words", f'write {key} = ["pass", "show", "github"]'
        )
    return tuple(value)


def prefix(key: str, value: Any) -> str:
    """Check how placeholders begin."""
    if not isinstance(value, str) or not _PREFIX.fullmatch(value):
        raise InvalidValueError(
            key,
            value,
            "must be at most 32 letters, digits, dots, dashes and underscores",
            'write what every key of the service begins with, such as "sk-"',
        )
    return value


def named(key: str, value: Any, kind: Any) -> FrozenMap:
    """Check a table of secrets; `kind` is the model of one."""
    if not isinstance(value, Mapping):
        raise InvalidValueError(key, None, "must be a table", f"write [{key}.GITHUB_TOKEN]")
    if len(value) > MOST_SECRETS:
        raise InvalidValueError(key, None, f"has more than {MOST_SECRETS} secrets", "use several sandboxes")
    return FrozenMap({name: _one(f"{key}.{name}", name, table, kind) for name, table in value.items()})


def _one(key: str, name: Any, table: Any, kind: Any) -> Any:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _NOT_NAMES:
        raise InvalidValueError(
            key, None, "programs have the placeholder as a variable of this name", "write [secrets.API_KEY]"
        )
    if isinstance(table, kind):
        return table
    if not isinstance(table, Mapping):
        raise InvalidValueError(
            key, None, "must be a table", f'write [{key}] and below it from_env = "{name}" and hosts = [...]'
        )
    known = kind.__struct_encode_fields__
    for inner in table:
        if inner not in known:
            raise InvalidValueError(
                f"{key}.{inner}",
                None,
                "there is no such key",
                f"{nearest(str(inner), known)}; a policy never has the value itself",
            )
    try:
        return kind(**{("as_" if inner == "as" else inner): one for inner, one in table.items()})
    except InvalidValueError as error:
        inner = error.key.removeprefix("secrets.NAME.").replace("as_", "as")
        shown = None if inner.startswith("from_env") else error.value
        hint = error.hint.replace("secrets.NAME.", f"{key}.").replace(".as_", ".as")
        raise InvalidValueError(f"{key}.{inner}".rstrip("."), shown, error.problem, hint) from None


def check_together(
    secrets: Mapping[str, Any], net: Iterable[str] | str, env: Mapping[str, str], pass_env: Iterable[str]
) -> None:
    """Refuse secrets that contradict other clauses: their host has no rule, or one that is not judged."""
    rules = [] if isinstance(net, str) else [parse_rule(text) for text in net]
    for name, secret in secrets.items():
        key = f"secrets.{name}"
        variable = (secret.from_env or "").removesuffix("?")
        if variable and variable in pass_env:
            raise InvalidValueError(
                f"{key}.from_env",
                variable,
                "the program gets this variable itself",
                f"remove {variable} from pass_env",
            )
        for clause, names in (("env", env), ("pass_env", pass_env)):
            if name in names and secret.inside != "file":
                raise InvalidValueError(
                    key, None, f"{clause} sets the variable {name} too", f"remove {name} from {clause}"
                )
        for text in secret.hosts:
            if not any(_covers(rule, _host_rule(text)) for rule in rules):
                where = _host_rule(text).text
                problem = (
                    'net = "open" passes requests that Stockade does not see'
                    if net == "open"
                    else "no rule of net is about requests to this host"
                )
                raise InvalidValueError(
                    f"{key}.hosts",
                    text,
                    problem,
                    f'add to net: "{where}", or only the requests that you need',
                )

    if not isinstance(net, str):
        refuse_unjudged(secrets, net)


def refuse_unjudged(secrets: Mapping[str, Any], net: Iterable[str]) -> None:
    """Refuse a rule by which a host that has a secret could send it back in bytes that are not searched."""
    rules = [parse_rule(text) for text in net]
    plain = [rule for rule in rules if rule.http is None and rule.name]
    for name, secret in secrets.items():
        for host in map(_host_rule, secret.hosts):
            about = [rule for rule in plain if covers_name(rule, host)]
            denied = [pair for rule in about if rule.deny for pair in rule.ports]
            for rule in about:
                if not rule.deny and (left := without(rule.ports, denied)):
                    raise InvalidValueError(
                        "net",
                        rule.text,
                        f"{host.name} gets secrets.{name}, and could send it back on a connection that "
                        "Stockade does not look into",
                        _judged_instead(rule, host, ports_text(left)),
                    )


def _judged_instead(rule: NetRule, host: NetRule, ports: str) -> str:
    """Return what to write so that everything that a host answers is searched."""
    deny = f'"!{host.name}:{ports}"'
    if rule.udp and rule.name == host.name:
        return "leave it out: no rule looks into datagrams"
    if rule.udp or rule.name == ANY_HOST:
        return f"deny this host there: {deny}"
    shown = f"*.{rule.name}" if rule.wildcard else rule.name
    port = ports.partition(",")[0].partition("-")[0]
    scheme = "http" if port == "80" else "https"
    place = shown if port in ("80", "443") else f"{shown}:{port}"
    judged = f'write a rule for requests instead: "* {scheme}://{place}/**"'
    if ports != port:
        judged += ", one for each port"
    return f"{judged}, or deny this host there: {deny}" if rule.wildcard else judged


def rules_for(hosts: Iterable[str], net: Iterable[str]) -> list[str]:
    """Return a rule that allows all requests to each of these hosts to which no rule allows some.

    It is an error if a rule allows connections to such a host and port without a look at the requests.
    """
    rules = [parse_rule(text) for text in net]
    wanted = dict.fromkeys(map(_host_rule, hosts))
    missing = [one for one in wanted if not any(_covers(rule, one) for rule in rules)]
    for host, rule in itertools.product(missing, rules):
        if rule.http is None and not rule.deny and covers_name(rule, host) and _has_ports(rule, host):
            raise InvalidValueError(
                "net",
                rule.text,
                f"--secret allows requests to {host.name}, and this rule allows connections to it that "
                "Stockade does not look into",
                "leave the rule out" if rule.name == host.name else "name the other hosts instead",
            )
    return [one.text for one in missing]


def _covers(rule: NetRule, host: NetRule) -> bool:
    return (
        rule.http is not None
        and host.http is not None
        and not rule.deny
        and rule.http.scheme == host.http.scheme
        and covers_name(rule, host)
        and _has_ports(rule, host)
    )


def _has_ports(rule: NetRule, host: NetRule) -> bool:
    return not without(host.ports, rule.ports)
