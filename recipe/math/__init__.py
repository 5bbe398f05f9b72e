"""Sums that can be checked."""
