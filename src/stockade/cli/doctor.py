"""`stockade doctor`: show what this machine can enforce, and how to fix what it cannot."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser

if TYPE_CHECKING:
    from stockade.backends.backend import Offer
    from stockade.backends.selection import Selection
    from stockade.controls import Control
    from stockade.errors import UnsupportedError
    from stockade.host.capabilities import Host, Probe


def main(argv: list[str]) -> int:
    """Probe the machine afresh and print the findings; return 0 if it can enforce the default policy."""
    options = build_parser().parse_args(argv)
    from stockade import backends
    from stockade.backends.selection import select
    from stockade.errors import UnsupportedError
    from stockade.host import engines, host
    from stockade.policy import Policy

    machine = host(fresh=True, helpers=True)
    offers = {name: backends.table(name).offers(machine) for name in backends.names()}
    verdict: Selection | UnsupportedError
    try:
        verdict = select(Policy(), machine)
    except UnsupportedError as error:
        verdict = error
    others = engines.find() if machine.system == "linux" else {}
    if options.json:
        print(as_json(machine, offers, others, verdict))
    else:
        width = shutil.get_terminal_size().columns
        shown = {name: offers[name] for name in backends.considered(machine.system)}
        elsewhere = {name: backends.table(name).system for name in offers if name not in shown}
        width = max(40, min(width, 100))
        rest = "`stockade doctor -v` shows the mechanisms, and how to fix what is missing."
        if options.verbose:
            rest = details(machine, shown, elsewhere, others, width)
        print(output.clean(f"{summary(shown, verdict, width)}\n\n{rest}"))
    return 1 if isinstance(verdict, UnsupportedError) else 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade doctor",
        description="Try out on this machine everything that the walls need, and show which controls it "
        "can enforce, by which mechanism, and how to fix what is missing. Exit code 0: the machine can "
        "enforce the default policy.",
        epilog="example: stockade doctor --json | jq .default_policy",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return output.add_verbosity(
        parser, verbose="print the mechanisms too, and why each missing control is missing"
    )


def as_json(
    host: Host,
    offers: Mapping[str, Mapping[Control, Offer]],
    others: Mapping[str, Probe],
    verdict: Selection | UnsupportedError,
) -> str:
    """Return all findings as JSON."""
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
    return output.indented_json(whole)


def summary(
    offers: Mapping[str, Mapping[Control, Offer]], verdict: Selection | UnsupportedError, width: int
) -> str:
    """Return the verdict, with the fix if it needs one, and the table of controls by backend."""
    from stockade.errors import UnsupportedError

    if isinstance(verdict, UnsupportedError):
        lines = ["This machine can NOT enforce the default policy; Stockade would run nothing."]
        lines += _easiest_fix(offers, verdict, width)
    else:
        weaker = ", ".join(verdict.weaker)
        words = f"This machine can enforce the default policy, by {verdict.backend}"
        lines = _wrapped(words + (f"; weaker than elsewhere: {weaker}." if weaker else "."), width)
    return "\n".join([*lines, "", *_table(offers)])


def _easiest_fix(
    offers: Mapping[str, Mapping[Control, Offer]], verdict: UnsupportedError, width: int
) -> list[str]:
    from stockade.backends.selection import easiest

    missing = {
        name: {control: offer for control, offer in offers[name].items() if control.value in lacking}
        for name, lacking in verdict.missing.items()
    }
    name = easiest(missing)
    return _missing(name, missing[name], width, every=not any(one.available for one in offers[name].values()))


def details(
    host: Host,
    offers: Mapping[str, Mapping[Control, Offer]],
    elsewhere: Mapping[str, str],
    others: Mapping[str, Probe],
    width: int,
) -> str:
    """Return the facts of the machine, every mechanism, and every reason and fix, wrapped to the width.

    `elsewhere` are the backends for other systems, which get one line.
    """
    from stockade.host.capabilities import called

    working = [name for name in host.probes if host.has(name)]
    facts = f"{host.system} {host.kernel} on {host.machine}"
    facts += f", uid {host.uid}" if host.uid >= 0 else ""
    facts += f", Landlock ABI {host.landlock}" if host.system == "linux" else ""
    foreign = ", ".join(f"{name} ({called(system)})" for name, system in elsewhere.items())
    sections = [
        _wrapped(facts, width) + _wrapped("works: " + (", ".join(working) or "nothing"), width, "  "),
        *(_mechanisms(name, table, width) for name, table in offers.items()),
        *(_everything_missing(name, table, width) for name, table in offers.items()),
        _wrapped(f"Backends for other systems: {foreign}", width) if foreign else [],
        _others(others, width),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _mark(offer: Offer) -> str:
    if offer.available:
        return "yes"
    if offer.weaker and offer.waivable:
        return "part"
    # The backend that would enforce it is only a plan.
    return "plan" if offer.mechanism or offer.weaker else "no"


def _table(offers: Mapping[str, Mapping[Control, Offer]]) -> list[str]:
    """Return a table of controls by backend: yes, no, part if a policy may accept that, plan if untried."""
    from stockade.controls import Control

    head = ["CONTROL", *(name.upper() for name in offers)]
    rows = [[control.value, *(_mark(table[control]) for table in offers.values())] for control in Control]
    return output.table(rows, head).splitlines()


def _mechanisms(name: str, table: Mapping[Control, Offer], width: int) -> list[str]:
    """Return a table of one backend's mechanisms; a backend that enforces nothing has none."""
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


def _everything_missing(name: str, table: Mapping[Control, Offer], width: int) -> list[str]:
    lacking = {control: offer for control, offer in table.items() if not offer.available}
    return _missing(name, lacking, width, every=len(lacking) == len(table))


def _missing(name: str, lacking: Mapping[Control, Offer], width: int, *, every: bool) -> list[str]:
    """Return why a backend misses these controls, and the fixes; `every` says that it enforces none."""
    from stockade.backends.selection import by_reason

    lines = []
    for (reason, fix), controls in by_reason(lacking).items():
        what = "every control" if every and len(controls) == len(lacking) else ", ".join(controls)
        lines += _wrapped(f"{name} misses {what}: {reason}", width)
        lines += _wrapped(f"fix: {fix}", width, "  ") if fix else []
    return lines


def _others(others: Mapping[str, Probe], width: int) -> list[str]:
    lines = ["Other sandboxing tools on this machine:"] if others else []
    for name, probe in others.items():
        about = probe.detail if probe.ok else probe.reason
        lines += _wrapped(f"{name}: {'yes' if probe.ok else 'no'}, {about}", width, "  ")
        if not probe.ok:
            lines += _wrapped(f"fix: {probe.fix}", width, "    ")
    return lines


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    # Keep commands and paths whole, so that the user can copy them.
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
