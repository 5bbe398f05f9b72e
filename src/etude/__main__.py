"""`python -m etude` is the `etude` command."""

from etude.cli.main import main

if __name__ == "__main__":
    main()
