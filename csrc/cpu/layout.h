// Memory layout of weights and activations of native products, the same at every level, as are the results: block sums are exact integers, followed by
// the same fused floating-point steps in the same order.
//
// Weights: a record holds LANES outputs of one block, with quads of an output's inputs adjacent, as dot-product instructions need. Records of the same
// outputs are a group; two groups are a pair with alternating records, read as one stream. A last group without a partner is alone.
// Activations: a tile holds TILE rows, block by block; it always has full size, and absent rows are not read.
#pragma once

#include <stdint.h>

#define LANES 16
#define TILE  8

// Which record it is, of a matrix of `groups` groups of `blocks` blocks: that of a group's block.
static inline int64_t record_of(int64_t groups, int64_t blocks, int64_t group, int64_t block) {
    const int64_t first = group & ~(int64_t) 1;
    return first + 1 < groups ? first * blocks + 2 * block + (group - first) : group * blocks + block;
}

// ---- weights. Scales are F16, as in the file.

typedef struct rec_q8_0 {
    uint8_t  q[8][4 * LANES];  // + 128: inputs 4 i .. 4 i + 3 of every output
    uint16_t d[LANES];
} rec_q8_0;

typedef struct rec_q4_0 {
    uint8_t  q[4][4 * LANES];  // + 8: low nibbles are quad i, high ones quad i + 4
    uint16_t d[LANES];
} rec_q4_0;

typedef struct rec_q4_1 {  // d * q + m
    uint8_t  q[4][4 * LANES];
    uint16_t d[LANES], m[LANES];
} rec_q4_1;

typedef struct rec_q5_0 {
    uint8_t  q[4][4 * LANES];
    uint8_t  high[4 * LANES];  // + 16; bit j: the fifth bit of quad j
    uint16_t d[LANES];
} rec_q5_0;

typedef struct rec_q5_1 {  // d * q + m
    uint8_t  q[4][4 * LANES];
    uint8_t  high[4 * LANES];
    uint16_t d[LANES], m[LANES];
} rec_q5_1;

typedef struct rec_q4_0 rec_iq4_nl;  // indices into a table of sixteen values

typedef struct rec_mxfp4 {
    uint8_t q[4][4 * LANES];  // places in a table of sixteen values, in the order of rec_q4_0
    uint8_t e[LANES];         // exponents of two
} rec_mxfp4;

typedef struct head_k {        // of 256 inputs in 8 sub-blocks
    uint8_t  scale[8][LANES];
    uint8_t  min[4][2 * LANES];  // of two sub-blocks, neighbours
    uint16_t d[LANES], dmin[LANES];
} head_k;

typedef struct rec_q4_k {
    head_k  h;
    uint8_t q[4][8][4 * LANES];  // [i][quad]: low nibbles are of sub-block 2 i, high ones of 2 i + 1
} rec_q4_k;

typedef struct rec_q5_k {
    head_k  h;
    uint8_t high[8][4 * LANES];  // [quad]: bit j is the fifth bit of sub-block j
    uint8_t q[4][8][4 * LANES];
} rec_q5_k;

typedef struct rec_q2_k {        // of 256 inputs in 16 sub-blocks
    uint8_t  scale[16][LANES];  // low nibbles; high ones are mins
    uint16_t d[LANES], dmin[LANES];
    uint8_t  q[4][4][4 * LANES];  // [i][quad]: bits 2 j and 2 j + 1 are of sub-block 4 i + j
} rec_q2_k;

typedef struct rec_q3_k {        // of 256 inputs in 16 sub-blocks
    int8_t   scale[16][LANES];
    uint16_t d[LANES];
    uint8_t  q[4][4][4 * LANES];     // + 4; as of rec_q2_k
    uint8_t  high[2][4][4 * LANES];  // [i][quad]: bit j is the third bit of sub-block 8 i + j
} rec_q3_k;

typedef struct rec_iq4_xs {      // of 256 inputs in 8 sub-blocks
    int8_t   scale[8][LANES];
    uint16_t d[LANES];
    uint8_t  q[8][4][4 * LANES];  // indices into the table of IQ4_NL, in the order of rec_q4_0
} rec_iq4_xs;

typedef struct rec_q6_k {        // of 256 inputs in 16 sub-blocks
    int8_t   scale[16][LANES];
    uint16_t d[LANES];
    uint8_t  q[8][4][4 * LANES];     // + 32; [i][quad]: low nibbles are of sub-block 2 i, high ones of 2 i + 1
    uint8_t  high[4][4][4 * LANES];  // [i][quad]: bits 2 j and 2 j + 1 are the upper two of sub-block 4 i + j
} rec_q6_k;

// Types whose records are the words of a file's blocks, then the F16 scales that blocks begin with (IQ1_M and NVFP4 have none): X(type, bytes of a block)
#define EACH_GRID(X)   X(IQ1_S, 50) X(IQ1_M, 56) X(IQ2_XXS, 66) X(IQ2_XS, 74) X(IQ2_S, 82) X(IQ3_XXS, 98) X(IQ3_S, 110)
#define EACH_TURNED(X) EACH_GRID(X) X(NVFP4, 36)
#define MOST_TURNED    110

// Grids, made of what ggml decodes (pack.c). Of IQ3 the four values + 128 of an index; of IQ1 and IQ2 which of three values: byte i has two bits for each of
// inputs i and i + 4.
extern struct pgs_grids {
    uint32_t iq1[2048], iq2_xxs[256], iq2_xs[512], iq2_s[1024], iq3_xxs[256], iq3_s[512];
} pgs_grids;
void pgs_make_grids(void);  // before the first product

typedef struct rec_f16 {  // F16 or BF16
    uint16_t w[32][LANES];
} rec_f16;

typedef struct rec_f32 {
    float w[32][LANES];
} rec_f32;

// ---- activations, rounded as ggml rounds them: Q8_0 for blocks of 32, Q8_K for blocks of 256

typedef struct act_32 {
    int8_t  q[TILE][32];
    int32_t by_128[TILE], by_8[TILE];  // what weights + 128, and + 8, add too much: - 128 and - 8 times the sum of the values
    int32_t first[TILE];               // the sum of the first 16
    float   d[TILE];
} act_32;

typedef struct act_256 {
    int8_t  q[TILE][256];
    int32_t by_32[TILE][16];  // - 32 times the sum of 16 values each
    int16_t sum[TILE][8], of_16[TILE][16];  // sums of 32 and of 16 values each
    float   d[TILE];
} act_256;

typedef struct act_f32 {
    float x[TILE][32];
} act_f32;
