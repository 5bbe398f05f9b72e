"""What a search has learned of where a policy fails: Gaussian process regression on the episodes that it played.

Shape letters: N episodes, M vectors asked about, D numbers.
"""

from __future__ import annotations

import math

import numpy as np

from etude.simulation.environments.base import Array

SMOOTH, CURVED, NOISE = 0.2, 0.1, 0.05
"""Variance of what is smooth, of what is a polynomial of second degree, and of what no vector explains: chance, and
edges that are sharp. The polynomial carries what was learned to where nothing was tried: with it 18 of 138 failures of
a stand-in for the policy of `benchmarks/stress.py` were 1.0 deviations apart, without it 7 of 139."""
UNCLEAR, LEAST_SCALE = 4.0, 0.3
"""A number in which failures are as far from chance as chance alone may be, in squared standard errors, counts half;
and what all numbers count at least, for few failures show little."""
MOST_EPISODES = 1000
"""Episodes that are learned from, the latest: with so many a round takes 0.7 s to choose, on one core."""


class FailureModel:
    """How sure vectors are to be failures; 0 where nothing was tried, with much doubt.

    Args:
        white_ND: What was tried, in deviations.
        failed_N: What failed.
    """

    def __init__(self, white_ND: Array, failed_N: Array) -> None:
        self.scale_D = np.sqrt(LEAST_SCALE + (1.0 - LEAST_SCALE) * relevance(white_ND[failed_N]))
        self._known_ND = white_ND[-MOST_EPISODES:] * self.scale_D
        kernel_NN = self._kernel(self._known_ND, self._known_ND)
        self._factor_NN = np.linalg.cholesky(kernel_NN + NOISE * np.eye(len(kernel_NN)))
        half_N = np.linalg.solve(self._factor_NN, failed_N[-MOST_EPISODES:].astype(np.float64))
        self._weights_N = np.linalg.solve(self._factor_NN.T, half_N)

    def predict(self, white_MD: Array) -> tuple[Array, Array]:
        """Return how sure vectors are to fail, about 0 to 1, and one deviation of that, each (M,)."""
        asked_MD = white_MD * self.scale_D
        kernel_MN = self._kernel(asked_MD, self._known_ND)
        explained_NM = np.linalg.solve(self._factor_NN, kernel_MN.T)
        before_M = SMOOTH + CURVED * np.square(1.0 + np.square(asked_MD).mean(-1))
        left_M = np.maximum(0.0, before_M - np.square(explained_NM).sum(0))
        return kernel_MN @ self._weights_N, np.sqrt(left_M)

    def _kernel(self, one_ND: Array, other_MD: Array) -> Array:
        product_NM = one_ND @ other_MD.T / one_ND.shape[1]
        apart_NM = np.square(one_ND).mean(-1)[:, None] + np.square(other_MD).mean(-1)[None] - 2.0 * product_NM
        found: Array = SMOOTH * np.exp(-0.5 * np.maximum(0.0, apart_NM)) + CURVED * np.square(1.0 + product_NM)
        return found


def relevance(failures_ND: Array) -> Array:
    """Return how clearly failures differ from chance in each number, by mean or width, from 0 to 1, (D,)."""
    root = math.sqrt(len(failures_ND))
    shift_D = failures_ND.mean(0) * root
    spread_D = (np.square(failures_ND).mean(0) - 1.0) * root / math.sqrt(2.0)
    clear_D = np.maximum(np.square(shift_D), np.square(spread_D))
    found: Array = clear_D / (clear_D + UNCLEAR)
    return found
