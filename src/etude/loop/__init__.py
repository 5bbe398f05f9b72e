"""The loop: how a batch becomes an update, what is recorded of it, and how all of it comes back after a kill."""
