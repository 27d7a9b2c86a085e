"""`ple-gateway`: read the settings, bind the port, serve."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from ple_gateway import __version__
from ple_gateway.keys import new_key
from ple_gateway.settings import SettingsError, load_settings

_EXAMPLES = """\
examples:
  ple-gateway serve
  ple-gateway serve --http-address 127.0.0.1:8000 --engine-url http://127.0.0.1:8100
  ple-gateway key
  PLE_GATEWAY_API_KEYS_FILE=/run/secrets/api_keys ple-gateway serve --http-address 0.0.0.0:8000

Every setting is also a variable PLE_GATEWAY_<NAME>; flags win.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    overrides = {
        name: value for name, value in vars(arguments).items() if name != "command" and value is not None
    }
    try:
        return _show_new_key() if arguments.command == "key" else _serve(overrides)
    except SettingsError as exc:
        print(f"ple-gateway: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "ple-gateway", description=__doc__, epilog=_EXAMPLES, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"ple-gateway {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve the OpenAI API", epilog=_EXAMPLES, formatter_class=raw)
    serve.add_argument("--http-address", metavar="HOST:PORT", help="where to listen (default 127.0.0.1:8000)")
    serve.add_argument("--engine-url", metavar="URL", help="the engine (default http://127.0.0.1:8100)")
    serve.add_argument("--log-level", choices=["debug", "info", "warning", "error"], help="default info")
    commands.add_parser("key", help="print a new API key, and the hash of it to keep in api_keys_file")
    return parser


def _show_new_key() -> int:
    key, entry = new_key()
    print(f"for the client:    {key}\nfor api_keys_file: {entry}")
    return 0


def _serve(overrides: dict[str, str]) -> int:
    settings = load_settings(os.environ, overrides)
    # Heavy imports come after the settings are known to be good, so that mistakes show at once.
    from ple_gateway import logs
    from ple_gateway.server import bind, serve

    logs.configure(settings.log_level)
    try:
        listener = bind(settings.http_address)
    except OSError as exc:
        raise SettingsError(
            f"cannot listen on {settings.http_address}: {exc.strerror or exc}; "
            "stop what uses it or choose another --http-address"
        ) from exc
    logging.getLogger(__name__).info("settings %s", " ".join(f"{k}={v}" for k, v in settings))
    return 0 if serve(settings, listener) else 1


if __name__ == "__main__":
    sys.exit(main())
