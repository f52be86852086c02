"""Writes a tiny random GGUF of one architecture: python scripts/random_gguf ARCH FILE [TYPE]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from random_gguf.archs import WRITERS
from random_gguf.model import Shape

if len(sys.argv) not in (3, 4) or sys.argv[1] not in WRITERS:
    sys.exit(f"usage: python scripts/random_gguf ARCH FILE [TYPE]; ARCH is one of {', '.join(WRITERS)}")
print(WRITERS[sys.argv[1]](Path(sys.argv[2]), Shape(), *(sys.argv[3:] or ["F32"])))
