// Our kernels for what is between products, as nodes of ggml's graphs: they run in its pool of threads, between its own nodes.
#include "kernels.h"
#include "layout.h"
#include "nodes.h"
#include "pgs.h"

static void run_look_up(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const struct ggml_tensor * packed = dst->src[0], * index = dst->src[1];
    for (int64_t r = ith; r < dst->ne[1]; r += nth) {
        const int32_t i   = *(const int32_t *) ((const char *) index->data + (size_t) r * index->nb[0]);
        float *       out = (float *) dst->data + r * dst->ne[0];
        if (i >= 0 && i < packed->ne[2] * LANES) {
            pgs_look_up((enum ggml_type) (uintptr_t) userdata, packed->data, dst->ne[0], packed->ne[2] * LANES, i, out);
        } else {
            memset(out, 0xff, (size_t) dst->ne[0] * sizeof(float));  // NaN, which the engine notices
        }
    }
}

// Rows of a table that products use, too: F32 [n_in, T] for index I32 [T].
struct ggml_tensor * pgs_packed_rows(struct ggml_context * ctx, enum ggml_type type, struct ggml_tensor * packed, int64_t n_in,
                                     struct ggml_tensor * index) {
    struct ggml_tensor * src[] = { packed, index };
    return named(ggml_custom_4d(ctx, GGML_TYPE_F32, n_in, index->ne[0], 1, 1, src, 2, run_look_up, GGML_N_TASKS_MAX, (void *) (uintptr_t) type),
                 "native rows");
}

// ---- norms

void pgs_run_norm(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const pgs_level *          level = userdata;
    const struct ggml_tensor * x = dst->src[0], * weight = dst->src[1], * gate = dst->src[2];
    const int64_t rows = rows_of(dst);
    float         eps;
    memcpy(&eps, parameters_of(dst), sizeof(eps));
    for (int64_t row = rows * ith / nth; row < rows * (ith + 1) / nth; row++) {
        level->norm(row_of(x, row), weight != NULL ? weight->data : NULL, gate != NULL ? row_of(gate, row) : NULL, eps, dst->ne[0],
                    (float *) dst->data + row * dst->ne[0]);
    }
}

struct ggml_tensor * pgs_norm(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * x, struct ggml_tensor * weight,
                              struct ggml_tensor * gate, float eps) {
    struct ggml_tensor * src[] = { x, weight, gate };
    struct ggml_tensor * out   = ggml_custom_4d(ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], x->ne[2], x->ne[3], src, 3, pgs_run_norm, GGML_N_TASKS_MAX,
                                                (void *) level);
    return with_parameters(out, &eps, sizeof(eps), "native norm");
}

// ---- rows of values

// Threads share rows, and where there are fewer rows than threads, multiples of LANES in them.
void pgs_run_gate(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const struct ggml_tensor * x = dst->src[0], * gate = dst->src[1];
    const int64_t rows = rows_of(gate), n = gate->ne[0], groups = (n + LANES - 1) / LANES, units = rows * groups;
    int32_t       silus;
    memcpy(&silus, parameters_of(dst), sizeof(silus));
    for (int64_t unit = units * ith / nth, end = units * (ith + 1) / nth; unit < end;) {
        const int64_t row = unit / groups, first = unit % groups * LANES, last = end < (row + 1) * groups ? (end - row * groups) * LANES : n;
        // heads of x may be one row of it: its own rows are whole, those of the gate lie where they lie
        const float * from = (const float *) ((const char *) x->data + (size_t) (row * n / x->ne[0]) * x->nb[1]) + row * n % x->ne[0];
        ((const pgs_level *) userdata)->gate(from + first, row_of(gate, row) + first, last - first, silus, (float *) dst->data + row * n + first);
        unit = (row + 1) * groups < end ? (row + 1) * groups : end;
    }
}

struct ggml_tensor * pgs_gate(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * x, struct ggml_tensor * gate, bool silus) {
    struct ggml_tensor * src[] = { x, gate };
    struct ggml_tensor * out   = ggml_custom_4d(ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], 1, 1, src, 2, pgs_run_gate, GGML_N_TASKS_MAX, (void *) level);
    const int32_t        how   = silus;
    return with_parameters(out, &how, sizeof(how), "native gate");
}

static void run_sum(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    for (int64_t row = ith; row < rows_of(dst); row += nth) {
        ((float *) dst->data)[row] = ((const pgs_level *) userdata)->sum(row_of(dst->src[0], row), dst->src[0]->ne[0]);
    }
}

struct ggml_tensor * pgs_sum_rows(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * x) {
    struct ggml_tensor * src[] = { x };
    return named(ggml_custom_4d(ctx, GGML_TYPE_F32, 1, x->ne[1], x->ne[2], x->ne[3], src, 1, run_sum, GGML_N_TASKS_MAX, (void *) level), "native sum");
}

static void run_argmax(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    for (int64_t row = ith; row < dst->ne[0]; row += nth) {
        ((int32_t *) dst->data)[row] = (int32_t) ((const pgs_level *) userdata)->argmax(row_of(dst->src[0], row), dst->src[0]->ne[0]);
    }
}

struct ggml_tensor * pgs_argmax(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * x) {
    struct ggml_tensor * src[] = { x };
    return named(ggml_custom_4d(ctx, GGML_TYPE_I32, x->ne[1], 1, 1, 1, src, 1, run_argmax, GGML_N_TASKS_MAX, (void *) level), "native argmax");
}

static void run_join(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    (void) userdata;
    for (int64_t row = ith; row < dst->ne[1]; row += nth) {
        float * to = (float *) dst->data + row * dst->ne[0];
        for (int i = 0; i < GGML_MAX_SRC && dst->src[i] != NULL; i++) {
            memcpy(to, row_of(dst->src[i], row), (size_t) dst->src[i]->ne[0] * sizeof(float));
            to += dst->src[i]->ne[0];
        }
    }
}

struct ggml_tensor * pgs_join(struct ggml_context * ctx, struct ggml_tensor ** parts, int count) {
    int64_t n = 0;
    for (int i = 0; i < count; i++) {
        n += parts[i]->ne[0];
    }
    return named(ggml_custom_4d(ctx, GGML_TYPE_F32, n, parts[0]->ne[1], 1, 1, parts, count, run_join, GGML_N_TASKS_MAX, NULL), "native join");
}

// What the five nodes of pgs_kv_mask compute, as one.
static void run_mask(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const struct ggml_tensor * base = dst->src[0], * last = dst->src[1], * first = dst->src[2];
    const int64_t kv_bucket = dst->ne[0], T = dst->ne[1], rows = rows_of(dst);
    (void) userdata;
    for (int64_t row = ith; row < rows; row += nth) {
        const float * x     = (const float *) ((const char *) base->data + (base->ne[1] > 1 ? (size_t) (row / T) * base->nb[1] : 0));
        const float   upper = *row_of(last, row), lower = first != NULL ? *row_of(first, row) : 0.0f;
        uint16_t *    to    = (uint16_t *) dst->data + row * kv_bucket;
        if (first == NULL) {
            for (int64_t i = 0; i < kv_bucket; i++) {
                to[i] = x[i] + upper > 0.0f ? 0 : HIDDEN;
            }
        } else {
            for (int64_t i = 0; i < kv_bucket; i++) {
                to[i] = x[i] + upper > 0.0f && (x[i] + lower) * -1.0f + 1.0f > 0.0f ? 0 : HIDDEN;
            }
        }
    }
}

struct ggml_tensor * pgs_mask(struct ggml_context * ctx, struct ggml_tensor * mask_base, struct ggml_tensor * q_last, struct ggml_tensor * q_first,
                              int64_t kv_bucket, int64_t slots) {
    struct ggml_tensor * src[] = { mask_base, q_last, q_first };
    return named(ggml_custom_4d(ctx, GGML_TYPE_F16, kv_bucket, q_last->ne[1] / slots, 1, slots, src, 3, run_mask, GGML_N_TASKS_MAX, NULL), "native mask");
}

// ---- attention

// Heads whose rows are prefetched, relative to this one: `count` from `first` on.
static pgs_cache cache_of(const struct ggml_tensor * t, int64_t head, int64_t slot, int64_t first, int64_t count) {
    const bool   direct = t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_F16 || t->type == GGML_TYPE_BF16;
    const size_t prefetched   = count > 0 ? (size_t) (count - 1) * t->nb[2] + ggml_row_size(t->type, t->ne[0]) : 0;
    return (pgs_cache) { (const char *) t->data + (size_t) head * t->nb[2] + (size_t) slot * t->nb[3], t->nb[1], prefetched, (size_t) first * t->nb[2],
                         t->type, (int) t->ne[0], direct ? NULL : ggml_get_type_traits(t->type)->to_float };
}

// Query rows that share a head of K and V and a slot: heads of a token are neighbours, then tokens. Threads share pieces of these rows.
static void run_attention(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const struct pgs_level *   level = userdata;
    const struct ggml_tensor * q = dst->src[0], * k = dst->src[1], * v = dst->src[2], * mask = dst->src[3];
    const int64_t T = q->ne[1], H = q->ne[2], slots = q->ne[3], heads = k->ne[2], group = H / heads, rows = T * group;
    int64_t piece = (rows * heads * slots + nth - 1) / nth;
    piece         = piece < 1 ? 1 : piece > MOST_ROWS ? MOST_ROWS : piece;
    const int64_t pieces = (rows + piece - 1) / piece, units = pieces * heads * slots, begin = units * ith / nth, end = units * (ith + 1) / nth;
    const bool    neighbours = k->nb[2] < k->nb[1] && v->nb[2] < v->nb[1];  // heads of a position
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t first = unit % pieces * piece, head = unit / pieces % heads, slot = unit / pieces / heads;
        // the first head of a thread or slot prefetches its own rows; each head prefetches those of the next one where they are adjacent
        const bool    starts = unit == begin || unit % pieces == 0, own = unit == begin || head == 0 || !neighbours;
        const bool    more   = neighbours && head + 1 < heads && (unit / pieces + 1) * pieces < end;
        const int64_t from = own ? 0 : 1, count = starts ? own + more : 0;
        pgs_attention a = { .rows = (int) (rows - first < piece ? rows - first : piece), .span = k->ne[1] };
        memcpy(&a.scale, parameters_of(dst), sizeof(a.scale));
        a.k = cache_of(k, head, slot, from, count);
        a.v = cache_of(v, head, slot, from, count);
        for (int r = 0; r < a.rows; r++) {
            const int64_t t = (first + r) / group, h = head * group + (first + r) % group;
            a.q[r]    = (const float *) ((const char *) q->data + (size_t) t * q->nb[1] + (size_t) h * q->nb[2] + (size_t) slot * q->nb[3]);
            a.mask[r] = (const uint16_t *) ((const char *) mask->data + (size_t) t * mask->nb[1] + (size_t) slot * mask->nb[3]);
            a.out[r]  = (float *) dst->data + ((slot * T + t) * H + h) * dst->ne[0];
        }
        level->attend(&a);
    }
}

static bool reads(const struct ggml_tensor * t) {
    const bool direct = t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_F16 || t->type == GGML_TYPE_BF16;
    return t->ne[0] % LANES == 0 && t->ne[0] <= MOST_SIZE && (direct || ggml_get_type_traits(t->type)->to_float != NULL);
}

// q F32 [size, T, H, slots], k and v [size, span, heads, slots], mask F16 [span, T, 1, slots] -> F32 [size, H, T, slots].
struct ggml_tensor * pgs_attention_node(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * q, struct ggml_tensor * k,
                                        struct ggml_tensor * v, struct ggml_tensor * mask, float scale) {
    if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float) || !reads(k) || !reads(v) || mask->type != GGML_TYPE_F16 || mask->ne[2] != 1) {
        return NULL;
    }
    struct ggml_tensor * src[] = { q, k, v, mask };
    struct ggml_tensor * out   = ggml_custom_4d(ctx, GGML_TYPE_F32, v->ne[0], q->ne[2], q->ne[1], q->ne[3], src, 4, run_attention,
                                                GGML_N_TASKS_MAX, (void *) level);
    return with_parameters(out, &scale, sizeof(scale), "native attention");
}
