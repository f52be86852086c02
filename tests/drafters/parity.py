"""Comparing a session with a drafter in llama.cpp (llama_oracle.py), block after block."""

UB = 32  # tokens of a micro-batch, and of a chunk
LAST = 3 * UB + 7
LENGTHS = (0, 1, 2, 3, 4, 4, 0, 0, 2, 4, 1, 1, 3)


def disagreement(session, oracle, blocks, lengths=LENGTHS):
    """The first block whose drafts differ, None if none does; ``lengths``: how many drafts of each block are accepted."""
    engine, width = session.engine, session.engine.options.width
    for i in range(blocks):
        result, accepted = engine.fused_step(), min(lengths[i % len(lengths)], width - 1)
        if result.tokens[1:].tolist() != oracle.draft(width):
            return i
        ids, _ = oracle.verify(result.tokens[1:].tolist(), accepted)
        assert result.ids.tolist() == ids.tolist(), f"verified ids of block {i}"
        engine.accept(accepted + 1, int(result.ids[accepted]))
    return None
