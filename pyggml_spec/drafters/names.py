"""Names of drafters' files, as llama.cpp and publishers give them."""

KINDS = ("dflash", "dspark", "eagle3", "mtp-", "-assistant")  # those of the most tokens per step first; "mtp-" begins a name


def kind_of(name: str) -> int | None:
    """Which of KINDS the name of a GGUF has, in any case; None for names of other models."""
    name = name.rsplit("/", maxsplit=1)[-1].lower()
    return next((i for i, word in enumerate(KINDS) if (name.startswith(word) if word.endswith("-") else word in name)), None)
