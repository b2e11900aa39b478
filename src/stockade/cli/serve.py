"""`stockade serve`: sandboxes over HTTP, for clients of the OpenSandbox contract."""

from __future__ import annotations

import argparse
import os

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.errors import SetupError
from stockade.linux.user import Caller
from stockade.state import ensure, state_dir


def main(argv: list[str]) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.listen is not None and (args.host is not None or args.port is not None):
        parser.error("--listen has both the address and the port: leave out --host and --port")
    caller = Caller.current()
    try:
        from stockade.server import process
        from stockade.server.config import load_config, with_address, with_listen
        from stockade.server.front.authentication import ClientKeys
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the server needs the Python package {error.name}",
            stage="server",
            hint="pip install 'stockade[server]'",
        ) from None
    config = load_config(args.config, caller.environ)
    config = with_address(config, args.host, args.port)
    if args.listen is not None:
        config = with_listen(config, args.listen)
    if args.check:
        _warn_of_images(config.images, state_dir(caller.environ, caller.home))
        print("the configuration is valid")
        return 0
    home = ensure(state_dir(caller.environ, caller.home))
    if args.add_key is not None:
        keys = ClientKeys(home, {})
        replaced = keys.has(args.add_key)
        print(keys.add(args.add_key), flush=True)
        output.say(f"this is the key of {args.add_key}; it is not kept, so store it now")
        if replaced:
            output.say(f"the earlier key of {args.add_key} no longer works")
        return 0
    process.serve(config, home, os.environ, _announce)
    return 0


def _warn_of_images(images: dict[str, str], home: str) -> None:
    """Warn of names that stand for an image which is not imported (yet)."""
    from stockade.images.names import HOST
    from stockade.images.store import list_images

    known = {HOST, *(image.name for image in list_images(home))}
    for pattern, target in images.items():
        if target not in known:
            output.say(
                f'warning: [images]: "{pattern}" stands for "{target}", which is not imported: '
                f"`stockade images import PATH {target}` does it"
            )


def _announce(text: str) -> None:
    """Print a line at once, also to a pipe; the key among them is shown even with `-q`."""
    print(text, flush=True)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade serve",
        description="Serve sandboxes over HTTP; the published SDKs of OpenSandbox are its clients. The\n"
        "first start makes a key and prints it once; STOCKADE_API_KEY sets one instead. Ctrl-C ends\n"
        "the server and not its sandboxes: the next start finds them again, and `stockade kill` ends them.",
        epilog="examples:\n"
        "  stockade serve\n"
        "  stockade serve --port 8081\n"
        "  stockade serve --config serve.toml --check",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the configuration; by default what STOCKADE_SERVER_CONFIG names"
    )
    parser.add_argument("--host", help="the address to listen on; by default 127.0.0.1")
    parser.add_argument(
        "--port", help="the port to listen on; by default 8080, and 0 is a free one that it prints"
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="both in one")
    parser.add_argument("--check", action="store_true", help="check the configuration and exit")
    parser.add_argument(
        "--add-key",
        metavar="NAME",
        help="make a key for another client, or a new one for this client; print it and exit",
    )
    return output.add_verbosity(parser)
