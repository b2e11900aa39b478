"""`stockade verify`: check whether a receipt is genuine, and show what it proves."""

from __future__ import annotations

import argparse
import os

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.formats import many, print_json
from stockade.errors import PolicyError, ReceiptError
from stockade.linux.user import Caller
from stockade.policy.net_reach import reach_text
from stockade.policy.toml import load, read_file
from stockade.receipt import chain, ed25519, keys
from stockade.receipt.batch import was_found
from stockade.receipt.statement import LARGEST, UNWALLED, Network, Receipt
from stockade.receipt.verify import (
    ChainCheck,
    check_controls,
    check_policy,
    nothing_seen,
    signed_by,
    walk_log,
)
from stockade.result import OPEN_NETWORK
from stockade.state import state_dir


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    if not args.receipt and not args.chain:
        raise PolicyError("there is nothing to verify", hint="name a file or an id, or add --chain")
    try:
        found, right, walk = _verify(args)
    except ReceiptError as error:
        if args.json:
            print_json({"ok": False, "failure": error.failure, "reason": error.message, "hint": error.hint})
        else:
            output.error(f"not verified: {error.message} ({error.failure})", hint=error.hint)
        return 1
    if args.json:
        about = {} if found is None else _about(found, right)
        print_json({"ok": True, **about, **(_about_chain(walk) if args.chain else {})})
        return 0
    if found is not None:
        _show(found, right)
    if args.chain:
        _show_chain(walk)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade verify",
        description="Check a receipt, or with --chain all of them: that its maker signed it, that no byte\n"
        "was changed, and that it proves what you require. This needs neither the network nor the\n"
        "machine that made it. Without --key, Stockade uses the keys of your own state directory.",
        epilog="examples:\n  stockade verify run.json --key stockade.pem --require network.none files\n"
        "  stockade verify last\n  stockade verify --chain\n"
        "  stockade verify all.jsonl --chain --key stockade.pem      an export\n\n"
        "exit codes: 0 verified; 1 not verified, and the reason is printed; 125 it could not be read",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "receipt",
        nargs="?",
        metavar="FILE|ID",
        help="a file (./42, not 42), or the id of one of your receipts",
    )
    add("--key", metavar="FILE", action="append", help="a public key, PEM, that must have signed; repeatable")
    add("--chain", action="store_true", help="check the whole chain: your own, or that in FILE")
    add("--policy", metavar="FILE", help="the policy that must have been in force")
    add(
        "--require",
        metavar="CONTROL",
        nargs="+",
        action="extend",
        help="controls that must have been enforced in full; after FILE|ID",
    )
    add("--json", action="store_true", help="print JSON")
    return output.add_verbosity(parser)


def _verify(args: argparse.Namespace) -> tuple[Receipt | None, set[str], ChainCheck | None]:
    """Return the named receipt, the ids of keys whose signatures are right, and the check of the chain."""
    caller = Caller.current()
    log = chain.of(state_dir(caller.environ, caller.home))
    given = {ed25519.key_id(key): key for key in map(_public, args.key or ())}
    known = given or {key.id: key.public for key in keys.known(log.home)}
    # An id comes first: a planted file of that name must not stand in for the log.
    file = args.receipt and not chain.is_id(args.receipt) and os.path.lexists(args.receipt)
    found, right, walk = None, set[str](), None
    if (args.policy or args.require) and (not args.receipt or (args.chain and file)):
        raise PolicyError(
            "--policy and --require need one receipt", hint="name it: stockade verify FILE|ID ..."
        )
    if args.chain and file:
        return None, right, _verify_export(args.receipt, known, every=bool(given))
    if args.receipt:
        found = Receipt.decode(read_file(args.receipt)) if file else log.find(args.receipt)
        right = signed_by(found, known, every=bool(given))
        if args.policy:
            check_policy(found, load(args.policy))
        check_controls(found, args.require or ())
    if args.chain and log.exists():
        walk = walk_log(log, known, every=bool(given))
    return found, right, walk


def _verify_export(path: str, known: dict[str, bytes], *, every: bool) -> ChainCheck:
    """Verify an export, one receipt per line, which may begin anywhere in its chain."""
    walk = ChainCheck(known, whole=False, every=every)
    # O_NONBLOCK: do not wait for a pipe that has no writer.
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    os.set_blocking(opened, True)
    with open(opened, "rb") as file:
        while line := file.readline(LARGEST + 1):
            walk.step(Receipt.decode(line))
    if not walk.count:
        raise ReceiptError(f"{path} contains no receipt", failure="malformed")
    walk.end()
    return walk


def _about_chain(walk: ChainCheck | None) -> dict[str, object]:
    if walk is None:
        return {"count": 0}
    counts = {"count": walk.count, **({"found": walk.found} if walk.found else {})}
    if walk.checkpoint is None:
        return {**counts}
    said = walk.checkpoint.predicate
    about = {"id": walk.checkpoint.id, "key": said.key, "at": said.started}
    return {**counts, "checkpoint": {**about, "through": walk.removed_through, "kept": walk.kept}}


def _show_chain(walk: ChainCheck | None) -> None:
    count = many(0 if walk is None else walk.count, "receipt")
    if walk is not None and walk.found:
        count += f", {walk.found} of them signed by another process, which found them in the log"
    if walk is None or walk.checkpoint is None:
        print(f"the chain is whole: {count}")
        return
    kept = f", except for {many(walk.kept, 'record')} that others depend on" if walk.kept else ""
    when = walk.checkpoint.predicate.started[:10]
    print(f"the chain is whole from receipt {walk.removed_through + 1} on: {count}")
    print(f"older ones were pruned on {when}, says checkpoint {walk.checkpoint.id}{kept}")


def _public(path: str) -> bytes:
    return ed25519.read_public(read_file(path), path)


def _signers(receipt: Receipt, right: set[str]) -> tuple[list[str], list[str]]:
    """Return the ids of keys whose signatures are verified, and of those that were not checked."""
    signed = receipt if receipt.head is None else receipt.head
    all = [one.keyid for one in signed.signatures]
    return [id for id in all if id in right], [id for id in all if id not in right]


def network_text(network: Network) -> str:
    """Return what a receipt says about the network of a run, in one line."""
    if network.mode == "open":
        return OPEN_NETWORK
    if network.mode != "rules" or network.counts is None:
        return network.mode or "-"
    counts = network.counts
    connections = f"{counts.connections_allowed} connections allowed, {counts.connections_refused} refused"
    names = f"{counts.names_answered} names answered, {counts.names_refused} refused"
    found = [connections, names]
    if counts.requests_allowed or counts.requests_refused:
        found.append(
            f"{counts.requests_allowed or 0} requests allowed, {counts.requests_refused or 0} refused"
        )
    if reach := reach_text(network.rules):
        found.append(output.name(reach))
    return f"{many(len(network.rules), 'rule')}: {'; '.join(found)}"


def _about(receipt: Receipt, right: set[str]) -> dict[str, object]:
    signed, unchecked = _signers(receipt, right)
    about: dict[str, object] = {"id": receipt.id, "hash": receipt.hash, "key": receipt.predicate.key}
    if receipt.head is not None:
        about |= {"head": receipt.head.id, "found": was_found(receipt, receipt.head)}
    return {**about, "signed_by": signed, "not_checked": unchecked}


def _head_row(receipt: Receipt, head: Receipt) -> list[str]:
    found = ", by another process, which found it in the log" if was_found(receipt, head) else ""
    return ["in a batch", f"head {head.id}{found}"]


def _show(receipt: Receipt, right: set[str]) -> None:
    said = receipt.predicate
    signed, unchecked = (", ".join(id[:16] for id in ids) for ids in _signers(receipt, right))
    rows = [
        ["receipt", f"{receipt.id} of chain {said.chain[:12]}"],
        ["signed by", signed + (f" (not checked: {unchecked})" if unchecked else "")],
        *([] if receipt.head is None else [_head_row(receipt, receipt.head)]),
        ["run", f"{said.ending.outcome}, exit code {said.ending.exit_code}, {said.started[:19]}Z"],
        ["program", output.name(said.command.program) or "-"],
        *([["name", output.name(said.name)]] if said.name else []),
        *([name, output.name(text)] for name in ("agent", "category", "action", "words")
          if (text := getattr(said.who, name))),
        *([["network", output.name(network_text(said.network))]] if said.network.mode != "none" else []),
        ["policy", said.policy[:16]],
        ["host", f"{said.host.kernel}, Landlock ABI {said.host.landlock}, Stockade {said.host.stockade}"],
    ]  # fmt: skip
    print(output.table(rows, ["VERIFIED", ""]))
    if why := nothing_seen(receipt):
        print(f"\nno control is known to have been enforced: {output.name(why)}")
        return
    if said.backend == UNWALLED:
        print("\nit ran without a sandbox: its agent's sandbox was switched off")
    print()
    shown = [
        [name, "yes" if one.grade.enforced else "NO", one.grade, output.name(one.mechanism)]
        for name, one in said.controls.items()
    ]
    print(output.table(shown, ["CONTROL", "IN FULL", "KNOWN BECAUSE", "BY"]))
