"""What cannot be played is refused by the Ray engine before it connects to a cluster, or starts one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="ray is not installed (extra: ray)")
from etude.data import ReplayBuffer, Windows
from etude.engines.ray import RayEngine, cluster
from etude.errors import ConfigError
from etude.registry import ENVIRONMENT_REGISTRY
from etude.types.names import ACTION, STATE
from tests.unit.rollouts.test_online import GuidedPoint, make, online
from tests.unit.simulation.point_reach import PointReach


def wide() -> Windows:
    """Return demonstrations of something else."""
    return Windows({STATE: np.zeros((9, 7)), ACTION: np.zeros((9, 2))}, [9], {ACTION: [0]})


@pytest.mark.parametrize(
    "make_it, engine, message",
    [
        (lambda: online(env="point_reach"), {}, "point_reach comes without one; use label: own"),
        (lambda: online(share=0.0), {}, "share must lie between 0 and 1, got 0.0"),
        (lambda: online(share=1.0), {}, "share must lie between 0 and 1, got 1.0"),
        (lambda: online(buffer=ReplayBuffer(max_frames=3)), {}, "max_frames is 3, less than the 4 rows of a batch"),
        (lambda: online(buffer=ReplayBuffer(max_frames=7)), {"num_workers": 2}, "is 7, less than the 8 rows"),
        (lambda: online(wide()), {}, r"the demonstrations have observation.state \[7\].* differs"),
        (online, {"num_workers": 2, "strategy": "fsdp"}, "spread over ranks cannot act; train online with DDP"),
        (online, {"num_workers": 3}, "episodes_per_round is 2, too few for 3 ranks"),
    ],
)
def test_what_cannot_be_played_is_refused_before_a_cluster_is_looked_for(
    make_it: Any, engine: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, kind in {"point_reach": PointReach, "guided_point": GuidedPoint}.items():
        monkeypatch.setitem(ENVIRONMENT_REGISTRY._entries, name, kind)
    monkeypatch.setattr(cluster, "connected", None)  # whoever gets as far as that fails otherwise
    with pytest.raises(ConfigError, match=message) as raised:
        trainer = make(make_it())
        trainer.engine = RayEngine(**engine)
        trainer.fit()
    assert "\n" not in str(raised.value)
