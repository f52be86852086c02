// Delta-net layers as native nodes: the convolution, the delta rule with everything in between, and the replay of uncommitted blocks. They write into the
// pools of csrc/delta_net.c as a side effect; readers come later in the graph, or in the next one.
#include "kernels.h"
#include "layout.h"
#include "nodes.h"
#include "pgs.h"

#include <math.h>

typedef struct delta_params {
    float   eps;
    bool    keeps, writes;  // normalised k, g and beta, in the pools; the states
    int16_t width;    // rows of a block in the pools
    int64_t beta_at;  // floats from a pool's g to its beta
    int64_t slots;    // pairs of layer and slot follow each other, slots first
    int64_t repeat;   // of each head of q and k, as in pgs_delta_shape
} delta_params;

_Static_assert(PARAMETERS_AT + sizeof(delta_params) <= GGML_MAX_OP_PARAMS, "parameters of a node");

static delta_params params_of(const struct ggml_tensor * node) {
    delta_params params;
    memcpy(&params, parameters_of(node), sizeof(params));
    return params;
}

static float at(const struct ggml_tensor * t, int64_t i, int64_t row) {
    return *(const float *) ((const char *) t->data + (size_t) i * t->nb[0] + (size_t) row * t->nb[1]);
}

static float * floats(const struct ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return (float *) ((char *) t->data + (size_t) i1 * t->nb[1] + (size_t) i2 * t->nb[2] + (size_t) i3 * t->nb[3]);
}

bool pgs_delta_native(const pgs_level * level, int64_t head_size, int64_t max_width, int64_t taps) {
    const bool sizes = head_size == 16 || head_size == 32 || head_size == 64 || head_size == 128 || head_size == 256;
    return level != NULL && sizes && max_width <= DELTA_ROWS && taps <= MOST_TAPS;
}

// ---- the convolution

typedef struct sections {  // of channels, as pgs_section has them
    int64_t first, later;
} sections;

static void run_convolution(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const pgs_level *          level = userdata;
    const struct ggml_tensor * x = dst->src[0], * taps = dst->src[1];
    const int64_t              n = dst->ne[0];
    sections                   s;
    memcpy(&s, parameters_of(dst), sizeof(s));
    for (int64_t start = 0, size; start < n; start += size) {
        size = pgs_section(s.first, s.later, start, n);
        const int64_t first = pgs_share(size, ith, nth), last = pgs_share(size, ith + 1, nth), count = (last < size ? last : size) - first, at = start + first;
        for (int64_t b = 0; b < dst->ne[2] && count > 0; b++) {
            level->convolve(floats(x, 0, b, 0) + at, x->nb[1] / sizeof(float), (const float *) taps->data + at * taps->ne[0], (int) taps->ne[0],
                            dst->ne[1], count, floats(dst, 0, b, 0) + at, dst->nb[1] / sizeof(float));
        }
    }
}

// rows F32 [channels, d_conv - 1 + T, B], whose rows may lie apart, taps F32 [d_conv, channels] -> silu of the convolution, F32 [channels, T, B]. Channels
// of `first` each in q and k and `later` in v, whose heads threads share; 0 if they are of nothing that has heads.
struct ggml_tensor * pgs_convolution(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * rows, struct ggml_tensor * taps,
                                     int64_t first, int64_t later) {
    struct ggml_tensor * src[] = { rows, taps };
    struct ggml_tensor * out   = ggml_custom_4d(ctx, GGML_TYPE_F32, rows->ne[0], rows->ne[1] - taps->ne[0] + 1, rows->ne[2], 1, src, 2, run_convolution,
                                                GGML_N_TASKS_MAX, (void *) level);
    const sections       s     = { first, later };
    return with_parameters(out, &s, sizeof(s), "native convolution");
}

// ---- the delta rule

// Pieces of the columns of every head, so that all threads have something to do.
typedef struct share {
    int64_t units, parts;
} share;

static share shared(int64_t heads, int64_t size, int nth) {
    int64_t parts = (nth + heads - 1) / heads;
    parts         = parts < 1 ? 1 : parts > size / LANES ? size / LANES : parts;
    return (share) { heads * parts, parts };
}

static void columns(const pgs_level * level, const pgs_head * h, int64_t part, int64_t parts) {
    level->delta(h, h->size / LANES * part / parts * LANES, h->size / LANES * (part + 1) / parts * LANES);
}

// One head of one sequence, `part` of its columns; whether the next columns `follow`.
static void run_head(const struct ggml_tensor * dst, const pgs_level * level, int64_t head, int64_t seq, int64_t part, int64_t parts, bool follow) {
    const struct ggml_tensor * mixed = dst->src[0], * beta = dst->src[1], * alpha = dst->src[2], * dt = dst->src[3], * a = dst->src[4];
    const struct ggml_tensor * on = dst->src[6], * qk_pool = dst->src[7], * gates_pool = dst->src[8];
    const delta_params p = params_of(dst);
    const int64_t size = dst->ne[0], heads = dst->ne[1], T = mixed->ne[1], heads_k = (mixed->ne[0] / size - heads) / 2, copy = head % (heads_k * p.repeat), k_head = copy / p.repeat;
    const int64_t step = p.writes ? LANES : T;  // rows at once: where states are not written between two pieces, they are one
    _Alignas(64) float q[DELTA_ROWS * 256], k[DELTA_ROWS * 256];
    float norm[256], decay[DELTA_ROWS], strength[DELTA_ROWS];
    const float scale = 1.0f / sqrtf((float) size);  // x / sqrt(sum x^2 + eps) is a norm with eps / size, times this
    for (int64_t i = 0; i < size; i++) {
        norm[i] = scale;
    }
    for (int64_t first = 0; first < T; first += step) {
        const int64_t rows = T - first < step ? T - first : step;
        for (int64_t t = 0; t < rows; t++) {
            pgs_will_write(floats(dst, head, seq * T + first + t, 0), (size_t) size * sizeof(float));
        }
        for (int64_t t = 0; t < rows; t++) {
            const int64_t row = seq * T + first + t;
            const float * x   = floats(mixed, first + t, seq, 0) + k_head * size;
            const float   s   = at(alpha, head, row) + at(dt, head, 0), switched = on != NULL ? at(on, 0, row) : 1.0f;
            const float   g   = (s > 20.0f ? s : logf(1.0f + expf(s))) * at(a, head, 0) * switched;
            decay[t]    = expf(g);
            strength[t] = 1.0f / (1.0f + expf(-at(beta, head, row))) * switched;
            level->norm(x, norm, NULL, p.eps / (float) size, size, q + t * size);
            level->norm(x + heads_k * size, norm, NULL, p.eps / (float) size, size, k + t * size);
            if (p.keeps && part == 0) {
                const int64_t kept = seq * p.width + first + t;
                float * gates = (float *) gates_pool->data + heads * kept + head;
                gates[0]         = g;
                gates[p.beta_at] = strength[t];
                if (head == copy) {
                    memcpy(floats(qk_pool, heads_k * p.repeat + head, kept, 0), k + t * size, (size_t) size * sizeof(float));
                }
            }
        }
        const pgs_head h = {
            .size = size, .rows = rows, .q = q, .k = k, .v = floats(mixed, first, seq, 0) + (2 * heads_k + head) * size,
            .step_k = (size_t) size, .step_v = mixed->nb[1] / sizeof(float), .decay = decay, .beta = strength, .scale = scale,
            .state = floats(dst->src[5], 0, head, seq), .keeps = p.writes, .out = floats(dst, head, seq * T + first, 0),
            .step_out = (size_t) (size * heads), .follows = follow && first + rows == T,
        };
        columns(level, &h, part, parts);
    }
}

static void run_delta(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const int64_t heads = dst->ne[1], B = dst->src[5]->ne[3];
    const share   s     = shared(heads * B, dst->ne[0], nth);
    const int64_t end = s.units * (ith + 1) / nth;
    for (int64_t unit = s.units * ith / nth; unit < end; unit++) {
        const int64_t pair = unit / s.parts;
        run_head(dst, userdata, pair % heads, pair / heads, unit % s.parts, s.parts, unit + 1 < end);
    }
}

// mixed F32 [channels, T, B] -> F32 [size, heads, T * B]. The states F32 [size, size, heads, B] are written in place if it `writes`. Where `qk` and `gates`
// are given, normalised k, g and beta go there, of each sequence to rows that are `width` apart: qk F32 [size, 2 heads_k repeat, rows], gates F32 with
// g [heads, rows] first, and beta at offset `beta_at`.
struct ggml_tensor * pgs_delta_rule(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * mixed, const pgs_delta_inputs * in,
                                    int64_t repeat, struct ggml_tensor * states, bool writes, struct ggml_tensor * qk, struct ggml_tensor * gates,
                                    int64_t beta_at, int64_t width) {
    struct ggml_tensor * src[] = { mixed, in->beta, in->alpha, in->dt, in->a, states, in->on, qk, gates };
    const delta_params   p     = { .eps = in->eps, .keeps = qk != NULL, .writes = writes, .width = (int16_t) width, .beta_at = beta_at, .repeat = repeat };
    struct ggml_tensor * out   = ggml_custom_4d(ctx, GGML_TYPE_F32, states->ne[0], states->ne[2], mixed->ne[1] * mixed->ne[2], 1, src, 9, run_delta,
                                                GGML_N_TASKS_MAX, (void *) level);
    return with_parameters(out, &p, sizeof(p), "native delta-net");
}

// ---- replay

// The accepted rows of one pair of layer and slot and one head, folded into a part of its columns.
static void replay_head(const struct ggml_tensor * dst, const pgs_level * level, int64_t n, int64_t head, int64_t part, int64_t parts, bool follow) {
    const struct ggml_tensor * k = dst->src[0], * v = dst->src[1], * gates = dst->src[2], * states = dst->src[3], * keep = dst->src[4];
    const delta_params p    = params_of(dst);
    const int64_t      size = states->ne[0], heads = states->ne[2], w = k->ne[2];
    const float *      kept = (const float *) keep->data + n % p.slots * w, * g = (const float *) gates->data + heads * w * n + head;
    float              decay[DELTA_ROWS], strength[DELTA_ROWS];
    int64_t            rows = 0;
    for (; rows < w && kept[rows] != 0.0f; rows++) {  // accepted rows come first; the others would leave the state as it is
        decay[rows]    = expf(g[rows * heads]);
        strength[rows] = g[rows * heads + p.beta_at];
    }
    const pgs_head h = {
        .size = size, .rows = rows, .k = floats(k, head % k->ne[1], 0, n), .v = floats(v, head, 0, n), .step_k = k->nb[2] / sizeof(float),
        .step_v = v->nb[2] / sizeof(float), .decay = decay, .beta = strength, .state = floats(states, 0, head, n), .keeps = true, .follows = follow,
    };
    if (rows > 0) {
        columns(level, &h, part, parts);
    }
}

// Threads share each layer as run_delta does, so a state is read by the core that wrote it.
static void run_replay(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const struct ggml_tensor * states = dst->src[3];
    const int64_t heads = states->ne[2], slots = params_of(dst).slots;
    const share   s     = shared(heads * slots, states->ne[0], nth);
    const int64_t first = s.units * ith / nth, end = s.units * (ith + 1) / nth;
    for (int64_t layer = 0; layer * slots < states->ne[3]; layer++) {
        for (int64_t unit = first; unit < end; unit++) {
            const int64_t pair = unit / s.parts;
            replay_head(dst, userdata, layer * slots + pair / heads, pair % heads, unit % s.parts, s.parts, unit + 1 < end);
        }
    }
}

// Commits the accepted rows of the blocks of n pairs of layer and slot to the states in place. k F32 [size, heads_k repeat, w, n], v F32 [size, heads, w, n],
// gates F32 with g [heads, w, n] first and beta at offset `beta_at`, states F32 [size, size, heads, n], keep F32 [w * slots] with 1 for accepted rows.
struct ggml_tensor * pgs_delta_replay(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * k, struct ggml_tensor * v,
                                      struct ggml_tensor * gates, int64_t beta_at, struct ggml_tensor * states, struct ggml_tensor * keep,
                                      int64_t slots) {
    struct ggml_tensor * src[] = { k, v, gates, states, keep };
    const delta_params   p     = { .beta_at = beta_at, .slots = slots };
    struct ggml_tensor * out   = ggml_custom_4d(ctx, GGML_TYPE_F32, 1, 1, 1, 1, src, 5, run_replay, GGML_N_TASKS_MAX, (void *) level);
    return with_parameters(out, &p, sizeof(p), "native replay");
}
