"""Listening sockets: addresses, and unix sockets, whose files are removed with them."""

import contextlib
import os
import socket
import stat
from collections.abc import Sequence
from typing import Any

from ..errors import PyspecError

BACKLOG = 2048  # connections that wait to be accepted


def listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """A listening socket per address; what ends with ".sock" is the path of a unix socket.

    Raises:
        PyspecError: an address cannot be had.
    """
    made: list[socket.socket] = []
    try:
        for host in hosts:
            sock = _listen_unix(host) if is_path(host) else _listen_tcp(host, port)
            made.append(sock)
            sock.listen(BACKLOG)
            sock.setblocking(False)
            port = port if is_path(host) else port or sock.getsockname()[1]
    except BaseException:
        for sock in made:
            sock.close()
        raise
    return made


class _UnixListener(socket.socket):
    """It removes its file when it is closed."""

    _file: tuple[str, int] | None = None

    def bind(self, path: Any) -> None:
        super().bind(path)
        self._file = path, os.stat(path).st_ino

    def close(self) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            if file is not None and os.stat(file[0]).st_ino == file[1]:
                os.unlink(file[0])
        super().close()


def is_path(host: str) -> bool:
    return host.endswith(".sock")


def address(scheme: str, host: str, sock: socket.socket) -> str:
    """Where to request, as it is shown."""
    if is_path(host):
        return f"unix:{host}"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}/"


def _listen_tcp(host: str, port: int) -> socket.socket:
    sock = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        return sock
    except (OSError, UnicodeError) as error:
        if sock is not None:
            sock.close()
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PyspecError(f"{host}:{port} cannot be listened at: {why}; choose another `port` or `host`") from None


def _listen_unix(path: str) -> socket.socket:
    """The file is for its user, and for the group if the umask allows that; one that a killed server left is replaced."""
    if not hasattr(socket, "AF_UNIX"):
        raise PyspecError(f"{path} is the path of a unix socket, which this system does not have; give `host` an address")
    sock = _UnixListener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_abandoned(path)
        sock.bind(path)
        os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & 0o660)  # before it listens
        return sock
    except OSError as error:
        sock.close()
        raise PyspecError(f"{path} cannot be listened at: {error.strerror or error}; choose another `host`") from None


def _remove_abandoned(path: str) -> None:
    """Raises OSError: another server listens there, or it is no socket."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError("there is a file of this name, which is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except PermissionError:
            raise
        except OSError:
            pass
    raise OSError("another server listens there")
