"""`stockade policy`: check a policy, or print the schema of policy files."""

from __future__ import annotations

import argparse

from stockade.cli import output
from stockade.policy import Caller, Discovered, Policy, discover
from stockade.policy.resolve import unfit
from stockade.state import state_dir


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.command == "schema":
        from stockade.policy.schema import schema

        print(_json(schema()))
        return 0
    from stockade.backends import syscalls

    caller = Caller.current()
    # As `stockade run` would have it: the directory one is in is the workspace if it can be.
    here = None if unfit(caller.cwd, caller, state_dir(caller.environ, caller.home)) else caller.cwd
    found = discover(caller.cwd, caller.environ, caller.home, file=args.file, workspace=here)
    syscalls.check_names(found.policy.syscalls.allow)
    print(_json(_facts(found)) if args.json else _summary(found))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(
        prog="stockade policy",
        description="Check a policy, or print the JSON Schema of policy files.",
        epilog="examples:\n  stockade policy check stockade.toml\n  stockade policy schema > schema.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", metavar="check | schema", required=True)
    check = commands.add_parser(
        "check",
        help="say whether a policy is sound, and what it needs",
        description="Say whether a policy is sound, which controls it needs and which clause needs each.",
        epilog="example:\n  stockade policy check stockade.toml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("file", nargs="?", help="the policy file; without it, the policy that applies here")
    check.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser(
        "schema",
        help="print the JSON Schema of policy files",
        description="Print the JSON Schema of policy files.",
        epilog="example:\n  stockade policy schema > schema.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return output.with_manners(made)


def _facts(found: Discovered) -> dict[str, object]:
    policy = found.policy
    return {
        "ok": True,
        "sources": found.sources,
        "hash": policy.hash,
        "policy": policy.table(full=True),
        "controls": {
            control.value: {"clause": clause, "required": policy.required(control)}
            for control, clause in policy.controls().items()
        },
    }


def _summary(found: Discovered) -> str:
    policy = found.policy
    rows = [
        [control.value, _weight(policy, control.value), clause]
        for control, clause in policy.controls().items()
    ]
    return (
        f"{output.paint('ok', 'green')}: {output.clean(', '.join(found.sources)) or 'the default policy'}\n"
        f"sha256 {policy.hash}\n\n" + output.table(rows, ["CONTROL", "", "BECAUSE OF"], wrap=(2,))
    )


def _weight(policy: Policy, control: str) -> str:
    if policy.required(control):
        return "required"
    return "accepted weaker" if control in policy.accept else "where the host can"


def _json(value: object) -> str:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value)).decode()
