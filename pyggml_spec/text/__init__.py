"""Text in and out of tokens: llama.cpp's own tokenizer, incremental decoding, stop strings."""
