"""Pictures: decoded and checked (pictures.py), and turned into rows of a prompt by libmtmd's encoders (encoder.py)."""
