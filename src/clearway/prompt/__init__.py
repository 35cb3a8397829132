"""Text -> Plan. No torch here."""

from clearway.prompt.chunks import Window, windows
from clearway.prompt.grammar import parse
from clearway.prompt.schedule import plan, unbuilt

__all__ = ["Window", "parse", "plan", "unbuilt", "windows"]
