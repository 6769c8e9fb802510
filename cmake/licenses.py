"""Copies the licences of what is compiled into the module from the build environment, for the wheel to carry.

Run as a script, with the folder to fill and the wheels whose code is compiled in. NOTICE says what is whose.
"""

import pathlib
import re
import sys

import cuda_toolkit

# Projects inside another project's wheel: the header whose first comment is the licence.
CONTAINED = {"nanobind": {"robin-map": "tsl/robin_hash.h"}}


def licenses_of(wheel):
    """The licence texts of an installed wheel, by the path below the folder of licences.

    Raises:
      SystemExit: the wheel, or a licence, is not there.
    """
    files = cuda_toolkit.wheel_files(wheel)
    found = {
        f"{wheel}/{file.name}": file.read_text()
        for file in files
        if ".dist-info" in file.parts[0] and re.match(r"(?i)licen[cs]e|copying|notice", file.name)
    }
    contained = CONTAINED.get(wheel, {})
    for project, header in contained.items():
        texts = [_first_comment(file.read_text()) for file in files if file.as_posix().endswith(header)]
        found |= {f"{project}/LICENSE": text for text in texts if text}
    if missing := {wheel, *contained} - {path.split("/")[0] for path in found}:
        raise SystemExit(f"{wheel}: no licence of {', '.join(sorted(missing))} in the build environment")
    return found


def _first_comment(text):
    comment = re.match(r"\s*/\*+\n?(.*?)\*/", text, re.DOTALL)
    return re.sub(r"^ \* ?", "", comment[1], flags=re.MULTILINE).strip() + "\n" if comment else ""


def main(folder, *wheels):
    for path, text in (item for wheel in wheels for item in licenses_of(wheel).items()):
        target = pathlib.Path(folder, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
