"""Behaviour cloning: imitate the recorded actions."""

from __future__ import annotations

from typing import Any


class BehaviorCloning:
    """Take the policy's own imitation loss: what `Trainer` does without an algorithm, by name."""

    def loss(self, policy: Any, batch: Any) -> Any:
        """Return the policy's loss on a batch of recorded actions."""
        return policy(batch)
