// Attention of a few query rows that share a head of K and V, once for all levels.
//
// Positions are taken in blocks of POSITIONS from the first row of the cache on, whatever the span and the number of query rows: a row has the
// same bits alone, in a block and in a prompt. What the mask hides adds exact zeros, so blocks that nobody sees are left out. Sums are F32.
#pragma once

#include <math.h>

#include "kernels.h"
#include "layout.h"

#define ROW_PAIR (VL / 8)      // query rows whose scores are summed at once: 8 sums fit the registers beside their operands
#define ACROSS   4         // vectors of a row of V that are summed at once
#define PV_ROWS  (VL / 4)  // for so many query rows

#define EACH_PART_OF(n) _Pragma("GCC unroll 4") for (int p = 0; p < (n); p++)

// e^x for x <= 0, within 2 units of the last place: 2^n times a polynomial of the rest; 0 below -87, NaN for NaN.
INLINE vf exponential(vf x) {
    const vf bounded = vf_max(vf_set(-88.0f), x);
    const vi n       = vi_nearest(vf_mul(bounded, vf_set(1.44269504f)));
    const vf whole   = vf_int(n);
    vf       r       = vf_fnma(whole, vf_set(0.693359375f), bounded);
    r                = vf_fnma(whole, vf_set(-2.12194440e-4f), r);
    vf sum           = vf_set(1.0f / 5040);
    sum              = vf_fma(sum, r, vf_set(1.0f / 720));
    sum              = vf_fma(sum, r, vf_set(1.0f / 120));
    sum              = vf_fma(sum, r, vf_set(1.0f / 24));
    sum              = vf_fma(sum, r, vf_set(1.0f / 6));
    sum              = vf_fma(sum, r, vf_set(0.5f));
    sum              = vf_fma(sum, r, vf_set(1.0f));
    sum              = vf_fma(sum, r, vf_set(1.0f));
    return vf_below(x, -87.0f, vf_zero(), vf_mul(sum, vf_exponent(n)));
}

// Rows [first, first + n) of a cache as F32; zeros behind them.
static void widen(const pgs_cache * c, int64_t first, int n, float * to) {
    for (int j = 0; j < n; j++) {
        const char * from = c->rows + (size_t) (first + j) * c->step;
        float *      row  = to + (size_t) j * c->size;
        if (c->to_float != NULL) {
            c->to_float(from, row, c->size);
            continue;
        }
        for (int i = 0; i < c->size; i += VL) {
            vf_store(row + i, c->type == GGML_TYPE_F16    ? vf_half((const uint16_t *) from + i)
                              : c->type == GGML_TYPE_BF16 ? vf_bf16((const uint16_t *) from + i)
                                                          : vf_load((const float *) from + i));
        }
    }
    memset(to + (size_t) n * c->size, 0, (size_t) (POSITIONS - n) * c->size * sizeof(float));
}

// Rows that come next are asked for while these are computed with: a step's weights have gone by since they were read last, and what is one head's of each
// position is too short for what processors fetch by themselves. One core of an EPYC 9004, a step of 1, 2, 4, 8, 16 rows of the embedded pair with 200
// positions: 60, 230, 306, 452, 727 us of attention, and 40, 180, 249, 393, 672 with it; every head for itself gains nothing there.
static void ask_for_rows(const pgs_cache * c, int64_t first, int64_t span) {
    for (int64_t j = first; c->asks > 0 && j < span && j < first + POSITIONS; j++) {
        pgs_ask_for(c->rows + (size_t) j * c->step, c->asks);
    }
}

// POSITIONS values of a mask as F32; -Inf behind the first n.
static void widen_mask(const uint16_t * mask, int n, float * to) {
    uint16_t whole[POSITIONS];
    for (int j = n; j < POSITIONS; j++) {
        whole[j] = HIDDEN;
    }
    memcpy(whole, mask, (size_t) n * sizeof(*mask));
    for (int j = 0; j < POSITIONS; j += VL) {
        vf_store(to + j, vf_half(whole + j));
    }
}

// scores[r][j] of `rows` query rows and POSITIONS rows of K
INLINE void score(const float * const * q, const float * k, int size, float (*scores)[POSITIONS], const int rows) {
    for (int j = 0; j < POSITIONS; j += 4) {
        vf s[ROW_PAIR][4][PARTS];
        _Pragma("GCC unroll 2") for (int r = 0; r < rows; r++) {
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
                EACH_PART s[r][i][p] = vf_zero();
            }
        }
        for (int e = 0; e < size; e += LANES) {
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
                EACH_PART {
                    const vf kv = vf_load(k + (size_t) (j + i) * size + e + VL * p);
                    _Pragma("GCC unroll 2") for (int r = 0; r < rows; r++) {
                        s[r][i][p] = vf_fma(kv, vf_load(q[r] + e + VL * p), s[r][i][p]);
                    }
                }
            }
        }
        _Pragma("GCC unroll 2") for (int r = 0; r < rows; r++) {
            sum_four(s[r][0], s[r][1], s[r][2], s[r][3], scores[r] + j);
        }
    }
}

// The same for many query rows: positions lie side by side, so no sum has to be collected from a vector. The partial sums, and the order in which they
// meet, are those of sum_four, and so are the bits. Turning the rows of K costs what some seven query rows save.
#define TURN_FROM 8
#define TURNED_ROWS (VL / 4)

static void turn(const float * k, int size, float * turned) {
    for (int j = 0; j < POSITIONS; j += VL) {
        for (int e = 0; e < size; e += VL) {
            vf x[VL];
            _Pragma("GCC unroll 16") for (int i = 0; i < VL; i++) x[i] = vf_load(k + (size_t) (j + i) * size + e);
            transpose(x);
            _Pragma("GCC unroll 16") for (int i = 0; i < VL; i++) vf_store(turned + (size_t) (e + i) * POSITIONS + j, x[i]);
        }
    }
}

INLINE void score_turned(const float * const * q, const float * turned, int size, float (*scores)[POSITIONS], const int rows) {
    for (int j = 0; j < POSITIONS; j += VL) {
        vf held[8][TURNED_ROWS];
        for (int l = 0; l < 8; l++) {
            vf s[TURNED_ROWS], t[TURNED_ROWS];
            _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) s[r] = t[r] = vf_zero();
            for (int e = l; e < size; e += LANES) {
                const vf a = vf_load(turned + (size_t) e * POSITIONS + j), b = vf_load(turned + (size_t) (e + 8) * POSITIONS + j);
                _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {
                    s[r] = vf_fma(a, vf_set(q[r][e]), s[r]);
                    t[r] = vf_fma(b, vf_set(q[r][e + 8]), t[r]);
                }
            }
            _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) held[l][r] = vf_add(s[r], t[r]);
        }
        _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {
            const vf even = vf_add(vf_add(held[0][r], held[4][r]), vf_add(held[2][r], held[6][r]));
            const vf odd  = vf_add(vf_add(held[1][r], held[5][r]), vf_add(held[3][r], held[7][r]));
            vf_store(scores[r] + j, vf_add(even, odd));
        }
    }
}

// scores of all query rows
static void score_rows(const pgs_attention * a, const float * k, float * turned, float (*scores)[POSITIONS]) {
    int r = 0;
    if (a->rows >= TURN_FROM) {
        turn(k, a->k.size, turned);
        for (; r + TURNED_ROWS <= a->rows; r += TURNED_ROWS) {
            score_turned(a->q + r, turned, a->k.size, scores + r, TURNED_ROWS);
        }
    }
    for (; r + ROW_PAIR <= a->rows; r += ROW_PAIR) {
        score(a->q + r, k, a->k.size, scores + r, ROW_PAIR);
    }
    for (; r < a->rows; r++) {
        score(a->q + r, k, a->k.size, scores + r, 1);
    }
}

// out[r] += scores[r][j] * v[j], positions in order, `n` vectors of each row from value `e` on
INLINE void weigh(float * out, const float * v, int size, int e, float (*scores)[POSITIONS], const int rows, const int n) {
    vf s[PV_ROWS][ACROSS];
    _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {
        EACH_PART_OF(n) s[r][p] = vf_load(out + (size_t) r * size + e + VL * p);
    }
    for (int j = 0; j < POSITIONS; j++) {
        vf x[ACROSS];
        EACH_PART_OF(n) x[p] = vf_load(v + (size_t) j * size + e + VL * p);
        _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {
            const vf w = vf_set(scores[r][j]);
            EACH_PART_OF(n) s[r][p] = vf_fma(w, x[p], s[r][p]);
        }
    }
    _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {
        EACH_PART_OF(n) vf_store(out + (size_t) r * size + e + VL * p, s[r][p]);
    }
}

static void weigh_rows(float * out, const float * v, int size, float (*scores)[POSITIONS], int rows) {
    for (int e = 0; e < size;) {
        const int wide = e + ACROSS * VL <= size;
        int       r    = 0;
        for (; r + PV_ROWS <= rows; r += PV_ROWS) {
            wide ? weigh(out + (size_t) r * size, v, size, e, scores + r, PV_ROWS, ACROSS) : weigh(out + (size_t) r * size, v, size, e, scores + r, PV_ROWS, 1);
        }
        for (; r < rows; r++) {
            wide ? weigh(out + (size_t) r * size, v, size, e, scores + r, 1, ACROSS) : weigh(out + (size_t) r * size, v, size, e, scores + r, 1, 1);
        }
        e += wide ? ACROSS * VL : VL;
    }
}

INLINE float sum_of(const float * x) {  // LANES values, in the order of sum_four
    vf v[PARTS], zero[PARTS];
    EACH_PART {
        v[p]    = vf_load(x + VL * p);
        zero[p] = vf_zero();
    }
    float out[4];
    sum_four(v, zero, zero, zero, out);
    return out[0];
}

typedef struct softmax {  // of one query row, so far
    float largest, sum;
    float kept;  // what was summed before is to be scaled by it
} softmax;

static float largest_lane(float * lanes) {  // LANES values, none of them NaN; a scalar after the other would wait 16 times for a comparison
    for (int w = LANES / 2; w > 0; w /= 2) {
        for (int j = 0; j < w; j++) {
            lanes[j] = lanes[j + w] > lanes[j] ? lanes[j + w] : lanes[j];
        }
    }
    return lanes[0];
}

// Scores of up to SOFTENED rows become weights. Rows are taken together because one exponential serves what each of them keeps, and one collection their sums.
#define SOFTENED 4

static void soften(float (*scores)[POSITIONS], const uint16_t * const * masks, int n, float scale, softmax * so_far, int rows) {
    float now[SOFTENED], lanes[LANES], kept[VL] = { 0 }, sums[4];
    vf    total[SOFTENED][PARTS];
    _Alignas(64) float mask[POSITIONS];
    for (int r = 0; r < rows; r++) {
        if (r == 0 || masks[r] != masks[r - 1]) {  // heads of a token share one
            widen_mask(masks[r], n, mask);
        }
        EACH_PART {
            vf top = vf_set(-INFINITY);
            for (int j = VL * p; j < POSITIONS; j += LANES) {
                const vf m = vf_load(mask + j);
                // what nobody may see may hold anything
                const vf s = vf_below(m, -1e30f, vf_set(-INFINITY), vf_fma(vf_load(scores[r] + j), vf_set(scale), m));
                vf_store(scores[r] + j, s);
                top = vf_max(s, top);
            }
            vf_store(lanes + VL * p, top);
        }
        const float most = largest_lane(lanes);
        now[r]  = most > so_far[r].largest ? most : so_far[r].largest;
        kept[r] = so_far[r].largest - now[r];
    }
    vf_store(kept, exponential(vf_load(kept)));
    for (int r = 0; r < SOFTENED; r++) {
        EACH_PART {
            total[r][p] = vf_zero();
            for (int j = VL * p; r < rows && j < POSITIONS; j += LANES) {
                const vf w = exponential(vf_sub(vf_load(scores[r] + j), vf_set(now[r])));
                if (now[r] != -INFINITY) {
                    vf_store(scores[r] + j, w);
                }
                total[r][p] = vf_add(total[r][p], w);
            }
        }
    }
    sum_four(total[0], total[1], total[2], total[3], sums);
    for (int r = 0; r < rows; r++) {
        softmax * s = so_far + r;
        if (now[r] == -INFINITY) {  // nothing seen yet, or NaN
            s->kept = 1.0f;
            for (int j = 0; j < POSITIONS; j++) {
                scores[r][j] = scores[r][j] != scores[r][j] ? NAN : 0.0f;
                s->sum += scores[r][j];
            }
        } else {
            *s = (softmax) { now[r], s->sum * kept[r] + sums[r], kept[r] };
        }
    }
}

static void attend(const pgs_attention * a) {
    _Alignas(64) float k[POSITIONS * MOST_SIZE], v[POSITIONS * MOST_SIZE], turned[POSITIONS * MOST_SIZE], out[MOST_ROWS * MOST_SIZE];
    _Alignas(64) float scores[MOST_ROWS][POSITIONS];
    softmax            so_far[MOST_ROWS];
    const int          size = a->v.size;
    for (int r = 0; r < a->rows; r++) {
        so_far[r] = (softmax) { -INFINITY, 0.0f, 1.0f };
    }
    memset(out, 0, (size_t) a->rows * size * sizeof(float));
    ask_for_rows(&a->k, 0, a->span);
    ask_for_rows(&a->v, 0, a->span);
    for (int64_t first = 0; first < a->span; first += POSITIONS) {
        const int n    = (int) (a->span - first < POSITIONS ? a->span - first : POSITIONS);
        int       seen = 0;
        const uint16_t * masks[MOST_ROWS];
        for (int r = 0; r < a->rows; r++) {
            masks[r] = a->mask[r] + first;
            for (int j = 0; j < n && (r == 0 || masks[r] != masks[r - 1]); j++) {
                seen |= masks[r][j] ^ HIDDEN;
            }
        }
        if (seen == 0) {
            continue;
        }
        ask_for_rows(&a->k, first + POSITIONS, a->span);
        ask_for_rows(&a->v, first + POSITIONS, a->span);
        widen(&a->k, first, n, k);
        widen(&a->v, first, n, v);
        score_rows(a, k, turned, scores);
        for (int r = 0; r < a->rows; r += SOFTENED) {
            soften(scores + r, masks + r, n, a->scale, so_far + r, a->rows - r < SOFTENED ? a->rows - r : SOFTENED);
        }
        for (int r = 0; r < a->rows; r++) {
            for (int e = 0; e < size && so_far[r].kept != 1.0f; e += VL) {
                float * o = out + (size_t) r * size + e;
                vf_store(o, vf_mul(vf_load(o), vf_set(so_far[r].kept)));
            }
        }
        weigh_rows(out, v, size, scores, a->rows);
    }
    for (int r = 0; r < a->rows; r++) {
        const float share = so_far[r].sum == 0.0f ? 0.0f : 1.0f / so_far[r].sum;
        for (int e = 0; e < size; e += VL) {
            vf_store(a->out[r] + e, vf_mul(vf_load(out + (size_t) r * size + e), vf_set(share)));
        }
    }
}
