// Rows of earlier positions, and rows of an n-gram's hash in a table (qwen4exp). Positions lie in a ring of cache rows: row = position % rows.
#include "pgs.h"

#include <string.h>

static const char * row_of(const struct ggml_tensor * cache, const struct ggml_tensor * positions, int64_t t, int64_t back) {
    const int64_t at = ((const int32_t *) positions->data)[t] - back, each = positions->ne[0] / cache->ne[2];
    return at < 0 ? NULL : (const char *) cache->data + (at % cache->ne[1]) * cache->nb[1] + (t / each) * cache->nb[2];
}

static void run_rows_before(struct ggml_tensor * dst, int ith, int nth, void * back) {
    const struct ggml_tensor * cache = dst->src[0], * positions = dst->src[1];
    for (int64_t t = ith; t < dst->ne[1]; t += nth) {
        float *      out = (float *) ((char *) dst->data + t * dst->nb[1]);
        const char * row = row_of(cache, positions, t, (int64_t) (intptr_t) back);
        if (row == NULL) {
            memset(out, 0, (size_t) dst->ne[0] * sizeof(float));
        } else {
            memcpy(out, row, (size_t) dst->ne[0] * sizeof(float));
        }
    }
}

// cache: F32 [n, rows (, slots)]; positions: I32 [T], those of several slots in order. Returns F32 [n, T], the rows `back` positions before; 0 where there are none.
struct ggml_tensor * pgs_rows_before(struct ggml_context * ctx, struct ggml_tensor * cache, struct ggml_tensor * positions, int64_t back) {
    struct ggml_tensor * src[] = { cache, positions };
    return ggml_custom_4d(ctx, GGML_TYPE_F32, cache->ne[0], positions->ne[0], 1, 1, src, 2, run_rows_before, GGML_N_TASKS_MAX, (void *) (intptr_t) back);
}

// An n-gram's hash is the xor of its tokens' products; an end token and what is missing stand for the end of all before them.
static void run_ngram_rows(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const pgs_ngrams *         h = userdata;
    const struct ggml_tensor * cache = dst->src[0], * positions = dst->src[1];
    for (int64_t t = ith; t < dst->ne[1]; t += nth) {
        int32_t * out = (int32_t *) ((char *) dst->data + t * dst->nb[1]);
        uint64_t  mixed = 0;
        bool      cut = false;
        for (int64_t i = 0; i < h->longest; i++) {
            const char * row = cut ? NULL : row_of(cache, positions, t, i);
            const int64_t token = row == NULL ? h->end : (int64_t) *(const float *) row;
            cut = i > 0 && (cut || token == h->end);
            mixed ^= (uint64_t) token * h->multipliers[i];
            for (int64_t j = 0; i > 0 && j < h->heads; j++) {
                const int64_t head = (i - 1) * h->heads + j;
                out[head] = (int32_t) (mixed % h->sizes[head] + h->offsets[head]);
            }
        }
    }
}

// tokens: F32 [1, rows (, slots)], ids by position. Returns I32 [(longest - 1) * heads, T]: rows of the n-grams of 2 to `longest` tokens that end at each position.
struct ggml_tensor * pgs_ngram_rows(struct ggml_context * ctx, struct ggml_tensor * tokens, struct ggml_tensor * positions, const pgs_ngrams * hash) {
    struct ggml_tensor * src[] = { tokens, positions };
    const int64_t        n = (hash->longest - 1) * hash->heads;
    return ggml_custom_4d(ctx, GGML_TYPE_I32, n, positions->ne[0], 1, 1, src, 2, run_ngram_rows, GGML_N_TASKS_MAX, (void *) hash);
}
