// Our kernels as nodes of ggml's graphs: they run in its pool of threads, between its own nodes.
#include "kernels.h"
#include "layout.h"
#include "pgs.h"

#include <string.h>

#define WIDE        (SUMS_STEP / LANES)  // groups whose sums are stored together, a row after the other: every row lies in a page of its own
#define FAR_BYTES   (1 << 20)      // of a matrix that is no longer in a second-level cache when it is read again
#define ASKED_TILES 4              // tiles with which it is measured how far ahead weights are asked for: with more, they come while these compute
#define ASKED_BYTES (64 << 10)     // of weights for a thread, with which it is measured: what else a product does would be taken for reading
#define ASKED_AHEAD (4 << 10)      // bytes ahead, where it is not measured

// ggml keeps a node's function in the first 24 bytes of its parameters; the scale of scores, or what is added to a mean, comes behind them.
#define SCALE_AT 32

#define MOST_MADE 16384  // values of a row that is made where it is rounded

#define ALONE         4096         // values that each thread of a product rounds for itself, at most
#define ROUNDED_BYTES (128 << 10)  // of a tile of these

// What scripts/profile_cpu.py knows a node by.
static struct ggml_tensor * named(struct ggml_tensor * node, const char * name) {
    return ggml_set_name(node, name);
}

static int64_t rows_of(const struct ggml_tensor * t) {
    return t->ne[1] * t->ne[2] * t->ne[3];
}

static const float * row_of(const struct ggml_tensor * t, int64_t row) {
    const int64_t i1 = row % t->ne[1], i2 = row / t->ne[1] % t->ne[2], i3 = row / t->ne[1] / t->ne[2];
    return (const float *) ((const char *) t->data + (size_t) i1 * t->nb[1] + (size_t) i2 * t->nb[2] + (size_t) i3 * t->nb[3]);
}

static int64_t blocks_of(const pgs_kernel * k, int64_t n_in) {
    return (n_in + k->block - 1) / k->block;
}

// What a row that products read is made of: it is given, or a norm or a gate that nobody else has to compute first.
typedef enum made_by { GIVEN, NORM, GATE } made_by;

// What a node that rounds has in its parameters, behind ggml's own.
typedef struct rounding {
    float   eps;  // of a norm
    int32_t type, made_by, silus;
    int32_t size;  // of a norm's rows: heads, which are one row of `n` values here
    int32_t n, rows;
} rounding;

static void run_norm(struct ggml_tensor * dst, int ith, int nth, void * userdata);
static void run_gate(struct ggml_tensor * dst, int ith, int nth, void * userdata);

// How `x` is rounded, and `from` what: three tensors or NULL. A graph waits for all threads behind each of its nodes, so norms and gates are made where
// they are rounded; their nodes fall out of the graph unless somebody else reads them.
static rounding rounding_of(enum ggml_type type, struct ggml_tensor * x, struct ggml_tensor ** from) {
    rounding             how      = { .type = type, .made_by = GIVEN, .n = (int32_t) x->ne[0], .rows = (int32_t) rows_of(x) };
    ggml_custom_op_t     function = NULL;
    struct ggml_tensor * made     = x->op == GGML_OP_RESHAPE && ggml_is_contiguous(x) ? x->src[0] : x;
    if (made->op == GGML_OP_CUSTOM && made->view_src == NULL && x->ne[0] <= MOST_MADE && x->ne[0] % made->ne[0] == 0) {
        memcpy(&function, made->op_params, sizeof(function));
    }
    const char * parameters = (const char *) made->op_params + SCALE_AT;
    from[0] = x;
    from[1] = from[2] = NULL;
    if (function == run_norm) {
        how.made_by = NORM;
        how.size    = (int32_t) made->ne[0];
        memcpy(&how.eps, parameters, sizeof(how.eps));
        memcpy(from, made->src, 3 * sizeof(from[0]));
    } else if (function == run_gate && made == x && x->src[1]->ne[0] == x->ne[0] && rows_of(x->src[1]) == rows_of(x)) {
        how.made_by = GATE;
        memcpy(&how.silus, parameters, sizeof(how.silus));
        memcpy(from, x->src, 2 * sizeof(from[0]));
    }
    return how;
}

// The blocks [first, end) of one row.
static void round_blocks(const pgs_level * level, const rounding * how, struct ggml_tensor * const * from, int64_t row, int64_t first, int64_t end,
                         char * tiles) {
    _Alignas(64) float made[MOST_MADE];
    const pgs_kernel * k      = pgs_kernel_of(level, how->type);
    const int64_t      begin  = first * k->block, stop = end * k->block < how->n ? end * k->block : how->n;
    const float *      values = made;
    if (how->made_by == NORM) {
        const int64_t heads = how->n / how->size;
        for (int64_t head = begin / how->size; head * how->size < stop; head++) {
            const int64_t i = row * heads + head;
            level->norm(row_of(from[0], i), from[1] != NULL ? from[1]->data : NULL, from[2] != NULL ? row_of(from[2], i) : NULL, how->eps, how->size,
                        made + head * how->size);
        }
        values = made + begin;
    } else if (how->made_by == GATE) {
        level->gate(row_of(from[0], row) + begin, row_of(from[1], row) + begin, stop - begin, how->silus, made);
    } else {
        values = row_of(from[0], row) + begin;
    }
    k->activations(values, stop - begin, tiles + (size_t) (row / TILE * blocks_of(k, how->n) + first) * k->act, (int) (row % TILE));
}

// Threads share rows, and where there are fewer rows than threads, parts of rows; each of these makes a norm of its own.
static void run_activations(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    rounding how;
    memcpy(&how, (const char *) dst->op_params + SCALE_AT, sizeof(how));
    const int64_t rows = how.rows, blocks = blocks_of(pgs_kernel_of(userdata, how.type), how.n), parts = rows < nth ? (nth + rows - 1) / rows : 1;
    for (int64_t unit = rows * parts * ith / nth; unit < rows * parts * (ith + 1) / nth; unit++) {
        const int64_t part = unit % parts;
        round_blocks(userdata, &how, dst->src, unit / parts, blocks * part / parts, blocks * (part + 1) / parts, dst->data);
    }
}

struct ggml_tensor * pgs_activations(struct ggml_context * ctx, const pgs_level * level, enum ggml_type type, struct ggml_tensor * x) {
    const pgs_kernel *   k = pgs_kernel_of(level, type);
    const int64_t        tiles = (rows_of(x) + TILE - 1) / TILE, size = tiles * blocks_of(k, x->ne[0]) * (int64_t) k->act;
    struct ggml_tensor * from[3];
    const rounding       how = rounding_of(type, x, from);
    struct ggml_tensor * out = ggml_custom_4d(ctx, GGML_TYPE_I8, size, 1, 1, 1, from, 3, run_activations, GGML_N_TASKS_MAX, (void *) level);
    memcpy((char *) out->op_params + SCALE_AT, &how, sizeof(how));
    return named(out, "own rounding");
}

typedef struct job {  // the products of one thread: weights, and as many tiles as stay in its cache
    const pgs_kernel * k;
    int64_t            blocks;
    const char *       tiles;
    int                count, rows;  // tiles, and rows in them
    size_t             ahead;        // bytes ahead of use that weights are asked for
} job;

// The outputs of a pair of groups, or of one.
static void multiply_groups(const job * j, const char * records, int groups, float * sums) {
    const pgs_kernel * k    = j->k;
    const size_t       size = (size_t) groups * k->record;
    const int64_t      fit  = (int64_t) (CHUNK_BYTES / size), chunk = j->count == 1 ? j->blocks : fit < 1 ? 1 : fit;
    for (int64_t first = 0; first < j->blocks; first += chunk) {
        const int64_t n = j->blocks - first < chunk ? j->blocks - first : chunk;
        for (int t = 0; t < j->count; t++) {
            const char * tile = j->tiles + (size_t) (t * j->blocks + first) * k->act;
            const int    rows = j->rows - t * TILE < TILE ? j->rows - t * TILE : TILE;
            k->product(records + (size_t) first * size, groups, n, tile, rows, sums + (size_t) t * TILE * SUMS_STEP, j->ahead);
        }
    }
}

// What a product reads: [weights, what is rounded already or else NULL, what it rounds for itself (three or NULL), what is added to it or NULL].
enum { WEIGHTS, TILES, FROM, ADDED = FROM + 3, SOURCES };

// What is added to a row of outputs; NULL for nothing.
static const float * added_to(const struct ggml_tensor * dst, int64_t row) {
    const struct ggml_tensor * added = dst->src[ADDED];
    return added == NULL ? NULL : (const float *) added->data + (rows_of(added) > 1 ? row * dst->ne[0] : 0);
}

// Threads share pairs of groups.
static void run_product(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    rounding how;
    memcpy(&how, (const char *) dst->op_params + SCALE_AT, sizeof(how));
    const pgs_kernel *         k = pgs_kernel_of(userdata, how.type);
    const struct ggml_tensor * w = dst->src[WEIGHTS], * rounded = dst->src[TILES];
    const int64_t blocks = w->ne[1], groups = w->ne[2], pairs = (groups + 1) / 2, n_out = dst->ne[0], rows = rows_of(dst);
    const int64_t first = pairs * ith / nth * 2, last = pairs * (ith + 1) / nth * 2, end = last < groups ? last : groups;
    const int64_t fit   = TILES_BYTES / (blocks * (int64_t) k->act), most = fit < 1 ? 1 : fit < MOST_TILES ? fit : MOST_TILES;
    const int64_t bytes = end > first ? (end - first) * blocks * (int64_t) k->record : 0;
    _Alignas(64) float sums[MOST_TILES * TILE * SUMS_STEP];
    _Alignas(64) char  own[ROUNDED_BYTES];
    if (rounded == NULL && bytes > 0) {
        for (int64_t row = 0; row < rows; row++) {
            round_blocks(userdata, &how, dst->src + FROM, row, 0, blocks, own);
        }
    }
    for (int64_t row = 0; row < rows; row += most * TILE) {
        const int        here   = (int) (rows - row < most * TILE ? rows - row : most * TILE), count = (here + TILE - 1) / TILE;
        const bool       timed  = count <= ASKED_TILES && bytes >= ASKED_BYTES;
        const pgs_asking asking = timed ? pgs_asking_begin(k->type, ggml_nbytes(w) >= FAR_BYTES ? PGS_FAR : PGS_NEAR, here) : (pgs_asking) { .ahead = ASKED_AHEAD };
        const char *     tiles  = rounded != NULL ? (const char *) rounded->data + (size_t) (row / TILE * blocks) * k->act : own;
        const job        j      = { k, blocks, tiles, count, here, asking.ahead };
        for (int64_t g = first; g < end; g += WIDE) {
            const int     wide = (int) (end - g < WIDE ? end - g : WIDE);
            const int64_t left = n_out - g * LANES, outputs = left < wide * LANES ? left : wide * LANES;  // a view may have a group more than outputs
            memset(sums, 0, (size_t) here * SUMS_STEP * sizeof(float));
            for (int i = 0; i < wide; i += 2) {
                const char * records = (const char *) w->data + (size_t) record_of(groups, blocks, g + i, 0) * k->record;
                multiply_groups(&j, records, wide - i < 2 ? 1 : 2, sums + i * LANES);
            }
            for (int r = 0; r < here && outputs > 0; r++) {
                const float * from = sums + r * SUMS_STEP, * added = added_to(dst, row + r);
                float *       to   = (float *) dst->data + (row + r) * n_out + g * LANES;
                if (added == NULL) {
                    memcpy(to, from, (size_t) outputs * sizeof(float));
                    continue;
                }
                for (int64_t i = 0; i < outputs; i++) {
                    to[i] = from[i] + added[g * LANES + i];
                }
            }
        }
        pgs_asking_end(&asking, (size_t) bytes);
    }
}

static struct ggml_tensor * product_of(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * const * sources, const int64_t * ne,
                                       const rounding * how) {
    struct ggml_tensor * src[SOURCES];
    memcpy(src, sources, sizeof(src));
    struct ggml_tensor * out = ggml_custom_4d(ctx, GGML_TYPE_F32, ne[0], ne[1], ne[2], ne[3], src, SOURCES, run_product, GGML_N_TASKS_MAX, (void *) level);
    memcpy((char *) out->op_params + SCALE_AT, how, sizeof(*how));
    return named(out, "own product");
}

bool pgs_rounds_alone(const pgs_level * level, enum ggml_type type, const struct ggml_tensor * x) {
    const pgs_kernel * k = pgs_kernel_of(level, type);
    return rows_of(x) <= TILE && ggml_nelements(x) <= ALONE && blocks_of(k, x->ne[0]) * (int64_t) k->act <= ROUNDED_BYTES;
}

struct ggml_tensor * pgs_product(struct ggml_context * ctx, const pgs_level * level, enum ggml_type type, struct ggml_tensor * packed,
                                 int64_t n_out, struct ggml_tensor * activations, struct ggml_tensor * x) {
    struct ggml_tensor * src[SOURCES] = { [WEIGHTS] = packed, [TILES] = activations };
    const int64_t        ne[]         = { n_out, x->ne[1], x->ne[2], x->ne[3] };
    struct ggml_tensor * from[3];
    const rounding       how = rounding_of(type, x, from);
    if (activations == NULL) {
        memcpy(src + FROM, from, sizeof(from));
    }
    return product_of(ctx, level, src, ne, &how);
}

struct ggml_tensor * pgs_product_plus(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * product, struct ggml_tensor * added) {
    ggml_custom_op_t function = NULL;
    rounding         how;
    if (product->op == GGML_OP_CUSTOM && product->view_src == NULL) {
        memcpy(&function, product->op_params, sizeof(function));
    }
    const bool alike = ggml_are_same_shape(product, added) || (added->ne[0] == product->ne[0] && rows_of(added) == 1);
    if (function != run_product || product->src[ADDED] != NULL || added->type != GGML_TYPE_F32 || !alike || !ggml_is_contiguous(added)) {
        return NULL;
    }
    struct ggml_tensor * src[SOURCES];
    memcpy(src, product->src, sizeof(src));
    memcpy(&how, (const char *) product->op_params + SCALE_AT, sizeof(how));
    src[ADDED] = added;
    return product_of(ctx, level, src, product->ne, &how);
}

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
                 "own rows");
}

// ---- norms

static void run_norm(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const pgs_level *          level = userdata;
    const struct ggml_tensor * x = dst->src[0], * weight = dst->src[1], * gate = dst->src[2];
    const int64_t rows = rows_of(dst);
    float         eps;
    memcpy(&eps, (const char *) dst->op_params + SCALE_AT, sizeof(eps));
    for (int64_t row = rows * ith / nth; row < rows * (ith + 1) / nth; row++) {
        level->norm(row_of(x, row), weight != NULL ? weight->data : NULL, gate != NULL ? row_of(gate, row) : NULL, eps, dst->ne[0],
                    (float *) dst->data + row * dst->ne[0]);
    }
}

struct ggml_tensor * pgs_norm(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * x, struct ggml_tensor * weight,
                              struct ggml_tensor * gate, float eps) {
    struct ggml_tensor * src[] = { x, weight, gate };
    struct ggml_tensor * out   = ggml_custom_4d(ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], x->ne[2], x->ne[3], src, 3, run_norm, GGML_N_TASKS_MAX,
                                                (void *) level);
    memcpy((char *) out->op_params + SCALE_AT, &eps, sizeof(eps));
    return named(out, "own norm");
}

// ---- rows of values

// Threads share rows, and where there are fewer rows than threads, multiples of LANES in them.
static void run_gate(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const struct ggml_tensor * x = dst->src[0], * gate = dst->src[1];
    const int64_t rows = rows_of(gate), n = gate->ne[0], groups = (n + LANES - 1) / LANES, units = rows * groups;
    int32_t       silus;
    memcpy(&silus, (const char *) dst->op_params + SCALE_AT, sizeof(silus));
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
    struct ggml_tensor * out   = ggml_custom_4d(ctx, GGML_TYPE_F32, x->ne[0], x->ne[1], 1, 1, src, 2, run_gate, GGML_N_TASKS_MAX, (void *) level);
    const int32_t        how   = silus;
    memcpy((char *) out->op_params + SCALE_AT, &how, sizeof(how));
    return named(out, "own gate");
}

static void run_sum(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    for (int64_t row = ith; row < rows_of(dst); row += nth) {
        ((float *) dst->data)[row] = ((const pgs_level *) userdata)->sum(row_of(dst->src[0], row), dst->src[0]->ne[0]);
    }
}

struct ggml_tensor * pgs_sum_rows(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * x) {
    struct ggml_tensor * src[] = { x };
    return named(ggml_custom_4d(ctx, GGML_TYPE_F32, 1, x->ne[1], x->ne[2], x->ne[3], src, 1, run_sum, GGML_N_TASKS_MAX, (void *) level), "own sum");
}

static void run_argmax(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    for (int64_t row = ith; row < dst->ne[0]; row += nth) {
        ((int32_t *) dst->data)[row] = (int32_t) ((const pgs_level *) userdata)->argmax(row_of(dst->src[0], row), dst->src[0]->ne[0]);
    }
}

struct ggml_tensor * pgs_argmax(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * x) {
    struct ggml_tensor * src[] = { x };
    return named(ggml_custom_4d(ctx, GGML_TYPE_I32, x->ne[1], 1, 1, 1, src, 1, run_argmax, GGML_N_TASKS_MAX, (void *) level), "own argmax");
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
    return named(ggml_custom_4d(ctx, GGML_TYPE_F32, n, parts[0]->ne[1], 1, 1, parts, count, run_join, GGML_N_TASKS_MAX, NULL), "own join");
}

// What the five nodes of pgs_span_mask compute, as one.
static void run_mask(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const struct ggml_tensor * near = dst->src[0], * last = dst->src[1], * first = dst->src[2];
    const int64_t span = dst->ne[0], T = dst->ne[1], rows = rows_of(dst);
    (void) userdata;
    for (int64_t row = ith; row < rows; row += nth) {
        const float * x     = (const float *) ((const char *) near->data + (near->ne[1] > 1 ? (size_t) (row / T) * near->nb[1] : 0));
        const float   upper = *row_of(last, row), lower = first != NULL ? *row_of(first, row) : 0.0f;
        uint16_t *    to    = (uint16_t *) dst->data + row * span;
        if (first == NULL) {
            for (int64_t i = 0; i < span; i++) {
                to[i] = x[i] + upper > 0.0f ? 0 : HIDDEN;
            }
        } else {
            for (int64_t i = 0; i < span; i++) {
                to[i] = x[i] + upper > 0.0f && (x[i] + lower) * -1.0f + 1.0f > 0.0f ? 0 : HIDDEN;
            }
        }
    }
}

struct ggml_tensor * pgs_mask(struct ggml_context * ctx, struct ggml_tensor * near, struct ggml_tensor * q_last, struct ggml_tensor * q_first,
                              int64_t span, int64_t slots) {
    struct ggml_tensor * src[] = { near, q_last, q_first };
    return named(ggml_custom_4d(ctx, GGML_TYPE_F16, span, q_last->ne[1] / slots, 1, slots, src, 3, run_mask, GGML_N_TASKS_MAX, NULL), "own mask");
}

// ---- attention

// Heads whose rows are asked for ahead of use, counted from this one: `count` from `first` on.
static pgs_cache cache_of(const struct ggml_tensor * t, int64_t head, int64_t slot, int64_t first, int64_t count) {
    const bool   direct = t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_F16 || t->type == GGML_TYPE_BF16;
    const size_t asks   = count > 0 ? (size_t) (count - 1) * t->nb[2] + ggml_row_size(t->type, t->ne[0]) : 0;
    return (pgs_cache) { (const char *) t->data + (size_t) head * t->nb[2] + (size_t) slot * t->nb[3], t->nb[1], asks, (size_t) first * t->nb[2],
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
        // the first head of a thread, or of a slot, asks for its own rows and, where they lie beside them, those of the next head, which asks for those of
        // the one behind it
        const bool    starts = unit == begin || unit % pieces == 0, own = unit == begin || head == 0 || !neighbours;
        const bool    more   = neighbours && head + 1 < heads && (unit / pieces + 1) * pieces < end;
        const int64_t from = own ? 0 : 1, count = starts ? own + more : 0;
        pgs_attention a = { .rows = (int) (rows - first < piece ? rows - first : piece), .span = k->ne[1] };
        memcpy(&a.scale, (const char *) dst->op_params + SCALE_AT, sizeof(a.scale));
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
    memcpy((char *) out->op_params + SCALE_AT, &scale, sizeof(scale));
    return named(out, "own attention");
}
