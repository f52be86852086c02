"""The HTTP server of `pyspec serve`. Its libraries are the package's extra `serve`; ``start.missing`` names those that are not installed."""
