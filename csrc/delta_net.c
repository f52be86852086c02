// Recurrent layers with an uncommitted block: gated delta-nets first.
//
// A token with g = 0 and beta = 0 leaves the recurrent state unchanged, bit for bit. So multiplying g and beta by 0 disables a row: for padding, and for
// rollback. Verification leaves the block's k, v, g and beta uncommitted; the next step begins by replaying it with `keep` = 1 for accepted rows.
//
// One call of ggml_gated_delta_net replays all layers (as its batch dimension) in place: the output is placed so that its state part is the state pool.
// Kernels own one state column each and read it before they write it, so this is safe; a test compares it with the copying form.
//
// Memory, F32, L layers, block of w rows, compact for width w, so that every view is contiguous:
//   states  [S, S, H_v, L]                      after a scratch area for the replay's unused attention output
//   conv    [row, (d_conv - 1) + w, L]          per layer: history rows, then the block's projected rows
//   convd   [channels, w, L]                    the block after convolution and SiLU; v is read from here
//   qk      [S, 2 H_k r, w, L]                  the block's normalised q and k, each head `repeat` times, r
//   gates   [H_v, w, L, 2]                      g of all layers, then beta of all layers
//
// With N slots every L above is N * L, slots inside layers: layer l of the slots [first, first + count) is contiguous, and all layers of all slots are one
// piece for the replay. Only `conv` differs: each layer has a table of rows
//   conv    [row, (d_conv - 1 + max_width + 1) * N, L]: histories [d_conv - 1, N], then blocks [w, N], at the end one plain token of each slot
// from which [history ; block] of every slot, and the next histories, are gathered by index. A step over some of the slots replays layer by layer, with a
// copy that ggml-cuda fuses.
//
// More recurrences share all of this. KDA is the delta rule with g [S, H_v, w, L], and replays layer by layer. A Mamba-2 scan has states [d_state,
// head_size, H, L], B and C in place of q and k (both after the convolution, so that `qk` is empty), and replays layer by layer from `convd` and `gates` (dt,
// and the layer's decay A). A row is switched off by a dt of -1e30, whose softplus is 0. A short convolution has neither states nor blocks: its histories are
// all that is committed.
//
// A chain (a small model that drafts) computes its block in several passes of one graph, each from the states that the pass before left in the graph; the
// pool keeps those before the block. Its blocks always have the layout of max_width rows, of which each pass fills some, with slots also for one sequence.
#include "pgs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct pgs_delta {
    pgs_delta_shape       s;
    int64_t               channels;
    int64_t               n_slots;  // of the layouts: 1 also where s.n_slots is 0
    struct ggml_context * ctx;
    ggml_backend_buffer_t buffer;
    size_t                bytes;
    // 1-d F32 homes; the layouts above are views made per graph
    struct ggml_tensor * states;
    struct ggml_tensor * conv;
    struct ggml_tensor * convd;
    struct ggml_tensor * qk;
    struct ggml_tensor * gates;
    struct ggml_tensor * norm;   // [S] filled with 1/sqrt(S): rms_norm times this is the L2 norm, and fuses with it
    struct ggml_tensor * decay;  // A of each layer, of a scan
    struct ggml_tensor * ids;    // I32 [n_slots] 0, 1, ...: the states that a scan reads
    // the graph under construction: its slots, and the states as it sees them: the pool, the replay's output, or one replay per layer
    int64_t               first, count;
    struct ggml_tensor *  fresh;
    struct ggml_tensor ** replayed;
};

static int64_t replay_scratch(const pgs_delta * d, int64_t width) {  // floats of attention output that a replay writes and discards
    return d->s.recurrence == PGS_DELTA_RULE ? d->s.head_size * d->s.n_head_v * width * d->n_slots * d->s.n_layer : 0;
}

static int64_t table_rows(const pgs_delta * d) {  // of one layer's table in conv, with slots
    return (d->s.conv - 1 + d->s.max_width + 1) * d->n_slots;
}

static int64_t heads_qk(const pgs_delta * d) {  // heads of q, and of k, as the recurrence reads them: v-head h goes with h modulo this
    return d->s.n_head_k * d->s.repeat;
}

static int64_t state_floats(const pgs_delta * d) {  // one layer
    return d->s.state_size * d->s.head_size * d->s.n_head_v;
}

// Floats per row of a layer's block: after the convolution; q and k; gates.
static int64_t convd_row(const pgs_delta * d) {
    return d->s.recurrence == PGS_CONVOLUTION ? 0 : d->channels;
}

static bool is_delta(const pgs_delta * d) {
    return d->s.recurrence == PGS_DELTA_RULE || d->s.recurrence == PGS_KDA;
}

static int64_t qk_row(const pgs_delta * d) {
    return is_delta(d) ? d->s.head_size * 2 * heads_qk(d) : 0;
}

static int64_t gates_row(const pgs_delta * d) {  // g, or dt of a scan
    return d->s.recurrence == PGS_CONVOLUTION ? 0 : d->s.recurrence == PGS_KDA ? d->s.head_size * d->s.n_head_v : d->s.n_head_v;
}

static int64_t beta_row(const pgs_delta * d) {
    return is_delta(d) ? d->s.n_head_v : 0;
}

void pgs_delta_free(pgs_delta * d) {
    if (d != NULL) {
        ggml_backend_buffer_free(d->buffer);
        ggml_free(d->ctx);
        free(d->replayed);
        free(d);
    }
}

// An empty buffer, and addresses in it that are never read.
static ggml_backend_buffer_t pretended(struct ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    const ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(buft, 0);
    for (struct ggml_tensor * t = ggml_get_first_tensor(ctx); t != NULL; t = ggml_get_next_tensor(ctx, t)) {
        t->data   = (void *) (uintptr_t) (1 << 20);
        t->buffer = buffer;
    }
    return buffer;
}

pgs_delta * pgs_delta_new(ggml_backend_t backend, const pgs_delta_shape * shape, char * err) {
    const pgs_delta_shape s = *shape;
    if (s.n_layer < 1 || s.head_size < 1 || s.state_size < 0 || s.n_head_k < 1 || s.repeat < 1 || s.n_head_v % (s.n_head_k * s.repeat) != 0 || s.conv < 2 ||
        s.max_width < 1 || s.n_slots < 0 || (s.recurrence <= PGS_KDA && s.state_size != s.head_size)) {
        snprintf(err, PGS_ERR, "delta-net shape out of range: %lld layers, head size %lld, %lld/%lld heads, %lld taps, width %lld, "
                 "%lld slots", (long long) s.n_layer, (long long) s.head_size, (long long) s.n_head_k, (long long) s.n_head_v,
                 (long long) s.conv, (long long) s.max_width, (long long) s.n_slots);
        return NULL;
    }
    pgs_delta * d = calloc(1, sizeof(*d));
    if (d == NULL) {
        snprintf(err, PGS_ERR, "no memory for the delta-net state");
        return NULL;
    }
    d->s        = s;
    d->n_slots  = s.n_slots > 0 ? s.n_slots : 1;
    d->count    = 1;
    d->channels = 2 * s.n_head_k * s.state_size + s.head_size * s.n_head_v;
    d->s.level  = s.recurrence == PGS_DELTA_RULE && pgs_delta_native(s.level, s.head_size, s.max_width, s.conv) ? s.level : NULL;
    if (s.row < d->channels) {
        snprintf(err, PGS_ERR, "delta-net rows of %lld floats are narrower than %lld convolution channels", (long long) s.row,
                 (long long) d->channels);
        free(d);
        return NULL;
    }
    const struct ggml_init_params params = { .mem_size = ggml_tensor_overhead() * 10, .mem_buffer = NULL, .no_alloc = true };
    const int64_t w = s.max_width, L = s.n_layer * d->n_slots;
    d->replayed = calloc((size_t) s.n_layer, sizeof(*d->replayed));
    d->ctx    = ggml_init(params);
    d->states = ggml_new_tensor_1d(d->ctx, GGML_TYPE_F32, replay_scratch(d, w) + state_floats(d) * L);
    d->conv   = ggml_new_tensor_1d(d->ctx, GGML_TYPE_F32, s.row * (s.n_slots > 0 ? table_rows(d) : s.conv - 1 + w) * s.n_layer);
    d->convd  = ggml_new_tensor_1d(d->ctx, GGML_TYPE_F32, convd_row(d) * w * L);
    d->qk     = ggml_new_tensor_1d(d->ctx, GGML_TYPE_F32, qk_row(d) * w * L);
    d->gates  = ggml_new_tensor_1d(d->ctx, GGML_TYPE_F32, (gates_row(d) + beta_row(d)) * w * L);
    d->norm   = ggml_new_tensor_1d(d->ctx, GGML_TYPE_F32, s.head_size);
    d->decay  = ggml_new_tensor_1d(d->ctx, GGML_TYPE_F32, s.recurrence == PGS_SCAN ? s.n_head_v * s.n_layer : 0);
    d->ids    = ggml_new_tensor_1d(d->ctx, GGML_TYPE_I32, d->n_slots);
    const ggml_backend_buffer_type_t buft = ggml_backend_get_default_buffer_type(backend);
    d->bytes  = ggml_backend_alloc_ctx_tensors_from_buft_size(d->ctx, buft);
    d->buffer = s.planned ? pretended(d->ctx, buft) : ggml_backend_alloc_ctx_tensors_from_buft(d->ctx, buft);
    if (d->buffer == NULL || d->replayed == NULL) {
        snprintf(err, PGS_ERR, "no memory for the delta-net state of %lld layers and %lld slots on %s", (long long) s.n_layer,
                 (long long) d->n_slots, ggml_backend_name(backend));
        pgs_delta_free(d);
        return NULL;
    }
    if (!s.planned) {
        d->bytes = ggml_backend_buffer_get_size(d->buffer);
        pgs_delta_clear(d);
    }
    return d;
}

static void write_constants(pgs_delta * d) {
    for (int32_t i = 0; i < d->n_slots; i++) {
        ggml_backend_tensor_set(d->ids, &i, (size_t) i * sizeof(i), sizeof(i));
    }
    const float each = 1.0f / sqrtf((float) d->s.head_size);
    for (int64_t i = 0; i < d->s.head_size; i++) {
        ggml_backend_tensor_set(d->norm, &each, (size_t) i * sizeof(float), sizeof(float));
    }
}

void pgs_delta_fill(pgs_delta * d, uint8_t value) {
    ggml_backend_buffer_clear(d->buffer, value);
    write_constants(d);
}

void pgs_delta_clear(pgs_delta * d) {
    pgs_delta_fill(d, 0);
}

size_t pgs_delta_bytes(const pgs_delta * d) {
    return d->bytes;
}

size_t pgs_delta_state_bytes(const pgs_delta * d) {
    return (size_t) (state_floats(d) * d->n_slots * d->s.n_layer) * sizeof(float);
}

void pgs_delta_read_state(const pgs_delta * d, void * out) {
    ggml_backend_tensor_get(d->states, out, (size_t) replay_scratch(d, d->s.max_width) * sizeof(float), pgs_delta_state_bytes(d));
}

// Sets every byte of what `slot` has: states, convolution histories, and its block in pools laid out for `width` (0: no block).
void pgs_delta_fill_slot(pgs_delta * d, int64_t slot, int64_t width, uint8_t value) {
    const size_t  f = sizeof(float);
    const int64_t N = d->n_slots, row = d->s.row, hist = d->s.conv - 1, scratch = replay_scratch(d, d->s.max_width), table = row * table_rows(d);
    const int64_t state = state_floats(d), gates = gates_row(d) * width, beta = beta_row(d) * width, qk = qk_row(d) * width, convd = convd_row(d) * width;
    const struct { struct ggml_tensor * pool; int64_t start, size, layer; } parts[] = {
        { d->states, scratch, state, state * N },
        { d->conv, 0, row * hist, table },
        { d->conv, row * hist * N, row * width, table },
        { d->conv, row * (hist + d->s.max_width) * N, row, table },
        { d->convd, 0, convd, convd * N },
        { d->qk, 0, qk, qk * N },
        { d->gates, 0, gates, gates * N },
        { d->gates, gates * N * d->s.n_layer, beta, beta * N },
    };
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        for (int64_t layer = 0; layer < d->s.n_layer; layer++) {
            const int64_t at = parts[i].start + parts[i].layer * layer + parts[i].size * slot;
            ggml_backend_tensor_memset(parts[i].pool, value, (size_t) at * f, (size_t) parts[i].size * f);
        }
    }
}

// Zeroes the block pools as far as a layout for `width` uses them: whatever another layout left there would pass through 0 * NaN.
void pgs_delta_clear_blocks(pgs_delta * d, int64_t width) {
    const size_t rows = (size_t) (width * d->n_slots * d->s.n_layer) * sizeof(float);
    ggml_backend_tensor_memset(d->convd, 0, 0, (size_t) convd_row(d) * rows);
    ggml_backend_tensor_memset(d->qk, 0, 0, (size_t) qk_row(d) * rows);
    ggml_backend_tensor_memset(d->gates, 0, 0, (size_t) (gates_row(d) + beta_row(d)) * rows);
    ggml_backend_tensor_memset(d->decay, 0, 0, ggml_nbytes(d->decay));
}

// Keeps `x`, F32 [n, T, count], as the rows from `row` on of the blocks of this graph's slots, whose first one is the block `at` of `pool`; blocks have `width`
// rows of n floats, after `base` others. Where the rows are one piece, `x` is computed there, otherwise copied.
static int keep_rows(const pgs_delta * d, struct ggml_context * ctx, struct ggml_cgraph * gf, struct ggml_tensor * pool, int64_t base, struct ggml_tensor * x,
                     int64_t n, int64_t row, int64_t width, int64_t at, char * err) {
    const int64_t T = ggml_nelements(x) / n / d->count;
    const size_t  f = sizeof(float), offset = (size_t) (base + n * (width * at + row)) * f;
    if (T == width || d->count == 1) {
        return pgs_place(pool, offset, x, err);
    }
    struct ggml_tensor * home = ggml_view_3d(ctx, pool, n, T, d->count, n * f, n * width * f, offset);
    ggml_build_forward_expand(gf, ggml_cpy(ctx, ggml_reshape_3d(ctx, x, n, T, d->count), home));
    return 0;
}

// The n_seq states at `offset` floats of `from`, F32 [state size, S, H_v, n_seq].
static struct ggml_tensor * states_view(const pgs_delta * d, struct ggml_context * ctx, struct ggml_tensor * from, int64_t offset,
                                        int64_t n_seq) {
    const int64_t S = d->s.head_size, n = d->s.state_size;
    const size_t  f = sizeof(float);
    return ggml_view_4d(ctx, from, n, S, d->s.n_head_v, n_seq, n * f, n * S * f, state_floats(d) * f, offset * f);
}

// Where the states of one layer live: 2-D and right after the node that makes them, so that ggml-cuda fuses the copy into its kernel.
static struct ggml_tensor * write_states(const pgs_delta * d, struct ggml_context * ctx, struct ggml_cgraph * gf, struct ggml_tensor * out,
                                         int64_t rows, int64_t layer) {
    const int64_t n = state_floats(d);
    const size_t  f = sizeof(float), tail = (size_t) (d->s.head_size * d->s.n_head_v * rows) * f;
    const size_t  home = (size_t) (replay_scratch(d, d->s.max_width) + n * (layer * d->n_slots + d->first)) * f;
    struct ggml_tensor * copy = ggml_cpy(ctx, ggml_view_2d(ctx, out, n, d->count, n * f, tail),
                                         ggml_view_2d(ctx, d->states, n, d->count, n * f, home));
    ggml_build_forward_expand(gf, copy);
    return copy;
}

// What `slot` keeps of one layer, as views: its committed state, F32 [S * S * H_v], and its convolution history, F32 [row * (d_conv - 1)].
// For one sequence the history lies there while the pool is laid out for width 0, that is, after a prefill or a commit into width 0.
void pgs_delta_kept(const pgs_delta * d, struct ggml_context * ctx, int64_t slot, int64_t layer, struct ggml_tensor ** state,
                    struct ggml_tensor ** history) {
    const int64_t n = state_floats(d), hist = d->s.conv - 1, first = layer * (d->s.n_slots > 0 ? table_rows(d) : hist) + hist * slot;
    const int64_t home = replay_scratch(d, d->s.max_width) + n * (layer * d->n_slots + slot);
    *state   = ggml_view_1d(ctx, d->states, n, (size_t) home * sizeof(float));
    *history = ggml_view_1d(ctx, d->conv, d->s.row * hist, (size_t) (d->s.row * first) * sizeof(float));
}

// [row, d_conv - 1 + width, L], or `rows` of its rows starting at `first`
static struct ggml_tensor * conv_view(const pgs_delta * d, struct ggml_context * ctx, int64_t width, int64_t row, int64_t first,
                                      int64_t rows, int64_t layer, int64_t n_layer) {
    const size_t nb1 = d->s.row * sizeof(float);
    const size_t nb2 = nb1 * (d->s.conv - 1 + width);
    return ggml_view_3d(ctx, d->conv, row, rows, n_layer, nb1, nb2, nb2 * layer + nb1 * first);
}

// With slots: `rows` rows from `first` on as one table, F32 [channels, rows].
static struct ggml_tensor * conv_table(const pgs_delta * d, struct ggml_context * ctx, int64_t first, int64_t rows) {
    const size_t nb1 = d->s.row * sizeof(float);
    return ggml_view_2d(ctx, d->conv, d->channels, rows, nb1, nb1 * first);
}

// The histories of this graph's slots, of `n_layer` layers from `layer` on: F32 [channels, d_conv - 1, count, n_layer].
static struct ggml_tensor * histories(const pgs_delta * d, struct ggml_context * ctx, int64_t layer, int64_t n_layer) {
    const int64_t hist = d->s.conv - 1;
    const size_t  nb1 = d->s.row * sizeof(float), nb2 = nb1 * hist, nb3 = nb1 * table_rows(d);
    return ggml_view_4d(ctx, d->conv, d->channels, hist, d->count, n_layer, nb1, nb2, nb3, nb3 * layer + nb2 * d->first);
}

// Makes the histories that the block before leads to and puts them where `width_to` looks for them.
static void next_histories(pgs_delta * d, struct ggml_context * ctx, struct ggml_cgraph * gf, int64_t width_from, int64_t width_to,
                           struct ggml_tensor * tail) {
    const pgs_delta_shape s = d->s;
    const int64_t hist = s.conv - 1, L = s.n_layer;
    struct ggml_tensor * from, * to;
    if (s.n_slots == 0) {
        from = conv_view(d, ctx, width_from, s.row, 0, hist + width_from, 0, L);
        to   = conv_view(d, ctx, width_to, s.row, 0, hist, 0, L);
    } else {
        from = conv_table(d, ctx, 0, table_rows(d) * L);
        to   = histories(d, ctx, 0, L);
    }
    ggml_build_forward_expand(gf, ggml_cpy(ctx, ggml_get_rows(ctx, from, tail), to));
}

// The uncommitted block of `width` rows of `n` consecutive (layer, slot) pairs, from `at` on, replayed on `state`. Rows of `gates` as in
// the pool but for the slots of this graph only: g of n_gates pairs, then beta; the pairs of this call start at `gate`.
static struct ggml_tensor * replay_block(const pgs_delta * d, struct ggml_context * ctx, int64_t width, int64_t at, int64_t n,
                                         struct ggml_tensor * gates, int64_t gate, int64_t n_gates, struct ggml_tensor * state) {
    const pgs_delta_shape s = d->s;
    const int64_t S = s.head_size, w = width, H = heads_qk(d);
    const size_t  f = sizeof(float), gn = s.n_head_v * f, kn = 2 * H * S * f, vn = d->channels * f;
    struct ggml_tensor * g    = ggml_view_4d(ctx, gates, 1, s.n_head_v, w, n, f, gn, gn * w, gn * w * gate);
    struct ggml_tensor * beta = ggml_view_4d(ctx, gates, 1, s.n_head_v, w, n, f, gn, gn * w, gn * w * (n_gates + gate));
    struct ggml_tensor * k = ggml_view_4d(ctx, d->qk, S, H, w, n, S * f, kn, kn * w, kn * w * at + H * S * f);
    struct ggml_tensor * v = ggml_view_4d(ctx, d->convd, S, s.n_head_v, w, n, S * f, vn, vn * w, vn * w * at + 2 * s.n_head_k * S * f);
    // k stands in for q: the attention output is not read
    return ggml_gated_delta_net(ctx, k, k, v, g, beta, state, 1);
}

// By native kernels the states are written in place, and rows that do not count are not computed.
static void own_replay(pgs_delta * d, struct ggml_context * ctx, struct ggml_cgraph * gf, int64_t w, struct ggml_tensor * keep) {
    const pgs_delta_shape s = d->s;
    const int64_t S = s.head_size, N = d->n_slots, H = heads_qk(d), together = d->count == N ? N * s.n_layer : d->count;
    const int64_t state = replay_scratch(d, s.max_width);
    const size_t  f = sizeof(float), kn = 2 * H * S * f, vn = d->channels * f;
    for (int64_t at = d->first; at < N * s.n_layer; at += together == d->count ? N : together) {
        struct ggml_tensor * k = ggml_view_4d(ctx, d->qk, S, H, w, together, S * f, kn, kn * w, kn * w * at + H * S * f);
        struct ggml_tensor * v = ggml_view_4d(ctx, d->convd, S, s.n_head_v, w, together, S * f, vn, vn * w, vn * w * at + 2 * s.n_head_k * S * f);
        struct ggml_tensor * gates = ggml_view_1d(ctx, d->gates, s.n_head_v * w * together, s.n_head_v * w * at * f);
        ggml_build_forward_expand(gf, pgs_delta_replay(ctx, s.level, k, v, gates, s.n_head_v * w * N * s.n_layer,
                                                       states_view(d, ctx, d->states, state + state_floats(d) * at, together), keep, d->count));
    }
}

// dt F32 [H, T, n] with rows switched off where `on` F32 [1, T, n] is 0 and otherwise unchanged.
static struct ggml_tensor * switched(struct ggml_context * ctx, struct ggml_tensor * dt, struct ggml_tensor * on) {
    on = ggml_reshape_3d(ctx, on, 1, dt->ne[1], dt->ne[2]);
    return ggml_add(ctx, ggml_mul(ctx, dt, on), ggml_scale_bias(ctx, on, 1e30f, -1e30f));
}

// A scan over x | B | C, F32 [channels, T, n] with `row` bytes between rows, from `state`; F32 y [S, H, T, n] and then the states.
static struct ggml_tensor * scan(const pgs_delta * d, struct ggml_context * ctx, struct ggml_tensor * mixed, struct ggml_tensor * dt, struct ggml_tensor * a,
                                 struct ggml_tensor * state) {
    const pgs_delta_shape s = d->s;
    const int64_t T = mixed->ne[1], n = mixed->ne[2], inner = s.head_size * s.n_head_v;
    const size_t  f = sizeof(float), row = mixed->nb[1], at = mixed->nb[2];
    struct ggml_tensor * x = ggml_view_4d(ctx, mixed, s.head_size, s.n_head_v, T, n, s.head_size * f, row, at, 0);
    struct ggml_tensor * B = ggml_view_4d(ctx, mixed, s.state_size, s.n_head_k, T, n, s.state_size * f, row, at, inner * f);
    struct ggml_tensor * C = ggml_view_4d(ctx, mixed, s.state_size, s.n_head_k, T, n, s.state_size * f, row, at, (inner + s.n_head_k * s.state_size) * f);
    return ggml_ssm_scan(ctx, state, x, dt, a, B, C, ggml_view_1d(ctx, d->ids, n, 0), 1);
}

// The decays that a layer's block was computed with, [1, H].
static struct ggml_tensor * decays(const pgs_delta * d, struct ggml_context * ctx, int64_t layer) {
    return ggml_view_2d(ctx, d->decay, 1, d->s.n_head_v, sizeof(float), (size_t) (d->s.n_head_v * layer) * sizeof(float));
}

static void scan_replay(pgs_delta * d, struct ggml_context * ctx, struct ggml_cgraph * gf, int64_t w, struct ggml_tensor * keep) {
    const pgs_delta_shape s = d->s;
    const int64_t scratch = replay_scratch(d, s.max_width), c = d->channels, H = s.n_head_v, n = d->count;
    const size_t  f = sizeof(float);
    for (int64_t layer = 0; layer < s.n_layer; layer++) {
        const int64_t at = layer * d->n_slots + d->first;
        struct ggml_tensor * mixed = ggml_view_3d(ctx, d->convd, c, w, n, c * f, c * w * f, (size_t) (c * w * at) * f);
        struct ggml_tensor * dt    = ggml_view_3d(ctx, d->gates, H, w, n, H * f, H * w * f, (size_t) (H * w * at) * f);
        struct ggml_tensor * state = states_view(d, ctx, d->states, scratch + state_floats(d) * at, n);
        struct ggml_tensor * out   = scan(d, ctx, mixed, switched(ctx, dt, keep), decays(d, ctx, layer), state);
        d->replayed[layer] = states_view(d, ctx, write_states(d, ctx, gf, out, w * n, layer), 0, n);
    }
}

// The delta rule with a decay per row of the state, layer by layer.
static void kda_replay(pgs_delta * d, struct ggml_context * ctx, struct ggml_cgraph * gf, int64_t w, struct ggml_tensor * keep) {
    const pgs_delta_shape s = d->s;
    const int64_t S = s.head_size, H = s.n_head_v, n = d->count, Q = heads_qk(d), pairs = s.n_layer * d->n_slots;
    const size_t  f = sizeof(float), kn = 2 * Q * S * f, vn = d->channels * f;
    for (int64_t layer = 0; layer < s.n_layer; layer++) {
        const int64_t at = layer * d->n_slots + d->first;
        struct ggml_tensor * on = ggml_reshape_4d(ctx, keep, 1, 1, w, n);
        struct ggml_tensor * g = ggml_view_4d(ctx, d->gates, S, H, w, n, S * f, S * H * f, S * H * w * f, (size_t) (S * H * w * at) * f);
        struct ggml_tensor * beta = ggml_view_4d(ctx, d->gates, 1, H, w, n, f, H * f, H * w * f, (size_t) (S * H * w * pairs + H * w * at) * f);
        struct ggml_tensor * k = ggml_view_4d(ctx, d->qk, S, Q, w, n, S * f, kn, kn * w, kn * w * at + Q * S * f);
        struct ggml_tensor * v = ggml_view_4d(ctx, d->convd, S, H, w, n, S * f, vn, vn * w, vn * w * at + 2 * s.n_head_k * S * f);
        struct ggml_tensor * state = states_view(d, ctx, d->states, state_floats(d) * at, n);
        struct ggml_tensor * out = ggml_gated_delta_net(ctx, k, k, v, ggml_mul(ctx, g, on), ggml_mul(ctx, beta, on), state, 1);
        d->replayed[layer] = states_view(d, ctx, write_states(d, ctx, gf, out, w * n, layer), 0, n);
    }
}

static int replay_all(pgs_delta * d, struct ggml_context * ctx, struct ggml_cgraph * gf, int64_t width, struct ggml_tensor * keep,
                      char * err) {
    const pgs_delta_shape s = d->s;
    const int64_t L = s.n_layer, N = d->n_slots, w = width, scratch = replay_scratch(d, s.max_width);
    const size_t  f = sizeof(float), gn = s.n_head_v * f;
    struct ggml_tensor * gates;
    if (s.recurrence == PGS_CONVOLUTION) {
        return 0;
    }
    if (s.level != NULL) {
        own_replay(d, ctx, gf, width, keep);
        return 0;
    }
    if (s.recurrence == PGS_SCAN || s.recurrence == PGS_KDA) {
        (s.recurrence == PGS_SCAN ? scan_replay : kda_replay)(d, ctx, gf, width, keep);
        return 0;
    }
    if (s.n_slots == 0) {
        gates = ggml_mul(ctx, ggml_view_3d(ctx, d->gates, s.n_head_v, w, 2 * L, gn, gn * w, 0), keep);
    } else {
        gates = ggml_view_4d(ctx, d->gates, s.n_head_v, w, d->count, 2 * L, gn, gn * w, gn * w * N, gn * w * d->first);
        gates = ggml_mul(ctx, gates, ggml_reshape_3d(ctx, keep, 1, w, d->count));
    }
    if (d->count == N) {
        struct ggml_tensor * replay = replay_block(d, ctx, w, 0, N * L, gates, 0, N * L, d->fresh);
        if (pgs_place(d->states, (scratch - replay_scratch(d, w)) * f, replay, err) != 0) {
            return 1;
        }
        ggml_build_forward_expand(gf, replay);
        d->fresh = states_view(d, ctx, replay, replay_scratch(d, w), N * L);
        return 0;
    }
    for (int64_t layer = 0; layer < L; layer++) {
        const int64_t at = layer * N + d->first;
        struct ggml_tensor * state  = states_view(d, ctx, d->states, scratch + state_floats(d) * at, d->count);
        struct ggml_tensor * replay = replay_block(d, ctx, w, at, d->count, gates, d->count * layer, d->count * L, state);
        d->replayed[layer] = states_view(d, ctx, write_states(d, ctx, gf, replay, w * d->count, layer), 0, d->count);
    }
    return 0;
}

// Row `number` of [history ; block of `width` rows] of a slot: of that itself, or of a layer's table.
static int64_t history_row(const pgs_delta * d, int64_t slot, int64_t width, int64_t number) {
    const int64_t hist = d->s.conv - 1;
    if (d->s.n_slots == 0) {
        return number;
    }
    return number < hist ? slot * hist + number : d->n_slots * hist + slot * width + number - hist;
}

void pgs_delta_fill_commit(const pgs_delta * d, const int64_t * accepted, bool replay, int64_t first, int64_t count, int64_t width,
                           int32_t * tail, float * keep) {
    const int64_t hist = d->s.conv - 1;
    for (int64_t slot = first; slot < first + count; slot++) {
        for (int64_t h = 0; tail != NULL && h < hist; h++) {
            const int64_t row = history_row(d, slot, width, accepted[slot] + h);
            for (int64_t layer = 0; layer < d->s.n_layer; layer++) {
                const int64_t before = d->s.n_slots > 0 ? layer * table_rows(d) : 0;
                tail[(layer * count + slot - first) * hist + h] = (int32_t) (before + row);
            }
        }
        for (int64_t i = 0; keep != NULL && i < width; i++) {
            keep[(slot - first) * width + i] = replay && i < accepted[slot] ? 1.0f : 0.0f;
        }
    }
}

// Starts a graph over the slots [first, first + count): commits the blocks of `width_from` rows that the step before left, and lays the
// convolution history out for `width_to`.
//   keep: F32 [1, width_from * count], 1 for accepted rows, 0 for the others; NULL where the state has been written directly
//   tail: I32 [d_conv - 1, L], rows of [history ; block] that become the history: n, n + 1, ... for n accepted rows; NULL: as it lies.
//         With slots I32 [(d_conv - 1) * count * L], rows of the whole table in `conv`, slots inside layers
int pgs_delta_begin(pgs_delta * d, struct ggml_context * ctx, struct ggml_cgraph * gf, int64_t first, int64_t count, int64_t width_from,
                    int64_t width_to, struct ggml_tensor * keep, struct ggml_tensor * tail, char * err) {
    const pgs_delta_shape s = d->s;
    if (width_from < 0 || width_from > s.max_width || width_to < 0 || width_to > s.max_width) {
        snprintf(err, PGS_ERR, "block width %lld -> %lld, but the delta-net state was made for up to %lld", (long long) width_from,
                 (long long) width_to, (long long) s.max_width);
        return 1;
    }
    if (first < 0 || count < 1 || first + count > d->n_slots) {
        snprintf(err, PGS_ERR, "slots %lld to %lld, but the delta-net state was made for %lld", (long long) first,
                 (long long) (first + count - 1), (long long) d->n_slots);
        return 1;
    }
    d->first = first;
    d->count = count;
    d->fresh = states_view(d, ctx, d->states, replay_scratch(d, s.max_width), d->n_slots * s.n_layer);
    memset(d->replayed, 0, (size_t) s.n_layer * sizeof(*d->replayed));
    if (tail == NULL) {  // prefill after prefill: the history lies where it is read
        return 0;
    }
    next_histories(d, ctx, gf, width_from, width_to, tail);
    return keep != NULL ? replay_all(d, ctx, gf, width_from, keep, err) : 0;
}

// [history ; block] of one layer, F32 [channels, d_conv - 1 + T]. Also makes the history of the next step.
static struct ggml_tensor * conv_input(pgs_delta * d, struct ggml_context * ctx, struct ggml_cgraph * gf, int64_t layer, int64_t width,
                                       const pgs_delta_inputs * in, char * err) {
    const int64_t hist = d->s.conv - 1;
    struct ggml_tensor * rows;
    if (width > 0) {
        // the projection writes into the block's rows; [history ; block] is then one view
        if (pgs_place(d->conv, (size_t) ((d->s.row * (hist + width)) * layer + d->s.row * hist) * sizeof(float), in->proj, err) != 0) {
            return NULL;
        }
        ggml_build_forward_expand(gf, in->proj);
        rows = conv_view(d, ctx, width, d->channels, 0, hist + width, layer, 1);
    } else {
        struct ggml_tensor * block = ggml_view_2d(ctx, in->proj, d->channels, in->proj->ne[1], in->proj->nb[1], 0);
        rows = ggml_concat(ctx, conv_view(d, ctx, 0, d->channels, 0, hist, layer, 1), block, 1);
        struct ggml_tensor * next = ggml_get_rows(ctx, rows, in->last);
        ggml_build_forward_expand(gf, ggml_cpy(ctx, next, conv_view(d, ctx, 0, d->channels, 0, hist, layer, 1)));
    }
    return rows;
}

// The same for the slots of this graph: F32 [channels, d_conv - 1 + T, count], T rows of each. `width`: rows of a block; 0: the histories are made now.
static struct ggml_tensor * conv_input_slots(pgs_delta * d, struct ggml_context * ctx, struct ggml_cgraph * gf, int64_t layer,
                                             int64_t width, const pgs_delta_inputs * in, char * err) {
    const int64_t hist = d->s.conv - 1, N = d->n_slots, T = in->proj->ne[1] / d->count, table = table_rows(d) * layer;
    struct ggml_tensor * rows;
    if (in->take != NULL) {  // the projection goes into the table
        const int64_t before = table + (hist + (width > 0 ? 0 : d->s.max_width)) * N;
        if (keep_rows(d, ctx, gf, d->conv, d->s.row * before, in->proj, d->s.row, in->row, width > 0 ? width : T, d->first, err) != 0) {
            return NULL;
        }
        ggml_build_forward_expand(gf, in->proj);
        rows = ggml_get_rows(ctx, conv_table(d, ctx, table, table_rows(d)), in->take);
        rows = ggml_reshape_3d(ctx, rows, d->channels, hist + T, d->count);
    } else {
        struct ggml_tensor * block = ggml_view_3d(ctx, in->proj, d->channels, T, d->count, in->proj->nb[1], in->proj->nb[1] * T, 0);
        rows = ggml_concat(ctx, histories(d, ctx, layer, 1), block, 1);
    }
    if (width == 0) {
        ggml_build_forward_expand(gf, ggml_cpy(ctx, ggml_get_rows(ctx, rows, in->last), histories(d, ctx, layer, 1)));
    }
    return rows;
}

// By native kernels, from [history ; block] on. `width`: rows of a block.
static struct ggml_tensor * own_layer(pgs_delta * d, struct ggml_context * ctx, struct ggml_cgraph * gf, int64_t layer, int64_t width, pgs_delta_mode mode,
                                      const pgs_delta_inputs * in, struct ggml_tensor * sx, char * err) {
    const pgs_delta_shape s = d->s;
    const int64_t S = s.head_size, B = d->count, T = in->proj->ne[1] / B, pairs = s.n_layer * d->n_slots, H = heads_qk(d), at = layer * d->n_slots + d->first;
    const int64_t row = width * at + in->row, rows = width * (B - 1) + T;  // of the pools
    const size_t  f = sizeof(float);
    pgs_share_sections(in->proj, S * s.n_head_k, S * s.n_head_v);
    struct ggml_tensor * mixed = pgs_convolution(ctx, s.level, sx, in->conv_w, S * s.n_head_k, S * s.n_head_v), * qk = NULL, * gates = NULL;
    struct ggml_tensor * state = states_view(d, ctx, d->states, replay_scratch(d, s.max_width) + state_floats(d) * at, B);
    if (mode != PGS_DELTA_DIRECT) {
        if (keep_rows(d, ctx, gf, d->convd, 0, mixed, d->channels, in->row, width, at, err) != 0) {
            return NULL;
        }
        qk    = ggml_view_3d(ctx, d->qk, S, 2 * H, rows, S * f, 2 * H * S * f, (size_t) (2 * H * S * row) * f);
        gates = ggml_view_1d(ctx, d->gates, s.n_head_v * rows, (size_t) (s.n_head_v * row) * f);
    }
    if (mode == PGS_DELTA_CHAINED) {
        state = d->replayed[layer] = d->replayed[layer] != NULL ? d->replayed[layer] : ggml_dup(ctx, state);
    }
    const int64_t beta_at = s.n_head_v * width * pairs;
    struct ggml_tensor * out = pgs_delta_rule(ctx, s.level, mixed, in, s.repeat, state, mode != PGS_DELTA_UNCOMMITTED, qk, gates, beta_at, width);
    ggml_build_forward_expand(gf, out);
    return out;
}

// A Mamba-2 layer from the convolution F32 [channels, T, B] on, with the skip of x. Returns F32 [S, H, rows].
static struct ggml_tensor * scan_layer(pgs_delta * d, struct ggml_context * ctx, struct ggml_cgraph * gf, int64_t layer, int64_t width, pgs_delta_mode mode,
                                       const pgs_delta_inputs * in, struct ggml_tensor * mixed, char * err) {
    const pgs_delta_shape s = d->s;
    const int64_t B = d->count, T = mixed->ne[1], rows = T * B, at = layer * d->n_slots + d->first;
    const size_t  f = sizeof(float);
    struct ggml_tensor * dt = ggml_add(ctx, ggml_cont_3d(ctx, in->alpha, s.n_head_v, T, B), in->dt);
    if (in->on != NULL) {
        dt = switched(ctx, dt, in->on);
    }
    if (mode != PGS_DELTA_DIRECT) {
        if (keep_rows(d, ctx, gf, d->convd, 0, mixed, d->channels, in->row, width, at, err) != 0 ||
            keep_rows(d, ctx, gf, d->gates, 0, dt, s.n_head_v, in->row, width, at, err) != 0) {
            return NULL;
        }
        ggml_build_forward_expand(gf, ggml_cpy(ctx, in->a, decays(d, ctx, layer)));
    }
    struct ggml_tensor * state = d->replayed[layer] != NULL ? d->replayed[layer] :
        states_view(d, ctx, d->states, replay_scratch(d, s.max_width) + state_floats(d) * at, B);
    struct ggml_tensor * out = scan(d, ctx, mixed, dt, in->a, state);
    if (mode == PGS_DELTA_DIRECT) {
        write_states(d, ctx, gf, out, rows, layer);
    } else if (mode == PGS_DELTA_CHAINED) {
        d->replayed[layer] = states_view(d, ctx, out, s.head_size * s.n_head_v * rows, B);
    }
    struct ggml_tensor * x = ggml_view_3d(ctx, mixed, s.head_size, s.n_head_v, rows, s.head_size * f, mixed->nb[1], 0);
    struct ggml_tensor * y = ggml_view_3d(ctx, out, s.head_size, s.n_head_v, rows, s.head_size * f, s.head_size * s.n_head_v * f, 0);
    return ggml_add(ctx, y, ggml_mul(ctx, x, in->beta));
}

// One recurrent layer over T rows, up to but without the output norm. Returns F32 [S, H_v, T], of a convolution [channels, T]. With slots, T rows are `count`
// slots of the same number of rows, one slot after the other.
//   width = T / count for blocks (the projected rows stay in the pool, the next begin makes the history from them), 0 for prefill.
struct ggml_tensor * pgs_delta_layer(pgs_delta * d, struct ggml_context * ctx, struct ggml_cgraph * gf, int64_t layer, int64_t width,
                                     pgs_delta_mode mode, const pgs_delta_inputs * in, char * err) {
    const pgs_delta_shape s = d->s;
    const int64_t L = s.n_layer, S = s.head_size, rows = in->proj->ne[1], B = d->count, T = rows / B, at = layer * d->n_slots + d->first, H = heads_qk(d);
    const int64_t W = mode == PGS_DELTA_CHAINED ? s.max_width : T;  // rows of a block
    const size_t  f = sizeof(float);
    const bool    chained = mode == PGS_DELTA_CHAINED, kept = mode != PGS_DELTA_DIRECT;
    if (layer < 0 || layer >= L || T * B != rows || in->proj->ne[0] != s.row || (width != 0 && width != T) || width > s.max_width || (kept && width == 0) ||
        (in->take != NULL && width == 0 && T != 1) || (in->take == NULL && width != 0 && s.n_slots > 0) ||
        in->row < 0 || (chained ? s.n_slots == 0 || in->take == NULL || in->row + T > W : in->row != 0)) {
        snprintf(err, PGS_ERR, "delta-net layer %lld of %lld over %lld rows of %lld values and %lld slots at width %lld", (long long) layer,
                 (long long) L, (long long) rows, (long long) in->proj->ne[0], (long long) B, (long long) width);
        return NULL;
    }
    struct ggml_tensor * sx = s.n_slots > 0 ? conv_input_slots(d, ctx, gf, layer, width > 0 ? W : 0, in, err)
                                            : conv_input(d, ctx, gf, layer, width, in, err);
    if (sx == NULL) {
        return NULL;
    }
    if (s.level != NULL) {
        return own_layer(d, ctx, gf, layer, W, mode, in, sx, err);
    }
    sx = ggml_cont(ctx, ggml_transpose(ctx, sx));
    struct ggml_tensor * mixed = ggml_ssm_conv(ctx, sx, in->conv_w);  // [channels, T, B]
    if (s.recurrence == PGS_CONVOLUTION) {
        return ggml_reshape_2d(ctx, mixed, d->channels, rows);
    }
    mixed = ggml_silu(ctx, in->conv_b != NULL ? ggml_add(ctx, mixed, in->conv_b) : mixed);
    if (s.recurrence == PGS_SCAN) {
        return scan_layer(d, ctx, gf, layer, W, mode, in, mixed, err);
    }
    if (kept && keep_rows(d, ctx, gf, d->convd, 0, mixed, d->channels, in->row, W, at, err) != 0) {
        return NULL;
    }
    const size_t row = mixed->nb[1];
    struct ggml_tensor * v  = ggml_view_4d(ctx, mixed, S, s.n_head_v, T, B, S * f, row, row * T, 2 * s.n_head_k * S * f);
    struct ggml_tensor * qk = ggml_view_3d(ctx, mixed, S, 2 * s.n_head_k, rows, S * f, row, 0);
    // x / sqrt(sum x^2 + eps) as rms_norm(x, eps / S) / sqrt(S): ggml_l2_norm has another epsilon (3.6 % relative error in the logits)
    qk = ggml_mul(ctx, ggml_rms_norm(ctx, qk, in->eps / (float) S), d->norm);
    if (s.repeat > 1) {
        qk = ggml_repeat_4d(ctx, ggml_reshape_3d(ctx, qk, S, 1, 2 * s.n_head_k * rows), S, s.repeat, 2 * s.n_head_k * rows, 1);
    }
    if (kept && keep_rows(d, ctx, gf, d->qk, 0, qk, 2 * H * S, in->row, W, at, err) != 0) {
        return NULL;
    }
    const size_t each_row  = 2 * H * S * f;
    struct ggml_tensor * q = ggml_view_4d(ctx, qk, S, H, T, B, S * f, each_row, each_row * T, 0);
    struct ggml_tensor * k = ggml_view_4d(ctx, qk, S, H, T, B, S * f, each_row, each_row * T, H * S * f);

    // part of a fused product, beta has gaps between its rows, which the sigmoid of several backends does not take
    struct ggml_tensor * beta = ggml_sigmoid(ctx, ggml_is_contiguous(in->beta) ? in->beta : ggml_cont(ctx, in->beta));
    const int64_t decays_per_head = gates_row(d) / s.n_head_v;
    struct ggml_tensor * g = ggml_add(ctx, in->alpha, in->dt);
    g = in->bound == 0.0f ? ggml_softplus(ctx, g) : g;
    g = ggml_mul(ctx, decays_per_head > 1 ? ggml_reshape_3d(ctx, g, decays_per_head, s.n_head_v, rows) : g, in->a);
    if (in->bound != 0.0f) {
        g = ggml_scale(ctx, ggml_sigmoid(ctx, ggml_scale(ctx, g, -1.0f)), in->bound);
    }
    if (in->on != NULL) {
        g    = ggml_mul(ctx, g, decays_per_head > 1 ? ggml_reshape_3d(ctx, in->on, 1, 1, rows) : in->on);
        beta = ggml_mul(ctx, beta, in->on);
    }
    if (kept && (keep_rows(d, ctx, gf, d->gates, 0, g, gates_row(d), in->row, W, at, err) != 0 ||
                                     keep_rows(d, ctx, gf, d->gates, gates_row(d) * W * L * d->n_slots, beta, beta_row(d), in->row, W, at, err) != 0)) {
        return NULL;
    }
    struct ggml_tensor * state =
        d->replayed[layer] != NULL ? d->replayed[layer] : states_view(d, ctx, d->fresh, state_floats(d) * at, B);
    struct ggml_tensor * out = ggml_gated_delta_net(ctx, q, k, v, ggml_reshape_4d(ctx, g, decays_per_head, s.n_head_v, T, B),
                                                    ggml_reshape_4d(ctx, beta, 1, s.n_head_v, T, B), state, 1);
    if (mode == PGS_DELTA_DIRECT) {
        write_states(d, ctx, gf, out, rows, layer);
    } else if (chained) {
        d->replayed[layer] = states_view(d, ctx, out, S * s.n_head_v * rows, B);
    }
    return ggml_view_3d(ctx, out, S, s.n_head_v, rows, S * f, S * s.n_head_v * f, 0);
}
