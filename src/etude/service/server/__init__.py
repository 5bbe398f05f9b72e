"""A training service over HTTP that the official Tinker client can use: `etude serve`."""
