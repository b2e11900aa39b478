"""`stockade agents`: which agents there are, and whether their calls are sandboxed."""

from __future__ import annotations

import argparse

from stockade.agents import registry
from stockade.agents.registry import Agent
from stockade.cli import output
from stockade.cli.options import Parser
from stockade.cli.workspaces import print_json
from stockade.errors import PolicyError
from stockade.policy import Caller
from stockade.state import ensure, state_dir

ACTIONS = ("list", "add", "show", "enable", "disable", "remove")


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    action, name = args.action, args.name or ""
    if (action == "list") == bool(name):
        hint = f"stockade agents show {name}" if name else f"stockade agents {action} NAME"
        raise PolicyError(f"{action} takes no name" if name else f"{action} needs a name", hint=hint)
    if (args.category or args.policy) and action != "add":
        raise PolicyError("--category and --policy are for add", hint="stockade agents add NAME ...")
    if args.reason and action in ("list", "show"):
        raise PolicyError(
            "--reason is for what is recorded", hint="stockade agents disable NAME --reason ..."
        )
    caller = Caller.current()
    home = state_dir(caller.environ, caller.home)
    if action == "list":
        return _list(registry.every(home), as_json=args.json)
    if action == "show":
        return _show(registry.get(home, name), caller, as_json=args.json)
    ensure(home)
    if action == "add":
        found = registry.add(home, name, args.category or "", args.policy or "", args.reason)
        say = f"{found.name} is in the registry; its calls are {_sandboxed(found)}"
    elif action == "remove":
        registry.remove(home, name, args.reason)
        say = f"{name} is forgotten; a handler of that name is sandboxed"
    else:
        found = registry.switch(home, name, enabled=action == "enable", reason=args.reason)
        say = f"the calls of {found.name} are {_sandboxed(found)} from now on (receipt {found.place})"
    output.say(say)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade agents",
        description="List the agents, add one or give it another category or policy, and switch its sandbox\n"
        "on or off. That counts from its next call on, for this agent and no other, and is recorded in the\n"
        "chain of receipts. The receipts of calls without a sandbox say so.",
        epilog="examples:\n  stockade agents add linter --category reviewers\n"
        '  stockade agents disable linter --reason "needs the GPU; ticket 42"\n'
        "  stockade agents enable linter",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("action", nargs="?", choices=ACTIONS, default="list")
    add("name", nargs="?", metavar="NAME", help="which agent; all actions but list need it")
    add("--category", metavar="NAME", help="add: the category whose layer holds for it")
    add("-p", "--policy", metavar="FILE", help="add: its policy, as it is in the file now")
    add("--reason", metavar="TEXT", default="", help="why; disable needs one")
    add("--json", action="store_true", help="list, show: print JSON")
    return output.with_manners(made)


def _sandboxed(agent: Agent) -> str:
    return "sandboxed" if agent.enabled else "NOT sandboxed"


def _plain(agent: Agent) -> dict[str, object]:
    import msgspec

    return msgspec.structs.asdict(agent)


def _list(found: list[Agent], *, as_json: bool) -> int:
    if as_json:
        print_json([_plain(agent) for agent in found])
    elif found:
        rows = [
            [
                agent.name,
                agent.category or "-",
                "on" if agent.enabled else "OFF",
                output.name(agent.policy) or "-",
                str(agent.place),
            ]
            for agent in found
        ]
        print(output.table(rows, ["AGENT", "CATEGORY", "SANDBOX", "POLICY", "RECEIPT"], cut=(3,)))
    else:
        print("there are no agents")
    return 0


def _show(agent: Agent, caller: Caller, *, as_json: bool) -> int:
    """How it stands, and the policy that comes of that."""
    from stockade.agents.policies import policy_for

    policy = policy_for(agent, caller).policy
    if as_json:
        print_json({**_plain(agent), "in_force": policy.table(), "in_force_hash": policy.hash})
        return 0
    rows = [
        ["category", agent.category or "-"],
        ["sandbox", "on" if agent.enabled else "OFF: its calls run without walls"],
        ["policy", output.name(agent.policy) or "by the layers, or your own"],
        ["decided by", f"receipt {agent.place}"],
    ]
    print(output.table(rows, ["AGENT", agent.name]))
    print("\n" + output.clean(policy.to_toml() or "# the default policy\n").rstrip())
    return 0
