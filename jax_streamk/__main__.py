"""``python -m jax_streamk``: the commands of jax_streamk/tools, a module each."""

import argparse
import importlib
import sys

COMMANDS = ("bench", "tune", "info")


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m jax_streamk", description="Tools for split-K and Stream-K matrix products.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"jax_streamk.tools.{name}")
        summary = module.__doc__.split(": ", 1)[1]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
