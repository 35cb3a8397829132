"""`python -m clearway` is the `clearway` command."""

from clearway.cli import entry

entry()
