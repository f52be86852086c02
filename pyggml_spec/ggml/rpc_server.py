"""The process that serves devices to other machines; `pyspec worker` starts and restarts it.

    python -m pyggml_spec.ggml.rpc_server ENDPOINT THREADS CACHE DEVICE...

ENDPOINT is host:port, or fd:N for an inherited bound socket. CACHE is a folder, or empty. It ends when its standard input does.
"""

import os
import sys
import threading

from .device import device_handle, pick_device
from .library import ffi
from .rpc import library


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main(endpoint: str, threads: str, cache: str, *names: str) -> None:
    """Serves until it is killed; returns only if it cannot listen."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    handles = ffi.new("ggml_backend_dev_t[]", [device_handle(pick_device(name)) for name in names])
    folder = ffi.new("char[]", os.fsencode(cache)) if cache else ffi.NULL
    library().start_server(endpoint.encode(), folder, int(threads), len(names), handles)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.exit(1)
