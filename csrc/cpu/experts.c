// Products of routed experts: rows with the same expert share one pass over its weights.
//
// Three kinds of nodes: one orders the (token, choice) pairs by expert and assigns tile rows; one quantises each row once; one multiplies each expert's
// tiles with its weights, packed or in the file's format (then converted 16 rows at a time in the first-level cache, with the same bits).
#include "kernels.h"
#include "layout.h"
#include "nodes.h"
#include "pgs.h"

#define READING 2  // rows that cost as much time as reading weights

_Static_assert(sizeof(act_256) % sizeof(act_32) != 0 && sizeof(act_f32) % sizeof(act_32) != 0, "copy_row knows activations by their size");

// ---- which pair is where

typedef struct run {  // the pairs of one expert
    int32_t expert;
    int32_t place;  // of its first pair: tile * TILE + row
    int32_t rows;
} run;

// Memory layout after `count` runs: the place of every pair, -1 where its expert does not exist, then the pair at every place.
typedef struct order {
    int32_t * count;
    run *     runs;
    int32_t * place;
    int32_t * pair;
} order;

static int64_t most_runs(int64_t n_expert, int64_t pairs) {
    return n_expert < pairs ? n_expert : pairs;
}

static int64_t most_tiles(int64_t n_expert, int64_t pairs) {  // sum of ceil(rows / TILE)
    return (pairs + (TILE - 1) * most_runs(n_expert, pairs)) / TILE;
}

int64_t pgs_expert_order_size(int64_t n_expert, int64_t pairs) {
    return 1 + 3 * n_expert + pairs + TILE * most_tiles(n_expert, pairs);
}

static order order_at(const void * data, int64_t n_expert, int64_t pairs) {
    order o = { .count = (int32_t *) data };
    o.runs  = (run *) (o.count + 1);
    o.place = o.count + 1 + 3 * n_expert;
    o.pair  = o.place + pairs;
    return o;
}

static int64_t pairs_of(const struct ggml_tensor * chosen) {
    return chosen->ne[0] * chosen->ne[1];
}

static int32_t expert_of(const struct ggml_tensor * chosen, int64_t pair, int64_t n_expert) {
    const int64_t t = pair / chosen->ne[0], i = pair % chosen->ne[0];
    const int32_t e = *(const int32_t *) ((const char *) chosen->data + (size_t) t * chosen->nb[1] + (size_t) i * chosen->nb[0]);
    return e >= 0 && e < n_expert ? e : -1;
}

static void run_order(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const struct ggml_tensor * chosen   = dst->src[0];
    const int64_t              n_expert = (int64_t) (intptr_t) userdata, pairs = pairs_of(chosen);
    const order                o        = order_at(dst->data, n_expert, pairs);
    (void) nth;
    if (ith != 0) {
        return;
    }
    for (int64_t e = 0; e < n_expert; e++) {
        o.runs[e] = (run) { (int32_t) e, 0, 0 };
    }
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int32_t e = expert_of(chosen, pair, n_expert);
        if (e >= 0) {
            o.runs[e].rows++;
        }
    }
    int32_t place = 0;
    for (int64_t e = 0; e < n_expert; e++) {
        o.runs[e].place = place;
        place += (o.runs[e].rows + TILE - 1) / TILE * TILE;
    }
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int32_t e = expert_of(chosen, pair, n_expert);
        o.place[pair]   = e >= 0 ? o.runs[e].place++ : -1;
        if (e >= 0) {
            o.pair[o.place[pair]] = (int32_t) pair;
        }
    }
    int32_t count = 0;
    for (int64_t e = 0; e < n_expert; e++) {
        if (o.runs[e].rows > 0) {
            o.runs[count] = (run) { (int32_t) e, o.runs[e].place - o.runs[e].rows, o.runs[e].rows };
            count++;
        }
    }
    *o.count = count;
}

struct ggml_tensor * pgs_expert_order(struct ggml_context * ctx, struct ggml_tensor * chosen, int64_t n_expert) {
    struct ggml_tensor * src[] = { chosen };
    return named(ggml_custom_4d(ctx, GGML_TYPE_I32, pgs_expert_order_size(n_expert, pairs_of(chosen)), 1, 1, 1, src, 1, run_order, 1,
                                (void *) (intptr_t) n_expert), "native order");
}

// ---- activations

static void copy_row(const pgs_kernel * k, int64_t blocks, const char * from, int row, char * to, int at) {
    for (int64_t b = 0; b < blocks; b++, from += k->act, to += k->act) {
        if (k->act == sizeof(act_256)) {
            const act_256 * x = (const act_256 *) from;
            act_256 *       y = (act_256 *) to;
            memcpy(y->q[at], x->q[row], sizeof(x->q[0]));
            memcpy(y->by_32[at], x->by_32[row], sizeof(x->by_32[0]));
            memcpy(y->sum[at], x->sum[row], sizeof(x->sum[0]));
            memcpy(y->of_16[at], x->of_16[row], sizeof(x->of_16[0]));
            y->d[at] = x->d[row];
        } else if (k->act % sizeof(act_32) == 0) {
            const act_32 * x = (const act_32 *) from;
            act_32 *       y = (act_32 *) to;
            for (size_t i = 0; i < k->act / sizeof(act_32); i++) {
                memcpy(y[i].q[at], x[i].q[row], sizeof(x->q[0]));
                y[i].by_128[at] = x[i].by_128[row];
                y[i].by_8[at]   = x[i].by_8[row];
                y[i].first[at]  = x[i].first[row];
                y[i].d[at]      = x[i].d[row];
            }
        } else {
            memcpy(((act_f32 *) to)->x[at], ((const act_f32 *) from)->x[row], sizeof(act_f32) / TILE);
        }
    }
}

// x has a row for each pair, or one that all pairs of a token share. Threads share rows, and where there are fewer rows than threads, parts of rows.
static void run_activations(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const pgs_kernel *         k = userdata;
    const struct ggml_tensor * x = dst->src[0], * chosen = dst->src[2];
    int32_t                    n_expert;
    memcpy(&n_expert, parameters_of(dst), sizeof(n_expert));
    const order   o    = order_at(dst->src[1]->data, n_expert, pairs_of(chosen));
    const int64_t rows = x->ne[1] * x->ne[2], blocks = pgs_blocks(k, x->ne[0]), parts = rows < nth ? (nth + rows - 1) / rows : 1;
    const int64_t uses = pairs_of(chosen) / rows;  // pairs of a row: neighbours
    for (int64_t unit = rows * parts * ith / nth; unit < rows * parts * (ith + 1) / nth; unit++) {
        const int64_t row = unit / parts, first = blocks * (unit % parts) / parts, end = blocks * (unit % parts + 1) / parts;
        const int64_t from = first * k->block, to = end * k->block < x->ne[0] ? end * k->block : x->ne[0];
        const float * values = (const float *) ((const char *) x->data + (size_t) (row % x->ne[1]) * x->nb[1] + (size_t) (row / x->ne[1]) * x->nb[2]);
        const char *  done = NULL;
        int           done_row = 0;
        for (int64_t pair = row * uses; pair < (row + 1) * uses; pair++) {
            const int32_t place = o.place[pair];
            if (place < 0) {
                continue;
            }
            char * tile = (char *) dst->data + (size_t) (place / TILE * blocks + first) * k->act;
            if (done == NULL) {
                k->activations(values + from, to - from, tile, place % TILE);
                done     = tile;
                done_row = place % TILE;
            } else {
                copy_row(k, end - first, done, done_row, tile, place % TILE);
            }
        }
    }
}

size_t pgs_expert_tiles(const pgs_level * level, enum ggml_type type, int64_t n_in, int64_t n_expert, int64_t pairs) {
    const pgs_kernel * k = pgs_kernel_of(level, type);
    return k == NULL ? 0 : (size_t) (most_tiles(n_expert, pairs) * pgs_blocks(k, n_in)) * k->act;
}

struct ggml_tensor * pgs_expert_activations(struct ggml_context * ctx, const pgs_level * level, enum ggml_type type, struct ggml_tensor * x,
                                            struct ggml_tensor * by, struct ggml_tensor * chosen, int64_t n_expert) {
    const int64_t        size   = (int64_t) pgs_expert_tiles(level, type, x->ne[0], n_expert, pairs_of(chosen));
    const int32_t        count  = (int32_t) n_expert;
    struct ggml_tensor * src[]  = { x, by, chosen };
    struct ggml_tensor * out    = ggml_custom_4d(ctx, GGML_TYPE_I8, size, 1, 1, 1, src, 3, run_activations, GGML_N_TASKS_MAX,
                                                 (void *) pgs_kernel_of(level, type));
    return with_parameters(out, &count, sizeof(count), "native rounding");
}

// ---- products

typedef struct weights {
    const pgs_level *  level;
    const pgs_kernel * k;
    bool               packed;
    int                together;  // groups that are multiplied together: pairs where they are packed
    size_t             ahead;     // prefetch distance of weights in bytes
    const char *       data;
    size_t             row, expert;  // bytes, where they are a file's
    size_t             block;        // bytes of a file's block
    int64_t            n_in, n_out, blocks, groups;
} weights;

static weights weights_of(const struct ggml_tensor * w, const pgs_level * level, enum ggml_type type, int64_t n_in, int64_t n_out) {
    const pgs_kernel * k = pgs_kernel_of(level, type);
    const bool         packed = w->type == GGML_TYPE_I8;
    return (weights) { level, k, packed, packed ? 2 : 1, 0, w->data, w->nb[1], packed ? w->nb[3] : w->nb[2],
                       ggml_row_size(type, k->block), n_in, n_out, pgs_blocks(k, n_in), (n_out + LANES - 1) / LANES };
}

// `n` blocks from `first` on of the outputs of a group that a file has, as records in `to`.
static void regroup(const weights * w, int64_t expert, int64_t group, int64_t first, int64_t n, char * to) {
    const char *  data = w->data + (size_t) expert * w->expert;
    const int64_t left = w->n_out - group * LANES;
    const char *  rows = data + (size_t) (group * LANES) * w->row + (size_t) first * w->block;
    if (left >= LANES && (first + n) * w->k->block <= w->n_in) {
        const char * next = data + (size_t) (group + 1) * LANES * w->row + (size_t) first * LANES * w->block;
        w->level->regroup(w->k->type, rows, w->row, n, to, next);
        return;
    }
    memset(to, 0, (size_t) n * w->k->record);  // outputs and inputs that are not there
    const int64_t inputs = (first + n) * w->k->block < w->n_in ? n * w->k->block : w->n_in - first * w->k->block;
    for (int64_t i = 0; i < LANES && i < left; i++) {
        pgs_pack_rows((enum ggml_type) w->k->type, rows + (size_t) i * w->row, inputs, LANES, i, 1, to);
    }
}

typedef struct part {  // tiles of one expert that are multiplied together
    const char * tiles;
    int          count, rows;
} part;

// The outputs of a pair of groups, or of one: packed ones as they lie, those of a file by way of the first-level cache.
static void multiply_groups(const weights * w, int64_t expert, int64_t group, int groups, const part * p, float * sums) {
    _Alignas(64) char room[CHUNK_BYTES];
    const pgs_kernel * k    = w->k;
    const size_t       size = (size_t) groups * k->record;
    const int64_t      fit  = (int64_t) (CHUNK_BYTES / size), chunk = w->packed && p->count == 1 ? w->blocks : fit < 1 ? 1 : fit;
    const char *       packed = w->data + (size_t) expert * w->expert + (size_t) record_of(w->groups, w->blocks, group, 0) * k->record;
    for (int64_t first = 0; first < w->blocks; first += chunk) {
        const int64_t n = w->blocks - first < chunk ? w->blocks - first : chunk;
        if (!w->packed) {
            regroup(w, expert, group, first, n, room);
        }
        k->product(w->packed ? packed + (size_t) first * size : room, groups, n, p->tiles + (size_t) first * k->act, (size_t) w->blocks * k->act, p->rows,
                   sums, w->ahead);
    }
}

// Groups [first, end) of one expert's outputs, for all of its rows; of packed ones those of whole pairs.
static void multiply_run(const weights * w, const run * r, const int32_t * pair, const char * tiles, int64_t first, int64_t end, float * out) {
    const int64_t most = pgs_tiles_at_once(w->k, w->blocks);
    _Alignas(64) float sums[MOST_TILES * TILE * SUMS_STEP];
    for (int32_t done = 0; done < r->rows; done += (int32_t) most * TILE) {
        const int  here = r->rows - done < most * TILE ? r->rows - done : (int) most * TILE;
        const part p    = { tiles + (size_t) ((r->place + done) / TILE * w->blocks) * w->k->act, (here + TILE - 1) / TILE, here };
        for (int64_t g = first; g < end; g += w->together) {
            const int     groups = end - g < w->together ? 1 : w->together;
            const int64_t left = w->n_out - g * LANES, outputs = left < groups * LANES ? left : groups * LANES;
            memset(sums, 0, (size_t) here * SUMS_STEP * sizeof(float));
            multiply_groups(w, r->expert, g, groups, &p, sums);
            for (int i = 0; i < here; i++) {
                memcpy(out + pair[r->place + done + i] * w->n_out + g * LANES, sums + i * SUMS_STEP, (size_t) outputs * sizeof(float));
            }
        }
    }
}

static int64_t at_least(int64_t cost, int64_t of, int64_t most) {
    const int64_t n = cost <= 0 ? 0 : (cost + of - 1) / of;
    return n < most ? n : most;
}

// Threads share what is multiplied together, in order through all experts; an expert with many rows counts for more.
static void run_product(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const struct ggml_tensor * w = dst->src[0], * chosen = dst->src[3];
    int32_t                    p[3];  // type, inputs, experts
    memcpy(p, parameters_of(dst), sizeof(p));
    const int64_t pairs = pairs_of(chosen);
    weights       from  = weights_of(w, userdata, (enum ggml_type) p[0], p[1], dst->ne[0]);
    const int64_t units = (from.groups + from.together - 1) / from.together;
    const order   o     = order_at(dst->src[2]->data, p[2], pairs);
    int64_t       total = 0, before = 0;
    for (int32_t i = 0; i < *o.count; i++) {
        total += units * (o.runs[i].rows + READING);
    }
    const int64_t mine = total * ith / nth, others = total * (ith + 1) / nth;
    const int64_t rows = *o.count > 0 ? (pairs + *o.count - 1) / *o.count : 1;  // of an expert, about
    const pgs_prefetch_tune tune = from.packed && rows <= TILE ? pgs_prefetch_tune_begin(from.k->type, PGS_EXPERTS, rows) : (pgs_prefetch_tune) { 0 };
    int64_t          read   = 0;  // groups of weights
    from.ahead = tune.ahead;
    for (int32_t i = 0; i < *o.count; i++) {
        const int64_t cost  = o.runs[i].rows + READING;
        const int64_t first = from.together * at_least(mine - before, cost, units), last = from.together * at_least(others - before, cost, units);
        const int64_t end   = last < from.groups ? last : from.groups;
        if (first < end) {
            multiply_run(&from, &o.runs[i], o.pair, dst->src[1]->data, first, end, dst->data);
            read += end - first;
        }
        before += units * cost;
    }
    pgs_prefetch_tune_end(&tune, (size_t) (read * from.blocks) * from.k->record);
    for (int64_t pair = ith; pair < pairs; pair += nth) {
        if (o.place[pair] < 0) {
            memset((float *) dst->data + pair * dst->ne[0], 0xff, (size_t) dst->ne[0] * sizeof(float));  // NaN, which the engine notices
        }
    }
}

struct ggml_tensor * pgs_expert_product(struct ggml_context * ctx, const pgs_level * level, enum ggml_type type, struct ggml_tensor * experts,
                                        int64_t n_in, int64_t n_out, int64_t n_expert, struct ggml_tensor * activations, struct ggml_tensor * by,
                                        struct ggml_tensor * chosen) {
    struct ggml_tensor * src[] = { experts, activations, by, chosen };
    struct ggml_tensor * out   = ggml_custom_4d(ctx, GGML_TYPE_F32, n_out, chosen->ne[0], chosen->ne[1], 1, src, 4, run_product, GGML_N_TASKS_MAX,
                                                (void *) level);
    const int32_t        p[3]  = { type, (int32_t) n_in, (int32_t) n_expert };
    return with_parameters(out, p, sizeof(p), "native experts");
}

bool pgs_expert_types(const pgs_level * level, enum ggml_type type) {
    return pgs_kernel_of(level, type) != NULL;
}

// ---- packing, as fast as memory is

void pgs_pack_experts(const pgs_level * level, enum ggml_type type, const void * rows, int64_t n_in, int64_t n_out, int64_t n_expert, void * packed) {
    _Alignas(64) char room[CHUNK_BYTES];
    const pgs_kernel * k   = pgs_kernel_of(level, type);
    const size_t       row = ggml_row_size(type, n_in);
    const weights      w   = { level, k, false, 1, 0, rows, row, row * (size_t) n_out, ggml_row_size(type, k->block), n_in, n_out,
                               pgs_blocks(k, n_in), (n_out + LANES - 1) / LANES };
    const int64_t      chunk = (int64_t) (CHUNK_BYTES / k->record);
    for (int64_t e = 0; e < n_expert; e++) {
        char * expert = (char *) packed + (size_t) (e * w.groups * w.blocks) * k->record;
        for (int64_t g = 0; g < w.groups; g++) {
            for (int64_t first = 0; first < w.blocks; first += chunk) {
                const int64_t n = w.blocks - first < chunk ? w.blocks - first : chunk;
                regroup(&w, e, g, first, n, room);
                for (int64_t b = 0; b < n; b++) {
                    memcpy(expert + (size_t) record_of(w.groups, w.blocks, g, first + b) * k->record, room + (size_t) b * k->record, k->record);
                }
            }
        }
    }
}
