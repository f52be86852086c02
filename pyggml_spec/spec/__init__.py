"""The step engine's graphs, the speculative loop, acceptance and statistics."""
