"""Runs the commands of docs/examples.md and puts what they print below them.

    python docs/run_examples.py

Takes minutes, on the device that JAX finds. tests/test_examples.py compares the page with the examples, numbers aside.
"""

import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "examples.md"
RUN = re.compile(r"```sh\npython (examples/[^\n]*)\n```\n\n```text\n(.*?)```\n", re.DOTALL)


def printed(command):
    print(command, flush=True)
    return subprocess.run(
        [sys.executable, *shlex.split(command)], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main():
    PAGE.write_text(
        RUN.sub(lambda run: f"```sh\npython {run[1]}\n```\n\n```text\n{printed(run[1])}```\n", PAGE.read_text())
    )


if __name__ == "__main__":
    main()
