// Products for all levels: the file of a level includes its vectors, then this.
//
// Block sums are exact integers, followed by the same fused steps in the same order for every row, so a row has the same bits alone and in any batch.
#pragma once

#include "activations.h"
#include "kernels.h"

#define EACH_ROW  _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
#define PARTS     (LANES / VL)
#define EACH_PART _Pragma("GCC unroll 4") for (int p = 0; p < PARTS; p++)

// Outputs of G groups (a pair of them, or one alone), V vectors at once, N if there are as many: each value of a row that is loaded is multiplied with all
// of them.
#define V         (G * PARTS < N ? G * PARTS : N)
#define EACH_FEW  _Pragma("GCC unroll 4") for (int at = 0; at < G * PARTS; at += V)
#define EACH_TURN _Pragma("GCC unroll 1") for (int at = 0; at < G * PARTS; at += V)  // unrolled code is slower for Q6_K
#define EACH_VEC  _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)
#define GROUP     ((at + v) / PARTS)
#define PART      ((at + v) % PARTS)
#define SUM(r)    (sums + (size_t) (r) * SUMS_STEP + LANES * GROUP + VL * PART)

// Sums of few rows wait in registers while a block is multiplied, those of more in memory.
#define HELD_SUMS (G * PARTS * R <= HELD)
#define SUM_OF(acc, r) (HELD_SUMS ? (acc)[at + v][r] : vf_load(SUM(r)))
#define SUM_IS(acc, r, value)               \
    do {                                    \
        const vf sum_ = value;              \
        if (HELD_SUMS) {                    \
            (acc)[at + v][r] = sum_;        \
        } else {                            \
            vf_store(SUM(r), sum_);         \
        }                                   \
    } while (0)
#define SUMS_COME(acc) \
    if (HELD_SUMS) {   \
        EACH_FEW EACH_VEC EACH_ROW acc[at + v][r] = vf_load(SUM(r)); \
    }
#define SUMS_STAY(acc) \
    if (HELD_SUMS) {   \
        EACH_FEW EACH_VEC EACH_ROW vf_store(SUM(r), acc[at + v][r]); \
    }

// Keeps the rows in order: GCC 12 hoists common values and spills them where registers are short.
#define ROW_BY_ROW __asm__ volatile("" ::: "memory")

// Levels that widen sums to 32 bits by a product anyway do it with the scale.
#ifdef SCALED_DOTS
#define WHOLE_SCALES 1
#else
#define WHOLE_SCALES 0
#define SCALED_DOTS(whole, w, scales, x, stride) (void) (whole);
#endif

// s[v][r] += sums of quads of w (an expression of t and v, 0 .. most) times those of row r, n quads
#ifndef DOTS_OF
#define DOTS_OF(s, w, most, n, x, stride)                        \
    _Pragma("GCC unroll 8") for (int t = 0; t < (n); t++) {      \
        vb quads[2];                                             \
        EACH_VEC quads[v] = w;                                   \
        EACH_ROW {                                               \
            const vx a = vx_quad((x) + r * (stride) + 4 * t);    \
            EACH_VEC (s)[v][r] = vi_dot((s)[v][r], quads[v], a); \
        }                                                        \
    }
#endif

// `size` bytes of records `ahead` of where they are multiplied, into the first-level cache. How far ahead, or not at all (0), is measured (prefetch_tune.c).
INLINE void prefetch_matrix(const char * w, size_t ahead, size_t size) {
    for (size_t k = 0; k < size && ahead > 0; k += 64) {
        prefetch(w + ahead + k);
    }
}

// ---- blocks of 32

// Sums of whole numbers of a block, times its scales
#define ADD_BLOCK(acc, s, scale)                                                                     \
    vf d[2];                                                                                         \
    EACH_VEC d[v] = scale;                                                                           \
    EACH_ROW {                                                                                       \
        ROW_BY_ROW;                                                                                  \
        const vf dx = vf_set(x->d[row + r]);                                                         \
        EACH_VEC SUM_IS(acc, r, vf_fma(vf_int((s)[v][r]), vf_mul(d[v], dx), SUM_OF(acc, r)));        \
    }

static const uint8_t FP4[16] = { 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0 };                     // twice a value of E2M1, + 12
static const uint8_t IQ4[16] = { 1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241 };  // + 128

INLINE vb nibbles(const uint8_t * p, int high) { return high ? vb_high(vb_load(p)) : vb_low(vb_load(p)); }

#define ARGUMENTS const char * w, int64_t blocks, const char * tile, int row, float * sums, size_t ahead

// s[v][r] += sums of 8 quads of w + 128 (an expression of t and v) times those of row r
#define BIASED_DOTS(s, w, x, stride)                               \
    _Pragma("GCC unroll 8") for (int t = 0; t < 8; t++) {          \
        vbias q[2];                                                \
        EACH_VEC q[v] = bias_of(w);                                \
        EACH_ROW {                                                 \
            const vx a = vx_quad((x) + r * (stride) + 4 * t);      \
            EACH_VEC (s)[v][r] = bias_dot((s)[v][r], q[v], a);     \
        }                                                          \
    }

INLINE void q8_0_rows(ARGUMENTS, const int R, const int G, const int N) {
    const size_t   size = sizeof(rec_q8_0);
    const act_32 * x    = (const act_32 *) tile;
    vf             acc[4][ROWS];
    SUMS_COME(acc)
    for (int64_t b = 0; b < blocks; b++, w += G * size, x++) {
        prefetch_matrix(w, ahead, G * size);
        EACH_FEW {
            vi s[2][ROWS];
            EACH_VEC EACH_ROW s[v][r] = bias_start(x->by_128 + row + r);
            _Pragma("GCC unroll 8") for (int t = 0; t < 8; t++) {
                vbias q[2];
                EACH_VEC q[v] = bias_load(((const rec_q8_0 *) w)[GROUP].q[t] + 4 * VL * PART, GROUP);
                EACH_ROW {
                    const vx a = vx_quad(x->q[row + r] + 4 * t);
                    EACH_VEC s[v][r] = bias_dot(s[v][r], q[v], a);
                }
            }
            ADD_BLOCK(acc, s, vf_half(((const rec_q8_0 *) w)[GROUP].d + VL * PART))
        }
    }
    SUMS_STAY(acc)
}

// Types of 4 and 5 bits in blocks of 32: d * (q - bias), or d * q + m. The sum starts at what the bias adds too much.
enum { Q4_0, Q4_1, Q5_0, Q5_1, MXFP4 };
#define FIVE_BITS(kind) ((kind) == Q5_0 || (kind) == Q5_1)
#define HAS_MIN(kind)   ((kind) == Q4_1 || (kind) == Q5_1)
#define MOST_OF(kind)   (FIVE_BITS(kind) ? 31 : (kind) == MXFP4 ? 24 : 15)

INLINE size_t size_of_32(const int kind) {
    return kind == Q4_0 ? sizeof(rec_q4_0) : kind == Q4_1 ? sizeof(rec_q4_1) : kind == Q5_0 ? sizeof(rec_q5_0) : kind == Q5_1 ? sizeof(rec_q5_1) : sizeof(rec_mxfp4);
}

// Quad t of LANES outputs: q is the first of every record, the fifth bits follow.
INLINE vb quads_of_32(const char * record, int t, int p, const int kind) {
    const uint8_t * q   = (const uint8_t *) record;
    const vb        low = nibbles(q + t % 4 * (4 * LANES) + 4 * VL * p, t / 4);
    return kind == MXFP4 ? vb_look(FP4, low) : FIVE_BITS(kind) ? vb_fifth(low, vb_load(q + 16 * LANES + 4 * VL * p), t) : low;
}

INLINE vf scale_of_32(const char * record, int p, const int kind) {
    const uint8_t * d = (const uint8_t *) record + (FIVE_BITS(kind) ? 20 : 16) * LANES;
    return kind == MXFP4 ? vf_e8m0(d + VL * p) : vf_half((const uint16_t *) d + VL * p);
}

INLINE vf min_of_32(const char * record, int p, const int kind) {
    return vf_half((const uint16_t *) (record + (FIVE_BITS(kind) ? 20 : 16) * LANES) + LANES + VL * p);
}

INLINE int32_t start_of_32(int32_t by_8, const int kind) {
    return HAS_MIN(kind) ? 0 : kind == Q5_0 ? 2 * by_8 : kind == MXFP4 ? by_8 / 2 * 3 : by_8;
}

INLINE void small_rows(ARGUMENTS, const int R, const int G, const int N, const int kind) {
    const size_t   size = size_of_32(kind);
    const act_32 * x    = (const act_32 *) tile;
    vf             acc[4][ROWS];
    SUMS_COME(acc)
    for (int64_t b = 0; b < blocks; b++, w += G * size, x++) {
        prefetch_matrix(w, ahead, G * size);
        EACH_FEW {
            vi s[2][ROWS];
            EACH_VEC EACH_ROW s[v][r] = vi_set(start_of_32(x->by_8[row + r], kind));
            DOTS_OF(s, quads_of_32(w + GROUP * size, t, PART, kind), MOST_OF(kind), 8, x->q[row], 32)
            if (HAS_MIN(kind)) {
                vf m[2];
                EACH_VEC m[v] = min_of_32(w + GROUP * size, PART, kind);
                EACH_ROW {
                    const vf sum = vf_set((float) (x->by_8[row + r] / -8) * x->d[row + r]);
                    EACH_VEC SUM_IS(acc, r, vf_fma(m[v], sum, SUM_OF(acc, r)));
                }
            }
            ADD_BLOCK(acc, s, scale_of_32(w + GROUP * size, PART, kind))
        }
    }
    SUMS_STAY(acc)
}

// IQ4_NL: d times one of sixteen values, which are signed bytes
INLINE void iq4_nl_rows(ARGUMENTS, const int R, const int G, const int N) {
    const size_t   size = sizeof(rec_iq4_nl);
    const act_32 * x    = (const act_32 *) tile;
    vf             acc[4][ROWS];
    SUMS_COME(acc)
    for (int64_t b = 0; b < blocks; b++, w += G * size, x++) {
        prefetch_matrix(w, ahead, G * size);
        EACH_FEW {
            vi s[2][ROWS];
            EACH_VEC EACH_ROW s[v][r] = bias_start(x->by_128 + row + r);
            BIASED_DOTS(s, vb_look(IQ4, nibbles(((const rec_iq4_nl *) w)[GROUP].q[t % 4] + 4 * VL * PART, t / 4)), x->q[row], 32)
            ADD_BLOCK(acc, s, vf_half(((const rec_iq4_nl *) w)[GROUP].d + VL * PART))
        }
    }
    SUMS_STAY(acc)
}

// ---- words of VL outputs, of records that are turned blocks

INLINE vw vw_load(const char * record, int word, int p) {
    vw x;
    memcpy(&x, record + (word * LANES + VL * p) * 4, sizeof(x));
    return x;
}

INLINE vb vb_of(vw x) {
    vb out;
    memcpy(&out, &x, sizeof(out));
    return out;
}

INLINE vw vw_of(vb x) {
    vw out;
    memcpy(&out, &x, sizeof(out));
    return out;
}

INLINE vf vf_words(vw x) {  // below 2^31
    vi whole;
    memcpy(&whole, &x, sizeof(whole));
    return vf_int(whole);
}

// NVFP4: E2M1 times a scale of E4M3, without a sign, of 16 inputs; 0x7f is 0, too. As F16 such a scale is 2^-8 of itself, and values are doubled.
INLINE vf nvfp4_scale(const char * record, int j, int p) {
    const vw x = (vw_load(record, 0, p) >> (8 * j)) & 255;
    return vf_mul(vf_half_words(((x & 127) << 7) & ~(vw) (x == 127)), vf_set(128.0f));
}

INLINE void nvfp4_rows(ARGUMENTS, const int R, const int G, const int N) {
    const size_t   size = 36 * LANES;
    const act_32 * x    = (const act_32 *) tile;
    vf             acc[4][ROWS];
    SUMS_COME(acc)
    for (int64_t b = 0; b < blocks; b++, w += G * size) {
        prefetch_matrix(w, ahead, G * size);
        for (int half = 0; half < 2; half++, x++) {
            EACH_FEW {
                _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) {
                    vi s[2][ROWS];
                    EACH_ROW {
                        const int32_t first = 12 * x->first[row + r];
                        EACH_VEC s[v][r]    = vi_set(j == 0 ? -first : first + x->by_8[row + r] / 2 * 3);
                    }
                    const uint8_t * q = (const uint8_t *) w + 4 * LANES * (1 + 4 * half + 2 * j);
                    DOTS_OF(s, vb_look(FP4, nibbles(q + GROUP * size + 4 * LANES * (t % 2) + 4 * VL * PART, t / 2)), 24, 4, x->q[row] + 16 * j, 32)
                    ADD_BLOCK(acc, s, nvfp4_scale(w + GROUP * size, 2 * half + j, PART))
                }
            }
        }
    }
    SUMS_STAY(acc)
}

// ---- grids: d * (1 + 2 scale) * values of a table, with signs (IQ2, IQ3) or an eighth more or less (IQ1). Scales are of 16 or 32 inputs.

#define GRID_NAME(name, size)  name,
#define GRID_BYTES(name, size) size,
enum { EACH_GRID(GRID_NAME) };
#define IS_IQ1(kind) ((kind) <= IQ1_M)
#define IS_IQ3(kind) ((kind) >= IQ3_XXS)
#define OF_16(kind)  ((kind) == IQ1_M || (kind) == IQ2_XS || (kind) == IQ2_S)

INLINE size_t size_of_grid(const int kind) {
    static const uint8_t sizes[] = { EACH_GRID(GRID_BYTES) };
    return sizes[kind] * (size_t) LANES;
}

INLINE const uint32_t * grid_of(const int kind) {
    return IS_IQ1(kind) ? pgs_grids.iq1 : kind == IQ2_XXS ? pgs_grids.iq2_xxs : kind == IQ2_XS ? pgs_grids.iq2_xs : kind == IQ2_S ? pgs_grids.iq2_s
         : kind == IQ3_XXS ? pgs_grids.iq3_xxs : pgs_grids.iq3_s;
}

typedef struct grid_part {  // of 32 inputs
    vw index[2], high;  // low bytes of indices (IQ2_XS: halves with the whole index), and bits that go with them
    vw signs, scales;   // a bit of each input, IQ2_XS with its bytes 1 and 2 exchanged; two scales of four bits
} grid_part;

// Four bytes of seven bits, the eighth of which is their parity.
INLINE vw with_parity(vw x) {
    vw all = x ^ (x << 4);
    all ^= all << 2;
    all ^= all << 1;
    return x | (all & 0x80808080u);
}

// Words of four times seven bits and a scale.
INLINE vw signs_of_28(vw x) {
    return with_parity((x & 0x7f) | ((x << 1) & 0x7f00) | ((x << 2) & 0x7f0000) | ((x << 3) & 0x7f000000));
}

INLINE grid_part grid_part_of(const char * w, int i, int p, const int kind) {
    grid_part      g;
    const uint32_t byte = 8 * (i % 4), half = 16 * (i % 2);
#define WORD(n) vw_load(w, n, p)
    if (kind == IQ2_XXS || kind == IQ2_XS || IS_IQ3(kind)) {
        g.index[0] = WORD(2 * i);
        g.index[1] = kind == IQ2_XXS ? g.index[0] : WORD(2 * i + 1);
    } else {
        g.index[0] = g.index[1] = WORD(i);
    }
    g.high = g.signs = g.index[0];  // where there are none
    switch (kind) {
        case IQ1_S:
            g.high   = WORD(8 + i / 2) >> half;
            g.scales = (g.high >> 12) & 7;
            break;
        case IQ1_M:
            g.high   = WORD(8 + i / 2) >> half;
            g.scales = (WORD(12 + i / 4) >> (16 * (i / 2 % 2) + 6 * (i % 2)));
            g.scales = (g.scales & 7) | ((g.scales << 1) & 0x70);
            break;
        case IQ2_XXS:
            g.signs  = WORD(2 * i + 1);
            g.scales = g.signs >> 28;
            g.signs  = signs_of_28(g.signs);
            break;
        case IQ2_XS:
            g.signs  = with_parity(((g.index[0] >> 9) & 0x007f007f) | ((g.index[1] >> 1) & 0x7f007f00));
            g.scales = WORD(16 + i / 4) >> byte;
            break;
        case IQ2_S:
            g.signs  = WORD(8 + i);
            g.high   = WORD(16 + i / 4) >> byte;
            g.scales = WORD(18 + i / 4) >> byte;
            break;
        case IQ3_XXS:
            g.signs  = WORD(16 + i);
            g.scales = g.signs >> 28;
            g.signs  = signs_of_28(g.signs);
            break;
        default:
            g.signs  = WORD(18 + i);
            g.high   = WORD(16 + i / 4) >> byte;
            g.scales = WORD(26) >> (4 * i);
    }
#undef WORD
    return g;
}

// Eight inputs of 32, + 128, as two quads.
INLINE void grid_quads(const grid_part * g, int l, const int kind, vb * quads) {
    static const uint8_t lower[2][16] = {  // by the lower two bits: 8 g - 1 of IQ1, and the values of IQ2
        { 119, 127, 135, 0, 119, 127, 135, 0, 119, 127, 135 }, { 136, 153, 171, 0, 136, 153, 171, 0, 136, 153, 171 } };
    static const uint8_t upper[2][16] = { { 119, 119, 119, 0, 127, 127, 127, 0, 135, 135, 135 }, { 136, 136, 136, 0, 153, 153, 153, 0, 171, 171, 171 } };
    if (IS_IQ3(kind)) {
        _Pragma("GCC unroll 2") for (int t = 0; t < 2; t++) {
            const vw low = (g->index[l / 2] >> (8 * (l % 2 * 2 + t))) & 255;
            quads[t] = vb_grid(grid_of(kind), kind == IQ3_S ? low | (((g->high >> (2 * l + t)) & 1) << 8) : low);
        }
    } else {
        vw index = kind == IQ2_XS ? (g->index[l / 2] >> (16 * (l % 2))) & 511 : (g->index[0] >> (8 * l)) & 255;
        if (IS_IQ1(kind) || kind == IQ2_S) {
            const int bits = kind == IQ1_S ? 3 : kind == IQ1_M ? 4 : 2;
            index |= ((g->high >> (bits * l)) & (kind == IQ2_S ? 3 : 7)) << 8;
        }
        const vb threes = vb_grid(grid_of(kind), index);
        quads[0] = vb_look(lower[!IS_IQ1(kind)], threes);
        quads[1] = vb_look(upper[!IS_IQ1(kind)], threes);
    }
    if (IS_IQ1(kind)) {
        const vw more = (((g->high >> (kind == IQ1_S ? 15 : 4 * l + 3)) & 1) - 1) & 0x02020202;
        quads[0] = vb_of(vw_of(quads[0]) + more);
        quads[1] = vb_of(vw_of(quads[1]) + more);
    } else {
        const int at = kind == IQ2_XS ? l / 2 + l % 2 * 2 : l;
        quads[0] = vb_signed(quads[0], g->signs, at, 0);
        quads[1] = vb_signed(quads[1], g->signs, at, 1);
    }
}

INLINE vf grid_scale(const char * w, int p, const int kind) {
    if (kind == IQ1_M) {  // the upper nibbles of four scales
        const vw a = vw_load(w, 12, p), b = vw_load(w, 13, p);
        return vf_mul(vf_half_words(((a >> 12) & 15) | ((a >> 24) & 0xf0) | ((b >> 4) & 0xf00) | ((b >> 16) & 0xf000)), vf_set(0.125f));
    }
    const uint16_t * d = (const uint16_t *) (w + size_of_grid(kind)) - LANES + VL * p;
    return vf_mul(vf_half(d), vf_set(kind == IQ3_S ? 1.0f : kind == IQ3_XXS ? 0.25f : 0.125f));
}

// A record with its values as bytes, + 128: a row more costs as much as with Q8_0, whatever the grid.
typedef struct rec_grid {
    uint8_t q[64][4 * LANES];
    float   scale[16][LANES], d[LANES];  // of 16 or 32 inputs each, and of all
} rec_grid;

INLINE void grid_unpack(const char * w, rec_grid * to, const int kind) {
#pragma GCC unroll 1
    for (int i = 0; i < 8; i++) {
        EACH_PART {
            const grid_part g = grid_part_of(w, i, p, kind);
            _Pragma("GCC unroll 4") for (int l = 0; l < 4; l++) {
                vb quads[2];
                grid_quads(&g, l, kind, quads);
                memcpy(to->q[8 * i + 2 * l] + 4 * VL * p, &quads[0], sizeof(vb));
                memcpy(to->q[8 * i + 2 * l + 1] + 4 * VL * p, &quads[1], sizeof(vb));
            }
            vf_store(to->scale[OF_16(kind) ? 2 * i : i] + VL * p, vf_words((g.scales & 15) * 2 + 1));
            if (OF_16(kind)) {
                vf_store(to->scale[2 * i + 1] + VL * p, vf_words(((g.scales >> 4) & 15) * 2 + 1));
            }
        }
    }
    EACH_PART vf_store(to->d + VL * p, grid_scale(w, p, kind));
}

INLINE void grid_rows(ARGUMENTS, const int R, const int G, const int N, const int each) {
    const act_256 * x = (const act_256 *) tile;
    (void) ahead;
    for (int64_t b = 0; b < blocks; b++, w += G * sizeof(rec_grid), x++) {
        EACH_TURN {
#define RECORD (((const rec_grid *) w) + GROUP)
            vf sum[2][ROWS];
            EACH_VEC EACH_ROW sum[v][r] = vf_zero();
#pragma GCC unroll 1
            for (int j = 0; j < 256 / each; j++) {
                vi s[2][ROWS];
                EACH_ROW {
                    const int32_t by_128 = each == 16 ? 4 * x->by_32[row + r][j] : -128 * x->sum[row + r][j];
                    EACH_VEC s[v][r]     = bias_start(&by_128);
                }
                _Pragma("GCC unroll 8") for (int t = 0; t < each / 4; t++) {
                    vbias q[2];
                    EACH_VEC q[v] = bias_load(RECORD->q[j * (each / 4) + t] + 4 * VL * PART, 0);
                    EACH_ROW {
                        const vx a = vx_quad(x->q[row + r] + each * j + 4 * t);
                        EACH_VEC s[v][r] = bias_dot(s[v][r], q[v], a);
                    }
                }
                EACH_VEC {
                    const vf scale = vf_load(RECORD->scale[j] + VL * PART);
                    EACH_ROW sum[v][r] = vf_fma(vf_int(s[v][r]), scale, sum[v][r]);
                }
            }
            EACH_VEC {
                const vf d = vf_load(RECORD->d + VL * PART);
                EACH_ROW vf_store(SUM(r), vf_fma(sum[v][r], vf_mul(d, vf_set(x->d[row + r])), vf_load(SUM(r))));
            }
#undef RECORD
        }
    }
}

// ---- blocks of 256

INLINE vb q5_k_quads(const rec_q5_k * w, int i, int t, int p, int odd) {
    return vb_fifth(nibbles(w->q[i][t] + 4 * VL * p, odd), vb_load(w->high[t] + 4 * VL * p), 2 * i + odd);
}

// Q4_K and Q5_K: d * scale * q - dmin * min. Sums of Q4_K times scales are whole numbers, below 2^24 in half a block: floats hold them exactly, and levels
// that scale whole numbers (SCALED_DOTS) round the same sum of both halves, once.
INLINE void k_rows(ARGUMENTS, const int R, const int G, const int N, const int five) {
    const size_t    size = five ? sizeof(rec_q5_k) : sizeof(rec_q4_k);
    const act_256 * x    = (const act_256 *) tile;
    for (int64_t b = 0; b < blocks; b++, w += G * size, x++) {
        EACH_TURN {
            vf sum[2][ROWS], half[2][ROWS];
            vi whole[2][ROWS];
            EACH_VEC EACH_ROW {
                sum[v][r] = half[v][r] = vf_zero();
                whole[v][r]            = vi_set(0);
            }
#define HEAD ((const head_k *) (w + GROUP * size))
#pragma GCC unroll 1
            for (int i = 0; i < 4; i++) {
                if (at == 0) {
                    prefetch_matrix(w + (size_t) i * (G * size / 4), ahead, G * size / 4);
                }
                if (i == 2 && !five && !WHOLE_SCALES) {
                    EACH_VEC EACH_ROW {
                        half[v][r] = sum[v][r];
                        sum[v][r]  = vf_zero();
                    }
                }
                _Pragma("GCC unroll 2") for (int odd = 0; odd < 2; odd++) {
                    const int j = 2 * i + odd;
                    if (!five && WHOLE_SCALES) {
                        SCALED_DOTS(whole, nibbles(((const rec_q4_k *) w)[GROUP].q[i][t] + 4 * VL * PART, odd), HEAD->scale[j] + VL * PART,
                                    x->q[row] + 32 * j, 256)
                        continue;
                    }
                    vi s[2][ROWS];
                    EACH_VEC EACH_ROW s[v][r] = vi_set(0);
                    if (five) {
                        DOTS_OF(s, q5_k_quads((const rec_q5_k *) w + GROUP, i, t, PART, odd), 31, 8, x->q[row] + 32 * j, 256)
                    } else {
                        DOTS_OF(s, nibbles(((const rec_q4_k *) w)[GROUP].q[i][t] + 4 * VL * PART, odd), 15, 8, x->q[row] + 32 * j, 256)
                    }
                    EACH_VEC {
                        const vf scale = vf_u8(HEAD->scale[j] + VL * PART);
                        EACH_ROW sum[v][r] = vf_fma(vf_int(s[v][r]), scale, sum[v][r]);
                    }
                }
            }
            EACH_VEC {
                const vf d = vf_half(HEAD->d + VL * PART), dmin = vf_half(HEAD->dmin + VL * PART);
                vi       z[ROWS];
                EACH_ROW z[r] = vi_set(0);
                _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
                    EACH_ROW z[r] = vi_mins(z[r], HEAD->min[i] + 2 * VL * PART, x->sum[row + r] + 2 * i);
                }
                EACH_ROW {
                    const vf dx  = vf_set(x->d[row + r]);
                    const vf all = five ? sum[v][r] : WHOLE_SCALES ? vf_int(whole[v][r]) : vf_add(half[v][r], sum[v][r]);
                    vf_store(SUM(r), vf_fnma(vf_int(z[r]), vf_mul(dmin, dx), vf_fma(all, vf_mul(d, dx), vf_load(SUM(r)))));
                }
            }
#undef HEAD
        }
    }
}

// Q3_K and Q6_K: d * scale * (q - bias) in 16 sub-blocks. Both records begin with the scales and d.
INLINE vb signed_k_quads(const char * record, int i, int u, int t, int p, const int six) {
    const int at = 4 * VL * p, j = 4 * i + u;
    if (six) {
        const rec_q6_k * w = (const rec_q6_k *) record;
        return vb_join(nibbles(w->q[2 * i + u / 2][t] + at, u % 2), vb_load(w->high[i][t] + at), 2 * u, 2);
    }
    const rec_q3_k * w = (const rec_q3_k *) record;
    return vb_or(vb_place(vb_load(w->q[i][t] + at), 2 * u, 2, 0), vb_third(vb_load(w->high[i / 2][t] + at), j % 8));
}

INLINE void signed_k_rows(ARGUMENTS, const int R, const int G, const int N, const int six) {
    const size_t    size = six ? sizeof(rec_q6_k) : sizeof(rec_q3_k);
    const act_256 * x    = (const act_256 *) tile;
    for (int64_t b = 0; b < blocks; b++, w += G * size, x++) {
        EACH_TURN {
#define RECORD (w + GROUP * size)
            vf sum[2][ROWS];
            EACH_VEC EACH_ROW sum[v][r] = vf_zero();
#pragma GCC unroll 1
            for (int i = 0; i < 4; i++) {
                if (at == 0) {
                    prefetch_matrix(w + (size_t) i * (G * size / 4), ahead, G * size / 4);
                }
                _Pragma("GCC unroll 4") for (int u = 0; u < 4; u++) {
                    const int j = 4 * i + u;
                    vi        s[2][ROWS];
                    EACH_VEC EACH_ROW s[v][r] = vi_set(six ? x->by_32[row + r][j] : x->by_32[row + r][j] / 8);
                    DOTS_OF(s, signed_k_quads(RECORD, i, u, t, PART, six), six ? 63 : 7, 4, x->q[row] + 16 * j, 256)
                    EACH_VEC {
                        const vf scale = vf_i8(((const rec_q6_k *) RECORD)->scale[j] + VL * PART);
                        EACH_ROW sum[v][r] = vf_fma(vf_int(s[v][r]), scale, sum[v][r]);
                    }
                }
            }
            EACH_VEC {
                const vf d = vf_half(((const rec_q6_k *) RECORD)->d + VL * PART);
                EACH_ROW vf_store(SUM(r), vf_fma(sum[v][r], vf_mul(d, vf_set(x->d[row + r])), vf_load(SUM(r))));
            }
#undef RECORD
        }
    }
}

// Q2_K: d * scale * q - dmin * min. Sums times scales and mins are whole numbers below 2^24, which floats hold exactly.
INLINE void q2_k_rows(ARGUMENTS, const int R, const int G, const int N) {
    const size_t    size = sizeof(rec_q2_k);
    const act_256 * x    = (const act_256 *) tile;
    for (int64_t b = 0; b < blocks; b++, w += G * size, x++) {
        EACH_TURN {
#define RECORD (((const rec_q2_k *) w) + GROUP)
            vf sum[2][ROWS];
            vi z[2][ROWS];
            EACH_VEC EACH_ROW {
                sum[v][r] = vf_zero();
                z[v][r]   = vi_set(0);
            }
#pragma GCC unroll 1
            for (int i = 0; i < 4; i++) {
                if (at == 0) {
                    prefetch_matrix(w + (size_t) i * (G * size / 4), ahead, G * size / 4);
                }
                vw both[2][4];
                EACH_VEC {
                    _Pragma("GCC unroll 4") for (int u = 0; u < 4; u++) both[v][u] = vw_bytes(RECORD->scale[4 * i + u] + VL * PART);
                    EACH_ROW {
                        z[v][r] = vi_pairs(z[v][r], (both[v][0] >> 4) | (both[v][1] >> 4 << 16), x->of_16[row + r] + 4 * i);
                        z[v][r] = vi_pairs(z[v][r], (both[v][2] >> 4) | (both[v][3] >> 4 << 16), x->of_16[row + r] + 4 * i + 2);
                    }
                }
                _Pragma("GCC unroll 4") for (int u = 0; u < 4; u++) {
                    vi s[2][ROWS];
                    EACH_VEC EACH_ROW s[v][r] = vi_set(0);
                    DOTS_OF(s, vb_place(vb_load(RECORD->q[i][t] + 4 * VL * PART), 2 * u, 2, 0), 3, 4, x->q[row] + 64 * i + 16 * u, 256)
                    EACH_VEC {
                        const vf scale = vf_words(both[v][u] & 15);
                        EACH_ROW sum[v][r] = vf_fma(vf_int(s[v][r]), scale, sum[v][r]);
                    }
                }
            }
            EACH_VEC {
                const vf d = vf_half(RECORD->d + VL * PART), dmin = vf_half(RECORD->dmin + VL * PART);
                EACH_ROW {
                    const vf dx = vf_set(x->d[row + r]);
                    vf_store(SUM(r), vf_fnma(vf_int(z[v][r]), vf_mul(dmin, dx), vf_fma(sum[v][r], vf_mul(d, dx), vf_load(SUM(r)))));
                }
            }
#undef RECORD
        }
    }
}

// IQ4_XS: d * scale times one of sixteen values, which are signed bytes
INLINE void iq4_xs_rows(ARGUMENTS, const int R, const int G, const int N) {
    const size_t    size = sizeof(rec_iq4_xs);
    const act_256 * x    = (const act_256 *) tile;
    for (int64_t b = 0; b < blocks; b++, w += G * size, x++) {
        EACH_TURN {
#define RECORD (((const rec_iq4_xs *) w) + GROUP)
            vf sum[2][ROWS];
            EACH_VEC EACH_ROW sum[v][r] = vf_zero();
#pragma GCC unroll 1
            for (int j = 0; j < 8; j++) {
                if (at == 0) {
                    prefetch_matrix(w + (size_t) j * (G * size / 8), ahead, G * size / 8);
                }
                vi s[2][ROWS];
                EACH_ROW {
                    const int32_t by_128 = -128 * x->sum[row + r][j];
                    EACH_VEC s[v][r] = bias_start(&by_128);
                }
                BIASED_DOTS(s, vb_look(IQ4, nibbles(RECORD->q[j][t % 4] + 4 * VL * PART, t / 4)), x->q[row] + 32 * j, 256)
                EACH_VEC {
                    const vf scale = vf_i8(RECORD->scale[j] + VL * PART);
                    EACH_ROW sum[v][r] = vf_fma(vf_int(s[v][r]), scale, sum[v][r]);
                }
            }
            EACH_VEC {
                const vf d = vf_half(RECORD->d + VL * PART);
                EACH_ROW vf_store(SUM(r), vf_fma(sum[v][r], vf_mul(d, vf_set(x->d[row + r])), vf_load(SUM(r))));
            }
#undef RECORD
        }
    }
}

// ---- weights that are not quantised, times activations that are not either

enum { F16, BF16, F32 };

INLINE vf float_weights(const char * w, int i, int p, const int type) {
    return type == F32  ? vf_load(((const rec_f32 *) w)->w[i] + VL * p)
           : type == F16 ? vf_half(((const rec_f16 *) w)->w[i] + VL * p)
                         : vf_bf16(((const rec_f16 *) w)->w[i] + VL * p);
}

// Two sums per output and block, of even and odd inputs: one would wait for itself.
INLINE void float_rows(ARGUMENTS, const int R, const int G, const int N, const int type) {
    const size_t    size = type == F32 ? sizeof(rec_f32) : sizeof(rec_f16);
    const act_f32 * x    = (const act_f32 *) tile;
    for (int64_t b = 0; b < blocks; b++, w += G * size, x++) {
        prefetch_matrix(w, ahead, G * size);
        EACH_FEW {
            vf even[2][ROWS], odd[2][ROWS];
            EACH_VEC EACH_ROW even[v][r] = odd[v][r] = vf_zero();
#pragma GCC unroll 4
            for (int i = 0; i < 32; i += 2) {
                vf a[2], c[2];
                EACH_VEC {
                    a[v] = float_weights(w + GROUP * size, i, PART, type);
                    c[v] = float_weights(w + GROUP * size, i + 1, PART, type);
                }
                EACH_ROW {
                    const vf first = vf_set(x->x[row + r][i]), second = vf_set(x->x[row + r][i + 1]);
                    EACH_VEC even[v][r] = vf_fma(a[v], first, even[v][r]);
                    EACH_VEC odd[v][r]  = vf_fma(c[v], second, odd[v][r]);
                }
            }
            EACH_VEC EACH_ROW vf_store(SUM(r), vf_add(vf_load(SUM(r)), vf_add(even[v][r], odd[v][r])));
        }
    }
}

// ---- one function per number of rows, for a pair and for a group alone; not inlined, because compilers keep the sums of one in registers and spill those
// of many

#define ONE(name, R, G, N, call, ...)                                                  \
    static __attribute__((noinline)) void name##_##R##_##G(ARGUMENTS) {                \
        call(w, blocks, tile, row, sums, ahead, R, G, N, ##__VA_ARGS__);               \
    }
#define BOTH(name, R, N, ...)         ONE(name, R, 1, N, __VA_ARGS__) ONE(name, R, 2, N, __VA_ARGS__)
#define ROWS_4(name, few, many, ...)  BOTH(name, 1, few, __VA_ARGS__) BOTH(name, 2, few, __VA_ARGS__) BOTH(name, 3, few, __VA_ARGS__) BOTH(name, 4, few, __VA_ARGS__)
#define LAST_4(name, many, ...)       BOTH(name, 5, many, __VA_ARGS__) BOTH(name, 6, many, __VA_ARGS__) BOTH(name, 7, many, __VA_ARGS__) BOTH(name, 8, many, __VA_ARGS__)
#define ROWS_8(name, few, many, ...)  ROWS_4(name, few, many, __VA_ARGS__) LAST_4(name, many, __VA_ARGS__)
#define LIST_4(name, G) name##_1_##G, name##_2_##G, name##_3_##G, name##_4_##G
#define LIST_8(name, G) LIST_4(name, G), name##_5_##G, name##_6_##G, name##_7_##G, name##_8_##G

#define TAKES const char * records, int groups, int64_t blocks, const char * tiles, size_t step, int rows, float * sums, size_t ahead

// `shape`, of each level: rows at once at most, vectors of outputs at once for up to four rows, and for more.
#define PRODUCT(type, of, record, shape, ...) PRODUCT_OF(type, shape, __VA_ARGS__)
#define PRODUCT_OF(name, ...)                 PRODUCT_AS(name, __VA_ARGS__)
#define PRODUCT_AS(name, most, few, many, ...)                                                                                       \
    ROWS_##most(name, few, many, __VA_ARGS__)                                                                                        \
    static void product_##name(TAKES) {                                                                                              \
        typedef void (*one)(ARGUMENTS);                                                                                              \
        static const one of_rows[2][most] = { { LIST_##most(name, 1) }, { LIST_##most(name, 2) } };                                  \
        for (int row = 0; row < rows; row += most) {                                                                                 \
            const int now = rows - row < most ? rows - row : most;                                                                   \
            of_rows[groups - 1][now - 1](records, blocks, tiles + row / TILE * step, row % TILE, sums + SUMS_STEP * row,             \
                                      row == 0 ? ahead : 0); /* once for all rows */                                                 \
        }                                                                                                                            \
    }

// Of grids: each block is unpacked for all rows.
PRODUCT(GRID_16, , , GRID_SHAPE, grid_rows, 16)
PRODUCT(GRID_32, , , GRID_SHAPE, grid_rows, 32)

static void grid_product(TAKES, size_t size, void (*unpack)(const char *, rec_grid *), bool of_16) {
    _Alignas(64) rec_grid room[2];
    for (int64_t b = 0; b < blocks; b++, records += (size_t) groups * size, tiles += sizeof(act_256)) {
        prefetch_matrix(records, ahead, (size_t) groups * size);
        for (int g = 0; g < groups; g++) {
            unpack(records + (size_t) g * size, &room[g]);
        }
        (of_16 ? product_GRID_16 : product_GRID_32)((const char *) room, groups, 1, tiles, step, rows, sums, 0);
    }
}

#define GRID(name, size)                                                                                                             \
    static __attribute__((noinline)) void unpack_##name(const char * from, rec_grid * to) { grid_unpack(from, to, name); }            \
    static void product_##name(TAKES) {                                                                                              \
        grid_product(records, groups, blocks, tiles, step, rows, sums, ahead, (size) * LANES, unpack_##name, OF_16(name));                   \
    }

#define OF_32    32, sizeof(act_32), activations_32
#define OF_64    64, 2 * sizeof(act_32), activations_32
#define OF_256   256, sizeof(act_256), activations_256
#define OF_FLOAT 32, sizeof(act_f32), activations_f32

// Type, its blocks and their activations, bytes of a record, shape, function with what it takes besides. The first type of an activation names it.
#define EACH_TYPE(X)                                                     \
    X(Q8_0, OF_32, sizeof(rec_q8_0), BYTES_SHAPE, q8_0_rows)             \
    X(Q4_0, OF_32, sizeof(rec_q4_0), BYTES_SHAPE, small_rows, Q4_0)      \
    X(Q4_1, OF_32, sizeof(rec_q4_1), BYTES_SHAPE, small_rows, Q4_1)      \
    X(Q5_0, OF_32, sizeof(rec_q5_0), BYTES_SHAPE, small_rows, Q5_0)      \
    X(Q5_1, OF_32, sizeof(rec_q5_1), BYTES_SHAPE, small_rows, Q5_1)      \
    X(MXFP4, OF_32, sizeof(rec_mxfp4), BYTES_SHAPE, small_rows, MXFP4)   \
    X(IQ4_NL, OF_32, sizeof(rec_iq4_nl), BYTES_SHAPE, iq4_nl_rows)       \
    X(NVFP4, OF_64, 36 * LANES, BYTES_SHAPE, nvfp4_rows)                 \
    X(Q2_K, OF_256, sizeof(rec_q2_k), Q6_K_SHAPE, q2_k_rows)             \
    X(Q3_K, OF_256, sizeof(rec_q3_k), Q6_K_SHAPE, signed_k_rows, 0)      \
    X(Q4_K, OF_256, sizeof(rec_q4_k), Q4_K_SHAPE, k_rows, 0)             \
    X(Q5_K, OF_256, sizeof(rec_q5_k), Q5_K_SHAPE, k_rows, 1)             \
    X(Q6_K, OF_256, sizeof(rec_q6_k), Q6_K_SHAPE, signed_k_rows, 1)      \
    X(IQ4_XS, OF_256, sizeof(rec_iq4_xs), Q6_K_SHAPE, iq4_xs_rows)       \
    X(F16, OF_FLOAT, sizeof(rec_f16), FLOAT_SHAPE, float_rows, F16)      \
    X(BF16, OF_FLOAT, sizeof(rec_f16), FLOAT_SHAPE, float_rows, BF16)    \
    X(F32, OF_FLOAT, sizeof(rec_f32), FLOAT_SHAPE, float_rows, F32)

EACH_TYPE(PRODUCT)
EACH_GRID(GRID)

#define KERNEL(name, of, record, ...) { GGML_TYPE_##name, record, of, product_##name },
#define GRID_KERNEL(name, size)       KERNEL(name, OF_256, (size) * LANES)
static const pgs_kernel kernels[] = { EACH_TYPE(KERNEL) EACH_GRID(GRID_KERNEL) };

#undef V
#undef GROUP
#undef PART
#undef SUM
#undef ONE
#undef BOTH
