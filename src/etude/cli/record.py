"""`etude record`: demonstrations from an expert, a script or a policy, as a LeRobot dataset."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Sequence
from pathlib import Path

from etude.cli.acting import find_policy, read_options
from etude.cli.counting import Counting
from etude.cli.environments import find_environments, plain_name
from etude.cli.output import say


def record_demonstrations(
    envs: Sequence[str],
    root: Path | None,
    *,
    episodes: int,
    policy: str,
    seed: int,
    noise: float,
    noise_share: float,
    noise_rate: float,
    noise_steps: int,
    keep_failures: bool,
    rewards: bool,
    cameras: str | None,
    size: int | None,
    images: str,
    settings: Sequence[str],
    workers: int | None = None,
) -> None:
    """Record, or go on with a recording, and say what there is."""
    gc.enable()  # switched off for the start by `main`
    options = read_options(settings, cameras, size)
    envs = find_environments(envs)
    root = root or Path("data") / plain_name(envs)
    from etude.simulation.record import Noise, record

    demonstrator = find_policy(policy)
    counting = Counting("episode", episodes * len(envs))
    try:
        done = record(
            list(envs), root, episodes=episodes, policy=demonstrator, policy_name=policy, seed=seed,
            noise=Noise(noise, noise_share, noise_rate, noise_steps), keep_failures=keep_failures, rewards=rewards,
            options=options, images=images, workers=workers,
            on_episode=lambda saved, attempts: counting.show(saved, f"{attempts} attempts"),
        )  # fmt: skip
    finally:
        counting.close()
    made = f" in {done.seconds:.1f} s" if done.env_steps else ", all of them there already"
    say(f"{done.episodes} episodes, {done.frames} frames, {done.attempts} attempts{made}")
    say(f"dataset: {done.root}")
    say(f"look at it: etude data inspect {shlex.quote(str(done.root))}")
