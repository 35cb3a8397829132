"""How a module's forward is run. Executors know no models: they run callables and count what ran."""

from clearway.execution.eager import Eager

__all__ = ["Eager"]
