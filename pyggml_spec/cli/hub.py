"""-hf and -hfd: models from the Hugging Face hub, as in llama.cpp's tools."""

from typing import Any

import click

from .terminal import progress_line

HUB = [
    click.option("-hf", "-hfr", "--hf-repo", metavar="REPO[:QUANT]",
                 help="Target from the Hugging Face hub (USER/MODEL). Default of QUANT: Q4_K_M, else Q8_0, else the first file."),
    click.option("-hff", "--hf-file", metavar="NAME", help="This file of the repository, instead of QUANT."),
    click.option("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf", "hf_repo_draft", metavar="REPO[:QUANT]",
                 help="The same for the drafter; prefers files named dflash-*, dspark-*, eagle3-* or mtp-*."),
]  # fmt: skip


def fetched(values: dict[str, Any]) -> tuple[str | None, Any]:
    """Takes the files out of ``values``: the target and its drafters, fetched where they are named by repository."""
    target, draft = values.pop("target"), values.pop("draft")
    hf_repo, hf_file, hf_repo_draft = (values.pop(name) for name in ("hf_repo", "hf_file", "hf_repo_draft"))
    draft = None if not draft else draft[0] if len(draft) == 1 else draft
    for name, files in (("-m", (target,)), ("-md", draft if isinstance(draft, tuple) else (draft,))):
        if "" in files:
            raise click.UsageError(f"the name that {name} gives is empty; name a GGUF file")
    for name, repo, file in (("-hf", hf_repo, target), ("-hfd", hf_repo_draft, draft)):
        if repo is not None and file is not None:
            raise click.UsageError(f"{name} {repo} and {'-m' if name == '-hf' else '-md'} {file} both name a model; give one of them")
    if hf_file is not None and hf_repo is None:
        raise click.UsageError("-hff names a file of a repository, so it needs -hf")
    if hf_repo is not None or hf_repo_draft is not None:
        from ..hub import fetch

        with progress_line() as progress:
            target = target if hf_repo is None else fetch(hf_repo, file=hf_file, progress=progress)
            draft = draft if hf_repo_draft is None else fetch(hf_repo_draft, drafter=True, progress=progress)
    return target, draft
