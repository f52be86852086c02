"""The devices of one run: what `--device A,B` names, in the order in which layers go through them."""

from collections.abc import Sequence

from ..errors import DeviceError
from .device import Backend, Device, pick_device

MOST = 16  # devices of one run


def pick_devices(names: str | None = None) -> list[Device]:
    """The devices called ``names``, separated by commas; None for the one that ``pick_device`` picks.

    The CPU may be named more than once: every time is a backend of its own, which is how a split is tried without a second GPU.

    Raises:
        DeviceError: a name that no device has, an empty one, a GPU that is named twice, or too many.
    """
    if names is None:
        return [pick_device()]
    wanted = [name.strip() for name in str(names).split(",")]
    if not all(wanted):
        raise DeviceError(
            f"the list of devices {names!r} has an empty name; give names as `pyspec devices` lists them, separated by commas"
        )
    if len(wanted) > MOST:
        raise DeviceError(f"{len(wanted)} devices are named; a model is split over at most {MOST}")
    found = [pick_device(name) for name in wanted]
    for device in found:
        if device.kind != "cpu" and [other.name for other in found].count(device.name) > 1:
            raise DeviceError(f"{device.name} is named twice; a model is split over different devices")
    return found


def execution_order(found: Sequence[Device]) -> list[int]:
    """Which of the named devices computes first: CPUs, beside GPUs, have the first layers wherever they are named, because the last device has the
    head and the drafter too. Beside workers alone the order is the named one: a drafter on this machine is asked for by naming its CPU last."""
    first = any(device.kind in ("gpu", "igpu") for device in found)
    return sorted(range(len(found)), key=lambda i: first and found[i].kind != "cpu")


def open_backends(found: Sequence[Device], threads: int | None = None, kernels: str | None = None) -> list[Backend]:
    """A backend on each of these devices; the caller closes them. ``threads`` and ``kernels`` as of ``Backend``.

    Raises:
        DeviceError: a device that cannot be opened; none is open then.
    """
    opened: list[Backend] = []
    try:
        for device in found:
            # native kernels are the CPU's: asking for them beside a GPU asks nothing of the GPU
            asked = kernels if device.kind == "cpu" or len(found) == 1 else None
            opened.append(Backend(device, threads, asked))
    except BaseException:
        for backend in opened:
            backend.close()
        raise
    return opened
