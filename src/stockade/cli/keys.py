"""`stockade keys`: who signs the receipts of this state directory."""

from __future__ import annotations

import argparse
import os
import sys
import time

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.errors import PolicyError
from stockade.policy import Caller
from stockade.receipt import chain, crypto, keys
from stockade.receipt.statement import ROTATED
from stockade.state import ensure, state_dir


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if args.id and args.action != "export":
        raise PolicyError(f"{args.id!r}: an id is for export", hint="stockade keys export ID")
    if args.passphrase_file and args.action != "rotate":
        raise PolicyError(
            "--passphrase-file is for rotate", hint="stockade keys rotate --passphrase-file FILE"
        )
    caller = Caller.current()
    home = ensure(state_dir(caller.environ, caller.home))
    if args.action == "rotate":
        return _rotate(home, args.passphrase_file)
    log = chain.of(home)
    if not keys.known(home):
        keys.signer(home, log.settings)  # made on first use, which this is
    if args.action == "export":
        sys.stdout.write(crypto.public_pem(keys.find(home, args.id or "").public).decode())
        return 0
    _show(keys.known(home), as_json=args.json)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade keys",
        description="Show the keys that have signed receipts here, export a public one, or let a new one\n"
        "sign from now on. What older keys have signed stays verifiable; their private parts are gone.",
        epilog="examples:\n  stockade keys export > stockade.pem      for those who verify\n"
        "  stockade keys rotate --passphrase-file ~/.stockade-passphrase      the new key is encrypted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("action", nargs="?", choices=["show", "export", "rotate"], default="show")
    made.add_argument("id", nargs="?", metavar="ID", help="export: another key than the current one")
    made.add_argument(
        "--passphrase-file", metavar="FILE", help="rotate: encrypt the new key with what it has"
    )
    made.add_argument("--json", action="store_true", help="show: print JSON")
    return output.with_manners(made)


def _rotate(home: str, file: str | None) -> int:
    passphrase = None if file is None else keys.secret(file).rstrip(b"\r\n")
    if passphrase == b"":
        raise PolicyError(f"{file} is empty", hint="put the passphrase on its first line")
    log = chain.of(home)
    id = log.rotate(passphrase)
    print(id)
    output.say("receipts are signed by this key from now on; those before stay verifiable")
    last = log.rows(newest=1)
    if not last or last[0].action != ROTATED:
        output.say("the key before could not be used, so that it does not vouch for this one")
    if file is not None:
        path = os.path.abspath(file)
        output.say(f'so that it can be used, your config.toml needs: [receipts], passphrase_file = "{path}"')
    return 0


def _show(found: list[keys.Key], *, as_json: bool) -> None:
    if as_json:
        from stockade.cli.workspaces import print_json

        print_json(
            [{"id": key.id, "current": key.current, "made": key.made, "path": key.path} for key in found]
        )
        return
    rows = [
        [key.id, "current" if key.current else "", time.strftime("%Y-%m-%d %H:%M", time.localtime(key.made))]
        for key in found
    ]
    print(output.table(rows, ["KEY", "", "MADE"]))
