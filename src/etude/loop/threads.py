"""How many CPU threads a rank calculates with."""

from __future__ import annotations

import os

import torch
from torch import nn

from etude.loop.strategy import count_parameters

SMALL_POLICY = 1_000_000
"""Parameters below which one CPU thread is faster than several."""


def choose_threads(policy: nn.Module, wanted: int | None, device: torch.device) -> int:
    """Take as many threads as are wanted, or one for a small policy on a CPU; return how many there were before."""
    before = torch.get_num_threads()
    if wanted is None and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # Threads that wait for each other at every small matrix cost more than they bring: a 30k-parameter MLP
        # took 130 ms a step with two threads on two busy cores, and 1 ms with one.
        wanted = 1 if count_parameters(policy)[1] < SMALL_POLICY else None
    if wanted is not None:
        torch.set_num_threads(wanted)
    return before
