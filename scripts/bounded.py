"""Run a command, and end it with everything it started when it takes longer than so many minutes.

    python scripts/bounded.py MINUTES COMMAND...

Processes are asked by SIGABRT first, upon which pytest's print where they are: the tests that were running have their
names in there. The exit code is the command's, or 124 as that of timeout(1).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 5.0
LIMIT_EXIT_CODE = 124


def main(minutes: str, *command: str) -> int:
    """Run the command and return its exit code."""
    limit_s = 60 * float(minutes)
    # The command stays in the terminal's group: Ctrl-C reaches it as ever, and it is waited for all the same.
    signal.signal(signal.SIGINT, lambda *_: None)
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: child.send_signal(number))
    try:
        code = child.wait(timeout=limit_s)
        return code if code >= 0 else 128 - code
    except subprocess.TimeoutExpired:
        print(f"\nbounded: no end within {limit_s / 60:g} minutes; this is where it was:", file=sys.stderr, flush=True)
    end(child)
    print(f"bounded: ended after {limit_s / 60:g} minutes: {' '.join(command)}", file=sys.stderr, flush=True)
    return LIMIT_EXIT_CODE


def end(child: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants, those in sessions of their own included."""
    family = descendants(child.pid)
    send(family, signal.SIGABRT)
    deadline = time.monotonic() + GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    send(family | descendants(child.pid), signal.SIGKILL)
    child.wait(timeout=GRACE_S)


def send(family: dict[int, str], number: signal.Signals) -> None:
    """Send a signal to processes that are still the ones they were."""
    for process, started in family.items():
        if table().get(process, ("", ""))[1] == started:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue


def descendants(root: int) -> dict[int, str]:
    """Return a process and all below it, with the times they started."""
    known = table()
    found = {root: known[root][1]} if root in known else {}
    grew = True
    while grew:
        below = {pid: started for pid, (parent, started) in known.items() if parent.isdigit() and int(parent) in found}
        grew = not below.keys() <= found.keys()
        found |= below
    return found


def table() -> dict[int, tuple[str, str]]:
    """Return parent and starting time of every process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        found[int(path.parent.name)] = (fields[1], fields[19])
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
