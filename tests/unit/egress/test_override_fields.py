"""Headers that replace a part of the request: a request passes only if they repeat what was judged."""

from __future__ import annotations

import pytest

from stockade.egress.active_rules import ActiveRules
from stockade.egress.termination.judge import JudgedRequest, RequestJudge
from stockade.egress.termination.messages import RequestHead
from stockade.egress.termination.override_fields import is_override
from stockade.policy.net_rules import parse_rule

RULES = ActiveRules([parse_rule("GET https://a.test/ok/**")], [0])
OTHER_HOSTS = ("evil", "a.test:443, evil", "evil, a.test", "a.test evil", "a.test:8443", "a.test:", "a.test.")
HOST_FIELDS = ("x-forwarded-host", "x-original-host", "x-host", "x_forwarded_host", "x.original.host")
PATH_FIELDS = (
    "x-forwarded-uri", "x-forwarded-path", "x-envoy-original-path", "x-rewrite-url", "x-original-url",
    "x_original_url", "x-original.url",
)  # fmt: skip


def judge(name: str, value: str) -> JudgedRequest:
    fields = ((name.encode(), value.encode()),)
    head = RequestHead("GET", "https", "a.test", 443, "/ok/x", fields)
    return RequestJudge(lambda: RULES, "https", "a.test", 443).judge(head)


@pytest.mark.parametrize("name", HOST_FIELDS)
def test_a_header_that_could_name_another_host_is_refused(name: str) -> None:
    for value in OTHER_HOSTS:
        assert judge(name, value).status == 400, value
    assert not judge(name, "a.test").reason and not judge(name, "A.Test:443").reason


@pytest.mark.parametrize(
    "value",
    [
        "host=evil", "Host=evil", 'host="evil"', "for=1.2.3.4;host=evil", "host=a.test, host=evil",
        "host=a.test:443;for=x,for=y ; host = evil", 'for="x;host=evil"', 'for="x\\";host=evil;"',
        "for=x host=evil", "host=a.test:8443", "host=",
    ],
)  # fmt: skip
def test_a_forwarded_that_could_name_another_host_is_refused(value: str) -> None:
    assert judge("forwarded", value).status == 400


@pytest.mark.parametrize(
    "value", ["for=192.0.2.1;proto=https", 'host=a.test, for="[::1]"; host="a.test:443"']
)
def test_a_forwarded_that_names_the_same_host_passes(value: str) -> None:
    assert not judge("forwarded", value).reason


@pytest.mark.parametrize("name", PATH_FIELDS)
def test_a_header_that_names_a_path_is_refused(name: str) -> None:
    assert judge(name, "/ok/x").status == 400


def test_a_header_that_names_a_method_is_judged_as_one() -> None:
    assert judge("x-forwarded-method", "DELETE").status == 403
    assert judge("x-http-method-override", "DEL ETE").status == 400
    assert not judge("x-http-method-override", "get").reason
    assert judge("x.http.method.override", "GET").status == 400


def test_trailers_can_ask_which_headers_these_are() -> None:
    for name in (*HOST_FIELDS, *PATH_FIELDS, "forwarded", "x-http-method-override", "x_http_method"):
        assert is_override(name.encode()), name
    assert not is_override(b"x-request-id")
