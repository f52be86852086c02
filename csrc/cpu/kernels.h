// Native products on CPUs: the functions of one instruction level. A file is compiled for each level, with its own flags; which one runs is
// decided when a backend is opened.
#pragma once

#include "layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SUMS_STEP 64  // outputs, of four groups, whose sums are adjacent

typedef struct pgs_kernel {  // products with one type of weight
    int    type;             // enum ggml_type
    size_t record;           // bytes of a record
    int    block;            // inputs of a record
    size_t act;              // bytes of a block of a tile

    // Rounds `n` values of one row to what products read: `blocks` blocks of row `row` of a tile, zero-padded.
    void (*activations)(const float * x, int64_t n, char * tile, int row);
    // sums[r * SUMS_STEP + i] += the products of the outputs i of a pair of groups, or of one, with the rows r of tiles, over `blocks` blocks: their records
    // lie as layout.h says, tiles `step` bytes apart. `ahead`: prefetch distance of weights in bytes, 0: none. A row's bits depend neither on the other rows
    // nor on the other group.
    void (*product)(const char * records, int groups, int64_t blocks, const char * tiles, size_t step, int rows, float * sums, size_t ahead);
} pgs_kernel;

#define POSITIONS 32      // rows of K and V that are taken together
#define MOST_SIZE 576     // values of a head, latent ones included
#define MOST_ROWS 32      // query rows that are taken together
#define HIDDEN    0xfc00  // -Inf, what a mask has where a row must not look

typedef struct pgs_cache {  // rows of one head of K or V
    const char * rows;
    size_t       step;  // bytes between them
    size_t       prefetched;  // bytes of each row to prefetch,
    size_t       from;  // from here on: 0, or what another head reads next
    int          type, size;
    void (*to_float)(const void * from, float * to, int64_t n);  // NULL for F32, F16 and BF16
} pgs_cache;

typedef struct pgs_attention {  // query rows of one head of K and V
    int              rows;
    int64_t          span;  // rows of K and V
    float            scale;
    pgs_cache        k, v;
    const float *    q[MOST_ROWS];
    const uint16_t * mask[MOST_ROWS];  // F16 [span]
    float *          out[MOST_ROWS];
} pgs_attention;

#define MOST_TAPS  16  // of a convolution
#define DELTA_ROWS 64  // rows of a block that the delta rule takes without writing the state

typedef struct pgs_head {  // one head of a delta-net layer and some rows of a sequence
    int64_t       size, rows;
    const float * q, * k, * v;
    size_t        step_k, step_v;  // floats between rows, of q and k, and of v
    const float * decay, * beta;   // [rows]
    float         scale;           // of what comes out
    float *       state;           // [size][size], column after column
    bool          keeps;           // whether the state is written
    float *       out;             // NULL: only the state is wanted
    size_t        step_out;
    bool          follows;         // whether the next columns follow; they are prefetched
} pgs_head;

struct pgs_level {
    const char *       name;
    const pgs_kernel * kernels;
    int                count;
    void (*attend)(const pgs_attention * a);
    void (*norm)(const float * x, const float * weight, const float * gate, float eps, int64_t n, float * out);
    void (*convolve)(const float * x, size_t step, const float * taps, int n_taps, int64_t rows, int64_t channels, float * out, size_t to);
    void (*gate)(const float * x, const float * by, int64_t n, int silus, float * out);
    float (*sum)(const float * x, int64_t n);
    int64_t (*argmax)(const float * x, int64_t n);
    void (*delta)(const pgs_head * h, int64_t first, int64_t end);  // columns; a multiple of 4
    // `blocks` blocks of each of LANES rows as files store them, `step` bytes apart, as records of the type; as many bytes from `next` on come
    // nearer meanwhile.
    void (*regroup)(int type, const char * rows, size_t step, int64_t blocks, char * records, const char * next);
};

extern const struct pgs_level pgs_level_avx512vnni, pgs_level_avxvnni, pgs_level_avxvnni_evex, pgs_level_avx2, pgs_level_neondot;

// Of products with matrices and with experts:
#define MOST_TILES  16           // tiles that a group of outputs is multiplied with before the next one
#define TILES_BYTES (384 << 10)  // of their activations: they stay in the second-level cache
#define CHUNK_BYTES (12 << 10)   // of weights that stay in the first-level cache while tiles use them

// Of a row of so many inputs.
static inline int64_t pgs_blocks(const pgs_kernel * k, int64_t n_in) {
    return (n_in + k->block - 1) / k->block;
}

static inline int64_t pgs_tiles_at_once(const pgs_kernel * k, int64_t blocks) {
    const int64_t fit = TILES_BYTES / (blocks * (int64_t) k->act);
    return fit < 1 ? 1 : fit < MOST_TILES ? fit : MOST_TILES;
}

// Into the second-level cache, without the places that first-level misses need.
static inline void pgs_prefetch(const char * from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(from + i, 0, 2);
    }
}

// Prefetches lines for writing: stores to lines that a core of another cache domain has read are serialised otherwise.
static inline void pgs_will_write(void * to, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) {
#if defined(__x86_64__)
        __asm__ volatile("prefetchw %0" : : "m"(*((const char *) to + i)));  // compilers make another one of it where they may not assume this one
#else
        __builtin_prefetch((const char *) to + i, 1, 3);
#endif
    }
}

// Where weights are: possibly in a cache, in memory, or experts, whose choice varies.
typedef enum pgs_locality { PGS_IN_CACHE, PGS_IN_MEMORY, PGS_EXPERTS, PGS_PLACES } pgs_locality;

typedef struct pgs_prefetch_tune {
    void * trial;  // NULL where it is decided
    int    way;
    size_t ahead;  // prefetch distance in bytes; 0: none
    double began;  // nanoseconds
} pgs_prefetch_tune;

// Called around a product of up to 32 rows; `bytes`: weights read by this thread (prefetch_tune.c).
pgs_prefetch_tune pgs_prefetch_tune_begin(int type, pgs_locality where, int64_t rows);
void       pgs_prefetch_tune_end(const pgs_prefetch_tune * a, size_t bytes);

// Outputs of the section that begins at `start`, of n: two of `first`, then those of `later`; all of them if `first` is 0. Each section is shared among all
// threads, so a thread that has heads of q has those of k and v too.
static inline int64_t pgs_section(int64_t first, int64_t later, int64_t start, int64_t n) {
    const int64_t size = first == 0 ? n : start < 2 * first ? first : later, left = n - start;
    return size < left ? size : left;
}

// Of so many outputs, those before the share of thread i: whole pairs of groups, so it may be more than there are.
static inline int64_t pgs_share(int64_t outputs, int i, int nth) {
    return (outputs + 2 * LANES - 1) / (2 * LANES) * i / nth * (2 * LANES);
}

// The kernel for a type of weight, or NULL.
const pgs_kernel * pgs_kernel_of(const struct pgs_level * level, int type);
