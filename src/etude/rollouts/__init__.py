"""How experience is made: environments, demonstrations, evaluation in simulation."""
