"""`python -m clearway` is the `clearway` command."""

from clearway.cli.main import entry

entry()
