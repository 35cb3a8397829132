"""Measuring: clocks, memory, pictures against a reference, records. It listens; the flow knows it not."""
