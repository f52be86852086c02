// The inputs of a step that follow from the committed tokens and the rows of each slot. In C because up to nine small arrays per step cost numpy a third of a
// plain step's host time.
#include "pgs.h"

#include <math.h>

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

// Which position each of the first `near` rows of a ring holds once `n` + `real` tokens are in it: the last one of its remainder. Where that one was
// overwritten by a token that was rejected since, it lies at least ring - widest >= window before the block, and no query of the block sees it.
static void fill_near(float * near, int64_t count, int64_t ring, int64_t n, int64_t real) {
    const int64_t last = n + real - 1, turn = last - last % ring;
    for (int64_t j = 0; j < count; j++) {
        const int64_t held = turn + j <= last ? turn + j : turn + j - ring;
        near[j]            = held < 0 ? PGS_NOWHERE : (float) (0.5 - (double) held);
    }
}

// The row of a ring that has the i-th row of a step; those past `real` are trash rows.
static int64_t ring_row(int64_t at, int64_t n, int64_t i, int64_t real, int64_t ring, int64_t trash) {
    return at * (ring + trash) + (i < real ? (n + i) % ring : ring + (i - real) % trash);
}

// A slot without work looks at its first row, so that what it computes is finite, and writes trash rows.
static void fill_slot(const pgs_rows * r, int64_t at, int64_t committed, int64_t real) {
    const int64_t n = real > 0 ? committed : 0, first = at * r->width;
    const int64_t visible = n < r->live ? least(real, r->live - n) : 0;
    for (int64_t i = 0; i < r->width; i++) {
        const int64_t position   = real > 0 ? n + i : 0;
        r->positions[first + i] = (int32_t) position;
        r->kv_rows[first + i]   = at * (r->live + r->trash) + (i < visible ? n + i : r->live + (i - visible) % r->trash);
        if (r->q_last != NULL) {
            r->q_last[first + i] = (float) position;
        }
        if (r->q_first != NULL) {
            const int64_t own     = least(position, real > 0 ? n + real - 1 : 0);  // padding sees what the last row sees
            r->q_first[first + i] = (float) (r->chunked ? own - own % r->window : position - r->window + 1);
        }
        if (r->sliding_rows != NULL) {
            r->sliding_rows[first + i] = ring_row(at, n, i, real, r->ring, r->trash);
        }
        if (r->context_ring != NULL) {
            r->context_ring[first + i] = ring_row(at, n, i, real, r->draft_ring, r->trash);
        }
        if (r->on != NULL) {
            r->on[first + i] = i < real ? 1.0f : 0.0f;
        }
    }
    if (r->sliding_near != NULL) {
        fill_near(r->sliding_near + at * r->near, r->near, r->ring, n, real > 0 ? real : 1 - n);
    }
    for (int64_t j = 0; r->last != NULL && j < r->history; j++) {
        r->last[at * r->history + j] = (int32_t) (real + j);
    }
    if (r->out_row != NULL) {
        r->out_row[at] = (int32_t) (first + (real > 0 ? real - 1 : 0));
    }
}

void pgs_fill_rows(const pgs_rows * rows, const int64_t * committed, const int64_t * real) {
    for (int64_t at = 0; at < rows->count; at++) {
        fill_slot(rows, at, committed[at], real[at]);
    }
}

bool pgs_finite(const float * values, int64_t n) {
    bool finite = true;
    for (int64_t i = 0; i < n; i++) {
        finite = finite && isfinite(values[i]);
    }
    return finite;
}

bool pgs_finite_at(const float * values, int64_t n, int64_t rows, const int64_t * ids) {
    bool finite = true;
    for (int64_t i = 0; i < rows; i++) {
        finite = finite && isfinite(values[i * n + ids[i]]);
    }
    return finite;
}
