// Auto-tuning of the prefetch distance of weights: the best one depends on the processor's hardware prefetchers (a Xeon with AMX is slower with software
// prefetch, EPYCs are faster). Each thread times the first products of a kind with every distance. Results are bit-equal.
#include "kernels.h"
#include "ggml.h"

#include <stdlib.h>
#include <time.h>

#define SKIPPED 63  // untimed warm-up products of a kind
#define TRIALS  32  // timed products per distance
#define WAYS    3
#define KINDS   6   // classes of row counts

static const size_t AHEAD[WAYS] = { 0, 4 << 10, 16 << 10 };

typedef struct trial {
    int   seen, best;
    float took[WAYS][TRIALS];  // nanoseconds per byte
} trial;

static _Thread_local trial trials[GGML_TYPE_COUNT][PGS_PLACES][KINDS];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double) t.tv_sec + (double) t.tv_nsec;
}

static int by_size(const void * a, const void * b) {
    const float x = *(const float *) a, y = *(const float *) b;
    return (x > y) - (x < y);
}

// One way of each WAYS products, in an order without a period: graphs have one, and their matrices differ.
static int way_of(int seen) {
    int sum = 0;
    for (; seen > 0; seen /= WAYS) {
        sum += seen % WAYS;
    }
    return sum % WAYS;
}

pgs_prefetch_tune pgs_prefetch_tune_begin(int type, pgs_locality where, int64_t rows) {
    const int kind = rows <= 2 ? (int) rows - 1 : rows <= 4 ? 2 : rows <= 8 ? 3 : rows <= 16 ? 4 : 5;
    trial *   t    = &trials[type][where][kind];
    if (t->seen == SKIPPED + WAYS * TRIALS) {
        return (pgs_prefetch_tune) { NULL, t->best, AHEAD[t->best], 0 };
    }
    const int way = way_of(t->seen);
    return (pgs_prefetch_tune) { t, way, AHEAD[way], now() };
}

void pgs_prefetch_tune_end(const pgs_prefetch_tune * a, size_t bytes) {
    trial * t = a->trial;
    if (t == NULL || bytes == 0) {
        return;
    }
    const int i = t->seen++ - SKIPPED;
    if (i >= 0) {
        t->took[a->way][i / WAYS] = (float) ((now() - a->began) / (double) bytes);
    }
    if (i == WAYS * TRIALS - 1) {
        for (int way = 0; way < WAYS; way++) {
            qsort(t->took[way], TRIALS, sizeof(float), by_size);
            t->best = t->took[way][TRIALS / 2] < t->took[t->best][TRIALS / 2] ? way : t->best;
        }
    }
}
