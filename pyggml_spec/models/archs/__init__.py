"""One file per architecture, or family of them: each is a description that registers itself. Every file here is imported by ``registry``."""
