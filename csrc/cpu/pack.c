// From rows as GGUF files store them to records of LANES outputs, and back to a row where one is looked up.
#include "layout.h"
#include "pgs.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

// ---- blocks as files have them

typedef struct block_q8_0 {
    uint16_t d;
    uint8_t  q[32];
} block_q8_0;

typedef struct block_q4_0 {
    uint16_t d;
    uint8_t  q[16];  // low nibbles: inputs 0 .. 15, high ones: 16 .. 31
} block_q4_0;

typedef struct block_q4_1 {
    uint16_t d, m;
    uint8_t  q[16];
} block_q4_1;

typedef struct block_q5_0 {
    uint16_t d;
    uint8_t  high[4];  // bit i: the fifth bit of input i
    uint8_t  q[16];
} block_q5_0;

typedef struct block_q5_1 {
    uint16_t d, m;
    uint8_t  high[4];
    uint8_t  q[16];
} block_q5_1;

typedef struct block_mxfp4 {
    uint8_t e;
    uint8_t q[16];  // as of block_q4_0
} block_mxfp4;

typedef struct block_q4_k {
    uint16_t d, dmin;
    uint8_t  scales[12];
    uint8_t  q[128];  // of each 32 bytes, low nibbles are one sub-block and high ones the next
} block_q4_k;

typedef struct block_q5_k {
    uint16_t d, dmin;
    uint8_t  scales[12];
    uint8_t  high[32];  // bit j: the fifth bit of sub-block j
    uint8_t  q[128];
} block_q5_k;

typedef struct block_q2_k {
    uint8_t  scales[16];  // low nibbles are scales, high ones mins
    uint8_t  q[64];       // of each 32 bytes, bits 2 j and 2 j + 1 are inputs 32 j .. 32 j + 31 of a half
    uint16_t d, dmin;
} block_q2_k;

typedef struct block_q3_k {
    uint8_t  high[32];  // bit j: the third bit of inputs 32 j .. 32 j + 31
    uint8_t  q[64];     // as of block_q2_k
    uint8_t  scales[12];
    uint16_t d;
} block_q3_k;

typedef struct block_iq4_xs {
    uint16_t d, scales_high;
    uint8_t  scales_low[4];
    uint8_t  q[128];  // of each 16 bytes, low nibbles are inputs 0 .. 15 of a sub-block and high ones 16 .. 31
} block_iq4_xs;

typedef struct block_q6_k {
    uint8_t  low[128];
    uint8_t  high[64];
    int8_t   scale[16];
    uint16_t d;
} block_q6_k;

// Eight scales and eight mins of 6 bits each in twelve bytes.
static void scale_and_min(const uint8_t * s, int j, uint8_t * scale, uint8_t * min) {
    if (j < 4) {
        *scale = s[j] & 63;
        *min   = s[j + 4] & 63;
    } else {
        *scale = (uint8_t) ((s[j + 4] & 15) | (s[j - 4] >> 6 << 4));
        *min   = (uint8_t) ((s[j + 4] >> 4) | (s[j] >> 6 << 4));
    }
}

// Scale `j` of sixteen, 6 bits each in twelve bytes, less 32.
static int8_t scale_of_q3_k(const uint8_t * s, int j) {
    return (int8_t) (((s[j % 8] >> (j / 8 * 4) & 15) | (s[8 + j % 4] >> (j / 4 * 2) & 3) << 4) - 32);
}

// Two bits of input `i` of 256, as Q2_K and Q3_K have them.
static uint8_t two_bits(const uint8_t * q, int i) {
    return q[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}

// 6 bits of input `i` of 256. Each half of a block has 64 bytes of nibbles, low ones of its first 64 inputs, and 32 bytes of pairs of bits.
static uint8_t six_bits(const block_q6_k * b, int i) {
    const int half = i / 128, at = i % 128;
    const int low  = b->low[64 * half + at % 64] >> (at / 64 * 4) & 15;
    const int high = b->high[32 * half + at % 32] >> (at / 32 * 2) & 3;
    return (uint8_t) (low | high << 4);
}

// ---- records

typedef struct shape {
    int    block;
    size_t record, file;  // bytes of a record, and of one output's block in the file
} shape;

static bool shape_of(enum ggml_type type, shape * out) {
    switch (type) {
        case GGML_TYPE_Q8_0: *out = (shape) { 32, sizeof(rec_q8_0), sizeof(block_q8_0) }; return true;
        case GGML_TYPE_Q4_0: *out = (shape) { 32, sizeof(rec_q4_0), sizeof(block_q4_0) }; return true;
        case GGML_TYPE_Q4_1: *out = (shape) { 32, sizeof(rec_q4_1), sizeof(block_q4_1) }; return true;
        case GGML_TYPE_Q5_0: *out = (shape) { 32, sizeof(rec_q5_0), sizeof(block_q5_0) }; return true;
        case GGML_TYPE_Q5_1: *out = (shape) { 32, sizeof(rec_q5_1), sizeof(block_q5_1) }; return true;
        case GGML_TYPE_IQ4_NL: *out = (shape) { 32, sizeof(rec_iq4_nl), sizeof(block_q4_0) }; return true;
        case GGML_TYPE_Q2_K: *out = (shape) { 256, sizeof(rec_q2_k), sizeof(block_q2_k) }; return true;
        case GGML_TYPE_Q3_K: *out = (shape) { 256, sizeof(rec_q3_k), sizeof(block_q3_k) }; return true;
        case GGML_TYPE_IQ4_XS: *out = (shape) { 256, sizeof(rec_iq4_xs), sizeof(block_iq4_xs) }; return true;
        case GGML_TYPE_MXFP4: *out = (shape) { 32, sizeof(rec_mxfp4), sizeof(block_mxfp4) }; return true;
        case GGML_TYPE_Q4_K: *out = (shape) { 256, sizeof(rec_q4_k), sizeof(block_q4_k) }; return true;
        case GGML_TYPE_Q5_K: *out = (shape) { 256, sizeof(rec_q5_k), sizeof(block_q5_k) }; return true;
        case GGML_TYPE_Q6_K: *out = (shape) { 256, sizeof(rec_q6_k), sizeof(block_q6_k) }; return true;
#define TURNED_CASE(type, size) case GGML_TYPE_##type:
        EACH_TURNED(TURNED_CASE)
            *out = (shape) { (int) ggml_blck_size(type), LANES * ggml_type_size(type), ggml_type_size(type) };
            return true;
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16: *out = (shape) { 32, sizeof(rec_f16), 0 }; return true;
        case GGML_TYPE_F32: *out = (shape) { 32, sizeof(rec_f32), 0 }; return true;
        default: return false;
    }
}

bool pgs_pack_shape(enum ggml_type type, int64_t n_in, int64_t n_out, int64_t * ne) {
    shape s;
    if (n_in < 1 || n_out < 1 || !shape_of(type, &s) || (s.file != 0 && n_in % s.block != 0)) {
        return false;
    }
    ne[0] = (int64_t) s.record;
    ne[1] = (n_in + s.block - 1) / s.block;
    ne[2] = (n_out + LANES - 1) / LANES;
    return true;
}

static void copy_quads(uint8_t (*to)[4 * LANES], const uint8_t * from, int quads, int lane, uint8_t flip) {
    for (int t = 0; t < quads; t++) {
        for (int i = 0; i < 4; i++) {
            to[t][4 * lane + i] = from[4 * t + i] ^ flip;
        }
    }
}

// The fifth bits of 32 inputs: bit t of a byte is that of quad t.
static void pack_fifth(uint8_t * to, const uint8_t * high, int lane) {
    for (int i = 0; i < 32; i++) {
        const int at = 4 * lane + i % 4, bit = high[i / 8] >> i % 8 & 1;
        to[at]       = (uint8_t) ((to[at] & ~(1 << i / 4)) | bit << i / 4);
    }
}

// Two bits of each input of 256: sub-blocks of 16.
static void pack_two_bits(uint8_t (*to)[4][4 * LANES], const uint8_t * q, int lane) {
    for (int i = 0; i < 256; i++) {
        uint8_t * at = &to[i / 64][i % 16 / 4][4 * lane + i % 4];
        const int by = i / 16 % 4 * 2;
        *at          = (uint8_t) ((*at & ~(3 << by)) | two_bits(q, i) << by);
    }
}

static void pack_q2_k(rec_q2_k * to, const block_q2_k * b, int lane) {
    for (int j = 0; j < 16; j++) {
        to->scale[j][lane] = b->scales[j];
    }
    to->d[lane]    = b->d;
    to->dmin[lane] = b->dmin;
    pack_two_bits(to->q, b->q, lane);
}

static void pack_q3_k(rec_q3_k * to, const block_q3_k * b, int lane) {
    for (int j = 0; j < 16; j++) {
        to->scale[j][lane] = scale_of_q3_k(b->scales, j);
    }
    to->d[lane] = b->d;
    pack_two_bits(to->q, b->q, lane);
    for (int i = 0; i < 256; i++) {
        uint8_t * at = &to->high[i / 128][i % 16 / 4][4 * lane + i % 4];
        const int by = i / 16 % 8;
        *at          = (uint8_t) ((*at & ~(1 << by)) | (b->high[i % 32] >> (i / 32) & 1) << by);
    }
}

static void pack_iq4_xs(rec_iq4_xs * to, const block_iq4_xs * b, int lane) {
    for (int j = 0; j < 8; j++) {
        const int low = b->scales_low[j / 2] >> (j % 2 * 4) & 15, high = b->scales_high >> (2 * j) & 3;
        to->scale[j][lane] = (int8_t) ((low | high << 4) - 32);
        copy_quads(to->q[j], b->q + 16 * j, 4, lane, 0);
    }
    to->d[lane] = b->d;
}

static void pack_head(head_k * h, uint16_t d, uint16_t dmin, const uint8_t * scales, int lane) {
    for (int j = 0; j < 8; j++) {
        scale_and_min(scales, j, &h->scale[j][lane], &h->min[j / 2][2 * lane + j % 2]);
    }
    h->d[lane]    = d;
    h->dmin[lane] = dmin;
}

static void pack_q6_k(rec_q6_k * to, const block_q6_k * b, int lane) {
    for (int j = 0; j < 16; j++) {
        to->scale[j][lane] = b->scale[j];
        for (int i = 0; i < 16; i++) {
            const uint8_t v  = six_bits(b, 16 * j + i);
            const int     at = 4 * lane + i % 4;
            uint8_t *     q = &to->q[j / 2][i / 4][at], *high = &to->high[j / 4][i / 4][at];
            *q    = (uint8_t) (j % 2 != 0 ? (*q & 15) | (v & 15) << 4 : (*q & 240) | (v & 15));
            *high = (uint8_t) ((*high & ~(3 << (j % 4 * 2))) | v >> 4 << (j % 4 * 2));
        }
    }
    to->d[lane] = b->d;
}

// A block of `size` bytes to its lane of a record, and back.
static void turn_block(const char * block, size_t size, char * record, int lane) {
    const size_t half = size % 4, words = size / 4;
    for (size_t t = 0; t < words; t++) {
        memcpy(record + 4 * (t * LANES + (size_t) lane), block + half + 4 * t, 4);
    }
    memcpy(record + 4 * words * LANES + half * (size_t) lane, block, half);
}

static void turn_back(const char * record, size_t size, char * block, int lane) {
    const size_t half = size % 4, words = size / 4;
    for (size_t t = 0; t < words; t++) {
        memcpy(block + half + 4 * t, record + 4 * (t * LANES + (size_t) lane), 4);
    }
    memcpy(block, record + 4 * words * LANES + half * (size_t) lane, half);
}

static void pack_block(enum ggml_type type, const void * from, int64_t left, void * record, int lane) {
    switch (type) {
        case GGML_TYPE_Q8_0: {
            const block_q8_0 * b = from;
            rec_q8_0 *         r = record;
            copy_quads(r->q, b->q, 8, lane, 128);
            r->d[lane] = b->d;
            break;
        }
        case GGML_TYPE_IQ4_NL:
        case GGML_TYPE_Q4_0: {
            const block_q4_0 * b = from;
            rec_q4_0 *         r = record;
            copy_quads(r->q, b->q, 4, lane, 0);
            r->d[lane] = b->d;
            break;
        }
        case GGML_TYPE_Q4_1: {
            const block_q4_1 * b = from;
            rec_q4_1 *         r = record;
            copy_quads(r->q, b->q, 4, lane, 0);
            r->d[lane] = b->d;
            r->m[lane] = b->m;
            break;
        }
        case GGML_TYPE_Q5_0: {
            const block_q5_0 * b = from;
            rec_q5_0 *         r = record;
            copy_quads(r->q, b->q, 4, lane, 0);
            pack_fifth(r->high, b->high, lane);
            r->d[lane] = b->d;
            break;
        }
        case GGML_TYPE_Q5_1: {
            const block_q5_1 * b = from;
            rec_q5_1 *         r = record;
            copy_quads(r->q, b->q, 4, lane, 0);
            pack_fifth(r->high, b->high, lane);
            r->d[lane] = b->d;
            r->m[lane] = b->m;
            break;
        }
        case GGML_TYPE_Q2_K: pack_q2_k(record, from, lane); break;
        case GGML_TYPE_Q3_K: pack_q3_k(record, from, lane); break;
        case GGML_TYPE_IQ4_XS: pack_iq4_xs(record, from, lane); break;
        case GGML_TYPE_MXFP4: {
            const block_mxfp4 * b = from;
            rec_mxfp4 *         r = record;
            copy_quads(r->q, b->q, 4, lane, 0);
            r->e[lane] = b->e;
            break;
        }
        case GGML_TYPE_Q4_K: {
            const block_q4_k * b = from;
            rec_q4_k *         r = record;
            pack_head(&r->h, b->d, b->dmin, b->scales, lane);
            for (int i = 0; i < 4; i++) {
                copy_quads(r->q[i], b->q + 32 * i, 8, lane, 0);
            }
            break;
        }
        case GGML_TYPE_Q5_K: {
            const block_q5_k * b = from;
            rec_q5_k *         r = record;
            pack_head(&r->h, b->d, b->dmin, b->scales, lane);
            copy_quads(r->high, b->high, 8, lane, 0);
            for (int i = 0; i < 4; i++) {
                copy_quads(r->q[i], b->q + 32 * i, 8, lane, 0);
            }
            break;
        }
        case GGML_TYPE_Q6_K: pack_q6_k(record, from, lane); break;
        EACH_TURNED(TURNED_CASE)
            turn_block(from, ggml_type_size(type), record, lane);
            break;
        case GGML_TYPE_F32:
            for (int64_t i = 0; i < 32 && i < left; i++) {
                ((rec_f32 *) record)->w[i][lane] = ((const float *) from)[i];
            }
            break;
        default:
            for (int64_t i = 0; i < 32 && i < left; i++) {
                ((rec_f16 *) record)->w[i][lane] = ((const uint16_t *) from)[i];
            }
    }
}

void pgs_pack_rows(enum ggml_type type, const void * rows, int64_t n_in, int64_t n_out, int64_t first, int64_t n_rows, void * packed) {
    shape s;
    if (!shape_of(type, &s)) {
        return;
    }
    const int64_t blocks = (n_in + s.block - 1) / s.block, groups = (n_out + LANES - 1) / LANES;
    const size_t  size   = ggml_row_size(type, n_in), step = s.file != 0 ? s.file : 32 * ggml_type_size(type);
    for (int64_t r = 0; r < n_rows; r++) {
        const int64_t out  = first + r;
        const char *  from = (const char *) rows + (size_t) r * size;
        for (int64_t b = 0; b < blocks; b++) {
            char * record = (char *) packed + (size_t) record_of(groups, blocks, out / LANES, b) * s.record;
            pack_block(type, from + (size_t) b * step, n_in - 32 * b, record, (int) (out % LANES));
        }
    }
}

// ---- grids

struct pgs_grids pgs_grids;

// Which of three values a decoded one is.
static uint32_t one_of_three(float x, bool iq1) {
    return (uint32_t) (iq1 ? x + 1.0f : x / 2.0f);  // -7/8, 1/8, 9/8 or 1, 25/8, 43/8
}

void pgs_make_grids(void) {
    static atomic_bool made;
    const struct {
        enum ggml_type type;
        uint32_t *     grid;
        int            count, high;  // indices, and the byte of a block with the upper bits of the first one
    } grids[] = {
        { GGML_TYPE_IQ1_S, pgs_grids.iq1, 2048, 34 },   { GGML_TYPE_IQ2_XXS, pgs_grids.iq2_xxs, 256, 3 }, { GGML_TYPE_IQ2_XS, pgs_grids.iq2_xs, 512, 3 },
        { GGML_TYPE_IQ2_S, pgs_grids.iq2_s, 1024, 66 }, { GGML_TYPE_IQ3_XXS, pgs_grids.iq3_xxs, 256, 3 }, { GGML_TYPE_IQ3_S, pgs_grids.iq3_s, 512, 66 },
    };
    for (size_t g = 0; g < sizeof(grids) / sizeof(grids[0]) && !atomic_load(&made); g++) {
        const enum ggml_type type = grids[g].type;
        const bool           iq3 = type == GGML_TYPE_IQ3_XXS || type == GGML_TYPE_IQ3_S;
        for (int i = 0; i < grids[g].count; i++) {
            uint8_t  block[MOST_TURNED] = { 0, 0x3c, (uint8_t) i };  // d is 1
            float    x[256];
            uint32_t word = 0;
            block[grids[g].high] |= (uint8_t) (i >> 8);
            ggml_get_type_traits(type)->to_float(block, x, 256);
            for (int j = 0; j < 4; j++) {
                const uint32_t three = one_of_three(x[j], type == GGML_TYPE_IQ1_S) | one_of_three(x[j + 4], type == GGML_TYPE_IQ1_S) << 2;
                word |= (iq3 ? 128 + (uint32_t) (type == GGML_TYPE_IQ3_S ? x[j] : 4 * x[j]) : three) << (8 * j);
            }
            grids[g].grid[i] = word;
        }
    }
    atomic_store(&made, true);
}

// ---- one output back as numbers

static float half(uint16_t x) {
    return ggml_fp16_to_fp32(x);
}

static const float IQ4_VALUES[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

// The nibble of input `i` of 32.
static int nibble_at(const uint8_t (*q)[4 * LANES], int lane, int i) {
    return q[i % 16 / 4][4 * lane + i % 4] >> (i / 16 * 4) & 15;
}

static int fifth_at(const uint8_t * high, int lane, int i) {
    return (high[4 * lane + i % 4] >> (i / 4) & 1) << 4;
}

static int two_bits_at(const uint8_t (*q)[4][4 * LANES], int lane, int i) {
    return q[i / 64][i % 16 / 4][4 * lane + i % 4] >> (i / 16 % 4 * 2) & 3;
}

static void look_up_k(const head_k * h, const uint8_t (*high)[4 * LANES], const uint8_t (*q)[8][4 * LANES], int lane, float * out) {
    const float d = half(h->d[lane]), dmin = half(h->dmin[lane]);
    for (int i = 0; i < 256; i++) {
        const int j = i / 32, t = i % 32 / 4, at = 4 * lane + i % 4;
        const int v = (q[j / 2][t][at] >> (j % 2 * 4) & 15) | (high != NULL ? (high[t][at] >> j & 1) << 4 : 0);
        out[i] = d * h->scale[j][lane] * (float) v - dmin * h->min[j / 2][2 * lane + j % 2];
    }
}

void pgs_look_up(enum ggml_type type, const void * packed, int64_t n_in, int64_t n_out, int64_t index, float * out) {
    shape s;
    if (!shape_of(type, &s)) {
        return;
    }
    const int64_t blocks = (n_in + s.block - 1) / s.block, groups = (n_out + LANES - 1) / LANES;
    const int     lane   = (int) (index % LANES);
    for (int64_t b = 0; b < blocks; b++, out += s.block) {
        const char *  record = (const char *) packed + (size_t) record_of(groups, blocks, index / LANES, b) * s.record;
        const int64_t left   = n_in - b * s.block;
        switch (type) {
            case GGML_TYPE_Q8_0: {
                const rec_q8_0 * r = (const rec_q8_0 *) record;
                const float      d = half(r->d[lane]);
                for (int i = 0; i < 32; i++) {
                    out[i] = d * (float) (r->q[i / 4][4 * lane + i % 4] - 128);
                }
                break;
            }
            case GGML_TYPE_Q4_0: {
                const rec_q4_0 * r = (const rec_q4_0 *) record;
                const float      d = half(r->d[lane]);
                for (int i = 0; i < 32; i++) {
                    out[i] = d * (float) (nibble_at(r->q, lane, i) - 8);
                }
                break;
            }
            case GGML_TYPE_Q4_1: {
                const rec_q4_1 * r = (const rec_q4_1 *) record;
                for (int i = 0; i < 32; i++) {
                    out[i] = half(r->d[lane]) * (float) nibble_at(r->q, lane, i) + half(r->m[lane]);
                }
                break;
            }
            case GGML_TYPE_Q5_0: {
                const rec_q5_0 * r = (const rec_q5_0 *) record;
                for (int i = 0; i < 32; i++) {
                    out[i] = half(r->d[lane]) * (float) ((nibble_at(r->q, lane, i) | fifth_at(r->high, lane, i)) - 16);
                }
                break;
            }
            case GGML_TYPE_Q5_1: {
                const rec_q5_1 * r = (const rec_q5_1 *) record;
                for (int i = 0; i < 32; i++) {
                    out[i] = half(r->d[lane]) * (float) (nibble_at(r->q, lane, i) | fifth_at(r->high, lane, i)) + half(r->m[lane]);
                }
                break;
            }
            case GGML_TYPE_IQ4_NL: {
                const rec_iq4_nl * r = (const rec_iq4_nl *) record;
                for (int i = 0; i < 32; i++) {
                    out[i] = half(r->d[lane]) * IQ4_VALUES[nibble_at(r->q, lane, i)];
                }
                break;
            }
            case GGML_TYPE_Q2_K: {
                const rec_q2_k * r = (const rec_q2_k *) record;
                for (int i = 0; i < 256; i++) {
                    const uint8_t both = r->scale[i / 16][lane];
                    const float   d = half(r->d[lane]) * (both & 15), m = half(r->dmin[lane]) * (both >> 4);
                    out[i]          = d * (float) two_bits_at(r->q, lane, i) - m;
                }
                break;
            }
            case GGML_TYPE_Q3_K: {
                const rec_q3_k * r = (const rec_q3_k *) record;
                for (int i = 0; i < 256; i++) {
                    const int high = r->high[i / 128][i % 16 / 4][4 * lane + i % 4] >> (i / 16 % 8) & 1;
                    out[i]         = half(r->d[lane]) * r->scale[i / 16][lane] * (float) ((two_bits_at(r->q, lane, i) | high << 2) - 4);
                }
                break;
            }
            case GGML_TYPE_IQ4_XS: {
                const rec_iq4_xs * r = (const rec_iq4_xs *) record;
                for (int i = 0; i < 256; i++) {
                    out[i] = half(r->d[lane]) * r->scale[i / 32][lane] * IQ4_VALUES[nibble_at(r->q[i / 32], lane, i % 32)];
                }
                break;
            }
            case GGML_TYPE_MXFP4: {
                static const float values[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };
                const rec_mxfp4 *  r          = (const rec_mxfp4 *) record;
                const float        d          = ldexpf(1.0f, r->e[lane] - 128);
                for (int i = 0; i < 32; i++) {
                    out[i] = d * values[nibble_at(r->q, lane, i)];
                }
                break;
            }
            case GGML_TYPE_Q4_K: {
                const rec_q4_k * r = (const rec_q4_k *) record;
                look_up_k(&r->h, NULL, r->q, lane, out);
                break;
            }
            case GGML_TYPE_Q5_K: {
                const rec_q5_k * r = (const rec_q5_k *) record;
                look_up_k(&r->h, r->high, r->q, lane, out);
                break;
            }
            case GGML_TYPE_Q6_K: {
                const rec_q6_k * r = (const rec_q6_k *) record;
                const float      d = half(r->d[lane]);
                for (int i = 0; i < 256; i++) {
                    const int j = i / 16, t = i % 16 / 4, at = 4 * lane + i % 4;
                    const int v = (r->q[j / 2][t][at] >> (j % 2 * 4) & 15) | (r->high[j / 4][t][at] >> (j % 4 * 2) & 3) << 4;
                    out[i] = d * r->scale[j][lane] * (float) (v - 32);
                }
                break;
            }
            EACH_TURNED(TURNED_CASE) {
                char block[MOST_TURNED];
                turn_back(record, s.file, block, lane);
                ggml_get_type_traits(type)->to_float(block, out, s.block);
                break;
            }
            case GGML_TYPE_F32:
                for (int64_t i = 0; i < 32 && i < left; i++) {
                    out[i] = ((const rec_f32 *) record)->w[i][lane];
                }
                break;
            default:
                for (int64_t i = 0; i < 32 && i < left; i++) {
                    const uint16_t w = ((const rec_f16 *) record)->w[i][lane];
                    out[i]           = type == GGML_TYPE_F16 ? half(w) : ggml_bf16_to_fp32((ggml_bf16_t) { w });
                }
        }
    }
}
