"""Run a command of ours as a child that does not outlive its parent: `python -m etude.cli.child PID train ...`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

LOOK_EVERY_S = 0.5


def end_with(parent: int) -> None:
    """Ask this process to stop, as Ctrl-C would, when its parent is gone: it saves, and can go on another time."""
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run the command that the arguments name."""
    parent = int(sys.argv[1])
    sys.argv = ["etude", *sys.argv[2:]]
    threading.Thread(target=end_with, args=(parent,), name="parent", daemon=True).start()
    from etude.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
