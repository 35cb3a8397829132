"""Measuring: clocks, memory, pictures against a reference, records. It listens; the flow knows nothing of it."""
