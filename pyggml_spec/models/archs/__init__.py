"""One file per architecture or family, a description that registers itself; ``registry`` imports all of them."""
