"""A trainer of one's own, as the guide to custom trainers has it."""
