// Attention over a padded span: the first `span` cache rows, span a multiple of 256, so that a graph changes only when the sequence
// crosses a span boundary. The mask is exact and made on the device; 1 MB of mask per step at 32k tokens is never uploaded.
#include "pgs.h"

// kv_near: F32 [rows], 0.5 - position of each cache row (positions are whole numbers: the half keeps every comparison away from the
// edge); q_last: F32 [1, T], the last position that each query row sees; q_first: F32 [1, T] or NULL, the first one (sliding windows).
// Returns F16 [span, T]: 0 where visible, -inf elsewhere, by log(step(q_last - position + 0.5)).
struct ggml_tensor * pgs_span_mask(struct ggml_context * ctx, struct ggml_tensor * kv_near, struct ggml_tensor * q_last,
                                   struct ggml_tensor * q_first, int64_t span) {
    struct ggml_tensor * near = ggml_repeat_4d(ctx, ggml_view_1d(ctx, kv_near, span, 0), span, q_last->ne[1], 1, 1);
    struct ggml_tensor * seen = ggml_step(ctx, ggml_add(ctx, near, q_last));
    if (q_first != NULL) {
        seen = ggml_mul(ctx, seen, ggml_step(ctx, ggml_scale_bias(ctx, ggml_add(ctx, near, q_first), -1.0f, 1.0f)));
    }
    return ggml_cast(ctx, ggml_log(ctx, seen), GGML_TYPE_F16);
}

// q: F32 [head_size, n_head, T]; cache_k, cache_v: [head_size * n_head_kv, n_rows]; returns F32 [head_size * n_head, T].
struct ggml_tensor * pgs_fa_span(struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * cache_k,
                                 struct ggml_tensor * cache_v, struct ggml_tensor * mask, int64_t n_head_kv, int64_t span, float scale) {
    const int64_t size_k = cache_k->ne[0] / n_head_kv;
    const int64_t size_v = cache_v->ne[0] / n_head_kv;
    struct ggml_tensor * k = ggml_view_3d(ctx, cache_k, size_k, span, n_head_kv, cache_k->nb[1], ggml_row_size(cache_k->type, size_k), 0);
    struct ggml_tensor * v = ggml_view_3d(ctx, cache_v, size_v, span, n_head_kv, cache_v->nb[1], ggml_row_size(cache_v->type, size_v), 0);
    struct ggml_tensor * out = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), k, v, mask, scale, 0.0f, 0.0f);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    return ggml_reshape_2d(ctx, out, out->ne[0] * out->ne[1], out->ne[2]);
}
