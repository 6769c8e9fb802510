"""Checks the log of a build with -Xptxas=-v: python3 check_ptxas.py LOG

Fails if ptxas serialized wgmma (C7510 and others), or if an sm90 kernel spills registers or has arrays in local memory,
such as accumulators indexed by a loop that was not unrolled. Lists what other kernels spill.
"""

import re
import sys

# The sm80 family compiles for sm_80 and sm_90, the sm90 family for sm_90a.
ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(sm_\w+)'")
LOCAL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def main(path):
    entries, local, serialized = {}, [], []
    name = arch = None
    for line in open(path, errors="replace"):
        if "wgmma" in line and "serialized" in line:
            serialized.append(line.strip())
        elif found := ENTRY.search(line):
            name, arch = found.groups()
            entries[arch] = entries.get(arch, 0) + 1
        elif (found := LOCAL.search(line)) and name:
            if any(map(int, found.groups())):
                local.append((arch, name, line.strip()))
            name = None
    print("ptxas compiled", ", ".join(f"{count} entries for {arch}" for arch, count in sorted(entries.items())))
    for arch, name, what in local:
        print(f"local memory on {arch}: {what}: {name[:160]}")
    for line in serialized:
        print(f"serialized wgmma: {line}")
    if "sm_90a" not in entries or "sm_80" not in entries:
        sys.exit("the log shows no kernels for sm_80 or none for sm_90a: was it compiled with -Xptxas=-v?")
    if serialized or any(arch == "sm_90a" for arch, *_ in local):
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
