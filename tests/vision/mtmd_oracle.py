"""llama.cpp's own path of pictures, libmtmd over a libllama context: the oracle of prompts with pictures."""

import ctypes

import llama_cpp as L
import numpy as np
from llama_cpp import mtmd_cpp as M
from llama_oracle import _context, _decode, _model

from pyggml_spec.cache.kv import KVTypes
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.vision.encoder import repair_breaks

MARKER = "<__media__>"


def after_pictures(target, mmproj, text, files, greedy=8, n_ctx=2048, n_batch=512, gpu=False, kv="f16", threads=1):
    """Logits after a text with a MARKER for each of ``files``, F32 [n_vocab], so many greedy tokens, and the rows of each picture or part, F32 [n, n_embd]."""
    model = _model(target, gpu)
    ctx = _context(model, n_ctx, n_batch, threads, KVTypes(kv, kv))
    params = M.mtmd_context_params_default()
    params.use_gpu, params.print_timings, params.n_threads = gpu, False, threads  # warmed up, as llama-server does
    mtmd = M.mtmd_init_from_file(str(mmproj).encode(), model, params)
    assert mtmd, mmproj
    bitmaps = [
        M.mtmd_helper_bitmap_init_from_buf(mtmd, (ctypes.c_uint8 * len(data)).from_buffer_copy(data), len(data), False) for data in files
    ]
    chunks = M.mtmd_input_chunks_init()
    raw = text.encode()
    said = M.mtmd_input_text(text=raw, text_len=len(raw), add_special=True, parse_special=True)
    assert M.mtmd_tokenize(mtmd, chunks, ctypes.byref(said), (ctypes.c_void_p * len(bitmaps))(*bitmaps), len(bitmaps)) == 0
    rows, n_past = [], L.llama_pos(0)
    for i in range(M.mtmd_input_chunks_size(chunks)):
        chunk = M.mtmd_input_chunks_get(chunks, i)
        if M.mtmd_input_chunk_get_type(chunk) == M.MTMD_INPUT_CHUNK_TYPE_TEXT:
            assert M.mtmd_helper_eval_chunk_single(mtmd, ctx, chunk, n_past, 0, n_batch, True, ctypes.byref(n_past)) == 0
            continue
        assert M.mtmd_encode_chunk(mtmd, chunk) == 0
        shape = M.mtmd_input_chunk_get_n_tokens(chunk), L.llama_model_n_embd_inp(model)
        rows.append(np.ctypeslib.as_array(M.mtmd_get_output_embd(mtmd), shape).copy())
        with GGUFFile(mmproj) as file:
            repair_breaks(rows[-1], file)  # theirs are NaN at times
        values = rows[-1].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        decoded = M.mtmd_helper_decode_image_chunk(
            mtmd, ctx, chunk, values, n_past, 0, n_batch, ctypes.byref(n_past), M.mtmd_helper_post_decode_callback(), None
        )
        assert decoded == 0
    n_vocab, batch, position = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model)), L.llama_batch_init(1, 0, 1), n_past.value
    first = logits = np.ctypeslib.as_array(L.llama_get_logits_ith(ctx, -1), (n_vocab,)).copy()
    ids = []
    for _ in range(greedy):
        ids.append(int(logits.argmax()))
        (logits,) = _decode(ctx, batch, ids[-1:], position, n_vocab)
        position += 1
    for bitmap in bitmaps:
        M.mtmd_bitmap_free(bitmap)
    M.mtmd_input_chunks_free(chunks)
    M.mtmd_free(mtmd)
    L.llama_batch_free(batch)
    L.llama_free(ctx)
    L.llama_model_free(model)
    return first, ids, rows
