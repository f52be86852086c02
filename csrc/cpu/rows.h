// Operations on rows between products, for all levels: norms, the causal convolution, gates. A row's bits depend on nothing but
// the row: sums are of LANES values side by side, in the order of their places.
#pragma once

#include "attention.h"
#include "kernels.h"
#include "layout.h"

// 1 / (1 + e^-x)
INLINE vf sigmoid(vf x) {
    const vf e = exponential(vf_sub(vf_zero(), vf_abs(x)));  // of a magnitude, so it cannot overflow
    return vf_div(vf_below(x, 0.0f, e, vf_set(1.0f)), vf_add(vf_set(1.0f), e));
}

INLINE vf silu(vf x) { return vf_mul(x, sigmoid(x)); }

// LANES values from x[i] on, zeros from x[n] on
INLINE const float * whole_lanes(const float * x, int64_t i, int64_t n, float * copy) {
    if (i + LANES <= n) {
        return x + i;
    }
    for (int64_t j = 0; j < LANES; j++) {
        copy[j] = i + j < n ? x[i + j] : 0.0f;
    }
    return copy;
}

INLINE void norm_lanes(const float * x, const float * weight, const float * gate, vf scale, float * out, const int weighted, const int gated) {
    EACH_PART {
        vf y = vf_mul(vf_load(x + VL * p), scale);
        y    = weighted ? vf_mul(y, vf_load(weight + VL * p)) : y;
        vf_store(out + VL * p, gated ? vf_mul(silu(vf_load(gate + VL * p)), y) : y);
    }
}

INLINE void norm_by(const float * x, const float * weight, const float * gate, vf scale, int64_t n, float * out, const int weighted, const int gated) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        norm_lanes(x + i, weight + i, gate + i, scale, out + i, weighted, gated);
    }
    if (i < n) {
        float part[LANES], more[LANES], last[LANES];
        norm_lanes(whole_lanes(x, i, n, part), weighted ? whole_lanes(weight, i, n, more) : NULL, gated ? whole_lanes(gate, i, n, last) : NULL, scale, part,
                   weighted, gated);
        memcpy(out + i, part, (size_t) (n - i) * sizeof(float));
    }
}

// out = x / sqrt(mean(x^2) + eps), times `weight` and times silu(gate) where they are not NULL. `out` may be x.
static void norm(const float * x, const float * weight, const float * gate, float eps, int64_t n, float * out) {
    vf    acc[4][PARTS];
    float part[LANES];
    _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) {
        EACH_PART acc[k][p] = vf_zero();
    }
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) {
            EACH_PART {
                const vf v = vf_load(x + i + k * LANES + VL * p);
                acc[k][p]  = vf_fma(v, v, acc[k][p]);
            }
        }
    }
    if (i < n) {
        _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) {
            if (i + k * LANES < n) {
                const float * from = whole_lanes(x, i + k * LANES, n, part);
                EACH_PART {
                    const vf v = vf_load(from + VL * p);
                    acc[k][p]  = vf_fma(v, v, acc[k][p]);
                }
            }
        }
    }
    EACH_PART vf_store(part + VL * p, vf_add(vf_add(acc[0][p], acc[2][p]), vf_add(acc[1][p], acc[3][p])));
    const vf scale = vf_set(1.0f / sqrtf(sum_of(part) / (float) n + eps));
    if (gate != NULL) {
        weight != NULL ? norm_by(x, weight, gate, scale, n, out, 1, 1) : norm_by(x, x, gate, scale, n, out, 0, 1);
    } else {
        weight != NULL ? norm_by(x, weight, x, scale, n, out, 1, 0) : norm_by(x, x, x, scale, n, out, 0, 0);
    }
}

// out[t] = silu(sum of taps[k] * x[t + k], k in order) for `rows` rows of `channels` (a multiple of LANES); rows of x lie `step` floats apart, those of
// out `to` floats. taps: F32 [n_taps] of one channel after the other, as files have them.
static void convolve(const float * x, size_t step, const float * taps, int n_taps, int64_t rows, int64_t channels, float * out, size_t to) {
    float turned[MOST_TAPS][LANES];
    for (int64_t c = 0; c < channels; c += LANES) {
        if (n_taps == 4) {
            for (int j = 0; j < LANES; j += VL) {
                turn_fours(taps + (c + j) * 4, turned[0] + j, LANES);
            }
        } else {
            for (int k = 0; k < n_taps; k++) {
                for (int j = 0; j < LANES; j++) {
                    turned[k][j] = taps[(c + j) * n_taps + k];
                }
            }
        }
        for (int64_t t = 0; t < rows; t++) {
            EACH_PART {
                vf sum = vf_zero();
                for (int k = 0; k < n_taps; k++) {
                    sum = vf_fma(vf_load(x + (size_t) (t + k) * step + c + VL * p), vf_load(turned[k] + VL * p), sum);
                }
                vf_store(out + (size_t) t * to + c + VL * p, silu(sum));
            }
        }
    }
}

// out = x * sigmoid(gate); with `silus` gate * sigmoid(gate) * x
static void gate(const float * x, const float * by, int64_t n, int silus, float * out) {
    float part[LANES], more[LANES];
    for (int64_t i = 0; i < n; i += LANES) {
        const float * from = whole_lanes(x, i, n, part), * z = whole_lanes(by, i, n, more);
        float *       to = i + LANES <= n ? out + i : part;
        EACH_PART {
            const vf g = vf_load(z + VL * p), v = vf_load(from + VL * p);
            vf_store(to + VL * p, vf_mul(silus ? silu(g) : sigmoid(g), v));
        }
        if (to == part) {
            memcpy(out + i, part, (size_t) (n - i) * sizeof(float));
        }
    }
}

static float sum(const float * x, int64_t n) {
    float part[LANES], total[LANES];
    vf    acc[PARTS];
    EACH_PART acc[p] = vf_zero();
    for (int64_t i = 0; i < n; i += LANES) {
        const float * from = whole_lanes(x, i, n, part);
        EACH_PART acc[p] = vf_add(acc[p], vf_load(from + VL * p));
    }
    EACH_PART vf_store(total + VL * p, acc[p]);
    return sum_of(total);
}

// The first place of the largest value; NaN is never the largest, and if there is nothing else, the place is 0.
static int64_t argmax(const float * x, int64_t n) {
    float top[4][LANES], most = -INFINITY;
    vf    acc[4][PARTS];
    for (int k = 0; k < 4; k++) {
        EACH_PART acc[k][p] = vf_set(-INFINITY);
    }
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) {
            EACH_PART acc[k][p] = vf_max(vf_load(x + i + k * LANES + VL * p), acc[k][p]);
        }
    }
    for (int k = 0; k < 4; k++) {
        EACH_PART vf_store(top[k] + VL * p, acc[k][p]);
        for (int j = 0; j < LANES; j++) {
            most = top[k][j] > most ? top[k][j] : most;
        }
    }
    for (; i < n; i++) {
        most = x[i] > most ? x[i] : most;
    }
    for (i = 0; i < n; i++) {
        if (x[i] == most) {
            return i;
        }
    }
    return 0;
}
