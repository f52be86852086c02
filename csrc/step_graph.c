// One graph allocator per kind of step; each graph is planned once and then only recomputed. Graphs that fit the buffer of another kind use it, because
// a device computes one step at a time.
#ifdef __linux__
#define _DEFAULT_SOURCE
#include <sys/mman.h>
#elif defined(_WIN32)
#include <malloc.h>
#endif

#include "pgs.h"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define PGS_LOCKS
#endif

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct pgs_allocator {
    ggml_backend_t backend;
    ggml_gallocr_t galloc;
    pgs_allocator * before;     // of another kind of step, never under way at the same time; NULL for none
    pgs_counters   counters;
    uint32_t       generation;  // grows when the buffer moved: graphs planned before then point at freed memory
    int            held;        // steps of lanes that are under way in the buffer
#ifdef PGS_LOCKS
    pthread_mutex_t lock;       // of `held`, and of the buffer while a graph is planned: none begins in it meanwhile
#endif
};

static void lock(pgs_allocator * allocator) {
#ifdef PGS_LOCKS
    pthread_mutex_lock(&allocator->lock);
#else
    (void) allocator;  // no lanes there
#endif
}

static void unlock(pgs_allocator * allocator) {
#ifdef PGS_LOCKS
    pthread_mutex_unlock(&allocator->lock);
#else
    (void) allocator;
#endif
}

// The leading fields of ggml's struct, which its public headers hide. A part of a graph has to share the whole graph's use counts, or ggml-cuda fuses nothing;
// and only a graph with a uid is recognised without comparing nodes. The version of ggml is checked at import, the fields in known_fields.
typedef struct graph_fields {
    int                   size, n_nodes, n_leafs;
    struct ggml_tensor ** nodes;
    struct ggml_tensor ** grads;
    struct ggml_tensor ** grad_accs;
    struct ggml_tensor ** leafs;
    int32_t *             use_counts;
    struct {
        size_t                size;
        uint32_t *            used;
        struct ggml_tensor ** keys;
    } visited;
    int      order;
    uint64_t uid;
} graph_fields;

typedef struct graph_cut {
    int           end;  // nodes before the cut
    pgs_experts * experts;  // NULL where weights come from a stream
    int64_t       layer, rows;
    bool          first;  // of the two cuts of a layer
} graph_cut;

struct pgs_graph {
    pgs_allocator *            allocator;
    pgs_allocator *            home;  // whose buffer it was planned in
    void *                arena;
    size_t                arena_size;
    struct ggml_context * ctx;
    struct ggml_cgraph *  gf;
    uint32_t              generation;
    bool                  planned;
    graph_cut *           cuts;
    int                   n_cuts;
    pgs_stream *          stream;  // NULL for none
    ggml_backend_t        captured_by;  // NULL: its calls capture it
    bool                  all_threads;  // its bits depend on their number
};

pgs_allocator * pgs_allocator_new(ggml_backend_t backend, pgs_allocator * before) {
    pgs_allocator * allocator = calloc(1, sizeof(*allocator));
    if (allocator == NULL) {
        return NULL;
    }
    allocator->backend = backend;
    allocator->before  = before;
    allocator->galloc  = ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend));
#ifdef PGS_LOCKS
    pthread_mutex_init(&allocator->lock, NULL);
#endif
    return allocator;
}

void pgs_allocator_free(pgs_allocator * allocator) {
    if (allocator != NULL) {
        ggml_gallocr_free(allocator->galloc);
#ifdef PGS_LOCKS
        pthread_mutex_destroy(&allocator->lock);
#endif
        free(allocator);
    }
}

void pgs_allocator_counters(const pgs_allocator * allocator, pgs_counters * out) {
    *out = allocator->counters;
}

size_t pgs_allocator_buffer_size(const pgs_allocator * allocator) {
    return ggml_gallocr_get_buffer_size(allocator->galloc, 0);
}

// ggml asserts 32 of what a CPU buffer begins with, and 16 of an arena; malloc promises 16 at most.
enum { PAGES_ALIGN = 64 };

// Memory in pages of its own, for what comes and goes while a server runs: all of it is given back at once. malloc keeps blocks of these sizes once one
// of them was freed, and what lies between them keeps the rest: 1,800 requests left 56 MiB free in it that no request could use.
static void * pages_new(size_t size) {
#ifdef __linux__
    void * pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) {
        return NULL;
    }
    madvise(pages, size, MADV_NOHUGEPAGE);
    return pages;
#elif defined(_WIN32)
    return _aligned_malloc(size, PAGES_ALIGN);
#else
    return aligned_alloc(PAGES_ALIGN, GGML_PAD(size, PAGES_ALIGN));
#endif
}

static void pages_free(void * pages, size_t size) {
#ifdef __linux__
    if (pages != NULL) {
        munmap(pages, size);
    }
#elif defined(_WIN32)
    (void) size;
    _aligned_free(pages);
#else
    (void) size;
    free(pages);
#endif
}

size_t pgs_pages_size(struct ggml_context * ctx) {
    size_t size = 0;
    for (struct ggml_tensor * t = ggml_get_first_tensor(ctx); t != NULL; t = ggml_get_next_tensor(ctx, t)) {
        size += t->view_src == NULL ? GGML_PAD(ggml_nbytes(t), 64) : 0;
    }
    return size;
}

ggml_backend_buffer_t pgs_counted_buffer(struct ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    const uintptr_t       address = 1 << 20;  // not NULL, aligned, never read
    ggml_backend_buffer_t buffer  = ggml_backend_buft_alloc_buffer(buft, 0);
    for (struct ggml_tensor * t = ggml_get_first_tensor(ctx); t != NULL; t = ggml_get_next_tensor(ctx, t)) {
        if (t->data == NULL) {
            t->buffer = buffer;
            t->data   = (void *) (t->view_src != NULL ? (uintptr_t) t->view_src->data + t->view_offs : address);
        }
    }
    return buffer;
}

ggml_backend_buffer_t pgs_pages_buffer(struct ggml_context * ctx) {
    const size_t size = pgs_pages_size(ctx);
    char *                pages  = size > 0 ? pages_new(size) : NULL;
    ggml_backend_buffer_t buffer = pages != NULL ? ggml_backend_cpu_buffer_from_ptr(pages, size) : NULL;
    if (buffer == NULL) {
        pages_free(pages, size);
        return NULL;
    }
    for (struct ggml_tensor * t = ggml_get_first_tensor(ctx); t != NULL; t = ggml_get_next_tensor(ctx, t)) {
        if (t->view_src != NULL) {  // of a tensor before it
            ggml_backend_view_init(t);
            continue;
        }
        ggml_backend_tensor_alloc(buffer, t, pages);
        pages += GGML_PAD(ggml_nbytes(t), 64);
    }
    return buffer;
}

void pgs_pages_buffer_free(ggml_backend_buffer_t buffer) {
    void *       pages = ggml_backend_buffer_get_base(buffer);
    const size_t size  = ggml_backend_buffer_get_size(buffer);
    ggml_backend_buffer_free(buffer);
    pages_free(pages, size);
}

pgs_graph * pgs_graph_new(pgs_allocator * allocator, size_t max_nodes, char * err) {
    const size_t size  = GGML_PAD(ggml_tensor_overhead() * max_nodes + ggml_graph_overhead_custom(max_nodes, false), GGML_MEM_ALIGN);
    pgs_graph *  graph = calloc(1, sizeof(*graph));
    // made for the most nodes that a graph may have, and most have a tenth of them: pages cost memory only where a node lies
    void * arena = graph != NULL ? pages_new(size) : NULL;
    if (arena != NULL) {
        graph->allocator       = allocator;
        graph->home            = allocator;
        graph->arena      = arena;
        graph->arena_size = size;
        graph->ctx        = ggml_init((struct ggml_init_params){ .mem_size = size, .mem_buffer = arena, .no_alloc = true });
    }
    if (arena == NULL || graph->ctx == NULL) {
        snprintf(err, PGS_ERR, "no memory for a graph of %zu nodes", max_nodes);
        pages_free(arena, size);
        free(graph);
        return NULL;
    }
    graph->gf = ggml_new_graph_custom(graph->ctx, max_nodes, false);
    return graph;
}

// ggml-cuda runs a graph's first call node by node and captures it within the second. With patches/0026 it captures it before, without running it, and
// keeps that until it is released instead of ten seconds after its last call.
typedef bool (*capture_t)(ggml_backend_t, struct ggml_cgraph *, int64_t *);
typedef void (*release_t)(ggml_backend_t, struct ggml_cgraph *);

static capture_t tests_capture = NULL;
static release_t tests_release = NULL;

void pgs_capture_by(void * capture, void * release) {
    tests_capture = (capture_t) capture;
    tests_release = (release_t) release;
}

static void * proc_of(ggml_backend_t backend, const char * name) {
    const ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    return reg != NULL ? ggml_backend_reg_get_proc_address(reg, name) : NULL;
}

static capture_t capture_of(ggml_backend_t backend) {
    return tests_capture != NULL ? tests_capture : (capture_t) proc_of(backend, "ggml_backend_cuda_graph_capture");
}

static release_t release_of(ggml_backend_t backend) {
    return tests_release != NULL ? tests_release : (release_t) proc_of(backend, "ggml_backend_cuda_graph_release");
}

bool pgs_graph_capture(pgs_graph * graph, int64_t * us) {
    us[0] = us[1] = us[2] = 0;
    const capture_t capture = capture_of(graph->allocator->backend);
    // one with cuts is computed in parts, which are graphs without a uid
    if (capture == NULL || graph->n_cuts > 0 || pgs_graph_stale(graph) || pgs_graph_uid(graph) == 0 ||
        !capture(graph->allocator->backend, graph->gf, us)) {
        return false;
    }
    graph->captured_by = graph->allocator->backend;
    return true;
}

void pgs_graph_free(pgs_graph * graph) {
    if (graph != NULL) {
        const release_t release = graph->captured_by != NULL ? release_of(graph->captured_by) : NULL;
        if (release != NULL) {
            release(graph->captured_by, graph->gf);
        }
        ggml_free(graph->ctx);
        pages_free(graph->arena, graph->arena_size);
        free(graph->cuts);
        free(graph);
    }
}

size_t pgs_graph_host_bytes(const pgs_graph * graph) {
    return ggml_used_mem(graph->ctx);
}

struct ggml_context * pgs_graph_context(pgs_graph * graph) {
    return graph->ctx;
}

struct ggml_cgraph * pgs_graph_cgraph(pgs_graph * graph) {
    return graph->gf;
}

ggml_backend_t pgs_graph_backend(const pgs_graph * graph) {
    return graph->allocator->backend;
}

static void dims(const struct ggml_tensor * t, char * out, size_t n) {
    snprintf(out, n, "%s [%lld, %lld, %lld, %lld]", ggml_type_name(t->type), (long long) t->ne[0], (long long) t->ne[1],
             (long long) t->ne[2], (long long) t->ne[3]);
}

// A worker checks all nodes at once, one round trip per graph (patches/0030). The first node that it cannot compute, -1 if there is none;
// UNKNOWN of devices of this machine, and of workers that do not say.
enum { UNKNOWN = -2 };

typedef int (*check_graph_t)(ggml_backend_t, struct ggml_cgraph *);

static check_graph_t graph_check(ggml_backend_t backend) {
    return (check_graph_t) proc_of(backend, "ggml_backend_rpc_check_graph");
}

static bool is_remote(ggml_backend_t backend) {
    return graph_check(backend) != NULL;
}

static int remote_check(ggml_backend_t backend, struct ggml_cgraph * gf) {
    const check_graph_t check = graph_check(backend);
    return check != NULL ? check(backend, gf) : UNKNOWN;
}

// A backend asserts, and ends the process, on an unsupported operation: check first.
static int check_supported(const pgs_graph * graph, char * err) {
    struct ggml_cgraph * gf     = graph->gf;
    const int            remote = remote_check(graph->allocator->backend, gf);
    for (int i = 0; i < ggml_graph_n_nodes(gf); i++) {
        const struct ggml_tensor * node = ggml_graph_node(gf, i);
        if (i == remote || (remote == UNKNOWN && !ggml_backend_supports_op(graph->allocator->backend, node))) {
            char a[64] = "", b[64] = "";
            dims(node->src[0] ? node->src[0] : node, a, sizeof(a));
            dims(node, b, sizeof(b));
            snprintf(err, PGS_ERR, "the backend %s cannot run %s on %s -> %s", ggml_backend_name(graph->allocator->backend), ggml_op_desc(node),
                     a, b);
            return 1;
        }
    }
    return 0;
}

// Of a graph with nodes; NULL if this ggml lays its graphs out in another way.
static graph_fields * known_fields(pgs_graph * graph) {
    graph_fields * fields = (graph_fields *) graph->gf;
    const int      nodes  = ggml_graph_n_nodes(graph->gf);
    const bool     same   = fields->n_nodes == nodes && nodes > 0 && fields->nodes[nodes - 1] == ggml_graph_node(graph->gf, -1) &&
                      fields->size == ggml_graph_size(graph->gf);
    return same ? fields : NULL;
}

// ggml-cuda treats graphs with the same uid as unchanged and compares nothing, which saves 80 to 120 us per step at 4B. So each planned graph gets a new uid,
// unique per backend.
static uint64_t next_uid(void) {
    static _Atomic uint64_t last = 0;
    return ++last;
}

// Bytes that a graph needs. Not by the allocator of its kind, which would give its buffer back.
static size_t needed(const pgs_graph * graph) {
    size_t         need   = 0;
    ggml_gallocr_t sizing = ggml_gallocr_new(ggml_backend_get_default_buffer_type(graph->allocator->backend));
    ggml_gallocr_reserve_n_size(sizing, graph->gf, NULL, NULL, &need);
    ggml_gallocr_free(sizing);
    return need;
}

// The buffer of a kind of step before its own, if the graph fits: that one does not grow by it.
static pgs_allocator * roomy(const pgs_graph * graph) {
    const size_t need = graph->allocator->before != NULL ? needed(graph) : 0;
    for (pgs_allocator * home = graph->allocator->before; home != NULL; home = home->before) {
        if (need <= pgs_allocator_buffer_size(home)) {
            return home;
        }
    }
    return graph->allocator;
}

static int plan(pgs_graph * graph, char * err) {
    pgs_allocator * home = graph->home;
    pgs_counters *  counters = &graph->allocator->counters;
    // Always plan for exactly this graph: ggml's own check compares sizes, not lifetimes, so a plan of a sibling could be taken over.
    const size_t before = pgs_allocator_buffer_size(home);
    if (home->held > 0) {  // a larger buffer takes the place of the one that a lane's thread computes in
        const size_t need = needed(graph);
        if (need > before) {
            snprintf(err, PGS_ERR,
                     "this graph needs a compute buffer of %zu bytes where %zu were planned, and a step that is under way computes in that one: "
                     "land it first",
                     need, before);
            return 1;
        }
    }
    if (!ggml_gallocr_reserve(home->galloc, graph->gf) || !ggml_gallocr_alloc_graph(home->galloc, graph->gf)) {
        snprintf(err, PGS_ERR, "the backend %s has no memory for a compute buffer of this graph (%zu MiB were in use by its allocator)",
                 ggml_backend_name(home->backend), before >> 20);
        home->generation++;  // the buffer was freed before the larger one was allocated
        return 1;
    }
    const size_t after = pgs_allocator_buffer_size(home);
    if (after != before || home->generation == 0) {
        counters->buffer_growths++;
        home->generation++;
    } else {
        counters->replans++;
    }
    counters->graphs_built++;
    graph->generation  = home->generation;
    graph->planned     = true;
    graph->all_threads = pgs_needs_all_threads(graph->gf);
    graph_fields * fields = known_fields(graph);
    if (fields != NULL) {
        fields->uid = next_uid();
    }
    return 0;
}

int pgs_graph_plan(pgs_graph * graph, char * err) {
    if (graph->planned) {
        snprintf(err, PGS_ERR, "this graph is already planned");
        return 1;
    }
    if (check_supported(graph, err) != 0) {
        return 1;
    }
    graph->home = roomy(graph);
    lock(graph->home);
    const int status = plan(graph, err);
    unlock(graph->home);
    return status;
}

uint64_t pgs_graph_uid(pgs_graph * graph) {
    const graph_fields * fields = known_fields(graph);
    return fields != NULL ? fields->uid : 0;
}

void pgs_graph_hold(pgs_graph * graph, bool held) {
    lock(graph->home);
    graph->home->held += held ? 1 : -1;
    unlock(graph->home);
}

int pgs_graph_held(const pgs_graph * graph) {
    lock(graph->home);
    const int held = graph->home->held;
    unlock(graph->home);
    return held;
}

bool pgs_graph_stale(const pgs_graph * graph) {
    return !graph->planned || graph->generation != graph->home->generation;
}

// ---- what a graph needs whose K/V bucket lies between those of two others

typedef struct shape {
    int64_t ne[GGML_MAX_DIMS];
    size_t  nb[GGML_MAX_DIMS], view_offs;
} shape;

// Nodes and leafs of a graph, and the number of each by its address.
typedef struct members {
    int                   n, places;
    struct ggml_tensor ** all;
    int *                 numbers;  // from 1, 0 where there is none
} members;

static int * place_of(const members * m, const struct ggml_tensor * t) {
    size_t at = ((uintptr_t) t >> 4) * 0x9E3779B97F4A7C15ull >> 20;
    for (;; at++) {
        int * number = &m->numbers[at & (size_t) (m->places - 1)];
        if (*number == 0 || m->all[*number - 1] == t) {
            return number;
        }
    }
}

static bool members_of(pgs_graph * graph, members * m) {
    const graph_fields * fields = known_fields(graph);
    *m                          = (members) { .places = 64 };
    if (fields == NULL) {
        return false;
    }
    m->n = fields->n_nodes + fields->n_leafs;
    while (m->places < 2 * m->n) {
        m->places *= 2;
    }
    m->all     = malloc(sizeof(*m->all) * (size_t) m->n);
    m->numbers = calloc((size_t) m->places, sizeof(*m->numbers));
    for (int i = 0; m->all != NULL && m->numbers != NULL && i < m->n; i++) {
        m->all[i]               = i < fields->n_nodes ? fields->nodes[i] : fields->leafs[i - fields->n_nodes];
        *place_of(m, m->all[i]) = i + 1;
    }
    return m->all != NULL && m->numbers != NULL;
}

static bool same_place(const members * a, const struct ggml_tensor * x, const members * b, const struct ggml_tensor * y) {
    if (x == NULL || y == NULL || x == y) {
        return x == y;
    }
    const int number = *place_of(a, x);
    return number != 0 && number == *place_of(b, y);
}

static bool between(int64_t low, int64_t high, int64_t part, int64_t whole, int64_t * out) {
    *out = low + (high - low) / whole * part;
    return (high - low) % whole == 0;
}

// The shape of a tensor of the graph between; false if it does not follow from the two.
static bool shape_between(const struct ggml_tensor * low, const struct ggml_tensor * high, int64_t part, int64_t whole, shape * out) {
    int64_t value;
    for (int d = 0; d < GGML_MAX_DIMS; d++) {
        if (!between(low->ne[d], high->ne[d], part, whole, &out->ne[d]) || !between((int64_t) low->nb[d], (int64_t) high->nb[d], part, whole, &value)) {
            return false;
        }
        out->nb[d] = (size_t) value;
    }
    const bool found = between((int64_t) low->view_offs, (int64_t) high->view_offs, part, whole, &value);
    out->view_offs   = (size_t) value;
    return found;
}

static bool alike(const members * a, const members * b, int i) {
    const struct ggml_tensor * x = a->all[i], * y = b->all[i];
    bool same = x->op == y->op && x->type == y->type && x->flags == y->flags && (x->data == NULL) == (y->data == NULL) &&
                same_place(a, x->view_src, b, y->view_src) && ggml_is_contiguous(x) == ggml_is_contiguous(y);
    for (int j = 0; same && j < GGML_MAX_SRC; j++) {
        same = same_place(a, x->src[j], b, y->src[j]);
    }
    return same;
}

static void set_shape(struct ggml_tensor * t, const shape * s) {
    memcpy(t->ne, s->ne, sizeof(t->ne));
    memcpy(t->nb, s->nb, sizeof(t->nb));
    t->view_offs = s->view_offs;
}

size_t pgs_graph_measure_between(pgs_graph * low, pgs_graph * high, int64_t part, int64_t whole) {
    members a, b;
    size_t  need  = 0;
    bool    known = !low->planned && !high->planned && members_of(low, &a);
    if (!known) {
        a = (members) { 0 };
    }
    b             = (members) { 0 };
    known         = known && members_of(high, &b) && a.n == b.n && ggml_graph_n_nodes(low->gf) == ggml_graph_n_nodes(high->gf);
    shape * own   = known ? malloc(sizeof(*own) * 2 * (size_t) a.n) : NULL;  // then those of the graph between
    known         = own != NULL;
    for (int i = 0; known && i < a.n; i++) {
        known = alike(&a, &b, i) && shape_between(a.all[i], b.all[i], 0, 1, &own[i]) && shape_between(a.all[i], b.all[i], part, whole, &own[a.n + i]);
    }
    if (known) {
        bool contiguous = true;  // as the two are
        for (int i = 0; i < a.n; i++) {
            const bool before = ggml_is_contiguous(a.all[i]);
            set_shape(a.all[i], &own[a.n + i]);
            contiguous = contiguous && ggml_is_contiguous(a.all[i]) == before;
        }
        if (contiguous) {
            need = needed(low);
        }
        for (int i = 0; i < a.n; i++) {
            set_shape(a.all[i], &own[i]);
        }
    }
    free(own);
    free(a.all);
    free(a.numbers);
    free(b.all);
    free(b.numbers);
    return need;
}

static int add_cut(pgs_graph * graph, graph_cut cut, char * err) {
    // before its first node a graph cannot say how it is laid out: the next cut queries it
    if (ggml_graph_n_nodes(graph->gf) > 0 && known_fields(graph) == NULL) {
        snprintf(err, PGS_ERR, "this ggml lays its graphs out in another way, so weights of steps cannot be in host memory with it");
        return 1;
    }
    graph_cut * cuts = realloc(graph->cuts, (size_t) (graph->n_cuts + 1) * sizeof(*cuts));
    if (cuts == NULL) {
        snprintf(err, PGS_ERR, "no memory for the parts of a graph");
        return 1;
    }
    graph->cuts                  = cuts;
    graph->cuts[graph->n_cuts++] = cut;
    return 0;
}

int pgs_graph_cut(pgs_graph * graph, pgs_experts * experts, int64_t layer, int64_t rows, bool fetch, char * err) {
    return add_cut(graph, (graph_cut) { ggml_graph_n_nodes(graph->gf), experts, layer, rows, fetch }, err);
}

int pgs_graph_stream_cut(pgs_graph * graph, pgs_stream * stream, int64_t layer, bool begins, char * err) {
    if (graph->stream != NULL && graph->stream != stream) {
        snprintf(err, PGS_ERR, "a graph takes weights from one stream, and this one would take layer %lld from another", (long long) layer);
        return 1;
    }
    graph->stream = stream;
    return add_cut(graph, (graph_cut) { ggml_graph_n_nodes(graph->gf), NULL, layer, 0, begins }, err);
}

int pgs_graph_cuts(const pgs_graph * graph) {
    return graph->n_cuts;
}

// `number`: of the part, from 1 on, the same in every compute; 0: it is no part that comes again. A worker keeps parts by their numbers.
static int compute_part(pgs_graph * graph, int first, int end, int number, char * err) {
    if (first == end) {
        return 0;
    }
    graph_fields part = *(const graph_fields *) graph->gf;
    part.nodes += first;
    part.n_nodes = end - first;
    part.n_leafs = 0;
    part.uid     = number > 0 && part.uid != 0 && is_remote(graph->allocator->backend) ? part.uid | (uint64_t) number << 48 : 0;
    const enum ggml_status status = ggml_backend_graph_compute_async(graph->allocator->backend, (struct ggml_cgraph *) &part);
    if (status != GGML_STATUS_SUCCESS) {
        snprintf(err, PGS_ERR, "the backend %s failed on a part of a step: %s", ggml_backend_name(graph->allocator->backend),
                 ggml_status_to_string(status));
        return 1;
    }
    return 0;
}

static int at_cut(const pgs_graph * graph, const graph_cut * cut, char * err) {
    if (cut->experts != NULL) {
        return (cut->first ? pgs_experts_fetch : pgs_experts_give)(cut->experts, cut->layer, cut->rows, err);
    }
    (cut->first ? pgs_stream_wait : pgs_stream_leave)(graph->stream, (int) cut->layer);
    return 0;
}

static int compute_parts(pgs_graph * graph, char * err) {
    int first = 0;
    if (graph->stream != NULL) {
        pgs_stream_start(graph->stream);
    }
    for (int i = 0; i < graph->n_cuts; i++) {
        const graph_cut * cut = &graph->cuts[i];
        if (compute_part(graph, first, cut->end, i + 1, err) != 0 || at_cut(graph, cut, err) != 0) {
            if (graph->stream != NULL) {
                pgs_stream_reset(graph->stream);
            }
            return 1;
        }
        first = cut->end;
    }
    graph->allocator->counters.computes++;
    return compute_part(graph, first, ggml_graph_n_nodes(graph->gf), graph->n_cuts + 1, err);
}

int pgs_graph_compute(pgs_graph * graph, char * err) {
    if (pgs_graph_stale(graph)) {
        snprintf(err, PGS_ERR, "a graph was computed after its allocator's buffer had moved: build it again");
        return 1;
    }
    pgs_threads_before(graph->allocator->backend, graph->all_threads);
    if (graph->n_cuts > 0) {
        return compute_parts(graph, err);
    }
    const enum ggml_status status = ggml_backend_graph_compute_async(graph->allocator->backend, graph->gf);
    if (status != GGML_STATUS_SUCCESS) {
        snprintf(err, PGS_ERR, "the backend %s failed on a step: %s", ggml_backend_name(graph->allocator->backend),
                 ggml_status_to_string(status));
        return 1;
    }
    graph->allocator->counters.computes++;
    return 0;
}

static double thread_us(void) {
#ifdef CLOCK_THREAD_CPUTIME_ID
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return 1e6 * (double) t.tv_sec + 1e-3 * (double) t.tv_nsec;
#else
    return (double) ggml_time_us();
#endif
}

// One compute, a node at a time: microseconds of this thread for each of them (out[0 .. n_nodes)), of CPU backends. A norm and the product after
// it, which ggml computes as one, count as one. What it costs to compute a part is in every figure: that of views is nothing else.
int pgs_graph_times(pgs_graph * graph, double * out, char * err) {
    const graph_fields * fields = (const graph_fields *) graph->gf;
    const int            nodes  = ggml_graph_n_nodes(graph->gf);
    if (pgs_graph_stale(graph) || graph->n_cuts > 0 || fields->n_nodes != nodes || fields->nodes[0] != ggml_graph_node(graph->gf, 0)) {
        snprintf(err, PGS_ERR, "only a whole planned graph of this ggml's layout can be computed node by node");
        return 1;
    }
    for (int i = 0, n; i < nodes; i += n) {
        n = i + 1 < nodes && fields->nodes[i]->op == GGML_OP_RMS_NORM && fields->nodes[i + 1]->op == GGML_OP_MUL ? 2 : 1;
        const double start = thread_us();
        if (compute_part(graph, i, i + n, 0, err) != 0) {
            return 1;
        }
        ggml_backend_synchronize(graph->allocator->backend);
        out[i] = thread_us() - start;
        if (n == 2) {
            out[i + 1] = 0;
        }
    }
    graph->allocator->counters.computes++;
    return 0;
}

static uint64_t fnv(uint64_t h, const void * data, size_t n) {
    const uint8_t * p = data;
    for (size_t i = 0; i < n; i++) {
        h = (h ^ p[i]) * 1099511628211ull;
    }
    return h;
}

// Everything that CUDA graph replay compares: operation, parameters, shapes, strides and addresses of each node and its sources.
uint64_t pgs_graph_hash(const pgs_graph * graph) {
    uint64_t h = 14695981039346656037ull;
    for (int i = 0; i < ggml_graph_n_nodes(graph->gf); i++) {
        const struct ggml_tensor * node = ggml_graph_node(graph->gf, i);
        h = fnv(h, &node->op, sizeof(node->op));
        h = fnv(h, node->op_params, sizeof(node->op_params));
        for (int j = -1; j < GGML_MAX_SRC; j++) {
            const struct ggml_tensor * t = j < 0 ? node : node->src[j];
            if (t != NULL) {
                h = fnv(h, &t->data, sizeof(t->data));
                h = fnv(h, t->ne, sizeof(t->ne));
                h = fnv(h, t->nb, sizeof(t->nb));
            }
        }
    }
    return h;
}

// The part of the allocator's buffer that this graph's own nodes occupy (placed nodes live elsewhere).
void pgs_graph_memory(const pgs_graph * graph, uintptr_t * begin, uintptr_t * end) {
    *begin = UINTPTR_MAX;
    *end   = 0;
    for (int i = 0; i < ggml_graph_n_nodes(graph->gf); i++) {
        const struct ggml_tensor * node = ggml_graph_node(graph->gf, i);
        if (node->view_src == NULL && node->buffer != NULL &&
            ggml_backend_buffer_get_usage(node->buffer) == GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
            const uintptr_t at = (uintptr_t) node->data;
            *begin             = at < *begin ? at : *begin;
            *end               = at + ggml_nbytes(node) > *end ? at + ggml_nbytes(node) : *end;
        }
    }
}

static const struct ggml_tensor * home_of(const struct ggml_tensor * t) {
    return t->view_src != NULL ? t->view_src : t;
}

static bool persistent(const struct ggml_tensor * t) {
    const ggml_backend_buffer_t buffer = home_of(t)->buffer;
    return buffer != NULL && ggml_backend_buffer_get_usage(buffer) != GGML_BACKEND_BUFFER_USAGE_COMPUTE;
}

// Bytes of persistent memory (weights, K/V, recurrent state) that a compute has to move at least: everything read once however many nodes
// read it, plus what is written. Looked-up rows and routed experts count as far as they can be chosen, written cache rows as rows.
size_t pgs_graph_traffic(const pgs_graph * graph) {
    const int     n    = ggml_graph_n_nodes(graph->gf);
    const void ** seen = malloc(sizeof(void *) * GGML_MAX_SRC * (size_t) (n > 0 ? n : 1));
    size_t        n_seen = 0, total = 0;
    for (int i = 0; seen != NULL && i < n; i++) {
        const struct ggml_tensor * node = ggml_graph_node(graph->gf, i);
        if (node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE) {
            continue;
        }
        if (node->op == GGML_OP_SET_ROWS) {
            total += ggml_row_size(node->type, ggml_nelements(node->src[0]));
        } else if (persistent(node)) {
            total += ggml_nbytes(node);
        }
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            const struct ggml_tensor * t = node->src[j];
            if (t == NULL || !persistent(t) || (node->op == GGML_OP_SET_ROWS && home_of(t) == home_of(node))) {
                continue;
            }
            // a layout of its own can need more than the tensor: AMX keeps a sum for each column of a block
            size_t bytes = t->view_src == NULL && t->buffer != NULL ? ggml_backend_buffer_get_alloc_size(t->buffer, t) : ggml_nbytes(t);
            if (node->op == GGML_OP_GET_ROWS && j == 0) {
                const size_t rows = ggml_row_size(t->type, t->ne[0]) * (size_t) ggml_nelements(node->src[1]);
                bytes             = rows < bytes ? rows : bytes;
            } else if (node->op == GGML_OP_MUL_MAT_ID && j == 0) {
                const size_t chosen = t->nb[2] * (size_t) ggml_nelements(node->src[2]);
                bytes               = chosen < bytes ? chosen : bytes;
            }
            bool again = false;
            for (size_t k = 0; k < n_seen && !again; k++) {
                again = seen[k] == t->data;
            }
            if (!again) {
                seen[n_seen++] = t->data;
                total += bytes;
            }
        }
    }
    free(seen);
    return total;
}

int pgs_place(struct ggml_tensor * home, size_t offset, struct ggml_tensor * node, char * err) {
    if (home->buffer == NULL || node->data != NULL || node->view_src != NULL) {
        snprintf(err, PGS_ERR, "only an unallocated tensor that is not a view can be placed, and only into an allocated one");
        return 1;
    }
    if (offset > ggml_nbytes(home) || ggml_nbytes(node) > ggml_nbytes(home) - offset) {  // their sum could pass 2^64
        snprintf(err, PGS_ERR, "a node of %zu bytes does not fit at byte %zu of a buffer of %zu", ggml_nbytes(node), offset,
                 ggml_nbytes(home));
        return 1;
    }
    if (ggml_backend_buffer_get_size(home->buffer) == 0) {  // planned: no memory at the address
        node->buffer = home->buffer;
        node->data   = (char *) home->data + offset;
        return 0;
    }
    if (ggml_backend_tensor_alloc(home->buffer, node, (char *) home->data + offset) != GGML_STATUS_SUCCESS) {
        snprintf(err, PGS_ERR, "the backend refused to place a node");
        return 1;
    }
    return 0;
}

void pgs_attach(ggml_backend_buffer_t buffer, size_t offset, struct ggml_tensor * tensor) {
    ggml_backend_tensor_alloc(buffer, tensor, (char *) ggml_backend_buffer_get_base(buffer) + offset);
}

// Requests large pages for a host buffer before it is written: weights are read in order, and 4 KiB pages exhaust the TLB. Best effort.
void pgs_large_pages(ggml_backend_buffer_t buffer) {
#ifdef __linux__
    const uintptr_t page = (uintptr_t) 2 << 20, base = (uintptr_t) ggml_backend_buffer_get_base(buffer);
    const uintptr_t first = (base + page - 1) / page * page, end = (base + ggml_backend_buffer_get_size(buffer)) / page * page;
    if (first < end) {
        madvise((void *) first, end - first, MADV_HUGEPAGE);
    }
#else
    (void) buffer;
#endif
}
