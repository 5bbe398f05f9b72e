"""What the parts agree on. Plugins of one folder import each other: `from .shapes import STATE`."""

STATE, ACTION = 4, 2
