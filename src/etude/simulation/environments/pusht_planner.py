"""A planner for PushT: it tries straight pushes in a simulation of its own and executes the best, again and again.

The block moves only while it is pushed, so a push is known by where the finger touches the block, in which direction
it goes and how far. The planner simulates some hundred of them from the block's present pose, takes the one whose end
is nearest the goal (and not too far for the finger to go), goes there around the block, and pushes. When the block
is not where it should be by then, it plans again.

Its demonstrations are to be learned from, so it keeps well clear of the block on the way: a finger that clips a corner
changes the plan in a manner that nobody who sees only finger and block can foresee. The way counts by its length around
the block, so that a plan made halfway is the plan made at the beginning.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from etude.extras import import_extra
from etude.simulation.environments.base import Array

FINGER_RADIUS: Final = 15.0
TABLE: Final = (8.0, 504.0)
"""Where the finger may go, in both directions."""
_CLEARANCE: Final = 12.0
"""Space between finger and block where a push begins."""
_MARGIN: Final = 8.0
"""Space between finger and block on the way there."""
_SPACING: Final = 15.0
_REACH: Final = 160.0
"""The longest push."""
_TILTS: Final = (0.0, -0.35, 0.35)
_TURN_WEIGHT: Final = 45.0
"""Pixels that one radian is worth: what an end of the block moves by."""
_TRAVEL_WEIGHT: Final = 0.002
"""What a pixel of the way is worth, as a share of what there is to be done."""
_STEP_S: Final = 0.01
_FAST: Final = 70.0
"""How far ahead of the finger its target is on the way; half of it is what one step covers."""
_PACE: Final = 10.0
"""What a step of a push covers at most. All steps of a push are alike, the last one too: if the finger
slowed down towards the end, less than a pixel would decide between staying there and going on."""
_KEPT_WAY, _KEPT_SPEED = np.linalg.matrix_power(np.array([[0.99, 0.008], [-1.0, 0.8]]), 10)[0].tolist()
"""What a step of the environment leaves of the way to the target, and the way that a pixel per second goes in it: ten
times 10 ms of its controller, an acceleration of 100 times the way to the target less 20 times the velocity."""
_LANDED: Final = 0.5
_ARRIVED: Final = 4.0
_ASIDE: Final = 8.0
"""How far beside its line the finger may be in a push."""

Point = tuple[float, float]
Pose = tuple[float, float, float]


@dataclass(frozen=True)
class Push:
    """Put the finger at `start`, and push in a straight line to `end`."""

    start: Point
    end: Point
    cost: float
    """What remains to be done after it."""
    pose: Pose
    """Where the block is then expected: centre and angle."""


class PushTPlanner:
    """Decides where the finger of PushT goes.

    Args:
        goal: Position of the block's body at the goal, and its angle.
    """

    def __init__(self, goal: Sequence[float]) -> None:
        self._table = _Table()
        self._goal = self._table.centre_of((goal[0], goal[1], goal[2]))
        self._way: list[Point] = []
        self._push: Push | None = None
        self._before: Pose = (0.0, 0.0, 0.0)
        self._wait = 0

    def reset(self) -> None:
        """Forget the plan: a new episode begins."""
        self._way, self._push, self._wait = [], None, 0

    def act(self, finger: Point, block: Pose, velocity: Point) -> Array:
        """Return the target of the finger.

        Args:
            finger: Where the finger is.
            block: Position of the block's body, and its angle.
            velocity: How fast the finger is, in pixels per second.
        """
        centre = self._table.centre_of(block)
        if self._push is None or self._is_over(finger, centre):
            self._plan(finger, block)
        assert self._push is not None
        while self._way and math.dist(finger, self._way[0]) < (_ARRIVED if len(self._way) == 1 else 12.0):
            self._way.pop(0)
        if self._way:
            return np.array(_ahead(finger, self._way[0], _FAST), np.float32)
        start, end = self._push.start, self._push.end
        length = math.dist(start, end)
        done = max(_along(start, end, finger), 0.0)
        left = length - done
        step = left / max(1, math.ceil(left / _PACE))
        speed = _along((0.0, 0.0), (end[0] - start[0], end[1] - start[1]), velocity)
        share = (done + (step - _KEPT_SPEED * speed) / (1.0 - _KEPT_WAY)) / length
        target = (start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1]))
        return np.array(target, np.float32)

    def _is_over(self, finger: Point, centre: Pose) -> bool:
        """Whether the push is done, or the block or the finger has been moved by something else."""
        assert self._push is not None
        if self._way:
            return self._distance(centre, self._before) > 2.0
        start, end = self._push.start, self._push.end
        if math.dist(start, end) - _along(start, end, finger) < _LANDED or _beside(start, end, finger) > _ASIDE:
            return True
        self._wait += 1
        return self._wait > 40

    def _plan(self, finger: Point, block: Pose) -> None:
        self._before, self._wait = self._table.centre_of(block), 0
        outline = self._table.outline(block)
        found: list[Push] = []
        now = self._distance(self._before, self._goal)
        for start, direction in _contacts(outline):
            if push := self._try(block, start, direction, now):
                found.append(push)
        if (chosen := _choose(found, finger, _grown(outline), _TRAVEL_WEIGHT * now)) is not None:
            self._push, self._way = chosen
            return
        self._way, self._push = [], Push(finger, _ahead(finger, (256.0, 256.0), 30.0), now, self._before)

    def _try(self, block: Pose, start: Point, direction: Point, now: float) -> Push | None:
        """Simulate a push, and keep as much of it as is of use."""
        speed, hopeless = (200.0, 25.0) if now > 25.0 else (100.0, 12.0)
        best: Push | None = None
        for travelled, pose in self._table.push(block, start, direction, speed, _REACH):
            cost = self._distance(pose, self._goal)
            if best is None or cost < best.cost:
                end = (start[0] + travelled * direction[0], start[1] + travelled * direction[1])
                best = Push(start, end, cost, pose)
            elif cost > best.cost + hopeless:
                break
        return best if best is not None and best.cost < now - 0.3 else None

    @staticmethod
    def _distance(pose: Pose, other: Pose) -> float:
        turn = (pose[2] - other[2] + math.pi) % (2 * math.pi) - math.pi
        return math.hypot(pose[0] - other[0], pose[1] - other[1]) + _TURN_WEIGHT * abs(turn)


class _Table:
    """The physics of PushT, to try things in."""

    def __init__(self) -> None:
        env = import_extra("gym_pusht.envs.pusht", "sim").PushTEnv
        self._space = import_extra("pymunk", "sim").Space()
        self._space.gravity, self._space.damping = (0, 0), 0.0
        corners = ((5, 5), (506, 5), (506, 506), (5, 506), (5, 5))
        self._space.add(*(env.add_segment(self._space, a, b, 2) for a, b in pairwise(corners)))
        self._finger = env.add_circle(self._space, (0, 0), FINGER_RADIUS)
        self._block, self._shapes = env.add_tee(self._space, (256, 256), 0)
        self._cog = tuple(self._block.center_of_gravity)

    def _place(self, block: Pose) -> None:
        body = self._block
        body.angle = block[2]
        body.position = block[:2]
        body.velocity, body.angular_velocity = (0, 0), 0
        self._space.reindex_shapes_for_body(body)

    def centre_of(self, block: Pose) -> Pose:
        """Return the pose with the centre of gravity as its position."""
        x, y, angle = block
        c, s = math.cos(angle), math.sin(angle)
        return x + c * self._cog[0] - s * self._cog[1], y + s * self._cog[0] + c * self._cog[1], angle

    def outline(self, block: Pose) -> Any:
        """Return the block as a polygon."""
        geometry = import_extra("shapely.geometry", "sim")
        c, s = math.cos(block[2]), math.sin(block[2])
        return geometry.Polygon([(block[0] + c * x - s * y, block[1] + s * x + c * y) for x, y in _TEE])

    def push(
        self, block: Pose, start: Point, direction: Point, speed: float, reach: float
    ) -> Iterator[tuple[float, Pose]]:
        """Push from `start`; yield how far the finger has gone and where the block's centre is then."""
        self._place(block)
        finger = self._finger
        free = _MARGIN - 1.0  # it touches nothing so far
        finger.position = start[0] + free * direction[0], start[1] + free * direction[1]
        finger.velocity = (speed * direction[0], speed * direction[1])
        self._space.reindex_shapes_for_body(finger)
        pace = speed * _STEP_S
        for count in range(1, int((reach - free) / pace) + 1):
            self._space.step(_STEP_S)
            gone = free + count * pace
            x, y = start[0] + gone * direction[0], start[1] + gone * direction[1]  # nothing stops it
            if not (TABLE[0] < x < TABLE[1] and TABLE[0] < y < TABLE[1]):
                return
            yield gone, self.centre_of((*self._block.position, self._block.angle))


_TEE: Final = ((-60, 0), (60, 0), (60, 30), (15, 30), (15, 120), (-15, 120), (-15, 30), (-60, 30))


def _contacts(outline: Any) -> Iterator[tuple[Point, Point]]:
    """Yield places beside the block from which to push it, with directions."""
    away = FINGER_RADIUS + _CLEARANCE
    corners = list(outline.exterior.coords)
    turned = 1.0 if outline.exterior.is_ccw else -1.0
    for (ax, ay), (bx, by) in pairwise(corners):
        length = math.hypot(bx - ax, by - ay)
        tx, ty = (bx - ax) / length, (by - ay) / length
        nx, ny = ty * turned, -tx * turned  # outwards
        count = max(2, round(length / _SPACING))
        for index in range(count):
            at = length * (index + 0.5) / count
            touched = (ax + at * tx, ay + at * ty)
            for tilt in _TILTS:
                c, s = math.cos(tilt), math.sin(tilt)
                dx, dy = -(c * nx - s * ny), -(s * nx + c * ny)
                start = (touched[0] - away * dx, touched[1] - away * dy)
                if all(TABLE[0] < value < TABLE[1] for value in start) and _is_free(outline, start):
                    yield start, (dx, dy)


def _choose(pushes: list[Push], finger: Point, obstacle: Any, weight: float) -> tuple[Push, list[Point]] | None:
    """Return the push that leaves least to be done, its way counted, and the way; None where none can be reached."""
    best: tuple[float, Push, list[Point]] | None = None
    at_least = {push: push.cost + weight * math.dist(finger, push.start) for push in pushes}
    for push in sorted(pushes, key=at_least.__getitem__):
        if best is not None and at_least[push] >= best[0]:
            break
        way = find_way(obstacle, finger, push.start)
        if way is not None:
            total = push.cost + weight * sum(math.dist(*pair) for pair in pairwise([finger, *way]))
            if best is None or total < best[0]:
                best = total, push, way
    return best and best[1:]


def _is_free(outline: Any, point: Point) -> bool:
    geometry = import_extra("shapely.geometry", "sim")
    return bool(outline.distance(geometry.Point(point)) > FINGER_RADIUS + _MARGIN)


def _grown(outline: Any) -> Any:
    return outline.buffer(FINGER_RADIUS + _MARGIN, join_style="mitre")


def find_way(obstacle: Any, start: Point, end: Point) -> list[Point] | None:
    """Return the corners of the shortest way around an obstacle, the end included; None where there is none."""
    geometry = import_extra("shapely.geometry", "sim")
    inside = geometry.Point(start)
    first: list[Point] = []
    if obstacle.contains(inside):
        edge = obstacle.exterior
        exit_point = edge.interpolate(edge.project(inside))
        start = _ahead((inside.x, inside.y), (exit_point.x, exit_point.y), inside.distance(edge) + 1.0, beyond=True)
        first = [start]
    core = obstacle.buffer(-0.9, join_style="mitre")
    outer = obstacle.buffer(0.5, join_style="mitre").exterior.coords[:-1]
    nodes = [start, end, *(p for p in outer if all(TABLE[0] < value < TABLE[1] for value in p))]
    best = {0: 0.0}
    heap: list[tuple[float, int, list[Point]]] = [(0.0, 0, [])]
    while heap:
        length, at, way = heapq.heappop(heap)
        if at == 1:
            return [*first, *way]
        for to, point in enumerate(nodes):
            longer = length + math.dist(nodes[at], point)
            if to == at or longer >= best.get(to, math.inf):
                continue
            if not core.intersects(geometry.LineString([nodes[at], point])):
                best[to] = longer
                heapq.heappush(heap, (longer, to, [*way, point]))
    return None


def _ahead(finger: Point, goal: Point, most: float, *, beyond: bool = False) -> Point:
    """Return the goal, or a point on the way to it that is not farther than `most`."""
    distance = math.dist(finger, goal)
    if distance == 0.0 or (distance <= most and not beyond):
        return goal
    share = most / distance
    return finger[0] + share * (goal[0] - finger[0]), finger[1] + share * (goal[1] - finger[1])


def _along(start: Point, end: Point, point: Point) -> float:
    length = math.dist(start, end)
    dx, dy = (end[0] - start[0]) / length, (end[1] - start[1]) / length
    return (point[0] - start[0]) * dx + (point[1] - start[1]) * dy


def _beside(start: Point, end: Point, point: Point) -> float:
    length = math.dist(start, end)
    dx, dy = (end[0] - start[0]) / length, (end[1] - start[1]) / length
    return abs((point[0] - start[0]) * dy - (point[1] - start[1]) * dx)
