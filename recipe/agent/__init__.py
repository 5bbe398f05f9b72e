"""A model that learns to ask before it answers."""
