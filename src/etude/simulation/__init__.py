"""Simulators: environments, who acts in them, demonstrations, evaluation, films."""
