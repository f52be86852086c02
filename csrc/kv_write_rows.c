// K/V rows are appended by index, never at a byte offset: a view at a moving offset changes node properties and forbids replay.
#include "pgs.h"

// cache: [n_embd_kv, n_rows (, slots)] of any type that ggml_set_rows writes, rows counted through all slots; rows: F32 [head_size, n_head_kv, T]; index: I64 [T].
// Invisible rows (padding, rows past the context) carry the index of a trash row past the end of the live rows.
void pgs_kv_write_rows(struct ggml_context * ctx, struct ggml_cgraph * gf, struct ggml_tensor * cache, struct ggml_tensor * rows,
                       struct ggml_tensor * index) {
    if (cache->ne[2] > 1) {
        cache = ggml_view_2d(ctx, cache, cache->ne[0], cache->ne[1] * cache->ne[2], cache->nb[1], 0);
        ggml_build_forward_expand(gf, cache);
    }
    // expanded here, directly before view and set_rows: with I64 indices ggml-cuda then fuses rope + view + set_rows
    ggml_build_forward_expand(gf, rows);
    struct ggml_tensor * flat = ggml_view_2d(ctx, rows, rows->ne[0] * rows->ne[1], rows->ne[2], rows->nb[2], 0);
    ggml_build_forward_expand(gf, ggml_set_rows(ctx, cache, flat, index));
}
