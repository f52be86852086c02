// Attention of a few query rows that share a head of K and V, for all levels.
//
// Positions are processed in blocks of POSITIONS from the first cache row on, whatever the bucket and the number of rows, so a row has the same bits
// alone and in a batch. Masked positions add exact zeros, so fully masked blocks are skipped. Sums are F32.
#pragma once

#include <math.h>

#include "kernels.h"
#include "layout.h"

#define ROW_PAIR (VL / 8)      // query rows whose scores are summed at once: 8 sums fit the registers with their operands
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

// VL values of a row of a cache of F32, F16 or BF16, from value e on
INLINE vf cached(const char * row, int e, const int type) {
    return type == GGML_TYPE_F16    ? vf_half((const uint16_t *) row + e)
           : type == GGML_TYPE_BF16 ? vf_bf16((const uint16_t *) row + e)
                                    : vf_load((const float *) row + e);
}

INLINE void widen_row(const char * from, float * to, int size, const int type) {
    for (int e = 0; e < size; e += VL) {
        vf_store(to + e, cached(from, e, type));
    }
}

// Rows [first, first + n) of a cache as F32, zero-padded.
static void widen(const pgs_cache * c, int64_t first, int n, float * to) {
    for (int j = 0; j < n; j++) {
        const char * from = c->rows + (size_t) (first + j) * c->step;
        float *      row  = to + (size_t) j * c->size;
        if (c->to_float != NULL) {
            c->to_float(from, row, c->size);
        } else if (c->type == GGML_TYPE_F16) {
            widen_row(from, row, c->size, GGML_TYPE_F16);
        } else if (c->type == GGML_TYPE_BF16) {
            widen_row(from, row, c->size, GGML_TYPE_BF16);
        } else {
            widen_row(from, row, c->size, GGML_TYPE_F32);
        }
    }
    memset(to + (size_t) n * c->size, 0, (size_t) (POSITIONS - n) * c->size * sizeof(float));
}

// The next head's rows are prefetched during the computation: they are no longer cached, and one head's row of a position is too short for hardware
// prefetchers. Only a few rows at a time and one head ahead, because processors stall on too many outstanding prefetches.
typedef struct ahead {  // rows of K and of V from `first` to `end` are still to be prefetched, `each` at a time
    const pgs_cache * k, * v;
    int64_t           first, end, each;
} ahead;

static void prefetch_rows(ahead * next, int64_t n) {
    const int64_t first = next->first, end = first + n < next->end ? first + n : next->end;
    for (int64_t j = first; j < end; j++) {
        pgs_prefetch(next->k->rows + (size_t) j * next->k->step + next->k->from, next->k->prefetched);
        pgs_prefetch(next->v->rows + (size_t) j * next->v->step + next->v->from, next->v->prefetched);
        next->first = j + 1;
    }
}

// POSITIONS values of a mask as F32; -Inf after the first n.
static void widen_mask(const uint16_t * mask, int n, float * to) {
    uint16_t whole[POSITIONS];
    if (n < POSITIONS) {
        for (int j = n; j < POSITIONS; j++) {
            whole[j] = HIDDEN;
        }
        memcpy(whole, mask, (size_t) n * sizeof(*mask));
        mask = whole;
    }
    for (int j = 0; j < POSITIONS; j += VL) {
        vf_store(to + j, vf_half(mask + j));
    }
}

// Whether any of the first n values of a mask shows anything.
static bool shows(const uint16_t * mask, int n) {
    uint16_t seen = 0;
    if (n == POSITIONS) {  // a loop of known length becomes vectors
        for (int j = 0; j < POSITIONS; j++) {
            seen |= mask[j] ^ HIDDEN;
        }
    } else {
        for (int j = 0; j < n; j++) {
            seen |= mask[j] ^ HIDDEN;
        }
    }
    return seen != 0;
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
#define TURNED_ROWS (VL / 2)  // with two vectors of positions each that is as many sums as hide the latency of an addition, and two per value of q

INLINE void turn_as(const char * rows, size_t step, int n, int size, float * turned, const int type) {
    for (int j = 0; j < POSITIONS; j += VL) {
        for (int e = 0; e < size; e += VL) {
            vf x[VL];
            _Pragma("GCC unroll 16") for (int i = 0; i < VL; i++) {  // past the end the last one again, masked
                x[i] = cached(rows + (size_t) (j + i < n ? j + i : n - 1) * step, e, type);
            }
            transpose(x);
            _Pragma("GCC unroll 16") for (int i = 0; i < VL; i++) vf_store(turned + (size_t) (e + i) * POSITIONS + j, x[i]);
        }
    }
}

// Rows [first, first + n) of K, through `k` if they are neither F32 nor F16 nor BF16.
static void turn(const pgs_cache * c, int64_t first, int n, float * k, float * turned) {
    const char * rows = c->rows + (size_t) first * c->step;
    if (c->to_float != NULL) {
        widen(c, first, n, k);
        turn_as((const char *) k, (size_t) c->size * sizeof(float), n, c->size, turned, GGML_TYPE_F32);
    } else if (c->type == GGML_TYPE_F16) {
        turn_as(rows, c->step, n, c->size, turned, GGML_TYPE_F16);
    } else if (c->type == GGML_TYPE_BF16) {
        turn_as(rows, c->step, n, c->size, turned, GGML_TYPE_BF16);
    } else {
        turn_as(rows, c->step, n, c->size, turned, GGML_TYPE_F32);
    }
}

INLINE void score_turned(const float * const * q, const float * turned, int size, float (*scores)[POSITIONS], const int rows) {
    static const uint8_t lane[LANES] = { 0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15 };
    for (int j = 0; j < POSITIONS; j += 2 * VL) {
        vf held[5][TURNED_ROWS][2];  // sums of 1, 2, 4, 8, 16 lanes that wait for their other half
        for (int i = 0; i < LANES; i++) {
            vf s[TURNED_ROWS][2];
            _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) s[r][0] = s[r][1] = vf_zero();
            for (int e = lane[i]; e < size; e += LANES) {
                const vf a = vf_load(turned + (size_t) e * POSITIONS + j), b = vf_load(turned + (size_t) e * POSITIONS + j + VL);
                _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) {
                    const vf x = vf_set(q[r][e]);
                    s[r][0]    = vf_fma(a, x, s[r][0]);
                    s[r][1]    = vf_fma(b, x, s[r][1]);
                }
            }
            int level = 0;
            for (; i >> level & 1; level++) {
                _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) {
                    s[r][0] = vf_add(held[level][r][0], s[r][0]);
                    s[r][1] = vf_add(held[level][r][1], s[r][1]);
                }
            }
            _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) {
                held[level][r][0] = s[r][0];
                held[level][r][1] = s[r][1];
            }
        }
        _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) {
            vf_store(scores[r] + j, held[4][r][0]);
            vf_store(scores[r] + j + VL, held[4][r][1]);
        }
    }
}

// scores of all query rows with rows [first, first + n) of K
static void score_rows(const pgs_attention * a, int64_t first, int n, float (*scores)[POSITIONS], ahead * next) {
    _Alignas(64) float k[POSITIONS * MOST_SIZE], turned[POSITIONS * MOST_SIZE];
    const int size = a->k.size;
    int       r = 0;
    if (a->rows >= TURN_FROM) {
        turn(&a->k, first, n, k, turned);
        for (; r + TURNED_ROWS <= a->rows; r += TURNED_ROWS) {
            prefetch_rows(next, next->each);
            score_turned(a->q + r, turned, size, scores + r, TURNED_ROWS);
        }
        for (; r + TURNED_ROWS / 2 <= a->rows; r += TURNED_ROWS / 2) {
            score_turned(a->q + r, turned, size, scores + r, TURNED_ROWS / 2);
        }
    }
    if (r < a->rows) {
        widen(&a->k, first, n, k);
    }
    for (; r + ROW_PAIR <= a->rows; r += ROW_PAIR) {
        prefetch_rows(next, next->each);
        score(a->q + r, k, size, scores + r, ROW_PAIR);
    }
    for (; r < a->rows; r++) {
        score(a->q + r, k, size, scores + r, 1);
    }
}

// out[r] = out[r] * kept[r] + scores[r][j] * v[j], positions in order, `n` vectors of each row from value `e` on
INLINE void weigh(float * out, const float * kept, const float * v, int size, int e, float (*scores)[POSITIONS], const int rows, const int n) {
    vf s[PV_ROWS][ACROSS];
    _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {
        EACH_PART_OF(n) s[r][p] = vf_mul(vf_load(out + (size_t) r * size + e + VL * p), vf_set(kept[r]));
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

static void weigh_rows(float * out, const float * kept, const float * v, int size, float (*scores)[POSITIONS], int rows, ahead * next) {
    for (int e = 0; e < size;) {
        const int wide = e + ACROSS * VL <= size;
        int       r    = 0;
        for (; r + PV_ROWS <= rows; r += PV_ROWS) {
            float * to = out + (size_t) r * size;
            prefetch_rows(next, next->each);
            wide ? weigh(to, kept + r, v, size, e, scores + r, PV_ROWS, ACROSS) : weigh(to, kept + r, v, size, e, scores + r, PV_ROWS, 1);
        }
        for (; r < rows; r++) {
            float * to = out + (size_t) r * size;
            wide ? weigh(to, kept + r, v, size, e, scores + r, 1, ACROSS) : weigh(to, kept + r, v, size, e, scores + r, 1, 1);
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

typedef struct softmax {  // of query rows, so far
    float largest[MOST_ROWS], sum[MOST_ROWS];
    float kept[MOST_ROWS];  // what was summed before is to be scaled by it
} softmax;

// Scores of up to SOFTENED rows become weights. Rows are taken together because one exponential serves what each of them keeps, and one collection the
// largest, and the sums, of four of them.
#define SOFTENED VL

// Scores with the mask, and of each row the largest one that is not NaN.
static void mask_scores(float (*scores)[POSITIONS], const uint16_t * const * masks, int n, float scale, int rows, float * largest) {
    _Alignas(64) float mask[POSITIONS];
    for (int first = 0; first < rows; first += 4) {
        vf top[4][PARTS];
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
            const int r = first + i;
            EACH_PART top[i][p] = vf_set(-INFINITY);
            if (r >= rows) {
                continue;
            }
            if (r == 0 || masks[r] != masks[r - 1]) {  // heads of a token share one
                widen_mask(masks[r], n, mask);
            }
            _Pragma("GCC unroll 2") for (int j = 0; j < POSITIONS; j += LANES) {
                EACH_PART {
                    const vf m = vf_load(mask + j + VL * p);
                    // masked rows may hold anything
                    const vf s = vf_below(m, -1e30f, vf_set(-INFINITY), vf_fma(vf_load(scores[r] + j + VL * p), vf_set(scale), m));
                    vf_store(scores[r] + j + VL * p, s);
                    top[i][p] = vf_max(s, top[i][p]);
                }
            }
        }
        largest_four(top[0], top[1], top[2], top[3], largest + first);
    }
}

// Weights of a row that has seen nothing yet, or NaN: 0 or NaN.
static void soften_nothing(float * scores) {
    for (int j = 0; j < POSITIONS; j++) {
        scores[j] = scores[j] != scores[j] ? NAN : 0.0f;
    }
}

static void soften(float (*scores)[POSITIONS], const uint16_t * const * masks, int n, float scale, softmax * so_far, int at, int rows) {
    float now[SOFTENED], sums[SOFTENED] = { 0 }, * kept = so_far->kept + at;
    vf_store(now, vf_set(-INFINITY));
    mask_scores(scores, masks, n, scale, rows, now);
    const vf before = vf_load(so_far->largest + at), most = vf_max(vf_load(now), before);
    vf_store(now, most);
    vf_store(so_far->largest + at, most);
    vf_store(kept, exponential(vf_sub(before, most)));
    for (int first = 0; first < rows; first += 4) {
        vf total[4][PARTS];
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
            const int r = first + i;
            EACH_PART total[i][p] = vf_zero();
            if (r >= rows) {
                continue;
            }
            if (now[r] == -INFINITY) {
                kept[r] = 1.0f;
                soften_nothing(scores[r]);
            }
            _Pragma("GCC unroll 2") for (int j = 0; j < POSITIONS; j += LANES) {
                EACH_PART {
                    float *  to = scores[r] + j + VL * p;
                    const vf w  = now[r] == -INFINITY ? vf_load(to) : exponential(vf_sub(vf_load(to), vf_set(now[r])));
                    vf_store(to, w);
                    total[i][p] = vf_add(total[i][p], w);
                }
            }
        }
        sum_four(total[0], total[1], total[2], total[3], sums + first);
    }
    vf_store(so_far->sum + at, vf_add(vf_mul(vf_load(so_far->sum + at), vf_load(kept)), vf_load(sums)));
}

static void attend(const pgs_attention * a) {
    _Alignas(64) float v[POSITIONS * MOST_SIZE], out[MOST_ROWS * MOST_SIZE];
    _Alignas(64) float scores[MOST_ROWS][POSITIONS];
    softmax            so_far;
    const int          size = a->v.size;
    for (int r = 0; r < MOST_ROWS; r++) {
        so_far.largest[r] = -INFINITY;
        so_far.sum[r]     = 0.0f;
    }
    memset(out, 0, (size_t) a->rows * size * sizeof(float));
    // as often as score_rows and weigh_rows prefetch
    const int times = a->rows / (a->rows < TURN_FROM ? ROW_PAIR : TURNED_ROWS) + a->rows / PV_ROWS * ((size + ACROSS * VL - 1) / (ACROSS * VL)) + 1;
    ahead     next  = { &a->k, &a->v, 0, a->k.prefetched > 0 ? a->span : 0, (POSITIONS + times - 1) / times };
    const int64_t lead = a->k.from > 0 ? 0 : POSITIONS;  // rows of this head are prefetched a block ahead
    prefetch_rows(&next, lead);
    for (int64_t first = 0; first < a->span; first += POSITIONS) {
        const int n    = (int) (a->span - first < POSITIONS ? a->span - first : POSITIONS);
        bool      seen = false;
        const uint16_t * masks[MOST_ROWS];
        for (int r = 0; r < a->rows; r++) {
            masks[r] = a->mask[r] + first;
            seen     = seen || ((r == 0 || masks[r] != masks[r - 1]) && shows(masks[r], n));
        }
        if (!seen) {
            continue;
        }
        next.first = next.first < first + lead ? first + lead : next.first;
        widen(&a->v, first, n, v);
        score_rows(a, first, n, scores, &next);
        for (int r = 0; r < a->rows; r += SOFTENED) {
            soften(scores + r, masks + r, n, a->scale, &so_far, r, a->rows - r < SOFTENED ? a->rows - r : SOFTENED);
        }
        weigh_rows(out, so_far.kept, v, size, scores, a->rows, &next);
        prefetch_rows(&next, first + lead + POSITIONS - next.first);
    }
    for (int r = 0; r < a->rows; r++) {
        const float share = so_far.sum[r] == 0.0f ? 0.0f : 1.0f / so_far.sum[r];
        for (int e = 0; e < size; e += VL) {
            vf_store(a->out[r] + e, vf_mul(vf_load(out + (size_t) r * size + e), vf_set(share)));
        }
    }
}
