// Matrix products as graph nodes. Every node ends with a barrier, and lines written by a core of another cache domain cost 50 ns or more. So operands are
// computed where they are quantised (for few rows by each thread itself), and additions, gates and quantisation are fused into the product.
#include "kernels.h"
#include "layout.h"
#include "nodes.h"
#include "pgs.h"

#define WIDE          (SUMS_STEP / LANES)  // groups whose sums are stored together, a row after the other: every row lies in a page of its own
#define MEMORY_BYTES     (1 << 20)    // size of a matrix that does not stay in a second-level cache
#define PREFETCH_TILES   4            // most tiles of tuned products: with more, computation hides the latency
#define PREFETCH_BYTES   (64 << 10)   // fewest bytes of weights per thread of tuned products
#define PREFETCH_AHEAD   (4 << 10)    // default distance
#define MOST_MADE     16384        // values of a row that is made where it is rounded
#define ALONE         4096         // values that each thread of a product rounds for itself, at most
#define ROUNDED_BYTES (128 << 10)  // of a tile of these
#define GATED_ROWS    (4 * TILE)   // rows whose gates are computed where their products are
#define GATED         8192         // outputs of each half at once, of all rows: each change of halves waits for weights

// ---- rounding

// Source of an operand row: given, or a fused norm or gate.
typedef enum made_by { GIVEN, NORM, GATE } made_by;

typedef struct rounding {
    float   eps;   // of a norm
    int32_t size;  // of a norm's rows: heads, which are one row of `n` values here
    int32_t n, rows;
    uint8_t type, made_by, silus;
} rounding;

// How `x` is rounded, and `from` what: three tensors or NULL. Fused nodes leave the graph unless they have other readers.
static rounding rounding_of(enum ggml_type type, struct ggml_tensor * x, struct ggml_tensor ** from) {
    rounding             how  = { .n = (int32_t) x->ne[0], .rows = (int32_t) rows_of(x), .type = (uint8_t) type, .made_by = GIVEN };
    struct ggml_tensor * made = x->op == GGML_OP_RESHAPE && ggml_is_contiguous(x) ? x->src[0] : x;
    const bool           fits = x->ne[0] <= MOST_MADE && x->ne[0] % made->ne[0] == 0;
    from[0] = x;
    from[1] = from[2] = NULL;
    if (fits && function_of(made) == pgs_run_norm) {
        how.made_by = NORM;
        how.size    = (int32_t) made->ne[0];
        memcpy(&how.eps, parameters_of(made), sizeof(how.eps));
        memcpy(from, made->src, 3 * sizeof(from[0]));
    } else if (fits && function_of(x) == pgs_run_gate && x->src[1]->ne[0] == x->ne[0] && rows_of(x->src[1]) == rows_of(x)) {
        int32_t silus;
        memcpy(&silus, parameters_of(x), sizeof(silus));
        how.made_by = GATE;
        how.silus   = (uint8_t) silus;
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
    k->activations(values, stop - begin, tiles + (size_t) (row / TILE * pgs_blocks(k, how->n) + first) * k->act, (int) (row % TILE));
}

// Threads share rows, and where there are fewer rows than threads, parts of rows; each of these makes a norm of its own.
static void run_activations(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    rounding how;
    memcpy(&how, parameters_of(dst), sizeof(how));
    const int64_t rows = how.rows, blocks = pgs_blocks(pgs_kernel_of(userdata, how.type), how.n), parts = rows < nth ? (nth + rows - 1) / rows : 1;
    for (int64_t unit = rows * parts * ith / nth; unit < rows * parts * (ith + 1) / nth; unit++) {
        const int64_t part = unit % parts;
        round_blocks(userdata, &how, dst->src, unit / parts, blocks * part / parts, blocks * (part + 1) / parts, dst->data);
    }
}

// ---- products

// Sources of a product: [weights, what is rounded already or else NULL, what it rounds for itself (three or NULL), what is added to it or NULL].
enum { WEIGHTS, TILES, FROM, ADDED = FROM + 3, SOURCES };

typedef struct product_params {
    rounding in;
    uint8_t  type, silus, gate_last;  // of gated products: what rounds them, and whether the gate's outputs come last
    int32_t  first, later;            // outputs of each of the first two sections and of each later one, 0: all are one; of gated products, of a half
} product_params;

_Static_assert(PARAMETERS_AT + sizeof(product_params) <= GGML_MAX_OP_PARAMS, "parameters of a node");

static product_params params_of(const struct ggml_tensor * node) {
    product_params p;
    memcpy(&p, parameters_of(node), sizeof(p));
    return p;
}

typedef struct job {  // the products of one thread: weights, and as many tiles as stay in its cache
    const pgs_kernel * k;
    const char *       records;
    int64_t            blocks, groups;
    const char *       tiles;
    int                count, rows;  // tiles, and rows in them
    size_t             ahead;        // prefetch distance in bytes
} job;

// The outputs of a pair of groups, or of one.
static void multiply_groups(const job * j, const char * records, int groups, float * sums) {
    const pgs_kernel * k    = j->k;
    const size_t       size = (size_t) groups * k->record;
    const int64_t      fit  = (int64_t) (CHUNK_BYTES / size), chunk = j->count == 1 ? j->blocks : fit < 1 ? 1 : fit;
    for (int64_t first = 0; first < j->blocks; first += chunk) {
        const int64_t n = j->blocks - first < chunk ? j->blocks - first : chunk;
        k->product(records + (size_t) first * size, groups, n, j->tiles + (size_t) first * k->act, (size_t) j->blocks * k->act, j->rows, sums, j->ahead);
    }
}

// sums[r * SUMS_STEP ...] = the outputs of `wide` groups from g on, WIDE at most. Pairs begin at even groups.
static void multiply(const job * j, int64_t g, int wide, float * sums) {
    memset(sums, 0, (size_t) j->rows * SUMS_STEP * sizeof(float));
    for (int i = 0; i < wide; i += 2) {
        multiply_groups(j, j->records + (size_t) record_of(j->groups, j->blocks, g + i, 0) * j->k->record, wide - i < 2 ? 1 : 2, sums + i * LANES);
    }
}

// Weights of `bytes` for a thread, and what it rounds for itself, which `own` has room for.
static job begin_job(const struct ggml_tensor * node, const pgs_level * level, const product_params * p, int64_t bytes, char * own) {
    const struct ggml_tensor * w = node->src[WEIGHTS];
    const pgs_kernel *         k = pgs_kernel_of(level, p->in.type);
    job j = { .k = k, .records = w->data, .blocks = w->ne[1], .groups = w->ne[2], .tiles = own };
    if (node->src[TILES] != NULL) {
        j.tiles = node->src[TILES]->data;
    } else if (bytes > 0) {
        for (int64_t row = 0; row < p->in.rows; row++) {
            round_blocks(level, &p->in, node->src + FROM, row, 0, j.blocks, own);
        }
    }
    return j;
}

static pgs_prefetch_tune begin_prefetch_tune(const struct ggml_tensor * w, const job * j, int64_t bytes) {
    const bool timed = j->count <= PREFETCH_TILES && bytes >= PREFETCH_BYTES;
    return timed ? pgs_prefetch_tune_begin(j->k->type, ggml_nbytes(w) >= MEMORY_BYTES ? PGS_IN_MEMORY : PGS_IN_CACHE, j->rows) : (pgs_prefetch_tune) { .ahead = PREFETCH_AHEAD };
}

// Groups [first, end) of a thread: its share of the pairs of a section.
typedef struct range {
    int64_t first, end;
} range;

static range share_of(int64_t start, int64_t outputs, int64_t groups, int ith, int nth) {
    const int64_t end = (start + pgs_share(outputs, ith + 1, nth)) / LANES;
    return (range) { (start + pgs_share(outputs, ith, nth)) / LANES, end < groups ? end : groups };
}

// The sums of `outputs` outputs of each row, from `first` on, and what is added to them.
static void store(struct ggml_tensor * dst, int64_t row, int rows, int64_t first, int64_t outputs, const float * sums) {
    const struct ggml_tensor * added = dst->src[ADDED];
    const int64_t              step  = added != NULL && rows_of(added) > 1 ? dst->ne[0] : 0;
    for (int r = 0; r < rows; r++) {
        const float * from = sums + r * SUMS_STEP;
        float *       to   = (float *) dst->data + (row + r) * dst->ne[0] + first;
        if (added == NULL) {
            memcpy(to, from, (size_t) outputs * sizeof(float));
            continue;
        }
        const float * more = (const float *) added->data + (row + r) * step + first;
        for (int64_t i = 0; i < outputs; i++) {
            to[i] = from[i] + more[i];
        }
    }
}

// Threads share pairs of groups.
static void run_product(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const product_params       p = params_of(dst);
    const struct ggml_tensor * w = dst->src[WEIGHTS];
    const pgs_kernel *         k = pgs_kernel_of(userdata, p.in.type);
    const int64_t blocks = w->ne[1], groups = w->ne[2], n_out = dst->ne[0], rows = rows_of(dst), most = pgs_tiles_at_once(k, blocks);
    _Alignas(64) float sums[MOST_TILES * TILE * SUMS_STEP];
    _Alignas(64) char  own[ROUNDED_BYTES];
    int64_t bytes = 0;
    for (int64_t start = 0, size; start < n_out; start += size) {
        size = pgs_section(p.first, p.later, start, n_out);
        const range r = share_of(start, size, groups, ith, nth);
        bytes += (r.end - r.first) * blocks * (int64_t) k->record;
    }
    const job whole = begin_job(dst, userdata, &p, bytes, own);
    for (int64_t row = 0; row < rows && bytes > 0; row += most * TILE) {
        job j   = whole;
        j.rows  = (int) (rows - row < most * TILE ? rows - row : most * TILE);
        j.count = (j.rows + TILE - 1) / TILE;
        j.tiles += (size_t) (row / TILE * blocks) * k->act;
        const pgs_prefetch_tune tune = begin_prefetch_tune(w, &j, bytes);
        j.ahead = tune.ahead;
        for (int64_t start = 0, size; start < n_out; start += size) {
            size = pgs_section(p.first, p.later, start, n_out);
            const range r = share_of(start, size, groups, ith, nth);
            for (int64_t g = r.first; g < r.end; g += WIDE) {
                const int     wide = (int) (r.end - g < WIDE ? r.end - g : WIDE);
                const int64_t left = n_out - g * LANES, outputs = left < wide * LANES ? left : wide * LANES;  // a view may have a group more than outputs
                for (int i = 0; i < j.rows && outputs > 0; i++) {
                    pgs_will_write((float *) dst->data + (row + i) * n_out + g * LANES, (size_t) outputs * sizeof(float));
                }
                multiply(&j, g, wide, sums);
                if (outputs > 0) {
                    store(dst, row, j.rows, g * LANES, outputs, sums);
                }
            }
        }
        pgs_prefetch_tune_end(&tune, (size_t) bytes);
    }
}

static struct ggml_tensor * node_of(struct ggml_context * ctx, enum ggml_type type, const int64_t * ne, struct ggml_tensor ** src, int n_src,
                                    ggml_custom_op_t function, const pgs_level * level, const void * params, size_t size, const char * name) {
    struct ggml_tensor * out = ggml_custom_4d(ctx, type, ne[0], ne[1], ne[2], ne[3], src, n_src, function, GGML_N_TASKS_MAX, (void *) level);
    return with_parameters(out, params, size, name);
}

struct ggml_tensor * pgs_product(struct ggml_context * ctx, const pgs_level * level, enum ggml_type type, struct ggml_tensor * packed,
                                 int64_t n_out, struct ggml_tensor * activations, struct ggml_tensor * x) {
    struct ggml_tensor * src[SOURCES] = { [WEIGHTS] = packed, [TILES] = activations }, * from[3];
    const int64_t        ne[]         = { n_out, x->ne[1], x->ne[2], x->ne[3] };
    const product_params p            = { .in = rounding_of(type, x, from) };
    if (activations == NULL) {
        memcpy(src + FROM, from, sizeof(from));
    }
    return node_of(ctx, GGML_TYPE_F32, ne, src, SOURCES, run_product, level, &p, sizeof(p), "native product");
}

struct ggml_tensor * pgs_product_plus(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * product, struct ggml_tensor * added) {
    const bool alike = ggml_are_same_shape(product, added) || (added->ne[0] == product->ne[0] && rows_of(added) == 1);
    if (function_of(product) != run_product || product->src[ADDED] != NULL || added->type != GGML_TYPE_F32 || !alike || !ggml_is_contiguous(added)) {
        return NULL;
    }
    const product_params p = params_of(product);
    struct ggml_tensor * src[SOURCES];
    memcpy(src, product->src, sizeof(src));
    src[ADDED] = added;
    return node_of(ctx, GGML_TYPE_F32, product->ne, src, SOURCES, run_product, level, &p, sizeof(p), "native product");
}

void pgs_share_sections(struct ggml_tensor * x, int64_t first, int64_t later) {
    struct ggml_tensor * product = x->view_src != NULL ? x->view_src : x;
    while (product->op == GGML_OP_VIEW || product->op == GGML_OP_RESHAPE) {
        product = product->src[0];
    }
    if (function_of(product) == run_product && first % (2 * LANES) == 0 && later % (2 * LANES) == 0) {
        product_params p = params_of(product);
        p.first = (int32_t) first;
        p.later = (int32_t) later;
        memcpy(parameters_of(product), &p, sizeof(p));
    }
}

// ---- gated products: the two halves of a product's outputs, one of which gates the other, rounded for the product that reads them

// Threads share both halves alike.
static void run_gated(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const product_params       p = params_of(dst);
    const struct ggml_tensor * w = dst->src[WEIGHTS];
    const pgs_level *          level = userdata;
    const pgs_kernel *         to = pgs_kernel_of(level, p.type);
    const int64_t              n = p.first, least = to->block > SUMS_STEP ? to->block : SUMS_STEP, to_blocks = pgs_blocks(to, n);
    const int                  rows = p.in.rows;
    const int64_t parts = (n + least - 1) / least, first = parts * ith / nth * least, last = parts * (ith + 1) / nth * least, end = last < n ? last : n;
    const int64_t piece = GATED / rows / least * least;
    const int64_t bytes = end > first ? (end - first) / LANES * 2 * w->ne[1] * (int64_t) pgs_kernel_of(level, p.in.type)->record : 0;
    _Alignas(64) float sums[GATED_ROWS * SUMS_STEP], halves[2][GATED];
    _Alignas(64) char  own[ROUNDED_BYTES];
    job                j = begin_job(dst, level, &p, bytes, own);
    j.rows  = rows;
    j.count = (rows + TILE - 1) / TILE;
    const pgs_prefetch_tune tune = begin_prefetch_tune(w, &j, bytes);
    j.ahead = tune.ahead;
    float * up = halves[!p.gate_last], * gate = halves[p.gate_last];
    for (int64_t at = first; at < end; at += piece) {
        const int64_t here = end - at < piece ? end - at : piece;
        for (int half = 0; half < 2; half++) {
            for (int64_t i = 0; i < here; i += SUMS_STEP) {
                const int64_t outputs = here - i < SUMS_STEP ? here - i : SUMS_STEP;
                multiply(&j, (half * n + at + i) / LANES, (int) (outputs / LANES), sums);
                for (int r = 0; r < rows; r++) {
                    memcpy(halves[half] + r * here + i, sums + r * SUMS_STEP, (size_t) outputs * sizeof(float));
                }
            }
        }
        for (int r = 0; r < rows; r++) {
            level->gate(up + r * here, gate + r * here, here, p.silus, up + r * here);
            to->activations(up + r * here, here, (char *) dst->data + (size_t) (r / TILE * to_blocks + at / to->block) * to->act, r % TILE);
        }
    }
    pgs_prefetch_tune_end(&tune, (size_t) bytes);
}

// The product whose halves a gate reads, if the gate's values can be rounded for products with `type` where they are computed; NULL if not.
static struct ggml_tensor * gated_product(const pgs_level * level, enum ggml_type type, const struct ggml_tensor * x) {
    if (function_of(x) != pgs_run_gate || x->src[0]->view_src == NULL || x->src[0]->view_src != x->src[1]->view_src) {
        return NULL;
    }
    const struct ggml_tensor * up = x->src[0], * gate = x->src[1];
    struct ggml_tensor *       product = up->view_src;
    const int64_t              n = x->ne[0], rows = rows_of(x);
    const int                  block = pgs_kernel_of(level, type)->block;
    if (function_of(product) != run_product || product->src[ADDED] != NULL || product->ne[0] != 2 * n || rows > GATED_ROWS) {
        return NULL;
    }
    const product_params p    = params_of(product);
    const size_t         half = (size_t) n * sizeof(float);
    const bool each = up->ne[0] == n && gate->ne[0] == n && rows_of(up) == p.in.rows && rows_of(gate) == p.in.rows && rows == p.in.rows;
    const bool both = up->view_offs + gate->view_offs == half && (up->view_offs == 0 || gate->view_offs == 0);
    const bool step = up->nb[1] == product->nb[1] && gate->nb[1] == product->nb[1] && p.first == 0;
    const bool size = n % (2 * LANES) == 0 && n % block == 0 && block <= GATED / GATED_ROWS;
    return each && both && step && size && rows <= pgs_tiles_at_once(pgs_kernel_of(level, p.in.type), product->src[WEIGHTS]->ne[1]) * TILE ? product : NULL;
}

bool pgs_rounds_alone(const pgs_level * level, enum ggml_type type, const struct ggml_tensor * x) {
    const pgs_kernel * k = pgs_kernel_of(level, type);
    const bool         few = rows_of(x) <= TILE && ggml_nelements(x) <= ALONE && pgs_blocks(k, x->ne[0]) * (int64_t) k->act <= ROUNDED_BYTES;
    return few && gated_product(level, type, x) == NULL;
}

struct ggml_tensor * pgs_activations(struct ggml_context * ctx, const pgs_level * level, enum ggml_type type, struct ggml_tensor * x) {
    const pgs_kernel *   k    = pgs_kernel_of(level, type);
    const int64_t        ne[] = { (rows_of(x) + TILE - 1) / TILE * pgs_blocks(k, x->ne[0]) * (int64_t) k->act, 1, 1, 1 };
    struct ggml_tensor * product = gated_product(level, type, x), * from[3];
    const rounding       how = rounding_of(type, x, from);
    if (product == NULL) {
        return node_of(ctx, GGML_TYPE_I8, ne, from, 3, run_activations, level, &how, sizeof(how), "native rounding");
    }
    product_params p = params_of(product);
    int32_t        silus;
    memcpy(&silus, parameters_of(x), sizeof(silus));
    p.type      = (uint8_t) type;
    p.silus     = (uint8_t) silus;
    p.gate_last = x->src[1]->view_offs != 0;
    p.first     = (int32_t) x->ne[0];
    return node_of(ctx, GGML_TYPE_I8, ne, product->src, ADDED, run_gated, level, &p, sizeof(p), "native gated product");
}
