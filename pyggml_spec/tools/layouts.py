"""Layouts of published drafters; unsupported ones are refused by name."""

from ..errors import ConvertError
from ..gguf_io import GGUFFile
from ..gguf_io.reader import brief
from . import eagle3, zlab
from .checkpoint import SUPPORTED, Files, Layout, architectures


def read_layout(config: dict, files: Files, target: GGUFFile) -> Layout:
    """The GGUF for ``target`` from ``config`` and the tensors of ``files`` (by name, with prefix). Raises ConvertError: an unsupported
    layout or feature, or a drafter for another target."""
    _refuse_other_layouts(config, files)
    return (eagle3 if eagle3.is_eagle3(config, files) else zlab).read_layout(config, files, target)


def _refuse_other_layouts(config: dict, files: Files) -> None:
    archs = architectures(config)
    named, dflash = " ".join(archs), isinstance(config.get("dflash_config"), dict)

    def any_name(*parts: str) -> str | None:
        return next((name for name in files if any(part in name for part in parts)), None)

    def any_arch(*parts: str) -> str | None:
        return next((arch for arch in archs if any(part in arch.lower() for part in parts)), None)

    ours = eagle3.is_eagle3(config, files)
    dspark = zlab.is_dspark(config, files)
    other_spark = any_arch("dspark") if not {*archs} & {*zlab.DSPARK} else None
    found = (
        ("a DeepSeek V4 or Gemma 4 DSpark", other_spark or any_name("hc_attn", "layer_scalar")),
        ("a Domino", any_name("domino") or any_arch("domino")),
        ("an EAGLE", None if ours else any_arch("eagle") or any_name("eagle")),
        ("an MTP", any_name("mtp.", "nextn.", "eh_proj") or any_arch("mtp", "nextn")),
        ("a speculators", "speculators_config" in config and not ours and not dspark and "speculators_config"),
        ("a reduced-vocabulary", None if ours or dspark else any_name("d2t", "t2d")),
    )
    for layout, sign in found:
        if sign:
            raise ConvertError(f"this is {layout} drafter (it has {brief(sign)}), which is not supported; {SUPPORTED}")
    if not ours and archs and not {*archs} & {*zlab.ARCHITECTURES, *zlab.DSPARK}:
        raise ConvertError(f"config.json names the architecture {brief(named)}; {SUPPORTED}")
    if not ours and not archs and not dflash and not dspark:
        raise ConvertError(f"config.json has neither architectures nor dflash_config; {SUPPORTED}")
