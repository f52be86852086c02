"""The devices of one run: what `--device A,B` names, in execution order."""

from collections.abc import Sequence

from ..errors import DeviceError
from .device import Backend, Device, pick_device

MAX_DEVICES = 16


def pick_devices(names: str | None = None) -> list[Device]:
    """The devices in the comma-separated list ``names``; None for ``pick_device()``.

    The CPU may be named several times, each a backend of its own; that tests a split without a second GPU.

    Raises:
        DeviceError: an unknown or empty name, a GPU named twice, or too many devices.
    """
    if names is None:
        return [pick_device()]
    wanted = [name.strip() for name in str(names).split(",")]
    if not all(wanted):
        raise DeviceError(
            f"the list of devices {names!r} has an empty name; give names as `pyspec devices` lists them, separated by commas"
        )
    if len(wanted) > MAX_DEVICES:
        raise DeviceError(f"{len(wanted)} devices are named; a model is split over at most {MAX_DEVICES}")
    found = [pick_device(name) for name in wanted]
    for device in found:
        if device.kind != "cpu" and [other.name for other in found].count(device.name) > 1:
            raise DeviceError(f"{device.name} is named twice; a model is split over different devices")
    return found


def execution_order(found: Sequence[Device]) -> list[int]:
    """Indices into ``found`` in execution order. Next to GPUs, CPUs have the first layers: the last device also has the head and the drafter.
    With workers only, the named order holds."""
    first = any(device.kind in ("gpu", "igpu") for device in found)
    return sorted(range(len(found)), key=lambda i: first and found[i].kind != "cpu")


def open_backends(found: Sequence[Device], threads: int | None = None, kernels: str | None = None) -> list[Backend]:
    """One backend per device; the caller closes them. ``threads`` and ``kernels`` as of ``Backend``.

    Raises:
        DeviceError: a device cannot be opened; none stays open then.
    """
    opened: list[Backend] = []
    try:
        for device in found:
            level = kernels if device.kind == "cpu" or len(found) == 1 else None  # native kernels are for CPUs only
            opened.append(Backend(device, threads, level))
    except BaseException:
        for backend in opened:
            backend.close()
        raise
    return opened
