"""How a module's forward is run. Executors know no models: they run callables and count what ran."""

from __future__ import annotations

from clearway.execution.eager import Eager
from clearway.execution.executor import EXECUTORS, automatic, executor, forget, pools

__all__ = ["EXECUTORS", "Eager", "automatic", "executor", "forget", "pools"]
