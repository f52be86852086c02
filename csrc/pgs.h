// pyggml_spec step engine: the parts of a decoding step whose shapes must not change between steps.
//
//   pgs_allocator  one graph allocator (ggml_gallocr) and the counters of one kind of step
//   pgs_graph      one arena (ggml_context) with one graph, recomputed and never rebuilt
//   pgs_io         the device buffer of all small inputs and outputs of a step, and its pinned host mirror
//   pgs_chain      the graphs of a step on several devices, and the copies between them
//   pgs_lane       a thread that runs such steps, in parallel to other lanes
//   pgs_experts    transfers and host graphs of experts in host memory
//   pgs_stream     weight streaming from host memory, layer by layer
//   pgs_upload     threads that read weights from files onto devices
//   pgs_delta      recurrent states of all delta-net layers: states, convolution rows, uncommitted blocks
//
// Functions that can fail return 0 on success, else write one sentence into `err` (PGS_ERR bytes). Nothing aborts on a condition that a caller can cause.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"

#define PGS_ERR 256

typedef struct pgs_allocator  pgs_allocator;
typedef struct pgs_graph pgs_graph;
typedef struct pgs_io    pgs_io;
typedef struct pgs_chain pgs_chain;
typedef struct pgs_flow  pgs_flow;
typedef struct pgs_turns pgs_turns;
typedef struct pgs_lane  pgs_lane;
typedef struct pgs_delta pgs_delta;
typedef struct pgs_experts pgs_experts;
typedef struct pgs_stream pgs_stream;
typedef struct pgs_upload pgs_upload;
typedef struct pgs_level pgs_level;

typedef struct pgs_counters {
    int64_t graphs_built;    // graphs planned and allocated
    int64_t replans;         // plans made inside a buffer that was already there
    int64_t buffer_growths;  // device buffers allocated (the first one counts)
    int64_t computes;        // graphs computed
} pgs_counters;

// ---- step_graph.c

pgs_allocator * pgs_allocator_new(ggml_backend_t backend, pgs_allocator * before);  // `before`: whose buffer graphs may use that fit; not freed before this one's graphs
void       pgs_allocator_free(pgs_allocator * allocator);
void       pgs_allocator_counters(const pgs_allocator * allocator, pgs_counters * out);
size_t     pgs_allocator_buffer_size(const pgs_allocator * allocator);

pgs_graph *           pgs_graph_new(pgs_allocator * allocator, size_t max_nodes, char * err);
void                  pgs_graph_free(pgs_graph * graph);
size_t                pgs_graph_host_bytes(const pgs_graph * graph);
struct ggml_context * pgs_graph_context(pgs_graph * graph);
struct ggml_cgraph *  pgs_graph_cgraph(pgs_graph * graph);
ggml_backend_t        pgs_graph_backend(const pgs_graph * graph);
int                   pgs_graph_plan(pgs_graph * graph, char * err);
int                   pgs_graph_compute(pgs_graph * graph, char * err);
int                   pgs_graph_times(pgs_graph * graph, double * out, char * err);
bool                  pgs_graph_stale(const pgs_graph * graph);
// Has the device capture a planned graph before its first call, without running it; false where that is left to its calls. us[3]: recording, instantiating
// and uploading. Nothing else may use the backend meanwhile.
bool                  pgs_graph_capture(pgs_graph * graph, int64_t * us);
void                  pgs_capture_by(void * capture, void * release);  // instead of the device's own: tests; NULL: its own again
void                  pgs_graph_hold(pgs_graph * graph, bool held);  // while its allocator's buffer is held, no graph is planned that needs a larger one
int                   pgs_graph_held(const pgs_graph * graph);       // by how many steps of lanes
uint64_t              pgs_graph_hash(const pgs_graph * graph);
uint64_t              pgs_graph_uid(pgs_graph * graph);  // what ggml-cuda recognises it by; 0 before it is planned
size_t                pgs_graph_traffic(const pgs_graph * graph);
// Bytes of compute buffer of the graph whose K/V bucket lies `part` of `whole` above that of `low`, on the way to that of `high`, neither of them planned;
// 0 where the two differ in more than shapes that grow evenly.
size_t                pgs_graph_measure_between(pgs_graph * low, pgs_graph * high, int64_t part, int64_t whole);
void                  pgs_graph_memory(const pgs_graph * graph, uintptr_t * begin, uintptr_t * end);

// Cuts the graph after its last node: there the host fetches the inputs of the experts of `layer` (`fetch`), or returns their results.
int pgs_graph_cut(pgs_graph * graph, pgs_experts * experts, int64_t layer, int64_t rows, bool fetch, char * err);
// Cuts the graph where the device waits for the weights of `layer` (`begins`), or is done with them; layers ascending, one stream.
int pgs_graph_stream_cut(pgs_graph * graph, pgs_stream * stream, int64_t layer, bool begins, char * err);
int pgs_graph_cuts(const pgs_graph * graph);

// Gives `node` (not yet allocated, not a view) the memory at byte `offset` of the allocated tensor `home`.
int pgs_place(struct ggml_tensor * home, size_t offset, struct ggml_tensor * node, char * err);

// Gives `tensor` the memory at byte `offset` of a buffer that is large enough.
void pgs_attach(ggml_backend_buffer_t buffer, size_t offset, struct ggml_tensor * tensor);

// Asks for large pages for a buffer in host memory.
void pgs_large_pages(ggml_backend_buffer_t buffer);

// A buffer of host memory for the tensors of ``ctx`` in pages of its own, NULL if there is none; freed by the other one.
ggml_backend_buffer_t pgs_pages_buffer(struct ggml_context * ctx);
size_t                pgs_pages_size(struct ggml_context * ctx);  // that such a buffer would have
// Unallocated tensors of ctx get an empty buffer of this type and an address: graphs take them for allocated, and nothing may compute with them.
ggml_backend_buffer_t pgs_counted_buffer(struct ggml_context * ctx, ggml_backend_buffer_type_t buft);
void                  pgs_pages_buffer_free(ggml_backend_buffer_t buffer);

// ---- step_io.c

typedef struct pgs_step_times {  // microseconds of one step
    int64_t upload, compute, read;
} pgs_step_times;

pgs_io *             pgs_io_new(ggml_backend_t backend, size_t capacity, pgs_io * mirror, char * err);
void                 pgs_io_free(pgs_io * io);
void *               pgs_io_host(pgs_io * io);
struct ggml_tensor * pgs_io_home(pgs_io * io);
ggml_backend_t       pgs_io_backend(pgs_io * io);
void                 pgs_io_upload(pgs_io * io, const void * from, size_t bytes);  // queued, as is
void                 pgs_io_read(pgs_io * io, size_t offset, size_t bytes);        // this
struct ggml_tensor * pgs_io_tensor(pgs_io * io, struct ggml_context * ctx, enum ggml_type type, int64_t ne0, int64_t ne1, size_t offset,
                                   struct ggml_tensor * after, char * err);
int  pgs_step_launch(pgs_io * io, pgs_graph * graph, size_t upload_bytes, size_t read_offset, size_t read_bytes, pgs_step_times * times,
                     char * err);
void pgs_step_wait(pgs_io * io, pgs_step_times * times);

// ---- compute_threads.c

void pgs_release_threads(void);
bool pgs_threads_begin(ggml_backend_t backend, void * set, int most);
void pgs_threads_end(ggml_backend_t backend);
void pgs_threads_now(ggml_backend_t backend, int threads);
void pgs_threads_before(ggml_backend_t backend, bool all);
bool pgs_needs_all_threads(struct ggml_cgraph * graph);

// ---- step_chain.c

typedef struct pgs_hop {  // after the part `after`, its `src` is copied to `dst`, an input of the part `to`
    int32_t              after, to;
    struct ggml_tensor * src;
    struct ggml_tensor * dst;
} pgs_hop;

// Parts that were planned, in their order; `ios`: of each one's device. Borrows both.
pgs_chain * pgs_chain_new(pgs_graph ** parts, pgs_io ** ios, int n_parts, const pgs_hop * hops, int n_hops, char * err);
void        pgs_chain_free(pgs_chain * chain);

// State shared by overlapping steps on all devices of an engine; `capacity`: bytes of a step's inputs.
pgs_flow * pgs_flow_new(pgs_io ** ios, int n_ios, size_t capacity, char * err);
void       pgs_flow_free(pgs_flow * flow);
void       pgs_flow_settle(pgs_flow * flow);  // waits for all of them
int pgs_chain_launch(pgs_chain * chain, pgs_flow * flow, size_t upload_bytes, size_t read_offset, size_t read_bytes, bool ahead,
                     pgs_step_times * times, char * err);

// Its components.
int             pgs_chain_parts(const pgs_chain * chain);
int             pgs_chain_hops(const pgs_chain * chain);
pgs_graph *     pgs_chain_graph(const pgs_chain * chain, int part);
pgs_io *        pgs_chain_io(const pgs_chain * chain, int part);
const pgs_hop * pgs_chain_hop(const pgs_chain * chain, int hop);

// ---- map_watch.c

// On a read of this memory past the end of its truncated file, the process prints `sentence` and exits with 1. Returns a number for pgs_unwatch_map, or -1.
int  pgs_watch_map(const void * start, size_t bytes, const char * sentence);
void pgs_unwatch_map(int number);

// ---- step_lanes.c

typedef struct pgs_spent {  // by one device, on the steps of all lanes
    int64_t parts, computed_us;                // parts computed, uploads and reads included
    int64_t copies, copied_us, copied_bytes;   // to other devices
    int64_t queued_us;                         // that lanes waited for the device or its queue
} pgs_spent;

// The lane queue of each device of an engine; `ios` in device order.
pgs_turns * pgs_turns_new(pgs_io ** ios, int n_ios, char * err);
void        pgs_turns_free(pgs_turns * turns);
void        pgs_turns_spent(pgs_turns * turns, pgs_spent * out);  // [n_ios], since the last call

pgs_lane * pgs_lane_new(pgs_turns * turns, char * err);
void       pgs_lane_free(pgs_lane * lane);
void       pgs_lane_start(pgs_lane * lane, pgs_chain * chain, size_t upload_bytes, size_t read_offset, size_t read_bytes);
int        pgs_lane_wait(pgs_lane * lane, char * err);
bool       pgs_lane_busy(pgs_lane * lane);

// ---- step_rows.c

#define PGS_NOWHERE (-1073741824.0f)  // mask base of an empty ring row: later than every query

typedef struct pgs_rows {  // inputs of one graph in host memory; NULL: it has no such input
    int64_t   width, count;         // rows per slot, slots
    int64_t   live, ring, trash;    // live rows of full caches, of rings, and trash rows
    int64_t   draft_ring;           // live rows of the drafter's rings
    int64_t   window, near;         // positions that sliding layers see, ring rows that they read
    int64_t   history;              // rows of a convolution's history
    bool      chunked;              // sliding layers see their part of `window` positions, up to the row, and none before it
    int32_t * positions;            // [width * count]
    int64_t * kv_rows;              // [width * count] rows past those that count, or past the last live one, are trash rows
    float *   q_last;               // [width * count] the last position that each row sees
    float *   q_first;              // [width * count] and the first one in sliding layers
    int64_t * sliding_rows;         // [width * count] as kv_rows, in a ring
    float *   sliding_near;         // [near * count] 0.5 - the position that each row of a ring holds then
    int64_t * context_ring;         // [width * count] as sliding_rows, in the drafter's rings
    float *   on;                   // [width * count] 1 for rows that count
    int32_t * last;                 // [history * count] rows of [history ; block] that become the next history
    int32_t * out_row;              // [count] the last row of each slot that counts
} pgs_rows;

// `committed` and `real`, [count]: tokens of each slot before this step, and how many of its rows count.
void pgs_fill_rows(const pgs_rows * rows, const int64_t * committed, const int64_t * real);

bool pgs_finite(const float * values, int64_t n);  // neither NaN nor Inf among them
bool pgs_finite_at(const float * values, int64_t n, int64_t rows, const int64_t * ids);  // of [n, rows], the one that each row's id names

// ---- kv_write_rows.c

void pgs_kv_write_rows(struct ggml_context * ctx, struct ggml_cgraph * gf, struct ggml_tensor * cache, struct ggml_tensor * rows,
                       struct ggml_tensor * index);

// ---- ngram_rows.c

// Hashes of n-grams of 2 to `longest` tokens, `heads` of each; head i has `sizes[i]` rows from `offsets[i]` on. `end`: the end token.
typedef struct {
    int64_t          longest, heads, end;
    const uint64_t * multipliers;
    const uint64_t * sizes;
    const uint64_t * offsets;
} pgs_ngrams;

struct ggml_tensor * pgs_rows_before(struct ggml_context * ctx, struct ggml_tensor * cache, struct ggml_tensor * positions, int64_t back);
struct ggml_tensor * pgs_ngram_rows(struct ggml_context * ctx, struct ggml_tensor * tokens, struct ggml_tensor * positions, const pgs_ngrams * hash);

// ---- flash_attention.c

struct ggml_tensor * pgs_kv_mask(struct ggml_context * ctx, struct ggml_cgraph * gf, struct ggml_tensor * mask_base, struct ggml_tensor * q_last,
                                   struct ggml_tensor * q_first, int64_t kv_bucket, int64_t slots, const pgs_level * level);
struct ggml_tensor * pgs_flash_attention(struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * cache_k,
                                 struct ggml_tensor * cache_v, struct ggml_tensor * mask, int64_t n_head_kv, int64_t kv_bucket, float scale,
                                 float cap, struct ggml_tensor * sinks, const pgs_level * level);

// ---- delta_net.c

// Gated delta rule with a decay per head, or per row of the state (KDA); Mamba-2 scan; a convolution without more.
typedef enum { PGS_DELTA_RULE, PGS_KDA, PGS_SCAN, PGS_CONVOLUTION } pgs_recurrence;

typedef struct pgs_delta_shape {
    int64_t recurrence; // a pgs_recurrence
    int64_t n_layer;    // recurrent layers
    int64_t head_size;  // S: rows of one head's state; channels of a convolution
    int64_t state_size; // columns of it: S for the delta rule, 0 for a convolution
    int64_t n_head_k;   // H_k; groups of a scan
    int64_t n_head_v;   // H_v, a multiple of H_k * repeat; heads of a scan
    int64_t repeat;     // copies of each head of q and k: v-head h goes with head h % H_k of them for 1, with h / (H_v / H_k) for H_v / H_k
    int64_t conv;       // d_conv: taps of the causal convolution
    int64_t row;        // floats per projected row that the engine keeps: conv channels, or more when the projection is fused
    int64_t max_width;  // widest block that is verified
    int64_t n_slots;    // sequences that share steps; 0: one sequence, in the layout that needs no copy
    bool    planned;    // sizes instead of memory, for plans: graphs can be built and measured, not run
    const pgs_level * level;  // of native kernels; NULL for ggml's
} pgs_delta_shape;

typedef enum pgs_delta_mode {
    PGS_DELTA_DIRECT   = 0,  // the state is written by the step itself (prefill, plain decoding)
    PGS_DELTA_UNCOMMITTED = 1,  // the block stays uncommitted; the next step commits the accepted prefix by replay
    PGS_DELTA_CHAINED     = 2,  // the same, of some rows of a block, after the states that this graph's rows before them left
} pgs_delta_mode;

typedef struct pgs_delta_inputs {  // the tensors of one layer, all F32; T rows. Of a scan x | B | C, dt as alpha; of a convolution proj and conv_w only
    struct ggml_tensor * proj;    // [row, T] projections of the block; the first conv channels are q | k | v
    struct ggml_tensor * beta;    // [H_v, T] before the sigmoid; of a scan the factors of its skip, [1, H_v]
    struct ggml_tensor * alpha;   // [H_v, T]; of KDA [S * H_v, T]
    struct ggml_tensor * conv_w;  // [d_conv, channels]
    struct ggml_tensor * conv_b;  // [channels] or NULL
    struct ggml_tensor * dt;      // as alpha, one row
    struct ggml_tensor * a;       // [H_v] = -exp(A_log); of a scan and of KDA [1, H_v]
    struct ggml_tensor * on;      // [1, T] 1 for real rows, 0 for padding; NULL: all rows are real
    struct ggml_tensor * last;    // I32 [d_conv - 1 (, slots)] rows of [history ; block] that become the next history (prefill only)
    struct ggml_tensor * take;    // with slots, for blocks and single rows: I32 [(d_conv - 1 + T) * slots], rows of the layer's table in `conv`
    int64_t              row;     // of the block, where a pass of a chain begins
    float                eps;     // epsilon of the L2 norm of q and k
    float                bound;   // of KDA: the decay is bound * sigmoid(-a (alpha + dt)); 0: a softplus(alpha + dt)
} pgs_delta_inputs;

pgs_delta * pgs_delta_new(ggml_backend_t backend, const pgs_delta_shape * shape, char * err);
void        pgs_delta_free(pgs_delta * d);
void        pgs_delta_clear(pgs_delta * d);
size_t      pgs_delta_bytes(const pgs_delta * d);
void        pgs_delta_fill(pgs_delta * d, uint8_t value);  // tests: poison everything that a clean start must not depend on
void        pgs_delta_fill_slot(pgs_delta * d, int64_t slot, int64_t width, uint8_t value);
void        pgs_delta_clear_blocks(pgs_delta * d, int64_t width);
size_t      pgs_delta_state_bytes(const pgs_delta * d);
void        pgs_delta_read_state(const pgs_delta * d, void * out);
void        pgs_delta_kept(const pgs_delta * d, struct ggml_context * ctx, int64_t slot, int64_t layer, struct ggml_tensor ** state,
                           struct ggml_tensor ** history);

// The host's inputs of a commit of the slots [first, first + count), whose blocks have `width` rows, of which accepted[slot] count: the rows
// that become the histories (`tail`), and with `keep` 1 for each row that is replayed. NULL: the graph has no such input.
void pgs_delta_fill_commit(const pgs_delta * d, const int64_t * accepted, bool replay, int64_t first, int64_t count, int64_t width,
                           int32_t * tail, float * keep);

int pgs_delta_begin(pgs_delta * d, struct ggml_context * ctx, struct ggml_cgraph * gf, int64_t first, int64_t count, int64_t width_from,
                    int64_t width_to, struct ggml_tensor * keep, struct ggml_tensor * tail, char * err);
struct ggml_tensor * pgs_delta_layer(pgs_delta * d, struct ggml_context * ctx, struct ggml_cgraph * gf, int64_t layer, int64_t width,
                                     pgs_delta_mode mode, const pgs_delta_inputs * in, char * err);

// ---- host_experts.c

typedef enum { PGS_SWIGLU, PGS_GEGLU, PGS_SWIGLU_OAI } pgs_glu;  // how gate and up become one

typedef struct pgs_experts_shape {
    int64_t n_layer;   // layers of the model, including those without experts in host memory
    int64_t n_embd;
    int64_t n_ff;      // hidden values of one expert
    int64_t n_expert;
    int64_t n_used;    // experts per token
    int64_t max_rows;  // widest step
    pgs_glu glu;
    bool    distinct;  // wide products of the device need different experts for each token
    const pgs_level * level;  // of native kernels on the host; NULL for ggml's
    size_t  tiles;     // bytes of activations as native products read them, of the widest step (pgs_expert_tiles)
} pgs_experts_shape;

typedef struct pgs_experts_counts {
    int64_t chosen;   // (token, expert) pairs so far
    int64_t hits;     // of them, those whose expert is on the device
    int64_t host_us;  // microseconds that the host computed
} pgs_experts_counts;

pgs_experts * pgs_experts_new(ggml_backend_t device, ggml_backend_t host, const pgs_experts_shape * shape, char * err);
void          pgs_experts_free(pgs_experts * e);
int           pgs_experts_set_layer(pgs_experts * e, int64_t index, struct ggml_tensor * gate_up, struct ggml_tensor * gate,
                                    struct ggml_tensor * up, struct ggml_tensor * down, const float * gate_scale, const float * up_scale,
                                    struct ggml_tensor * gate_bias, struct ggml_tensor * up_bias, const int32_t * slot, char * err);

// Around the hot experts of a layer: `begin` returns the slots I32 [n_used, T] they are called with, `end` takes their result
// F32 [n_embd, n_used, T] (NULL where none is hot) and returns that of all experts.
struct ggml_tensor * pgs_experts_begin(pgs_experts * e, pgs_graph * graph, int64_t index, struct ggml_tensor * x,
                                       struct ggml_tensor * chosen, char * err);
struct ggml_tensor * pgs_experts_end(pgs_experts * e, pgs_graph * graph, int64_t index, struct ggml_tensor * down, int64_t rows, char * err);

// Padding slots after the hot experts of a layer, for pairs that the host computes.
int64_t pgs_experts_fillers(int64_t n_used, int64_t n_hot);
// The slots that a token's chosen experts I32 [n_used] are called with; a cold one's result is not used.
void   pgs_experts_slots(const int32_t * slot, const int32_t * chosen, int64_t n_used, int64_t n_hot, bool distinct, int32_t * out);
int    pgs_experts_fetch(pgs_experts * e, int64_t index, int64_t rows, char * err);
int    pgs_experts_give(pgs_experts * e, int64_t index, int64_t rows, char * err);
void   pgs_experts_counters(const pgs_experts * e, pgs_experts_counts * out);
void   pgs_experts_layer_counts(const pgs_experts * e, int64_t index, int64_t * out);
size_t pgs_experts_device_bytes(const pgs_experts * e);

// ---- string_array.c

// Where each of `count` strings of a GGUF begins, from byte `at` on, and where the last one ends; the number of those that lie before byte `end`.
int64_t pgs_string_bounds(const char * data, size_t at, size_t end, int64_t count, int64_t * bounds);
// Whether none of them is empty or equal to another, up to a zero in each. False without memory to tell.
bool pgs_strings_differ(const char * data, const int64_t * bounds, int64_t count);

// ---- upload.c

typedef struct pgs_upload_state {
    int64_t bytes;   // on the device so far
    int     failed;  // number of the first queued part that could not be read, from 0; -1 for none
    int     error;   // its errno; 0: the file ended before
} pgs_upload_state;

// `device`: whose pinned memory they read into. NULL where there are no threads.
pgs_upload * pgs_upload_new(ggml_backend_dev_t device, int threads);
void         pgs_upload_free(pgs_upload * u);  // what has not been begun is dropped
// Queues bytes of an open file for a tensor that is allocated; both stay until the end. False: out of memory, or they do not fit.
bool pgs_upload_add(pgs_upload * u, int fd, size_t at, struct ggml_tensor * tensor, size_t offset, size_t bytes);
// Whether all that was queued is on the device, or something failed; waits so many milliseconds for that.
bool pgs_upload_wait(pgs_upload * u, int ms, pgs_upload_state * out);

// ---- weight_stream.c

typedef struct pgs_stream_counts {
    int64_t bytes;   // copied so far
    int64_t chunks;  // steps that computed with them
} pgs_stream_counts;

// `home`: bytes on the device that the layers lie in; `queue`: another backend on the same device. Borrows all of them.
pgs_stream * pgs_stream_new(ggml_backend_t device, ggml_backend_t queue, struct ggml_tensor * home, int n_layers, char * err);
void         pgs_stream_free(pgs_stream * s);
// A part of a layer's weights: `bytes` of host memory, which stay as and where they are, go to byte `to` of the home.
int  pgs_stream_add(pgs_stream * s, int layer, const void * from, size_t to, size_t bytes, char * err);
void pgs_stream_more(pgs_stream * s, bool more);  // whether another chunk follows the next one
void pgs_stream_start(pgs_stream * s);
void pgs_stream_wait(pgs_stream * s, int layer);
void pgs_stream_leave(pgs_stream * s, int layer);
void pgs_stream_reset(pgs_stream * s);
void pgs_stream_counters(const pgs_stream * s, pgs_stream_counts * out);

// ---- cpu/: native kernels on CPUs

// The levels of instructions that this build has and this processor runs, best first; NULL after the last one.
const pgs_level * pgs_level_at(int index);
const char *      pgs_level_name(const pgs_level * level);

// Weights of `n_in` inputs and `n_out` outputs as packed tensors, I8 [ne[0], ne[1], ne[2]]; false if there is no product with this type.
bool pgs_pack_shape(enum ggml_type type, int64_t n_in, int64_t n_out, int64_t * ne);
// Packs `n_rows` rows of a file as the outputs `first` and following of `n_out`. Clear the buffer first if n_out is no multiple of 16.
void pgs_pack_rows(enum ggml_type type, const void * rows, int64_t n_in, int64_t n_out, int64_t first, int64_t n_rows, void * packed);
// One output's weights of `n_out`, F32 [n_in].
void pgs_look_up(enum ggml_type type, const void * packed, int64_t n_in, int64_t n_out, int64_t index, float * out);

// The first type whose products read the same activations as those of `type`.
enum ggml_type pgs_activation_type(const pgs_level * level, enum ggml_type type);
// x F32 [n_in, ...] as products with this type of weight read it; any number of products may.
struct ggml_tensor * pgs_activations(struct ggml_context * ctx, const pgs_level * level, enum ggml_type type, struct ggml_tensor * x);
// Whether x is small enough for each thread of a product to quantise it itself.
bool pgs_rounds_alone(const pgs_level * level, enum ggml_type type, const struct ggml_tensor * x);
// `activations` of x, or NULL: threads round x for themselves, which pgs_rounds_alone has to allow.
struct ggml_tensor * pgs_product(struct ggml_context * ctx, const pgs_level * level, enum ggml_type type, struct ggml_tensor * packed,
                                 int64_t n_out, struct ggml_tensor * activations, struct ggml_tensor * x);
// A product and F32 of its shape, or one row for all of its rows, as one node; NULL where `product` is none, or has something added already.
struct ggml_tensor * pgs_product_plus(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * product, struct ggml_tensor * added);
// Threads share each section of the outputs of the product that x is or is a part of: two of `first` outputs, then those of `later`.
void pgs_share_sections(struct ggml_tensor * x, int64_t first, int64_t later);
struct ggml_tensor * pgs_packed_rows(struct ggml_context * ctx, enum ggml_type type, struct ggml_tensor * packed, int64_t n_in,
                                     struct ggml_tensor * index);
// x F32 [n, ...] / sqrt(mean(x^2) + eps) over the innermost dimension, times weight F32 [n] and silu(gate) where they are not NULL; contiguous.
struct ggml_tensor * pgs_norm(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * x, struct ggml_tensor * weight,
                              struct ggml_tensor * gate, float eps);
// x F32 [n, T] times sigmoid(gate), or with `silus` times silu(gate); gate F32 of as many values, [n, T] or heads [size, n / size, T], that may lie apart.
struct ggml_tensor * pgs_gate(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * x, struct ggml_tensor * gate, bool silus);
// As the functions of ggml of these names.
struct ggml_tensor * pgs_sum_rows(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * x);
struct ggml_tensor * pgs_argmax(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * x);
// -- draws (draw.c)

typedef struct pgs_candidate {  // llama_token_data
    int32_t id;
    float   logit, p;
} pgs_candidate;

typedef struct pgs_draw_options {  // of one draft; all zero: the argmax
    float    temperature;
    int32_t  top_k;              // 0 for all; 64 at most are looked at
    float    top_p, min_p;
    uint32_t seed, index;        // of the token in its generation
    int32_t  temperature_first;  // before top_p and min_p
    int32_t  unused;
} pgs_draw_options;

// The place of the largest logit + noise, ties to the smaller id: a draw from softmax(logits). -1 if all are -inf or NaN. The noise is Gumbel's,
// -log(-log(u)), u in (0, 1) of Philox4x32-10 with the key (seed, 0) and the counter (index, redraw, token / 4, 0); `redraw`: for another draw of the
// same token.
int64_t pgs_draw(const pgs_candidate * candidates, int64_t count, uint32_t seed, uint32_t index, uint32_t redraw);
// logits F32 [n, T], draws I32 [8, T] of pgs_draw_options, map I32 or I64 [n] or [n, T] or NULL: the target's token of each logit -> I32 [T] indices of
// logits.
struct ggml_tensor * pgs_draw_node(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * logits, struct ggml_tensor * draws,
                                   struct ggml_tensor * map);
// The same on devices whose ggml has patches/0038.
struct ggml_tensor * pgs_device_draw(struct ggml_context * ctx, struct ggml_tensor * logits, struct ggml_tensor * draws, struct ggml_tensor * map);

// F32 [n_i, T] each -> F32 [n_0 + n_1 + ..., T]; at most 9.
struct ggml_tensor * pgs_join(struct ggml_context * ctx, struct ggml_tensor ** parts, int count);
struct ggml_tensor * pgs_mask(struct ggml_context * ctx, struct ggml_tensor * mask_base, struct ggml_tensor * q_last, struct ggml_tensor * q_first,
                              int64_t kv_bucket, int64_t slots);
// Attention as ggml_flash_attn_ext; NULL for shapes that native kernels do not take.
struct ggml_tensor * pgs_attention_node(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * q, struct ggml_tensor * k,
                                        struct ggml_tensor * v, struct ggml_tensor * mask, float scale);

// ---- cpu/experts.c

// Matrices of routed experts: packed ones are I8 [ne[0], ne[1], ne[2], n_expert] with the dimensions of one of them (pgs_pack_shape).
bool pgs_expert_types(const pgs_level * level, enum ggml_type type);
// Bytes that activations for so many pairs need, and numbers that their order needs.
size_t  pgs_expert_tiles(const pgs_level * level, enum ggml_type type, int64_t n_in, int64_t n_expert, int64_t pairs);
int64_t pgs_expert_order_size(int64_t n_expert, int64_t pairs);
// Packs `n_expert` consecutive matrices of a file.
void pgs_pack_experts(const pgs_level * level, enum ggml_type type, const void * rows, int64_t n_in, int64_t n_out, int64_t n_expert, void * packed);
// chosen I32 [n_used, T] -> the (token, choice) pairs ordered by expert, which the other two read. An expert that does not exist gives rows of NaN.
struct ggml_tensor * pgs_expert_order(struct ggml_context * ctx, struct ggml_tensor * chosen, int64_t n_expert);
// x F32 [n_in, 1 or n_used, T] as products with this type of weight read it.
struct ggml_tensor * pgs_expert_activations(struct ggml_context * ctx, const pgs_level * level, enum ggml_type type, struct ggml_tensor * x,
                                            struct ggml_tensor * by, struct ggml_tensor * chosen, int64_t n_expert);
// experts packed, or as the file has them [n_in, n_out, n_expert] -> F32 [n_out, n_used, T]
struct ggml_tensor * pgs_expert_product(struct ggml_context * ctx, const pgs_level * level, enum ggml_type type, struct ggml_tensor * experts,
                                        int64_t n_in, int64_t n_out, int64_t n_expert, struct ggml_tensor * activations, struct ggml_tensor * by,
                                        struct ggml_tensor * chosen);

// ---- cpu/delta_nodes.c

bool pgs_delta_native(const pgs_level * level, int64_t head_size, int64_t max_width, int64_t taps);
struct ggml_tensor * pgs_convolution(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * rows, struct ggml_tensor * taps,
                                     int64_t first, int64_t later);
struct ggml_tensor * pgs_delta_rule(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * mixed, const pgs_delta_inputs * in,
                                    int64_t repeat, struct ggml_tensor * states, bool writes, struct ggml_tensor * qk, struct ggml_tensor * gates,
                                    int64_t beta_at, int64_t width);
struct ggml_tensor * pgs_delta_replay(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * k, struct ggml_tensor * v,
                                      struct ggml_tensor * gates, int64_t beta_at, struct ggml_tensor * states, struct ggml_tensor * keep,
                                      int64_t slots);
