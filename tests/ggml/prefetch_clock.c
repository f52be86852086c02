// csrc/cpu/prefetch_tune.c by a clock that says what products took: is the distance that was fastest the one that is kept, of each kind by itself?
#include "kernels.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { LEFT_OUT = 63, MEASURED = LEFT_OUT + 96, BYTES = 1000 };

static _Thread_local int64_t passed;

static int clock_of_the_test(clockid_t clock, struct timespec * t) {
    (void) clock;
    *t = (struct timespec) { passed / 1000000000, passed % 1000000000 };
    return 0;
}

#define clock_gettime clock_of_the_test
#include "cpu/prefetch_tune.c"

static void expect(bool fine, const char * what) {
    if (!fine) {
        puts(what);
        exit(1);
    }
}

// Which of the distances was used. `took`: nanoseconds with each.
static int product(int type, pgs_locality where, int64_t rows, const int64_t took[WAYS], size_t bytes) {
    const pgs_prefetch_tune a = pgs_prefetch_tune_begin(type, where, rows);
    passed += took[a.way];
    pgs_prefetch_tune_end(&a, bytes);
    expect(a.ahead == AHEAD[a.way], "another distance than is measured");
    return a.way;
}

static const int64_t fastest[WAYS][WAYS] = { { 1000, 1300, 1200 }, { 1300, 1000, 1200 }, { 1300, 1200, 1000 } };  // with which distance it is

static int decided(int type, pgs_locality where, int64_t rows, const int64_t took[WAYS]) {
    for (int i = 0; i < MEASURED; i++) {
        product(type, where, rows, took, BYTES);
    }
    return product(type, where, rows, took, BYTES);
}

static void what_is_measured(void) {
    const int64_t misleads[WAYS] = { 9000, 10, 9000 };
    for (int i = 0; i < MEASURED; i += WAYS) {
        int used = 0;
        for (int j = 0; j < WAYS; j++) {
            used |= 1 << product(GGML_TYPE_Q8_0, PGS_IN_MEMORY, 1, i < LEFT_OUT || i % 10 == 0 ? misleads : fastest[0], BYTES);
            product(GGML_TYPE_Q8_0, PGS_IN_MEMORY, 1, misleads, 0);  // nothing of it is this thread's
        }
        expect(used == (1 << WAYS) - 1, "of as many products in a row as there are distances two had the same");
    }
    for (int i = 0; i < 10; i++) {
        expect(product(GGML_TYPE_Q8_0, PGS_IN_MEMORY, 1, fastest[1], BYTES) == 0, "the first products, or a few others, decided");
    }
}

static void * another_thread(void * arg) {
    expect(decided(GGML_TYPE_Q8_0, PGS_IN_MEMORY, 1, fastest[1]) == 1, "a thread took another one's decision");
    return arg;
}

int main(void) {
    what_is_measured();
    const int64_t rows[] = { 1, 2, 3, 5, 9, 17 }, most[] = { 1, 2, 4, 8, 16, 32 };
    const int     types[] = { GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,  GGML_TYPE_MXFP4, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K,
                              GGML_TYPE_Q6_K, GGML_TYPE_F16, GGML_TYPE_BF16,  GGML_TYPE_F32 };
    for (int t = 0; t < 9; t++) {
        for (int where = 0; where < PGS_PLACES; where++) {
            for (int r = 0; r < 6; r++) {
                if (t + where + r > 0 && !(t == 0 && where == PGS_IN_MEMORY && r == 0)) {
                    const int best = (t + where + r) % WAYS;
                    expect(decided(types[t], (pgs_locality) where, rows[r], fastest[best]) == best, "a slower distance was kept");
                    expect(product(types[t], (pgs_locality) where, most[r], fastest[(best + 1) % WAYS], BYTES) == best, "rows of one kind are two");
                }
            }
        }
    }
    expect(product(GGML_TYPE_Q8_0, PGS_IN_MEMORY, 1, fastest[1], BYTES) == 0, "a kind took another one's decision");
    pthread_t thread;
    expect(pthread_create(&thread, NULL, another_thread, NULL) == 0 && pthread_join(thread, NULL) == 0, "no thread");
    return 0;
}
