// The gated delta rule, once for all levels: S = decay * S + k (x) beta * (v - k decay S), o = q S / sqrt(size), row by row.
//
// A state is stored column after column. Columns do not meet: each is loaded once, stays in registers through all rows, and is stored once, or not
// at all. (ggml's goes over the whole state once per row and per operation.) Sums are of LANES values side by side, in order, whatever columns stand
// beside, so neither rows, threads nor levels change a bit.
#pragma once

#include "kernels.h"
#include "layout.h"
#include "rows.h"

// The sums of columns times `by`, one per column; of long columns those of even and of odd places apart, because one sum would wait for itself.
#define DELTA_SUMS(out, by)                                                                                                    \
    {                                                                                                                          \
        vf acc[2][4][PARTS];                                                                                                   \
        _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) { EACH_PART acc[0][c][p] = acc[1][c][p] = vf_zero(); }             \
        _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) {                                                                 \
            EACH_PART {                                                                                                        \
                const vf b = vf_load((by) + LANES * i + VL * p);                                                               \
                const int e = N >= 8 ? i % 2 : 0;                                                                              \
                _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) acc[e][c][p] = vf_fma(s[c][i][p], b, acc[e][c][p]);         \
            }                                                                                                                  \
        }                                                                                                                      \
        if (N >= 8) {                                                                                                          \
            _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) { EACH_PART acc[0][c][p] = vf_add(acc[0][c][p], acc[1][c][p]); } \
        }                                                                                                                      \
        sum_four(acc[0][0], acc[0][1], acc[0][2], acc[0][3], out);                                                             \
    }

// N: LANES values in a column; C: columns at once, 4 at most
INLINE void delta_columns(const pgs_head * h, int64_t j, const int N, const int C) {
    vf    s[4][16][PARTS];
    float sums[4];
    const int64_t size = N * LANES;
    _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) {
        _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) {
            EACH_PART s[c][i][p] = vf_load(h->state + (j + c) * size + LANES * i + VL * p);
        }
    }
    for (int64_t t = 0; t < h->rows; t++) {
        const float * k = h->k + (size_t) t * h->step_k, * v = h->v + (size_t) t * h->step_v + j;
        const vf      decay = vf_set(h->decay[t]);
        _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) {
            _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) {
                EACH_PART s[c][i][p] = vf_mul(s[c][i][p], decay);
            }
        }
        DELTA_SUMS(sums, k)
        vf d[4];
        _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) d[c] = vf_set((v[c] - sums[c]) * h->beta[t]);
        _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) {
            EACH_PART {
                const vf b = vf_load(k + LANES * i + VL * p);
                _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) s[c][i][p] = vf_fma(b, d[c], s[c][i][p]);
            }
        }
        if (h->out != NULL) {
            DELTA_SUMS(sums, h->q + (size_t) t * h->step_k)
            _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) h->out[(size_t) t * h->step_out + j + c] = sums[c] * h->scale;
        }
    }
    if (h->keeps) {
        _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) {
            _Pragma("GCC unroll 16") for (int i = 0; i < N; i++) {
                EACH_PART vf_store(h->state + (j + c) * size + LANES * i + VL * p, s[c][i][p]);
            }
        }
    }
}

// As many columns at once as registers hold.
#define DELTA_REGISTERS (VL)  // 16 of 32, 8 of 16
#define DELTA_COLUMNS(N) ((N) * PARTS * 4 <= DELTA_REGISTERS ? 4 : (N) * PARTS * 2 <= DELTA_REGISTERS ? 2 : 1)
#define DELTA(N)                                                                                    \
    static __attribute__((noinline)) void delta_##N(const pgs_head * h, int64_t first, int64_t end) { \
        for (int64_t j = first; j < end; j += DELTA_COLUMNS(N)) {                                   \
            delta_columns(h, j, N, DELTA_COLUMNS(N));                                               \
        }                                                                                           \
    }
DELTA(1)
DELTA(2)
DELTA(4)
DELTA(8)
DELTA(16)

static void delta(const pgs_head * h, int64_t first, int64_t end) {
    (h->size == 16 ? delta_1 : h->size == 32 ? delta_2 : h->size == 64 ? delta_4 : h->size == 128 ? delta_8 : delta_16)(h, first, end);
}
