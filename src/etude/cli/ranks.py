"""The ranks that a recipe asks for, started on this machine: torchrun's agent, around this very command."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from etude.cli.output import is_main_rank, show_log

if TYPE_CHECKING:
    from etude.config.schema import ExperimentConfig

log = logging.getLogger("etude")


def start_ranks(config: ExperimentConfig, command: Sequence[str]) -> bool:
    """Run a command of ours in as many ranks as a recipe asks for; return whether there was anything to start.

    Under torchrun there are ranks already, and Ray starts its own.

    Args:
        config: What is to be trained.
        command: The command and its arguments, which every rank is started with.
    """
    from etude.config.recipe_file import asked_ranks

    ranks = asked_ranks(config.trainer)
    if "WORLD_SIZE" in os.environ:
        there = int(os.environ["WORLD_SIZE"])
        if ranks not in (1, there) and is_main_rank():
            show_log()
            log.warning("the recipe asks for %d ranks, and %d were started: the numbers are the same", ranks, there)
        return False
    if ranks == 1 or config.engine.type != "torch":
        return False
    _run(ranks, ["-m", "etude", *command])
    return True


def _run(ranks: int, arguments: Sequence[str]) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What a rank has to say it says itself, in a sentence; the agent would add its own stack to that.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        1, 1, ranks, run_id=f"etude-{os.getpid()}", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
        local_addr="localhost",
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        raise SystemExit(next((code for code in codes if code > 0), 1)) from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
