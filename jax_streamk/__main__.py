"""``python -m jax_streamk``: the commands of jax_streamk/tools, a module each."""

import argparse
import importlib
import os
import sys
import textwrap

import jax

from jax_streamk import __version__
from jax_streamk.tools import results

COMMANDS = ("explain", "kernels", "bench", "tune", "fit", "info")


class _Once(argparse.Action):
    """Stores a value, and refuses another, which would silently replace it."""

    _given = False

    def __call__(self, parser, namespace, values, option_string=None):
        if self._given:
            raise argparse.ArgumentError(self, "given more than once")
        self._given = True
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        for name in (None, "store"):
            self.register("action", name, _Once)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")


def main(argv=None):
    """Runs a command and returns the exit status.

    0: done; 1: something failed; 2: the command line, or a file that it names, is wrong, and nothing was done; 130:
    Ctrl-C; 141 (as in a shell): a broken pipe. ``SystemExit`` carries 2, and 1 with a message, as argparse has it.
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):  # which Python writes out once more as it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 141


def _run(argv):
    parser = _Parser(
        prog="python -m jax_streamk",
        description="Tools for split-K and Stream-K matrix products.",
        epilog="Each command has examples: python -m jax_streamk COMMAND --help. Exit status: 0 done, 1 something "
        "failed, 2 the command line or a file that it names is wrong.",
    )
    parser.add_argument("--version", action="version", version=f"jax_streamk {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"jax_streamk.tools.{name}")
        summary, _, more = str(module.__doc__).split(": ", 1)[1].partition("\n\n")
        command = commands.add_parser(
            name,
            help=summary,
            description=textwrap.fill(summary, 100),
            epilog=more,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(command=name, run=module.run, error=command.error)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        arguments.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return arguments.run(arguments)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise SystemExit(f"{arguments.command}: {results.described(error)}") from None
        raise


if __name__ == "__main__":
    sys.exit(main())
