"""``python -m jax_streamk``: the tools."""

import argparse
import importlib
import sys

TOOLS = ("tune", "info")


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m jax_streamk")
    tools = parser.add_subparsers(required=True, metavar="TOOL")
    for name in TOOLS:
        module = importlib.import_module(f"jax_streamk.tools.{name}")
        tool = tools.add_parser(name, help=module.__doc__.splitlines()[0], description=module.__doc__)
        module.add_arguments(tool)
        tool.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
