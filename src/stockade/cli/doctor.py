"""`stockade doctor`: what this machine can enforce, and how to fix what it cannot."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stockade.cli import output
from stockade.cli.options import Parser

if TYPE_CHECKING:
    from stockade.backends.base import Offer
    from stockade.backends.select import Selection
    from stockade.controls import Control
    from stockade.errors import UnsupportedError
    from stockade.host.model import Host, Probe


def main(argv: list[str]) -> int:
    """Try everything out now and tell; 0 if the default policy can be enforced here."""
    options = parser().parse_args(argv)
    from stockade import backends
    from stockade.backends.select import select
    from stockade.errors import UnsupportedError
    from stockade.host import host, means
    from stockade.policy import Policy

    machine = host(fresh=True, helpers=True)
    offers = {name: backends.table(name).offers(machine) for name in backends.names()}
    verdict: Selection | UnsupportedError
    try:
        verdict = select(Policy(), machine)
    except UnsupportedError as error:
        verdict = error
    others = means.find() if machine.system == "linux" else {}
    if options.json:
        print(as_json(machine, offers, others, verdict))
    else:
        width = shutil.get_terminal_size().columns
        shown = {name: offers[name] for name in backends.considered(machine.system)}
        elsewhere = {name: backends.table(name).system for name in offers if name not in shown}
        told = as_text(machine, shown, elsewhere, others, verdict, max(40, min(width, 100)))
        print(output.clean(told))
    return 1 if isinstance(verdict, UnsupportedError) else 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade doctor",
        description="Tries out on this machine everything that the walls need, and says which controls "
        "can be enforced, by what, and how to fix what is missing. Exit code 0: the default policy can be "
        "enforced here.",
        epilog="example: stockade doctor --json | jq .default_policy",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return output.with_manners(made)


def as_json(
    host: Host,
    offers: Mapping[str, Mapping[Control, Offer]],
    others: Mapping[str, Probe],
    verdict: Selection | UnsupportedError,
) -> str:
    """Everything that is known, for programs."""
    import msgspec

    from stockade.errors import UnsupportedError

    default: dict[str, Any]
    if isinstance(verdict, UnsupportedError):
        default = {"enforced": False, "missing": verdict.missing, "hint": verdict.hint}
    else:
        default = {"enforced": True, "backend": verdict.backend, "controls": verdict.controls}
    backends = {
        name: {
            control.value: {"available": offer.available, **msgspec.structs.asdict(offer)}
            for control, offer in table.items()
        }
        for name, table in offers.items()
    }
    whole = {
        "host": {**msgspec.structs.asdict(host), "landlock": host.landlock},
        "backends": backends,
        "means": others,
        "default_policy": default,
    }
    return msgspec.json.format(msgspec.json.encode(whole)).decode()


def as_text(
    host: Host,
    offers: Mapping[str, Mapping[Control, Offer]],
    elsewhere: Mapping[str, str],
    others: Mapping[str, Probe],
    verdict: Selection | UnsupportedError,
    width: int,
) -> str:
    """The truth table, then every reason and fix, wrapped to the width.

    `elsewhere` are the backends for other systems, of which there is no more to say here.
    """
    from stockade.errors import UnsupportedError
    from stockade.host.model import called

    working = [name for name in host.probes if host.has(name)]
    facts = f"{host.system} {host.kernel} on {host.machine}"
    facts += f", uid {host.uid}" if host.uid >= 0 else ""
    facts += f", Landlock ABI {host.landlock}" if host.system == "linux" else ""
    foreign = ", ".join(f"{name} ({called(system)})" for name, system in elsewhere.items())
    sections = [
        _wrapped(facts, width) + _wrapped("works: " + (", ".join(working) or "nothing"), width, "  "),
        _table(offers),
        *(_mechanisms(name, table, width) for name, table in offers.items()),
        *(_missing(name, table, width) for name, table in offers.items()),
        _wrapped(f"Backends for other systems: {foreign}", width) if foreign else [],
        _others(others, width),
    ]
    if isinstance(verdict, UnsupportedError):
        sections.append(["The default policy can NOT be enforced here; nothing would be run."])
    else:
        weaker = ", ".join(verdict.weaker)
        line = f"The default policy can be enforced here, by {verdict.backend}"
        sections.append(_wrapped(line + (f"; weaker than elsewhere: {weaker}." if weaker else "."), width))
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _mark(offer: Offer) -> str:
    if offer.available:
        return "yes"
    if offer.weaker and offer.waivable:
        return "part"
    # It would be enforced by what has never been run here.
    return "plan" if offer.mechanism or offer.weaker else "no"


def _table(offers: Mapping[str, Mapping[Control, Offer]]) -> list[str]:
    """Every control by every backend: yes, no, in part where the policy accepts that, or only in plans."""
    from stockade.controls import Control

    head = ["CONTROL", *(name.upper() for name in offers)]
    rows = [[control.value, *(_mark(table[control]) for table in offers.values())] for control in Control]
    return output.table(rows, head).splitlines()


def _mechanisms(name: str, table: Mapping[Control, Offer], width: int) -> list[str]:
    """By what one backend enforces each control, or would; a backend that enforces nothing has no table."""
    if not any(_mark(offer) != "no" for offer in table.values()):
        return []
    room = max(20, width - max(map(len, table)) - len(name) - 4)
    rows = []
    for control, offer in table.items():
        by = offer.mechanism or (f"if accepted: {offer.weaker}" if offer.weaker else "")
        first, *rest = textwrap.wrap(by, room) or [""]
        mark = _mark(offer)
        rows.append([control.value, mark if mark in ("yes", "plan") else "no", first])
        rows += [["", "", line] for line in rest]
    return output.table(rows, ["CONTROL", name.upper(), "BY"]).splitlines()


def _missing(name: str, table: Mapping[Control, Offer], width: int) -> list[str]:
    from stockade.backends.select import by_reason

    lines = []
    lacking = {control: offer for control, offer in table.items() if not offer.available}
    for (reason, fix), controls in by_reason(lacking).items():
        what = "every control" if len(controls) == len(table) else ", ".join(controls)
        lines += _wrapped(f"{name} misses {what}: {reason}", width)
        lines += _wrapped(f"fix: {fix}", width, "  ") if fix else []
    return lines


def _others(others: Mapping[str, Probe], width: int) -> list[str]:
    lines = ["Other means on this machine:"] if others else []
    for name, found in others.items():
        about = found.detail if found.ok else found.reason
        lines += _wrapped(f"{name}: {'yes' if found.ok else 'no'}, {about}", width, "  ")
        if not found.ok:
            lines += _wrapped(f"fix: {found.fix}", width, "    ")
    return lines


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    # A command or a path stays whole, so that it can be copied.
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
