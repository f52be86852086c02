// The products, once for all levels: the file of a level includes its vectors, then this.
//
// A block is summed in whole numbers, exactly; then come the same fused steps in the same order for every row, whatever rows stand beside it
// and however they are cut into calls: that is why a row alone, in a block and in a prompt has the same bits.
#pragma once

#include "activations.h"
#include "kernels.h"

#define EACH_ROW  _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)
#define PARTS     (LANES / VL)
#define EACH_PART _Pragma("GCC unroll 4") for (int p = 0; p < PARTS; p++)
#define AHEAD     4096  // bytes that are asked for ahead of use

// s[r] += sums of n quads of w[0 .. n - 1] (0 .. 63) times those of row r. DOTS_OF, of each level, takes an expression of t and the largest weight.
#define DOTS(s, w, n, x, stride, R) DOTS_OF(s, (w)[t], 63, n, x, stride, R)

// Sums of up to HELD_ROWS rows wait in registers while a block is multiplied, those of more in memory.
#define HELD_SUMS (R <= HELD_ROWS)
#define SUM_OF(acc, r) (HELD_SUMS ? (acc)[p][r] : vf_load(sums + LANES * (r) + VL * p))
#define SUM_IS(acc, r, value)                             \
    do {                                                  \
        const vf sum_ = value;                            \
        if (HELD_SUMS) {                                  \
            (acc)[p][r] = sum_;                           \
        } else {                                          \
            vf_store(sums + LANES * (r) + VL * p, sum_);  \
        }                                                 \
    } while (0)
#define SUM_STAYS(acc, r)                                   \
    if (HELD_SUMS) {                                        \
        vf_store(sums + LANES * (r) + VL * p, (acc)[p][r]); \
    }

// Levels that widen sums to 32 bits by a product anyway do it with the scale.
#ifdef SCALED_DOTS
#define WHOLE_SCALES 1
#else
#define WHOLE_SCALES 0
#define SCALED_DOTS(whole, w, scales, x, stride, R) (void) (whole);
#endif

// Kernels of Q6_K, and those of Q4_K, Q5_K and Q8_0 for several rows, compute long enough between two records to gain by asking for what comes next, into
// the first-level cache. Whether the second level is told too, further ahead, is measured (asking.c).

// ---- blocks of 32

INLINE vb nibbles(const uint8_t * p, int high) { return high ? vb_high(vb_load(p)) : vb_low(vb_load(p)); }

INLINE void q8_0_rows(const char * records, int64_t blocks, const char * tile, int row, float * sums, const int R) {
    const rec_q8_0 * w = (const rec_q8_0 *) records;
    const act_32 *   x = (const act_32 *) tile;
    vf               acc[PARTS][ROWS];
    EACH_PART EACH_ROW acc[p][r] = vf_load(sums + LANES * r + VL * p);
    for (int64_t b = 0; b < blocks; b++, w++, x++) {
        if (R > 2) {
            _Pragma("GCC unroll 9") for (size_t k = 0; k < sizeof(*w); k += 64) prefetch((const char *) w + AHEAD + k);
        }
        EACH_PART {
            vi s[ROWS];
            EACH_ROW s[r] = bias_start(x->by_128 + row + r);
            _Pragma("GCC unroll 8") for (int t = 0; t < 8; t++) {
                const vbias q = bias_load(w->q[t] + 4 * VL * p);
                EACH_ROW s[r] = bias_dot(s[r], q, x->q[row + r] + 4 * t);
            }
            const vf d = vf_half(w->d + VL * p);
            EACH_ROW SUM_IS(acc, r, vf_fma(vf_int(s[r]), vf_mul(d, vf_set(x->d[row + r])), SUM_OF(acc, r)));
        }
    }
    EACH_PART EACH_ROW SUM_STAYS(acc, r);
}

INLINE vb nibble_quads(const uint8_t * p, int high, int fp4) { return fp4 ? vb_fp4(nibbles(p, high)) : nibbles(p, high); }

// Q4_0 and MXFP4, which lie alike: d * q, where q is too large by 8, or by 12, whose products with a row are by_8 and by_8 / 2 * 3.
INLINE void nibble_rows(const char * records, int64_t blocks, const char * tile, int row, float * sums, const int R, const int fp4) {
    const char *   w = records;
    const act_32 * x = (const act_32 *) tile;
    vf             acc[PARTS][ROWS];
    EACH_PART EACH_ROW acc[p][r] = vf_load(sums + LANES * r + VL * p);
    for (int64_t b = 0; b < blocks; b++, w += fp4 ? sizeof(rec_mxfp4) : sizeof(rec_q4_0), x++) {
        const uint8_t(*q)[4 * LANES] = fp4 ? ((const rec_mxfp4 *) w)->q : ((const rec_q4_0 *) w)->q;
        EACH_PART {
            vi s[ROWS];
            EACH_ROW s[r] = vi_set(fp4 ? x->by_8[row + r] / 2 * 3 : x->by_8[row + r]);
            DOTS_OF(s, nibble_quads(q[t % 4] + 4 * VL * p, t / 4, fp4), fp4 ? 24 : 15, 8, x->q[row], 32, R)
            const vf d = fp4 ? vf_e8m0(((const rec_mxfp4 *) w)->e + VL * p) : vf_half(((const rec_q4_0 *) w)->d + VL * p);
            EACH_ROW SUM_IS(acc, r, vf_fma(vf_int(s[r]), vf_mul(d, vf_set(x->d[row + r])), SUM_OF(acc, r)));
        }
    }
    EACH_PART EACH_ROW SUM_STAYS(acc, r);
}

// ---- blocks of 256

INLINE vb q5_k_quads(const rec_q5_k * w, int i, int t, int p, int odd) {
    return vb_fifth(nibbles(w->q[i][t] + 4 * VL * p, odd), vb_load(w->high[t] + 4 * VL * p), 2 * i + odd);
}

// Q4_K and Q5_K: d * scale * q - dmin * min. Sums of Q4_K times scales are whole numbers, below 2^24 in half a block: floats hold them exactly, and levels
// that scale whole numbers (SCALED_DOTS) round the same sum of both halves, once.
INLINE void k_rows(const char * records, int64_t blocks, const char * tile, int row, float * sums, const int R, const int five) {
    const size_t    size = five ? sizeof(rec_q5_k) : sizeof(rec_q4_k);
    const char *    w    = records;
    const act_256 * x    = (const act_256 *) tile;
    for (int64_t b = 0; b < blocks; b++, w += size, x++) {
        const head_k * h = (const head_k *) w;
        EACH_PART {
            vf sum[ROWS], half[ROWS];
            vi whole[ROWS];
            EACH_ROW {
                sum[r] = half[r] = vf_zero();
                whole[r]         = vi_set(0);
            }
#pragma GCC unroll 1
            for (int i = 0; i < 4; i++) {
                if (p == 0 && R > 1) {
                    for (size_t k = 0; k < size / 4; k += 64) {
                        prefetch(w + AHEAD + i * (size / 4) + k);
                    }
                }
                if (i == 2 && !five && !WHOLE_SCALES) {
                    EACH_ROW {
                        half[r] = sum[r];
                        sum[r]  = vf_zero();
                    }
                }
                _Pragma("GCC unroll 2") for (int odd = 0; odd < 2; odd++) {
                    const int j = 2 * i + odd;
                    if (!five && WHOLE_SCALES) {
                        SCALED_DOTS(whole, nibbles(((const rec_q4_k *) w)->q[i][t] + 4 * VL * p, odd), h->scale[j] + VL * p, x->q[row] + 32 * j, 256, R)
                        continue;
                    }
                    vi s[ROWS];
                    EACH_ROW s[r] = vi_set(0);
                    if (five) {
                        DOTS_OF(s, q5_k_quads((const rec_q5_k *) w, i, t, p, odd), 31, 8, x->q[row] + 32 * j, 256, R)
                    } else {
                        DOTS_OF(s, nibbles(((const rec_q4_k *) w)->q[i][t] + 4 * VL * p, odd), 15, 8, x->q[row] + 32 * j, 256, R)
                    }
                    const vf scale = vf_u8(h->scale[j] + VL * p);
                    EACH_ROW sum[r] = vf_fma(vf_int(s[r]), scale, sum[r]);
                }
            }
            const vf d = vf_half(h->d + VL * p), dmin = vf_half(h->dmin + VL * p);
            vi       z[ROWS];
            EACH_ROW z[r] = vi_set(0);
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
                EACH_ROW z[r] = vi_mins(z[r], h->min[i] + 2 * VL * p, x->sum[row + r] + 2 * i);
            }
            EACH_ROW {
                const vf dx  = vf_set(x->d[row + r]), all = five ? sum[r] : WHOLE_SCALES ? vf_int(whole[r]) : vf_add(half[r], sum[r]);
                float *  out = sums + LANES * r + VL * p;
                vf_store(out, vf_fnma(vf_int(z[r]), vf_mul(dmin, dx), vf_fma(all, vf_mul(d, dx), vf_load(out))));
            }
        }
    }
}

// Q6_K: d * scale * (q - 32)
INLINE void q6_k_rows(const char * records, int64_t blocks, const char * tile, int row, float * sums, const int R) {
    const size_t     size = sizeof(rec_q6_k);
    const rec_q6_k * w    = (const rec_q6_k *) records;
    const act_256 *  x    = (const act_256 *) tile;
    for (int64_t b = 0; b < blocks; b++, w++, x++) {
        EACH_PART {
            vf sum[ROWS];
            EACH_ROW sum[r] = vf_zero();
#pragma GCC unroll 1
            for (int i = 0; i < 4; i++) {
                if (p == 0) {
                    for (size_t k = 0; k < size / 4; k += 64) {
                        prefetch((const char *) w + AHEAD + i * (size / 4) + k);
                    }
                }
                _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) {
                    const int j = 4 * i + v;
                    vi        s[ROWS];
                    EACH_ROW s[r] = vi_set(x->by_32[row + r][j]);
                    DOTS_OF(s, vb_join(nibbles(w->q[2 * i + v / 2][t] + 4 * VL * p, v % 2), vb_load(w->high[i][t] + 4 * VL * p), 2 * v, 2), 63, 4,
                            x->q[row] + 16 * j, 256, R)
                    const vf scale = vf_i8(w->scale[j] + VL * p);
                    EACH_ROW sum[r] = vf_fma(vf_int(s[r]), scale, sum[r]);
                }
            }
            const vf d = vf_half(w->d + VL * p);
            EACH_ROW {
                float * out = sums + LANES * r + VL * p;
                vf_store(out, vf_fma(sum[r], vf_mul(d, vf_set(x->d[row + r])), vf_load(out)));
            }
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
INLINE void float_rows(const char * records, int64_t blocks, const char * tile, int row, float * sums, const int R, const int type) {
    const size_t    size = type == F32 ? sizeof(rec_f32) : sizeof(rec_f16);
    const char *    w    = records;
    const act_f32 * x    = (const act_f32 *) tile;
    for (int64_t b = 0; b < blocks; b++, w += size, x++) {
        EACH_PART {
            vf even[ROWS], odd[ROWS];
            EACH_ROW even[r] = odd[r] = vf_zero();
#pragma GCC unroll 4
            for (int i = 0; i < 32; i += 2) {
                const vf a = float_weights(w, i, p, type), c = float_weights(w, i + 1, p, type);
                EACH_ROW even[r] = vf_fma(a, vf_set(x->x[row + r][i]), even[r]);
                EACH_ROW odd[r]  = vf_fma(c, vf_set(x->x[row + r][i + 1]), odd[r]);
            }
            EACH_ROW {
                float * out = sums + LANES * r + VL * p;
                vf_store(out, vf_add(vf_load(out), vf_add(even[r], odd[r])));
            }
        }
    }
}

// ---- one function per number of rows; not inlined, because compilers keep the sums of one in registers and spill those of many

#define ONE(name, R, call)                                                                                                        \
    static __attribute__((noinline)) void name##_##R(const char * records, int64_t blocks, const char * tile, int row, float * sums) { \
        call(records, blocks, tile, row, sums, R);                                                                                \
    }
#define FOUR(name, call)  ONE(name, 1, call) ONE(name, 2, call) ONE(name, 3, call) ONE(name, 4, call)
#define EIGHT(name, call) FOUR(name, call) ONE(name, 5, call) ONE(name, 6, call) ONE(name, 7, call) ONE(name, 8, call)
#define FOUR_OF(name)     name##_1, name##_2, name##_3, name##_4
#define EIGHT_OF(name)    FOUR_OF(name), name##_5, name##_6, name##_7, name##_8

#define SOME(name, call, most, ONES, ONES_OF)                                                                                     \
    ONES(name, call)                                                                                                              \
    static void name(const char * records, int64_t blocks, const char * tile, int rows, float * sums) {                           \
        typedef void (*one)(const char *, int64_t, const char *, int, float *);                                                   \
        static const one of_rows[] = { ONES_OF(name) };                                                                           \
        for (int row = 0; row < rows; row += most) {                                                                              \
            of_rows[(rows - row < most ? rows - row : most) - 1](records, blocks, tile, row, sums + LANES * row);                 \
        }                                                                                                                         \
    }
#if ROWS == 8
#define PRODUCT(name, call) SOME(name, call, 8, EIGHT, EIGHT_OF)
#else
#define PRODUCT(name, call) SOME(name, call, 4, FOUR, FOUR_OF)
#endif
#if FLOAT_ROWS == 8
#define FLOAT_PRODUCT(name, call) SOME(name, call, 8, EIGHT, EIGHT_OF)
#else
#define FLOAT_PRODUCT(name, call) SOME(name, call, 4, FOUR, FOUR_OF)
#endif

#define Q4_0_ROWS(w, n, x, row, sums, R)  nibble_rows(w, n, x, row, sums, R, 0)
#define MXFP4_ROWS(w, n, x, row, sums, R) nibble_rows(w, n, x, row, sums, R, 1)
#define Q4_K_ROWS(w, n, x, row, sums, R) k_rows(w, n, x, row, sums, R, 0)
#define Q5_K_ROWS(w, n, x, row, sums, R) k_rows(w, n, x, row, sums, R, 1)
#define F16_ROWS(w, n, x, row, sums, R)  float_rows(w, n, x, row, sums, R, F16)
#define BF16_ROWS(w, n, x, row, sums, R) float_rows(w, n, x, row, sums, R, BF16)
#define F32_ROWS(w, n, x, row, sums, R)  float_rows(w, n, x, row, sums, R, F32)

PRODUCT(q8_0, q8_0_rows)
PRODUCT(q4_0, Q4_0_ROWS)
PRODUCT(mxfp4, MXFP4_ROWS)
PRODUCT(q4_k, Q4_K_ROWS)
PRODUCT(q5_k, Q5_K_ROWS)
PRODUCT(q6_k, q6_k_rows)
FLOAT_PRODUCT(f16, F16_ROWS)
FLOAT_PRODUCT(bf16, BF16_ROWS)
FLOAT_PRODUCT(f32, F32_ROWS)

static const pgs_kernel kernels[] = {
    { GGML_TYPE_Q8_0, 32, sizeof(rec_q8_0), sizeof(act_32), activations_32, q8_0 },
    { GGML_TYPE_Q4_0, 32, sizeof(rec_q4_0), sizeof(act_32), activations_32, q4_0 },
    { GGML_TYPE_MXFP4, 32, sizeof(rec_mxfp4), sizeof(act_32), activations_32, mxfp4 },
    { GGML_TYPE_Q4_K, 256, sizeof(rec_q4_k), sizeof(act_256), activations_256, q4_k },
    { GGML_TYPE_Q5_K, 256, sizeof(rec_q5_k), sizeof(act_256), activations_256, q5_k },
    { GGML_TYPE_Q6_K, 256, sizeof(rec_q6_k), sizeof(act_256), activations_256, q6_k },
    { GGML_TYPE_F16, 32, sizeof(rec_f16), sizeof(act_f32), activations_f32, f16 },
    { GGML_TYPE_BF16, 32, sizeof(rec_f16), sizeof(act_f32), activations_f32, bf16 },
    { GGML_TYPE_F32, 32, sizeof(rec_f32), sizeof(act_f32), activations_f32, f32 },
};
