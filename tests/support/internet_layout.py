"""Who is where in the small internet: addresses, names and ports."""

from __future__ import annotations

from typing import Any

#: An address that is dialled, and how it is added to the device. 11.0.0.0/24 is local as a whole.
ADDRESSES = {
    "11.0.0.1": "11.0.0.1/24",
    "11.0.0.10": "11.0.0.10/32",
    "11.0.0.66": "11.0.0.66/32",
    "8.8.8.8": "8.8.8.8/32",
    "10.0.0.5": "10.0.0.5/32",
    "169.254.169.254": "169.254.169.254/32",
    **{f"2a10:600d::{n}": f"2a10:600d::{n}/128" for n in (1, 10, 20, 30, 66)},
    "fd00:dead::5": "fd00:dead::5/128",
    # Further metadata services, and IPv6 addresses that stand for the IPv4 one of most of them.
    "100.100.100.200": "100.100.100.200/32",
    **{a: f"{a}/128" for a in ("fd00:ec2::254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1")},
}
DNS = "11.0.0.53"
#: One that no configuration names: programs with a server of their own ask it.
OTHER_DNS = "8.8.8.8"
DNS_SERVERS = (DNS, OTHER_DNS)

HTTP_PORTS = (80, 8080)
HTTPS_PORTS = (443, 8443)
#: Sends back what it gets; speaks first and then does the same; takes what it gets and says nothing.
ECHO, GREETER, SILENT = 7007, 2500, 9009
#: Over UDP: sends back what it gets, and answers the time; both on every address.
DATAGRAMS, TIME = 7008, 123
GREETING = b"220 greeter.good.example ready\r\n"

#: The servers answer on every address, so where a name leads is the zone's business alone.
ZONE: dict[str, dict[str, Any]] = {
    "api.good.example": {"A": ["11.0.0.10"], "AAAA": ["2a10:600d::10"]},
    "www.good.example": {"A": ["11.0.0.11"]},
    "h2.good.example": {"A": ["11.0.0.20"], "AAAA": ["2a10:600d::20"]},
    "echo.good.example": {"A": ["11.0.0.30"]},
    "greeter.good.example": {"A": ["11.0.0.31"]},
    "ssh.good.example": {"A": ["11.0.0.32"]},
    "db.good.example": {"A": ["11.0.0.33"]},
    "pypi.good.example": {"A": ["11.0.0.34"]},
    "npm.good.example": {"A": ["11.0.0.35"]},
    "git.good.example": {"A": ["11.0.0.36"]},
    "web.good.example": {"A": ["11.0.0.37"], "AAAA": ["2a10:600d::30"]},
    "alias.good.example": {"CNAME": "api.good.example"},
    "four.good.example": {"A": ["11.0.0.10"]},
    "six.good.example": {"AAAA": ["2a10:600d::10"]},
    "xn--bcher-kva.good.example": {"A": ["11.0.0.12"]},
    "*.wild.good.example": {"A": ["11.0.0.13"]},
    # Addresses that do not answer come first.
    "broken-six.good.example": {"A": ["11.0.0.10"], "AAAA": ["2a10:dead::1"]},
    "broken-four.good.example": {"A": ["12.0.0.1", "11.0.0.10"]},
    "nowhere.good.example": {"A": ["12.0.0.1"]},
    "servfail.good.example": {"rcode": 2},
    "slow.good.example": {"A": ["11.0.0.10"], "delay": 1.0},
    "never.good.example": {"delay": 600},
    # Names that lead where nothing from inside may go.
    "local.evil.example": {"A": ["127.0.0.1"]},
    "local-six.evil.example": {"AAAA": ["::1"]},
    "mapped.evil.example": {"AAAA": ["::ffff:127.0.0.1"]},
    "metadata.evil.example": {"A": ["169.254.169.254"]},
    "nat64.evil.example": {"AAAA": ["64:ff9b::a9fe:a9fe"]},
    "sixtofour.evil.example": {"AAAA": ["2002:7f00:1::"]},
    "private.evil.example": {"A": ["10.0.0.5"]},
    "private-six.evil.example": {"AAAA": ["fd00:dead::5"]},
    "zero.evil.example": {"A": ["0.0.0.0"]},
    "mixed.evil.example": {"A": ["127.0.0.1", "11.0.0.66"]},
    # A good address the first time, then the machine itself.
    "rebind.evil.example": {"A": [["11.0.0.66"], ["127.0.0.1"]], "ttl": 0},
    # The real names of agents' servers.
    "api.anthropic.com": {"A": ["11.0.0.40"]},
    "api.openai.com": {"A": ["11.0.0.41"]},
    "generativelanguage.googleapis.com": {"A": ["11.0.0.42"]},
    "evil.example": {"A": ["11.0.0.66"], "AAAA": ["2a10:600d::66"]},
    "*.evil.example": {"A": ["11.0.0.66"]},
}

RESOLV_CONF = f"nameserver {DNS}\noptions timeout:2 attempts:1\n"
HOSTS = "127.0.0.1 localhost\n::1 localhost\n11.0.0.14 in-hosts.good.example\n"
NSSWITCH = "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n"
