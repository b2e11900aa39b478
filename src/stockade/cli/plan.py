"""`stockade plan`: describe what `run` would do, without doing it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from stockade.cli.ui import output
from stockade.errors import PolicyError
from stockade.result import OPEN_NETWORK

if TYPE_CHECKING:
    import argparse

    from stockade.backends.other_systems.draft import DraftPlan
    from stockade.runs.prepare import RunPreparation


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options: those of `run`."""
    from stockade.cli.run import build_parser

    return build_parser("plan")


def main(argv: list[str]) -> int:
    """Print the operations, each with the clause of the policy that it serves."""
    from stockade.cli.run import (
        command,
        continued_workspace,
        discover_policy,
        parse_arguments,
        start_directory,
        user_and_state,
        with_location,
    )

    args = parse_arguments("plan", argv)
    words = command(args)
    workspace = continued_workspace(args)
    found = discover_policy(args, *user_and_state())
    from stockade.host import host

    if host().system != "linux":
        from stockade.backends.other_systems.draft import draw

        if (draft := draw(found.policy, pinned=found.pinned, command=words)) is not None:
            return _print_draft(draft, found.policy.hash, words, as_json=args.json)
    from stockade.runs.prepare import prepare

    try:
        start = start_directory(args, found)
        prepared = prepare(
            found.policy, pinned=found.pinned, dry=True, command=words, cwd=start, workspace=workspace
        )
    except PolicyError as error:
        raise with_location(error, found) from None
    try:
        plan, network = prepared.plan, prepared.resolved.network
        if args.json:
            import msgspec

            ops = [{**msgspec.to_builtins(op), "does": op.describe()} for op in plan.ops]
            shown = {
                "backend": plan.backend,
                "hash": plan.hash,
                "command": words,
                "operations": ops,
                "matched": prepared.resolved.hidden.matched,
                "passed": network.variables if network else {},
                "notes": [*network.notes, *network.warnings] if network else [],
                "network": _network(prepared),
            }
            sys.stdout.buffer.write(output.as_json(shown))
            return 0
        rows = [[str(number), op.describe(), op.clause] for number, op in enumerate(plan.ops, 1)]
        print(output.table(rows, ["", "operation", "because of"], wrap=(1, 2)))
        _print_network(prepared)
        where = f" in {output.name(start)}" if start else ""
        print(f"\nthen execute{where}: {output.name(' '.join(words))}")
        for note in (*(network.lines if network else ()), *prepared.resolved.hidden.notes):
            print(output.name(note))
        print(f"backend {plan.backend}, policy {found.policy.hash[:16]}, plan {plan.hash}")
        return 0
    finally:
        prepared.close(discard=True)


def _network(prepared: RunPreparation) -> dict[str, object]:
    """Return what the program reaches of the network and, with rules, what is made for that."""
    net = prepared.resolved.policy.net
    if net == "open":
        return {"mode": "open"}
    if not net:
        return {"mode": "none"}
    import msgspec

    from stockade.policy.net_reach import reach_text
    from stockade.runs.network.egress_configuration import planned_egress

    plan, ports, datagrams = planned_egress(prepared)
    operations = [{**msgspec.to_builtins(op), "does": op.describe()} for op in plan.ops]
    egress = {"hash": plan.hash, "operations": operations}
    found: dict[str, object] = {
        "mode": "rules",
        "rules": list(net),
        "reach": reach_text(net),
        "listeners": list(ports),
        "udp": list(datagrams),
        "egress": egress,
    }
    return {**found, "proxies": list(proxies)} if (proxies := _proxies(prepared)) else found


#: What the rule `ask` does.
ASKS = ": a connection to a name that no rule covers waits for your answer; without a terminal it is refused"


def _print_network(prepared: RunPreparation) -> None:
    """Print what the program reaches of the network, and the plan of its egress process."""
    net = prepared.resolved.policy.net
    if net == "open":
        print(f"\nnetwork: {OPEN_NETWORK}")
        return
    if not net:
        return
    from stockade.policy.net_reach import reach_text
    from stockade.runs.network.egress_configuration import planned_egress

    plan, ports, datagrams = planned_egress(prepared)
    print("\nnetwork: only what these rules allow")
    for rule in net:
        print(f"  {output.name(rule)}{ASKS if rule == 'ask' else ''}")
    if reach := reach_text(net):
        print(output.paint(f"WARNING: {reach}", "red"))
    tcp, udp = (", ".join(map(str, some)) for some in (ports, datagrams))
    print(f"listeners inside: TCP {tcp}; UDP {udp} (53 for names)")
    for name, secret in prepared.resolved.policy.secrets.items():
        hosts = ", ".join(secret.hosts)
        print(f"secret {output.name(name)}: a placeholder inside, and its value only in requests to {hosts}")
    for proxy in _proxies(prepared):
        print(f"connections leave through the proxy of your environment: {output.name(proxy)}")
    print(f"\nthe egress process, which relays, has walls of its own (plan {plan.hash}):")
    rows = [[str(number), op.describe(), op.clause] for number, op in enumerate(plan.ops, 1)]
    print(output.table(rows, ["", "operation", "because of"], wrap=(1, 2)))


def _proxies(prepared: RunPreparation) -> tuple[str, ...]:
    """Return the proxies of the host through which connections leave."""
    from stockade.runs.network.upstream_proxy import proxies_of

    found = proxies_of(prepared.resolved.caller.environ)
    return () if found is None else found.names


def _print_draft(plan: DraftPlan, policy: str, words: list[str], *, as_json: bool) -> int:
    """Print the plan for a system on which Stockade starts nothing."""
    if as_json:
        import msgspec

        ops = [{**msgspec.to_builtins(op), "does": op.describe()} for op in plan.ops]
        shown = {
            "backend": plan.backend,
            "hash": plan.hash,
            "command": words,
            "operations": ops,
            "argv": list(plan.argv),
            "texts": dict(plan.texts),
            "warnings": list(plan.warnings),
            "starts": False,
        }
        sys.stdout.buffer.write(output.as_json(shown))
        return 0
    for warning in plan.warnings:
        output.say(f"WARNING: {warning}")
    rows = [[str(number), op.describe(), op.clause] for number, op in enumerate(plan.ops, 1)]
    print(output.table(rows, ["", "operation", "because of"], wrap=(1, 2)))
    for name, text in plan.texts:
        lines = "\n".join(output.name(line) for line in text.split("\n"))
        print(f"\n{name}:\n{lines}")
    if plan.argv:
        whole = {text: f"<{name}>" for name, text in plan.texts}
        print("\narguments:")
        for word in plan.argv:
            print(f"  {whole.get(word) or output.name(word)}")
    print(f"\nthen execute: {output.name(' '.join(words))}")
    print(f"backend {plan.backend}, policy {policy[:16]}, plan {plan.hash}")
    print("This is a plan only: it is untested on this system, and `stockade run` starts nothing here.")
    return 0
