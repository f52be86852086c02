"""Writes the C source of the extension module ``pyggml_spec._mtmd``: cffi in API mode over libmtmd, llama.cpp's encoders of pictures. It is a module of its own,
so that only programs with pictures load that library.

    python mtmd_ffi.py OUT.c
"""

import sys

from cffi import FFI

DECLARATIONS = """
enum ggml_log_level { GGML_LOG_LEVEL_ERROR, ... };
enum llama_flash_attn_type { LLAMA_FLASH_ATTN_TYPE_AUTO, LLAMA_FLASH_ATTN_TYPE_DISABLED, LLAMA_FLASH_ATTN_TYPE_ENABLED, ... };
enum mtmd_input_chunk_type { MTMD_INPUT_CHUNK_TYPE_TEXT, MTMD_INPUT_CHUNK_TYPE_IMAGE, MTMD_INPUT_CHUNK_TYPE_AUDIO, ... };
struct llama_model; struct mtmd_context; struct mtmd_bitmap; struct mtmd_image_tokens; struct mtmd_input_chunk; struct mtmd_input_chunks;
typedef struct ggml_backend_device * ggml_backend_dev_t;
struct mtmd_input_text { const char * text; size_t text_len; bool add_special; bool parse_special; };
struct mtmd_input_part { const struct mtmd_input_text * text; const struct mtmd_bitmap * bitmap; };
struct mtmd_context_params { bool use_gpu; ggml_backend_dev_t device; bool print_timings; int n_threads; enum llama_flash_attn_type flash_attn_type; bool warmup; int image_min_tokens; int image_max_tokens; ...; };
struct mtmd_decoder_pos { uint32_t t; uint32_t x; uint32_t y; uint32_t z; };
struct mtmd_context_params mtmd_context_params_default(void);
struct mtmd_context * mtmd_init_from_file(const char * path, const struct llama_model * text_model, const struct mtmd_context_params params);
void mtmd_free(struct mtmd_context *);
bool mtmd_decode_use_non_causal(const struct mtmd_context *, const struct mtmd_input_chunk *);
bool mtmd_decode_use_mrope(const struct mtmd_context *);
bool mtmd_support_vision(const struct mtmd_context *);
int mtmd_get_audio_sample_rate(const struct mtmd_context *);
struct mtmd_bitmap * mtmd_bitmap_init(uint32_t nx, uint32_t ny, const unsigned char * data);
struct mtmd_bitmap * mtmd_bitmap_init_from_audio(size_t n_samples, const float * data);
void mtmd_bitmap_free(struct mtmd_bitmap *);
struct mtmd_input_chunks * mtmd_input_chunks_init(void);
size_t mtmd_input_chunks_size(const struct mtmd_input_chunks *);
const struct mtmd_input_chunk * mtmd_input_chunks_get(const struct mtmd_input_chunks *, size_t);
void mtmd_input_chunks_free(struct mtmd_input_chunks *);
enum mtmd_input_chunk_type mtmd_input_chunk_get_type(const struct mtmd_input_chunk *);
const int32_t * mtmd_input_chunk_get_tokens_text(const struct mtmd_input_chunk *, size_t * n);
const struct mtmd_image_tokens * mtmd_input_chunk_get_tokens_image(const struct mtmd_input_chunk *);
size_t mtmd_input_chunk_get_n_tokens(const struct mtmd_input_chunk *);
int32_t mtmd_input_chunk_get_n_pos(const struct mtmd_input_chunk *);
struct mtmd_decoder_pos mtmd_image_tokens_get_decoder_pos(const struct mtmd_image_tokens *, int32_t pos_0, size_t i);
int32_t mtmd_tokenize_from_parts(const struct mtmd_context *, struct mtmd_input_chunks * output, const struct mtmd_input_part * const * parts,
                                 size_t n_parts, bool add_special);
size_t mtmd_helper_get_n_tokens(const struct mtmd_input_chunks *);
int32_t mtmd_encode_chunk(struct mtmd_context *, const struct mtmd_input_chunk *);
float * mtmd_get_output_embd(struct mtmd_context *);
static void keep_errors(void);
static const char * kept_errors(void);
"""

SOURCE = """
#include "mtmd.h"
#include "mtmd-helper.h"
#include <stdio.h>
#include <string.h>
// What libmtmd logs as an error is kept for the sentence that it becomes part of.
static char errors[2048];
static void keep_error(enum ggml_log_level level, const char * text, void * user_data) {
    (void) user_data;
    if (level == GGML_LOG_LEVEL_ERROR) {
        const size_t used = strlen(errors), start = used + strlen(text) < sizeof(errors) ? used : 0;
        snprintf(errors + start, sizeof(errors) - start, "%s", text);
    }
}
// From now on, and none of before.
static void keep_errors(void) {
    errors[0] = 0;
    mtmd_helper_log_set(keep_error, NULL);
}
static const char * kept_errors(void) { return errors; }
"""


def main(out: str) -> None:
    ffi = FFI()
    ffi.cdef(DECLARATIONS)
    ffi.set_source("pyggml_spec._mtmd", SOURCE, py_limited_api=True)
    ffi.emit_c_code(out)


if __name__ == "__main__":
    main(sys.argv[1])
