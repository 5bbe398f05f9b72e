"""Many runs of one experiment: searches over its settings, and repetitions with other seeds."""
