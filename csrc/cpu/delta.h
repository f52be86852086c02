// The gated delta rule, once for all levels: S = decay * S + k (x) beta * (v - k decay S), o = q S / sqrt(size), row by row.
//
// A state is stored by columns. A row goes through a panel of columns that stays in the first-level cache before the next row does: first for the change,
// then for state and output, so that consecutive instructions are independent. Sums have LANES lanes in fixed order, independent of other columns,
// so rows, threads and levels do not change a bit.
#pragma once

#include "kernels.h"
#include "layout.h"
#include "rows.h"

#define DELTA_PANEL 4096  // values of columns that a row goes through: 16 KB

typedef float four __attribute__((vector_size(16)));  // one of each of four columns

INLINE four four_at(const float * x) {
    four out;
    memcpy(&out, x, sizeof(out));
    return out;
}

// The sums of four columns times `by`, from what is added up in acc; of long columns those of even and of odd places apart, because one sum would wait
// for itself.
#define DELTA_PLACES _Pragma("GCC unroll 16") for (int i = 0; i < N; i++)
#define DELTA_EACH   _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)
#define DELTA_ODD(i) (N >= 8 ? (i) % 2 : 0)

INLINE four delta_sums(vf (*acc)[4][PARTS], const int N) {
    float sums[4];
    if (N >= 8) {
        DELTA_EACH { EACH_PART acc[0][c][p] = vf_add(acc[0][c][p], acc[1][c][p]); }
    }
    sum_four(acc[0][0], acc[0][1], acc[0][2], acc[0][3], sums);
    return four_at(sums);
}

// beta * (v - k S) of four columns: what row t adds k times to them. S has the row's decay already, unless the block `starts` with this row.
INLINE four delta_change(const pgs_head * h, int64_t t, int64_t j, const float * state, const int N, const int starts) {
    const float * k = h->k + (size_t) t * h->step_k;
    const vf      decay = vf_set(h->decay[t]);
    vf            acc[2][4][PARTS];
    DELTA_EACH { EACH_PART acc[0][c][p] = acc[1][c][p] = vf_zero(); }
    EACH_PART {
        DELTA_PLACES {
            const int e = DELTA_ODD(i), at = LANES * i + VL * p;
            const vf  b = vf_load(k + at);
            DELTA_EACH {
                const vf s   = vf_load(state + c * N * LANES + at);
                acc[e][c][p] = vf_fma(starts ? vf_mul(s, decay) : s, b, acc[e][c][p]);
            }
        }
    }
    return (four_at(h->v + (size_t) t * h->step_v + j) - delta_sums(acc, N)) * h->beta[t];
}

// Four columns `from` one row `to` the next, whose decay they are given, and the output of the row where it `gives` one.
INLINE void delta_step(const pgs_head * h, int64_t t, int64_t j, const float * change, const float * from, float * to, float next, const int N,
                       const int starts, const int gives) {
    const float * k = h->k + (size_t) t * h->step_k, * q = gives ? h->q + (size_t) t * h->step_k : NULL;
    const vf      decay = vf_set(h->decay[t]), then = vf_set(next);
    vf            acc[2][4][PARTS];
    DELTA_EACH { EACH_PART acc[0][c][p] = acc[1][c][p] = vf_zero(); }
    EACH_PART {
        DELTA_PLACES {
            const int e = DELTA_ODD(i), at = LANES * i + VL * p;
            const vf  b = vf_load(k + at), x = gives ? vf_load(q + at) : b;
            DELTA_EACH {
                vf s = vf_load(from + c * N * LANES + at);
                s    = vf_fma(b, vf_set(change[c]), starts ? vf_mul(s, decay) : s);
                if (gives) {
                    acc[e][c][p] = vf_fma(s, x, acc[e][c][p]);
                }
                vf_store(to + c * N * LANES + at, vf_mul(s, then));
            }
        }
    }
    if (gives) {
        const four out = delta_sums(acc, N) * h->scale;
        memcpy(h->out + (size_t) t * h->step_out + j, &out, sizeof(out));
    }
}

// A panel of columns from j on: all rows.
INLINE void delta_panel(const pgs_head * h, int64_t j, int64_t count, bool follows, const int N, const int gives) {
    _Alignas(64) float own[DELTA_PANEL], change[DELTA_PANEL / LANES];
    const int64_t size = N * LANES;
    float *       state = h->state + j * size, * kept = h->keeps ? state : own;
    // States are no longer in the caches. The next panel is prefetched in small parts, because processors stall on too many outstanding prefetches.
    const size_t prefetched = follows ? ((size_t) (2 * size) * sizeof(float) / (size_t) h->rows + 63) / 64 * 64 : 0;
    const char * next_panel = (const char *) (state + count * size);
    for (int64_t t = 0; t < h->rows; t++) {
        const float next = t + 1 < h->rows ? h->decay[t + 1] : 1.0f;
        for (int64_t c = 0; c < count; c += 4, next_panel += prefetched) {
            pgs_prefetch(next_panel, prefetched);
            const four by = t == 0 ? delta_change(h, t, j + c, state + c * size, N, 1) : delta_change(h, t, j + c, kept + c * size, N, 0);
            memcpy(change + c, &by, sizeof(by));
        }
        for (int64_t c = 0; c < count; c += 4, next_panel += prefetched) {
            float * to = kept + c * size;
            pgs_prefetch(next_panel, prefetched);
            if (t == 0) {
                delta_step(h, t, j + c, change + c, state + c * size, to, next, N, 1, gives);
            } else {
                delta_step(h, t, j + c, change + c, to, to, next, N, 0, gives);
            }
        }
    }
}

#define DELTA(N)                                                                                    \
    static __attribute__((noinline)) void delta_##N(const pgs_head * h, int64_t first, int64_t end) { \
        const int64_t most = DELTA_PANEL / (N * LANES);                                             \
        for (int64_t j = first; j < end; j += most) {                                               \
            const int64_t count = end - j < most ? end - j : most;                                  \
            const bool    follows = h->follows || j + count < end;                                  \
            h->out != NULL ? delta_panel(h, j, count, follows, N, 1) : delta_panel(h, j, count, follows, N, 0); \
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
