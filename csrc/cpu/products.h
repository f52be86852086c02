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

// `size` bytes of records `ahead` of where they are multiplied, into the first-level cache. How far ahead, or not at all, is measured (prefetch_tune.c).
INLINE void prefetch_matrix(const char * w, size_t size) {
    for (size_t k = 0; k < size; k += 64) {
        prefetch(w + k);
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
        prefetch_matrix(w + ahead, G * size);
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
    return kind == MXFP4 ? vb_fp4(low) : FIVE_BITS(kind) ? vb_fifth(low, vb_load(q + 16 * LANES + 4 * VL * p), t) : low;
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
        prefetch_matrix(w + ahead, G * size);
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
        prefetch_matrix(w + ahead, G * size);
        EACH_FEW {
            vi s[2][ROWS];
            EACH_VEC EACH_ROW s[v][r] = bias_start(x->by_128 + row + r);
            BIASED_DOTS(s, vb_iq4(nibbles(((const rec_iq4_nl *) w)[GROUP].q[t % 4] + 4 * VL * PART, t / 4)), x->q[row], 32)
            ADD_BLOCK(acc, s, vf_half(((const rec_iq4_nl *) w)[GROUP].d + VL * PART))
        }
    }
    SUMS_STAY(acc)
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
                    prefetch_matrix(w + ahead + (size_t) i * (G * size / 4), G * size / 4);
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
                    prefetch_matrix(w + ahead + (size_t) i * (G * size / 4), G * size / 4);
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

// Q2_K: d * scale * q - dmin * min; sums of products with mins are whole numbers below 2^24, which floats hold exactly
INLINE void q2_k_rows(ARGUMENTS, const int R, const int G, const int N) {
    const size_t    size = sizeof(rec_q2_k);
    const act_256 * x    = (const act_256 *) tile;
    for (int64_t b = 0; b < blocks; b++, w += G * size, x++) {
        EACH_TURN {
#define RECORD (((const rec_q2_k *) w) + GROUP)
            vf sum[2][ROWS], mins[2][ROWS];
            EACH_VEC EACH_ROW sum[v][r] = mins[v][r] = vf_zero();
#pragma GCC unroll 1
            for (int i = 0; i < 4; i++) {
                if (at == 0) {
                    prefetch_matrix(w + ahead + (size_t) i * (G * size / 4), G * size / 4);
                }
                _Pragma("GCC unroll 4") for (int u = 0; u < 4; u++) {
                    const int j = 4 * i + u;
                    vi        s[2][ROWS];
                    EACH_VEC EACH_ROW s[v][r] = vi_set(0);
                    DOTS_OF(s, vb_place(vb_load(RECORD->q[i][t] + 4 * VL * PART), 2 * u, 2, 0), 3, 4, x->q[row] + 16 * j, 256)
                    EACH_VEC {
                        const vf scale = vf_u8(RECORD->scale[j] + VL * PART), min = vf_u8(RECORD->min[j] + VL * PART);
                        EACH_ROW sum[v][r]  = vf_fma(vf_int(s[v][r]), scale, sum[v][r]);
                        EACH_ROW mins[v][r] = vf_fma(min, vf_set((float) (x->by_32[row + r][j] / -32)), mins[v][r]);
                    }
                }
            }
            EACH_VEC {
                const vf d = vf_half(RECORD->d + VL * PART), dmin = vf_half(RECORD->dmin + VL * PART);
                EACH_ROW {
                    const vf dx = vf_set(x->d[row + r]);
                    vf_store(SUM(r), vf_fnma(mins[v][r], vf_mul(dmin, dx), vf_fma(sum[v][r], vf_mul(d, dx), vf_load(SUM(r)))));
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
                    prefetch_matrix(w + ahead + (size_t) j * (G * size / 8), G * size / 8);
                }
                vi s[2][ROWS];
                EACH_ROW {
                    const int32_t by_128 = -128 * x->sum[row + r][j];
                    EACH_VEC s[v][r] = bias_start(&by_128);
                }
                BIASED_DOTS(s, vb_iq4(nibbles(RECORD->q[j][t % 4] + 4 * VL * PART, t / 4)), x->q[row] + 32 * j, 256)
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
        prefetch_matrix(w + ahead, G * size);
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

#define ONE(name, R, G, N, call)                                        \
    static __attribute__((noinline)) void name##_##R##_##G(ARGUMENTS) { \
        call(w, blocks, tile, row, sums, ahead, R, G, N);               \
    }
#define BOTH(name, R, N, call) ONE(name, R, 1, N, call) ONE(name, R, 2, N, call)
#define ROWS_4(name, call, few, many) BOTH(name, 1, few, call) BOTH(name, 2, few, call) BOTH(name, 3, few, call) BOTH(name, 4, few, call)
#define ROWS_8(name, call, few, many)                                                                                                \
    ROWS_4(name, call, few, many) BOTH(name, 5, many, call) BOTH(name, 6, many, call) BOTH(name, 7, many, call) BOTH(name, 8, many, call)
#define LIST_4(name, G) name##_1_##G, name##_2_##G, name##_3_##G, name##_4_##G
#define LIST_8(name, G) LIST_4(name, G), name##_5_##G, name##_6_##G, name##_7_##G, name##_8_##G

// `shape`, of each level: rows at once at most, vectors of outputs at once for up to four rows, and for more.
#define PRODUCT(name, call, shape) PRODUCT_OF(name, call, shape)
#define PRODUCT_OF(name, call, most, few, many)                                                                                      \
    ROWS_##most(name, call, few, many)                                                                                               \
    static void name(const char * records, int groups, int64_t blocks, const char * tile, int rows, float * sums, size_t ahead) {    \
        typedef void (*one)(ARGUMENTS);                                                                                              \
        static const one of_rows[2][most] = { { LIST_##most(name, 1) }, { LIST_##most(name, 2) } };                                  \
        for (int row = 0; row < rows; row += most) {                                                                                 \
            const int now = rows - row < most ? rows - row : most;                                                                   \
            of_rows[groups - 1][now - 1](records, blocks, tile, row, sums + SUMS_STEP * row, ahead);                                 \
        }                                                                                                                            \
    }

#define Q4_0_ROWS(w, n, x, row, sums, ahead, R, G, N)  small_rows(w, n, x, row, sums, ahead, R, G, N, Q4_0)
#define Q4_1_ROWS(w, n, x, row, sums, ahead, R, G, N)  small_rows(w, n, x, row, sums, ahead, R, G, N, Q4_1)
#define Q5_0_ROWS(w, n, x, row, sums, ahead, R, G, N)  small_rows(w, n, x, row, sums, ahead, R, G, N, Q5_0)
#define Q5_1_ROWS(w, n, x, row, sums, ahead, R, G, N)  small_rows(w, n, x, row, sums, ahead, R, G, N, Q5_1)
#define MXFP4_ROWS(w, n, x, row, sums, ahead, R, G, N) small_rows(w, n, x, row, sums, ahead, R, G, N, MXFP4)
#define Q4_K_ROWS(w, n, x, row, sums, ahead, R, G, N)  k_rows(w, n, x, row, sums, ahead, R, G, N, 0)
#define Q5_K_ROWS(w, n, x, row, sums, ahead, R, G, N)  k_rows(w, n, x, row, sums, ahead, R, G, N, 1)
#define Q3_K_ROWS(w, n, x, row, sums, ahead, R, G, N)  signed_k_rows(w, n, x, row, sums, ahead, R, G, N, 0)
#define Q6_K_ROWS(w, n, x, row, sums, ahead, R, G, N)  signed_k_rows(w, n, x, row, sums, ahead, R, G, N, 1)
#define F16_ROWS(w, n, x, row, sums, ahead, R, G, N)   float_rows(w, n, x, row, sums, ahead, R, G, N, F16)
#define BF16_ROWS(w, n, x, row, sums, ahead, R, G, N)  float_rows(w, n, x, row, sums, ahead, R, G, N, BF16)
#define F32_ROWS(w, n, x, row, sums, ahead, R, G, N)   float_rows(w, n, x, row, sums, ahead, R, G, N, F32)

PRODUCT(q8_0, q8_0_rows, BYTES_SHAPE)
PRODUCT(q4_0, Q4_0_ROWS, BYTES_SHAPE)
PRODUCT(q4_1, Q4_1_ROWS, BYTES_SHAPE)
PRODUCT(q5_0, Q5_0_ROWS, BYTES_SHAPE)
PRODUCT(q5_1, Q5_1_ROWS, BYTES_SHAPE)
PRODUCT(iq4_nl, iq4_nl_rows, BYTES_SHAPE)
PRODUCT(mxfp4, MXFP4_ROWS, BYTES_SHAPE)
PRODUCT(q2_k, q2_k_rows, Q6_K_SHAPE)
PRODUCT(q3_k, Q3_K_ROWS, Q6_K_SHAPE)
PRODUCT(iq4_xs, iq4_xs_rows, Q6_K_SHAPE)
PRODUCT(q4_k, Q4_K_ROWS, Q4_K_SHAPE)
PRODUCT(q5_k, Q5_K_ROWS, Q5_K_SHAPE)
PRODUCT(q6_k, Q6_K_ROWS, Q6_K_SHAPE)
PRODUCT(f16, F16_ROWS, FLOAT_SHAPE)
PRODUCT(bf16, BF16_ROWS, FLOAT_SHAPE)
PRODUCT(f32, F32_ROWS, FLOAT_SHAPE)

static const pgs_kernel kernels[] = {
    { GGML_TYPE_Q8_0, 32, sizeof(rec_q8_0), sizeof(act_32), activations_32, q8_0 },
    { GGML_TYPE_Q4_0, 32, sizeof(rec_q4_0), sizeof(act_32), activations_32, q4_0 },
    { GGML_TYPE_Q4_1, 32, sizeof(rec_q4_1), sizeof(act_32), activations_32, q4_1 },
    { GGML_TYPE_Q5_0, 32, sizeof(rec_q5_0), sizeof(act_32), activations_32, q5_0 },
    { GGML_TYPE_Q5_1, 32, sizeof(rec_q5_1), sizeof(act_32), activations_32, q5_1 },
    { GGML_TYPE_IQ4_NL, 32, sizeof(rec_iq4_nl), sizeof(act_32), activations_32, iq4_nl },
    { GGML_TYPE_Q2_K, 256, sizeof(rec_q2_k), sizeof(act_256), activations_256, q2_k },
    { GGML_TYPE_Q3_K, 256, sizeof(rec_q3_k), sizeof(act_256), activations_256, q3_k },
    { GGML_TYPE_IQ4_XS, 256, sizeof(rec_iq4_xs), sizeof(act_256), activations_256, iq4_xs },
    { GGML_TYPE_MXFP4, 32, sizeof(rec_mxfp4), sizeof(act_32), activations_32, mxfp4 },
    { GGML_TYPE_Q4_K, 256, sizeof(rec_q4_k), sizeof(act_256), activations_256, q4_k },
    { GGML_TYPE_Q5_K, 256, sizeof(rec_q5_k), sizeof(act_256), activations_256, q5_k },
    { GGML_TYPE_Q6_K, 256, sizeof(rec_q6_k), sizeof(act_256), activations_256, q6_k },
    { GGML_TYPE_F16, 32, sizeof(rec_f16), sizeof(act_f32), activations_f32, f16 },
    { GGML_TYPE_BF16, 32, sizeof(rec_f16), sizeof(act_f32), activations_f32, bf16 },
    { GGML_TYPE_F32, 32, sizeof(rec_f32), sizeof(act_f32), activations_f32, f32 },
};

#undef V
#undef GROUP
#undef PART
#undef SUM
#undef ONE
#undef BOTH
