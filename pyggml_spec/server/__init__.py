"""The HTTP server behind `pyspec serve`. Its libraries are the package's extra `serve`; ``start.missing`` says what of them is not there."""
