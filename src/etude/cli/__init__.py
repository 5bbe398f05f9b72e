"""The `etude` command."""
