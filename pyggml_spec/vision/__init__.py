"""Pictures and sounds: decoded and checked (pictures.py, sounds.py), and turned into rows of a prompt by libmtmd's encoders (encoder.py)."""
