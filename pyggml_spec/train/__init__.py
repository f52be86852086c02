"""`pyspec train`: trains a drafter for a GGUF on that file's own answers. Needs torch (the extra `pyggml-spec[train]`), which nothing else imports."""
