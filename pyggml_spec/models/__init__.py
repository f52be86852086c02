"""One file per architecture. ``registry`` names them; ``blocks`` holds what they share."""
