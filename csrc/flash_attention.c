// Attention over the first `kv_bucket` cache rows, a multiple of 256, so that graphs change only with the bucket. The exact mask is computed on the device.
#include "pgs.h"

enum { MASK_SCRATCH = 16 << 20, MASK_PIECES = 64 };  // bytes of F32 values of a mask at a time, as far as so many pieces allow

// F32, 0 where visible and else -inf, of the query rows of `q_last` over `near`, F32 [kv_bucket, rows].
static struct ggml_tensor * hidden(struct ggml_context * ctx, struct ggml_tensor * near, struct ggml_tensor * q_last, struct ggml_tensor * q_first) {
    struct ggml_tensor * seen = ggml_step(ctx, ggml_add(ctx, near, q_last));
    if (q_first != NULL) {
        seen = ggml_mul(ctx, seen, ggml_step(ctx, ggml_scale_bias(ctx, ggml_add(ctx, near, q_first), -1.0f, 1.0f)));
    }
    return ggml_log(ctx, seen);
}

static struct ggml_tensor * some_rows(struct ggml_context * ctx, struct ggml_tensor * t, int64_t first, int64_t rows) {
    return t == NULL || (first == 0 && rows == t->ne[1]) ? t : ggml_view_2d(ctx, t, t->ne[0], rows, t->nb[1], (size_t) first * t->nb[1]);
}

// Rows of a mask that are computed at a time. The number of pieces is a power of two: masks of most lengths are graphs of the same form.
static int64_t rows_at_once(int64_t kv_bucket, int64_t T) {
    int64_t pieces = 1;
    while (pieces < MASK_PIECES && pieces < T && kv_bucket * T / pieces > MASK_SCRATCH / (int64_t) sizeof(float)) {
        pieces *= 2;
    }
    return (T + pieces - 1) / pieces;
}

// mask_base: F32 [rows], 0.5 - position of each cache row (the half keeps comparisons away from the edge); q_last: F32 [1, T], the last visible position of
// each query row; q_first: F32 [1, T] or NULL, the first one (sliding windows). With `slots`, the T rows are those of several slots in order, and mask_base
// may be F32 [rows, slots]. Returns F16 [kv_bucket, T], with slots [kv_bucket, T / slots, 1, slots]: 0 where visible, else -inf. With a `level`, a native node.
// The F32 values of a large mask, twice its size, are computed piece by piece.
struct ggml_tensor * pgs_kv_mask(struct ggml_context * ctx, struct ggml_cgraph * gf, struct ggml_tensor * mask_base, struct ggml_tensor * q_last,
                                   struct ggml_tensor * q_first, int64_t kv_bucket, int64_t slots, const pgs_level * level) {
    const int64_t T = q_last->ne[1], rows = rows_at_once(kv_bucket, T);
    if (level != NULL) {
        return pgs_mask(ctx, mask_base, q_last, q_first, kv_bucket, slots);
    }
    struct ggml_tensor * near, * mask;
    if (mask_base->ne[1] == 1) {
        near = ggml_repeat_4d(ctx, ggml_view_1d(ctx, mask_base, kv_bucket, 0), kv_bucket, rows, 1, 1);
    } else {
        near = ggml_view_3d(ctx, mask_base, kv_bucket, 1, slots, mask_base->nb[1], mask_base->nb[1], 0);
        near = ggml_reshape_2d(ctx, ggml_repeat_4d(ctx, near, kv_bucket, T / slots, slots, 1), kv_bucket, T);
    }
    if (near->ne[1] == T) {
        mask = ggml_cast(ctx, hidden(ctx, near, q_last, q_first), GGML_TYPE_F16);
    } else {
        mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, kv_bucket, T);
        for (int64_t first = 0; first < T; first += rows) {
            const int64_t        n    = first + rows < T ? rows : T - first;
            struct ggml_tensor * some = hidden(ctx, some_rows(ctx, near, 0, n), some_rows(ctx, q_last, first, n), some_rows(ctx, q_first, first, n));
            ggml_build_forward_expand(gf, ggml_cpy(ctx, some, some_rows(ctx, mask, first, n)));  // now: its readers do not depend on it
        }
    }
    return slots > 1 ? ggml_reshape_4d(ctx, mask, kv_bucket, T / slots, 1, slots) : mask;
}

// q: F32 [head_size, n_head, T]; cache_k, cache_v: [head_size * n_head_kv, n_rows (, slots)]; returns F32 [head_size * n_head, T].
// The mask determines the number of slots; each attends to its own cache rows. `sinks`: F32 [n_head] or NULL, per-head scores without a value. `cap`: scores are
// cap * tanh(score / cap), 0 for none. Native
// kernels at `level` where supported; they have neither sinks nor caps.
struct ggml_tensor * pgs_flash_attention(struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * cache_k,
                                 struct ggml_tensor * cache_v, struct ggml_tensor * mask, int64_t n_head_kv, int64_t kv_bucket, float scale,
                                 float cap, struct ggml_tensor * sinks, const pgs_level * level) {
    const int64_t size_k = cache_k->ne[0] / n_head_kv, size_v = cache_v->ne[0] / n_head_kv, slots = mask->ne[3];
    const size_t  head_k = ggml_row_size(cache_k->type, size_k), head_v = ggml_row_size(cache_v->type, size_v);
    struct ggml_tensor * k, * v;
    if (slots > 1) {
        k = ggml_view_4d(ctx, cache_k, size_k, kv_bucket, n_head_kv, slots, cache_k->nb[1], head_k, cache_k->nb[2], 0);
        v = ggml_view_4d(ctx, cache_v, size_v, kv_bucket, n_head_kv, slots, cache_v->nb[1], head_v, cache_v->nb[2], 0);
        q = ggml_view_4d(ctx, q, q->ne[0], q->ne[1], q->ne[2] / slots, slots, q->nb[1], q->nb[2], q->nb[2] * (q->ne[2] / slots), 0);
    } else {
        k = ggml_view_3d(ctx, cache_k, size_k, kv_bucket, n_head_kv, cache_k->nb[1], head_k, 0);
        v = ggml_view_3d(ctx, cache_v, size_v, kv_bucket, n_head_kv, cache_v->nb[1], head_v, 0);
    }
    q = ggml_permute(ctx, q, 0, 2, 1, 3);
    struct ggml_tensor * out = level != NULL && sinks == NULL && cap == 0.0f ? pgs_attention_node(ctx, level, q, k, v, mask, scale) : NULL;
    if (out == NULL) {
        out = ggml_flash_attn_ext(ctx, q, k, v, mask, scale, 0.0f, cap);
        ggml_prec_set_acc(out, GGML_PREC_F32);
        ggml_flash_attn_ext_add_sinks(out, sinks);
    }
    return ggml_reshape_2d(ctx, out, out->ne[0] * out->ne[1], out->ne[2] * out->ne[3]);
}
