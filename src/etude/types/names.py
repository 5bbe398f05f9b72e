"""What LeRobot calls the features that robots have in common."""

from __future__ import annotations

STATE = "observation.state"
ENVIRONMENT_STATE = "observation.environment_state"
ACTION = "action"


def image_name(camera: str) -> str:
    """Return the feature that holds the images of a camera."""
    return f"observation.images.{camera}"
