// Routed experts whose weights are partly or wholly in host memory.
//
// A device graph has two cuts per such layer. At the first one the host reads the router's choices and the input, and selects the device's resident ("hot")
// experts; the device computes these while the host computes the others ("cold"). At the second one the host's rows are uploaded, and the device
// selects a row per (token, choice): rows are never added, so placement does not change results.
//
// The host computes cold (token, expert) pairs only, each as its own product, with one graph per layer whose number of pairs varies.
//
// With the CPU as device, padding must not share an expert with a real row: ggml rounds differently from eight rows per expert on. So cold pairs get slots
// after the hot ones. On GPUs, ggml-cuda's wide product requires distinct experts per token, so each cold pair gets a different slot.
#include "pgs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HOST_NODES 24
#define OAI_ALPHA  1.702f  // of the sigmoid, and where gate and up are clamped: llama.cpp's build_moe_ffn
#define OAI_LIMIT  7.0f
#define NARROW     8  // rows up to which GPUs multiply pair by pair: one slot, whose weights stay in the cache, costs least

typedef struct host_layer {
    struct ggml_tensor *gate_up, *gate, *up, *down;  // of all experts, in host memory; gate_up, or gate and up
    float *             scale[2];                    // of the products of gate and up, by expert; NULL for 1
    struct ggml_tensor * pair_scale[2];              // F32 [1, 1, pairs], the same by pair
    struct ggml_tensor * bias[2];                    // F32 [n_ff, n_expert] added to the products of gate and up, in host memory; NULL for none
    int32_t *           slot;                        // place of each expert among the hot ones, -1 for the cold
    int64_t *           count;                       // how often each expert was chosen
    int64_t               n_hot;
    struct ggml_context * ctx;
    struct ggml_cgraph *  gf;
    struct ggml_tensor *  x;   // F32 [n_embd, 1, pairs]
    struct ggml_tensor *  id;  // I32 [1, pairs]
    struct ggml_tensor *  order, * rounded;  // of native kernels: the pairs by expert, and x as products read it,
    enum ggml_type        rounded_for;       // those of this type
} host_layer;

struct pgs_experts {
    ggml_backend_t      device, host;
    pgs_experts_shape   shape;
    int64_t             max_pairs;
    host_layer *        layers;
    pgs_experts_counts  counts;
    struct ggml_context *device_ctx, *host_ctx;
    ggml_backend_buffer_t device_buffer, host_buffer;
    struct {  // device memory
        struct ggml_tensor * order;  // I32 [n_expert, rows] experts of each row, best first; the first n_used of each are chosen
        struct ggml_tensor * x;      // F32 [n_embd, rows]
        struct ggml_tensor * hot;    // I32 [n_used * rows] slot of the hot expert, n_hot where it is cold
        struct ggml_tensor * pick;   // I32 [n_used * rows] row of the pool
        struct ggml_tensor * pool;   // F32 [n_embd, 2 * n_used * rows] the device's results, then the host's
    } on_device;
    struct {  // host memory, pinned where the device offers it
        struct ggml_tensor *order, *x, *hot, *pick, *pair_x, *pair_id, *pair_scale[2], *gate, *up, *hidden, *out;
        struct ggml_tensor *pair_order, *tiles;  // of native kernels
    } on_host;
    int64_t n_cold;  // pairs of the layer between its two cuts
};

static struct ggml_tensor * values(struct ggml_context * ctx, enum ggml_type type, int64_t n) {
    return ggml_new_tensor_1d(ctx, type, n);
}

static struct ggml_context * tensors_only(size_t count) {
    const struct ggml_init_params params = { .mem_size = ggml_tensor_overhead() * count, .mem_buffer = NULL, .no_alloc = true };
    return ggml_init(params);
}

static ggml_backend_buffer_t alloc_host(const pgs_experts * e) {
    const ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(ggml_backend_get_device(e->device));
    ggml_backend_buffer_t            buffer = pinned != NULL ? ggml_backend_alloc_ctx_tensors_from_buft(e->host_ctx, pinned) : NULL;
    return buffer != NULL ? buffer : ggml_backend_alloc_ctx_tensors(e->host_ctx, e->host);
}

pgs_experts * pgs_experts_new(ggml_backend_t device, ggml_backend_t host, const pgs_experts_shape * shape, char * err) {
    pgs_experts * e = calloc(1, sizeof(*e));
    if (e == NULL || (e->layers = calloc((size_t) shape->n_layer, sizeof(*e->layers))) == NULL) {
        snprintf(err, PGS_ERR, "no memory for the placement of experts");
        free(e);
        return NULL;
    }
    e->device = device;
    e->host   = host;
    e->shape  = *shape;
    const int64_t pairs = e->max_pairs = shape->n_used * shape->max_rows, n_embd = shape->n_embd, n_ff = shape->n_ff;

    e->device_ctx       = tensors_only(8);
    e->on_device.order  = values(e->device_ctx, GGML_TYPE_I32, shape->n_expert * shape->max_rows);
    e->on_device.x      = values(e->device_ctx, GGML_TYPE_F32, n_embd * shape->max_rows);
    e->on_device.hot    = values(e->device_ctx, GGML_TYPE_I32, pairs);
    e->on_device.pick   = values(e->device_ctx, GGML_TYPE_I32, pairs);
    e->on_device.pool   = values(e->device_ctx, GGML_TYPE_F32, n_embd * 2 * pairs);
    e->device_buffer    = ggml_backend_alloc_ctx_tensors(e->device_ctx, device);
    e->host_ctx         = tensors_only(16);
    e->on_host.order    = values(e->host_ctx, GGML_TYPE_I32, shape->n_expert * shape->max_rows);
    e->on_host.x        = values(e->host_ctx, GGML_TYPE_F32, n_embd * shape->max_rows);
    e->on_host.hot      = values(e->host_ctx, GGML_TYPE_I32, pairs);
    e->on_host.pick     = values(e->host_ctx, GGML_TYPE_I32, pairs);
    e->on_host.pair_x   = values(e->host_ctx, GGML_TYPE_F32, n_embd * pairs);
    e->on_host.pair_id  = values(e->host_ctx, GGML_TYPE_I32, pairs);
    for (int i = 0; i < 2; i++) {
        e->on_host.pair_scale[i] = values(e->host_ctx, GGML_TYPE_F32, pairs);
    }
    e->on_host.gate     = values(e->host_ctx, GGML_TYPE_F32, 2 * n_ff * pairs);
    e->on_host.up       = values(e->host_ctx, GGML_TYPE_F32, n_ff * pairs);
    e->on_host.hidden   = values(e->host_ctx, GGML_TYPE_F32, n_ff * pairs);
    e->on_host.out      = values(e->host_ctx, GGML_TYPE_F32, n_embd * pairs);
    if (shape->level != NULL) {
        e->on_host.pair_order = values(e->host_ctx, GGML_TYPE_I32, pgs_expert_order_size(shape->n_expert, pairs));
        e->on_host.tiles      = values(e->host_ctx, GGML_TYPE_I8, (int64_t) shape->tiles + 1);
    }
    e->host_buffer      = alloc_host(e);
    if (e->device_buffer == NULL || e->host_buffer == NULL) {
        snprintf(err, PGS_ERR, "no memory for the rows of experts in host memory (%lld pairs of %lld values)", (long long) pairs, (long long) n_embd);
        pgs_experts_free(e);
        return NULL;
    }
    ggml_backend_buffer_clear(e->device_buffer, 0);
    ggml_backend_buffer_clear(e->host_buffer, 0);
    return e;
}

void pgs_experts_free(pgs_experts * e) {
    if (e == NULL) {
        return;
    }
    for (int64_t i = 0; i < e->shape.n_layer; i++) {
        ggml_free(e->layers[i].ctx);
        free(e->layers[i].scale[0]);
        free(e->layers[i].scale[1]);
        free(e->layers[i].slot);
        free(e->layers[i].count);
    }
    free(e->layers);
    ggml_backend_buffer_free(e->device_buffer);
    ggml_backend_buffer_free(e->host_buffer);
    ggml_free(e->device_ctx);
    ggml_free(e->host_ctx);
    free(e);
}

// ---- what the host computes

static struct ggml_tensor * placed(struct ggml_tensor * home, struct ggml_tensor * node, char * err) {
    return pgs_place(home, 0, node, err) == 0 ? node : NULL;
}

static struct ggml_tensor * half(struct ggml_context * ctx, struct ggml_tensor * both, int64_t n, int64_t first) {
    struct ggml_tensor * part = ggml_view_3d(ctx, both, n, both->ne[1], both->ne[2], both->nb[1], both->nb[2], (size_t) first * 4);
    ggml_backend_view_init(part);
    return part;
}

// `x` times the scale of each pair's expert, in place; `x` itself where there are no scales. `which`: 0 for gate, 1 for up.
static struct ggml_tensor * scaled(pgs_experts * e, host_layer * layer, struct ggml_context * ctx, struct ggml_tensor * x, int which,
                                   char * err) {
    if (layer->scale[which] == NULL) {
        return x;
    }
    layer->pair_scale[which]  = placed(e->on_host.pair_scale[which], ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 1, 1, e->max_pairs), err);
    struct ggml_tensor * node = ggml_mul_inplace(ctx, x, layer->pair_scale[which]);
    ggml_backend_view_init(node);
    return node;
}

// x F32 [n_in, 1, pairs] times the experts of the pairs, in `home`: by native kernels where they know the type, else by ggml's.
static struct ggml_tensor * multiply(pgs_experts * e, host_layer * layer, struct ggml_context * ctx, struct ggml_tensor * experts,
                                     struct ggml_tensor * x, struct ggml_tensor * home, char * err) {
    const pgs_level * level = e->shape.level;
    if (level == NULL || !pgs_expert_types(level, experts->type)) {
        return placed(home, ggml_mul_mat_id(ctx, experts, x, layer->id), err);
    }
    const int64_t        n_expert = experts->ne[2];
    const enum ggml_type reads    = pgs_activation_type(level, experts->type);
    if (layer->order == NULL) {
        layer->order = placed(e->on_host.pair_order, pgs_expert_order(ctx, layer->id, n_expert), err);
    }
    struct ggml_tensor * rounded = layer->rounded;
    if (x != layer->x || rounded == NULL || layer->rounded_for != reads) {
        // one place for all: what it held was multiplied before the next rows are rounded
        rounded = placed(e->on_host.tiles, pgs_expert_activations(ctx, level, reads, x, layer->order, layer->id, n_expert), err);
    }
    if (x == layer->x) {
        layer->rounded     = rounded;
        layer->rounded_for = reads;
    }
    struct ggml_tensor * out =
        pgs_expert_product(ctx, level, experts->type, experts, experts->ne[0], experts->ne[1], n_expert, rounded, layer->order, layer->id);
    return placed(home, out, err);
}

// The products of gate (`which` 0) or up (1), in `home`: scaled, then biased, in place.
static struct ggml_tensor * products(pgs_experts * e, host_layer * layer, struct ggml_context * ctx, struct ggml_tensor * experts,
                                     struct ggml_tensor * home, int which, char * err) {
    struct ggml_tensor * x = scaled(e, layer, ctx, multiply(e, layer, ctx, experts, layer->x, home, err), which, err);
    return layer->bias[which] != NULL ? placed(home, ggml_add_id(ctx, x, layer->bias[which], layer->id), err) : x;
}

static struct ggml_tensor * gated(pgs_glu glu, struct ggml_context * ctx, struct ggml_tensor * gate, struct ggml_tensor * up) {
    switch (glu) {
        case PGS_GEGLU:      return ggml_geglu_split(ctx, gate, up);
        case PGS_SWIGLU_OAI: return ggml_swiglu_oai(ctx, gate, up, OAI_ALPHA, OAI_LIMIT);
        default:             return ggml_swiglu_split(ctx, gate, up);
    }
}

static int build(pgs_experts * e, host_layer * layer, char * err) {
    const struct ggml_init_params params = {
        .mem_size   = ggml_tensor_overhead() * HOST_NODES + ggml_graph_overhead_custom(HOST_NODES, false),
        .mem_buffer = NULL,
        .no_alloc   = true,
    };
    struct ggml_context * ctx = layer->ctx = ggml_init(params);
    if (ctx == NULL) {
        snprintf(err, PGS_ERR, "no memory for a graph of experts");
        return 1;
    }
    const int64_t n_ff = e->shape.n_ff;
    layer->x           = placed(e->on_host.pair_x, ggml_new_tensor_3d(ctx, GGML_TYPE_F32, e->shape.n_embd, 1, e->max_pairs), err);
    layer->id          = placed(e->on_host.pair_id, ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, e->max_pairs), err);
    struct ggml_tensor *gate, *up;
    if (layer->gate_up != NULL) {
        struct ggml_tensor * both = multiply(e, layer, ctx, layer->gate_up, layer->x, e->on_host.gate, err);
        gate                      = half(ctx, both, n_ff, 0);
        up                        = half(ctx, both, n_ff, n_ff);
    } else {
        up   = products(e, layer, ctx, layer->up, e->on_host.up, 1, err);
        gate = products(e, layer, ctx, layer->gate, e->on_host.gate, 0, err);
    }
    struct ggml_tensor * hidden = placed(e->on_host.hidden, gated(e->shape.glu, ctx, gate, up), err);
    struct ggml_tensor * result = multiply(e, layer, ctx, layer->down, hidden, e->on_host.out, err);
    layer->gf = ggml_new_graph_custom(ctx, HOST_NODES, false);
    ggml_build_forward_expand(layer->gf, result);
    for (int i = 0; i < ggml_graph_n_nodes(layer->gf); i++) {
        const struct ggml_tensor * node = ggml_graph_node(layer->gf, i);
        if (!ggml_backend_supports_op(e->host, node)) {
            snprintf(err, PGS_ERR, "the host cannot run %s on experts of type %s", ggml_op_desc(node), ggml_type_name(layer->down->type));
            return 1;
        }
    }
    return 0;
}

static void set_count(struct ggml_tensor * t, int axis, int64_t count) {
    t->ne[axis] = count;
    for (int i = axis + 1; i < GGML_MAX_DIMS; i++) {
        t->nb[i] = t->nb[i - 1] * (size_t) t->ne[i - 1];
    }
}

static void set_pairs(host_layer * layer, int64_t pairs) {
    set_count(layer->x, 2, pairs);
    set_count(layer->id, 1, pairs);
    for (int i = 0; i < 2; i++) {
        if (layer->pair_scale[i] != NULL) {
            set_count(layer->pair_scale[i], 2, pairs);
        }
    }
    for (int i = 0; i < ggml_graph_n_nodes(layer->gf); i++) {
        struct ggml_tensor * node = ggml_graph_node(layer->gf, i);
        if (node->type == GGML_TYPE_F32) {  // orders and rounded rows of native kernels have room for all
            set_count(node, 2, pairs);
        }
    }
}

int pgs_experts_set_layer(pgs_experts * e, int64_t index, struct ggml_tensor * gate_up, struct ggml_tensor * gate, struct ggml_tensor * up,
                          struct ggml_tensor * down, const float * gate_scale, const float * up_scale, struct ggml_tensor * gate_bias,
                          struct ggml_tensor * up_bias, const int32_t * slot, char * err) {
    const size_t n     = (size_t) e->shape.n_expert;
    host_layer * layer = &e->layers[index];
    layer->gate_up     = gate_up;
    layer->gate        = gate;
    layer->up          = up;
    layer->down        = down;
    layer->bias[0]     = gate_bias;
    layer->bias[1]     = up_bias;
    layer->slot        = malloc(n * sizeof(*layer->slot));
    layer->count       = calloc(n, sizeof(*layer->count));
    if (layer->slot == NULL || layer->count == NULL) {
        snprintf(err, PGS_ERR, "no memory for the placement of experts");
        return 1;
    }
    memcpy(layer->slot, slot, n * sizeof(*slot));
    const float * scales[2] = { gate_scale, up_scale };
    for (int i = 0; i < 2; i++) {
        if (scales[i] != NULL) {
            layer->scale[i] = malloc(n * sizeof(float));
            if (layer->scale[i] == NULL) {
                snprintf(err, PGS_ERR, "no memory for the scales of experts");
                return 1;
            }
            memcpy(layer->scale[i], scales[i], n * sizeof(float));
        }
    }
    for (size_t i = 0; i < n; i++) {
        layer->n_hot += slot[i] >= 0;
    }
    if (layer->n_hot == (int64_t) n) {
        return 0;
    }
    return build(e, layer, err);
}

// ---- what the graph of a step holds

struct ggml_tensor * pgs_experts_begin(pgs_experts * e, pgs_graph * graph, int64_t index, struct ggml_tensor * x, struct ggml_tensor * chosen,
                                       char * err) {
    struct ggml_context * ctx   = pgs_graph_context(graph);
    struct ggml_tensor *  order = chosen->view_src;
    const int64_t         rows  = x->ne[1];
    if (rows > e->shape.max_rows) {
        snprintf(err, PGS_ERR,
                 "a step of %lld rows is wider than the %lld that experts in host memory were planned for; use fewer slots", (long long) rows,
                 (long long) e->shape.max_rows);
        return NULL;
    }
    if (order == NULL || order->ne[0] != e->shape.n_expert || chosen->view_offs != 0 || chosen->nb[1] != order->nb[1]) {
        snprintf(err, PGS_ERR, "the chosen experts have to be the first of a whole order of all %lld", (long long) e->shape.n_expert);
        return NULL;
    }
    struct ggml_tensor * copy = ggml_cont(ctx, x);
    struct ggml_tensor * hot  = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, e->shape.n_used, rows);
    if (pgs_place(e->on_device.order, 0, order, err) != 0 || pgs_place(e->on_device.x, 0, copy, err) != 0 ||
        pgs_place(e->on_device.hot, 0, hot, err) != 0) {
        return NULL;
    }
    ggml_build_forward_expand(pgs_graph_cgraph(graph), copy);
    return pgs_graph_cut(graph, e, index, rows, true, err) == 0 ? hot : NULL;
}

struct ggml_tensor * pgs_experts_end(pgs_experts * e, pgs_graph * graph, int64_t index, struct ggml_tensor * down, int64_t rows, char * err) {
    struct ggml_context * ctx   = pgs_graph_context(graph);
    const int64_t         pairs = e->shape.n_used * rows, n_embd = e->shape.n_embd;
    if (down != NULL) {
        if (pgs_place(e->on_device.pool, 0, down, err) != 0) {
            return NULL;
        }
        ggml_build_forward_expand(pgs_graph_cgraph(graph), down);
    }
    if (pgs_graph_cut(graph, e, index, rows, false, err) != 0) {
        return NULL;
    }
    if (down == NULL) {  // every row is the host's, in order
        struct ggml_tensor * all = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_embd, e->shape.n_used, rows);
        return pgs_place(e->on_device.pool, 0, all, err) == 0 ? all : NULL;
    }
    struct ggml_tensor * pool = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_embd, 2 * pairs);
    struct ggml_tensor * pick = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, pairs);
    if (pgs_place(e->on_device.pool, 0, pool, err) != 0 || pgs_place(e->on_device.pick, 0, pick, err) != 0) {
        return NULL;
    }
    return ggml_reshape_3d(ctx, ggml_get_rows(ctx, pool, pick), n_embd, e->shape.n_used, rows);
}

// ---- what happens at the cuts

static bool taken(const int32_t * slots, int64_t n, int32_t slot) {
    for (int64_t i = 0; i < n; i++) {
        if (slots[i] == slot) {
            return true;
        }
    }
    return false;
}

int64_t pgs_experts_fillers(int64_t n_used, int64_t n_hot) {
    return n_used - n_hot > 1 ? n_used - n_hot : 1;
}

void pgs_experts_slots(const int32_t * slot, const int32_t * chosen, int64_t n_used, int64_t n_hot, bool distinct, int32_t * out) {
    const int32_t n_slots = (int32_t) (n_hot + pgs_experts_fillers(n_used, n_hot));
    for (int64_t i = 0; i < n_used; i++) {
        out[i] = slot[chosen[i]];
    }
    int32_t free_slot = (int32_t) n_hot;
    for (int64_t i = 0; i < n_used; i++) {
        if (out[i] >= 0) {
            continue;
        }
        while (distinct && taken(out, n_used, free_slot)) {
            free_slot = (free_slot + 1) % n_slots;
        }
        out[i] = free_slot;
    }
}

int pgs_experts_fetch(pgs_experts * e, int64_t index, int64_t rows, char * err) {
    host_layer *  layer  = &e->layers[index];
    const int64_t n_used = e->shape.n_used, n_expert = e->shape.n_expert, n_embd = e->shape.n_embd, pairs = n_used * rows;
    const bool    cold   = layer->n_hot < n_expert;
    ggml_backend_tensor_get_async(e->device, e->on_device.order, e->on_host.order->data, 0, (size_t) (n_expert * rows) * 4);
    if (cold) {
        ggml_backend_tensor_get_async(e->device, e->on_device.x, e->on_host.x->data, 0, (size_t) (n_embd * rows) * 4);
    }
    ggml_backend_synchronize(e->device);

    const int32_t * order   = e->on_host.order->data;
    int32_t *       hot     = e->on_host.hot->data;
    int32_t *       pick    = e->on_host.pick->data;
    int32_t *       pair_id = e->on_host.pair_id->data;
    const float *   x       = e->on_host.x->data;
    float *         pair_x  = e->on_host.pair_x->data;
    e->n_cold               = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int32_t * chosen = order + row * n_expert;
        for (int64_t i = 0; i < n_used; i++) {
            const int32_t expert = chosen[i];
            if (expert < 0 || expert >= n_expert) {
                snprintf(err, PGS_ERR, "a router chose expert %d of %lld: its logits are damaged", expert, (long long) n_expert);
                return 1;
            }
            layer->count[expert]++;
            pick[row * n_used + i] = (int32_t) (row * n_used + i);
            if (layer->slot[expert] < 0) {
                memcpy(pair_x + e->n_cold * n_embd, x + row * n_embd, (size_t) n_embd * 4);
                pick[row * n_used + i] = (int32_t) (pairs + e->n_cold);
                pair_id[e->n_cold++]   = expert;
            }
        }
        pgs_experts_slots(layer->slot, chosen, n_used, layer->n_hot, e->shape.distinct && rows > NARROW, hot + row * n_used);
    }
    e->counts.chosen += pairs;
    e->counts.hits += pairs - e->n_cold;
    if (layer->n_hot > 0) {
        ggml_backend_tensor_set_async(e->device, e->on_device.hot, hot, 0, (size_t) pairs * 4);
    }
    return 0;
}

int pgs_experts_give(pgs_experts * e, int64_t index, int64_t rows, char * err) {
    host_layer *  layer = &e->layers[index];
    const int64_t pairs = e->shape.n_used * rows, n_embd = e->shape.n_embd;
    if (layer->n_hot > 0) {
        ggml_backend_tensor_set_async(e->device, e->on_device.pick, e->on_host.pick->data, 0, (size_t) pairs * 4);
    }
    if (e->n_cold == 0) {
        return 0;
    }
    set_pairs(layer, e->n_cold);
    for (int i = 0; i < 2; i++) {
        for (int64_t pair = 0; layer->scale[i] != NULL && pair < e->n_cold; pair++) {
            ((float *) e->on_host.pair_scale[i]->data)[pair] = layer->scale[i][((const int32_t *) e->on_host.pair_id->data)[pair]];
        }
    }
    const int64_t         started = ggml_time_us();
    pgs_threads_before(e->host, false);
    const enum ggml_status status = ggml_backend_graph_compute(e->host, layer->gf);
    e->counts.host_us += ggml_time_us() - started;
    if (status != GGML_STATUS_SUCCESS) {
        snprintf(err, PGS_ERR, "the host failed on experts of layer %lld: %s", (long long) index, ggml_status_to_string(status));
        return 1;
    }
    const size_t first = layer->n_hot > 0 ? (size_t) (pairs * n_embd) * 4 : 0;
    ggml_backend_tensor_set_async(e->device, e->on_device.pool, e->on_host.out->data, first, (size_t) (e->n_cold * n_embd) * 4);
    return 0;
}

// ---- counters

void pgs_experts_counters(const pgs_experts * e, pgs_experts_counts * out) {
    *out = e->counts;
}

void pgs_experts_layer_counts(const pgs_experts * e, int64_t index, int64_t * out) {
    memcpy(out, e->layers[index].count, (size_t) e->shape.n_expert * sizeof(*out));
}

size_t pgs_experts_device_bytes(const pgs_experts * e) {
    return ggml_backend_buffer_get_size(e->device_buffer);
}
