// csrc/weight_stream.c on a device that does everything late, in any order that its two queues and their events allow: is what the device computes
// with always the layer that it is meant to be? ggml's functions are those below; a seed decides which queue goes on next.
#include "pgs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 1 << 16, PLACE = 8, WRITE = 0, RECORD, WAIT, READ };

typedef struct op {
    int kind, at, value;           // WRITE, READ: a byte of the home
    struct ggml_backend_event * event;
    int number;                    // of the record that is made, or waited for
} op;

struct ggml_backend {
    op  ops[MOST];
    int next, n;
};

struct ggml_backend_event {
    int made, done;
};

static struct ggml_backend device, queue;
static uint8_t             home[2 * PLACE];
static unsigned            state;
static bool                events;
static int                 waits;  // of the host

static unsigned dice(unsigned n) {
    state = state * 1664525u + 1013904223u;
    return (state >> 16) % n;
}

static bool go_on(struct ggml_backend * b) {
    if (b->next == b->n) {
        return false;
    }
    const op * o = &b->ops[b->next];
    if (o->kind == WAIT && o->event->done < o->number) {
        return false;
    }
    if (o->kind == WRITE) {
        home[o->at] = (uint8_t) o->value;
    } else if (o->kind == RECORD) {
        o->event->done = o->number;
    } else if (o->kind == READ && home[o->at] != o->value) {
        printf("byte %d is of layer %d, and layer %d is computed\n", o->at, home[o->at] - 1, o->value - 1);
        exit(1);
    }
    b->next++;
    return true;
}

static void later(struct ggml_backend * b, op o) {
    if (b->n == MOST) {
        abort();
    }
    b->ops[b->n++] = o;
    for (unsigned i = dice(6); i > 0; i--) {
        go_on(dice(2) ? &device : &queue);
    }
}

void ggml_backend_synchronize(ggml_backend_t b) {
    waits++;
    while (b->next < b->n) {
        if (!go_on(dice(2) ? &device : &queue) && !go_on(&device) && !go_on(&queue)) {
            puts("both queues wait for each other");
            exit(1);
        }
    }
}

void ggml_backend_tensor_set_async(ggml_backend_t b, struct ggml_tensor * t, const void * data, size_t offset, size_t size) {
    (void) t;
    for (size_t i = 0; i < size; i++) {
        later(b, (op) { WRITE, (int) (offset + i), ((const uint8_t *) data)[i], NULL, 0 });
    }
}

ggml_backend_event_t ggml_backend_event_new(ggml_backend_dev_t dev) {
    (void) dev;
    return events ? calloc(1, sizeof(struct ggml_backend_event)) : NULL;
}

void ggml_backend_event_free(ggml_backend_event_t event) {
    free(event);
}

void ggml_backend_event_record(ggml_backend_event_t event, ggml_backend_t b) {
    later(b, (op) { RECORD, 0, 0, event, ++event->made });
}

void ggml_backend_event_wait(ggml_backend_t b, ggml_backend_event_t event) {
    later(b, (op) { WAIT, 0, 0, event, event->made });
}

ggml_backend_dev_t ggml_backend_get_device(ggml_backend_t b) {
    (void) b;
    return NULL;
}

size_t ggml_nbytes(const struct ggml_tensor * t) {
    (void) t;
    return sizeof(home);
}

static void compute(int layer) {
    for (int i = 0; i < 3 * PLACE; i++) {
        later(&device, (op) { READ, layer % 2 * PLACE + (int) dice(PLACE), layer + 1, NULL, 0 });
    }
}

static int run(int layers) {
    static uint8_t weights[16][PLACE];
    char           err[PGS_ERR];
    memset(&device, 0, sizeof(device));
    memset(&queue, 0, sizeof(queue));
    memset(home, 0, sizeof(home));
    waits          = 0;
    pgs_stream * s = pgs_stream_new(&device, &queue, NULL, layers, err);
    for (int layer = 0; layer < layers; layer++) {
        memset(weights[layer], layer + 1, PLACE);
        for (int half = 0; half < 2; half++) {
            const size_t at = (size_t) (layer % 2 * PLACE + half * PLACE / 2);
            if (pgs_stream_add(s, layer, weights[layer], at, PLACE / 2, err) != 0) {
                return 1;
            }
        }
    }
    for (int chunk = 0; chunk < 5; chunk++) {
        pgs_stream_more(s, dice(2));
        pgs_stream_start(s);
        const int breaks = dice(8) == 0 ? (int) dice((unsigned) layers) : layers;
        for (int layer = 0; layer < layers; layer++) {
            pgs_stream_wait(s, layer);
            compute(layer);
            if (layer == breaks) {
                pgs_stream_reset(s);
                waits -= 2;
                break;
            }
            pgs_stream_leave(s, layer);
        }
        if (dice(2)) {
            ggml_backend_synchronize(&device);
            waits--;
        }
    }
    ggml_backend_synchronize(&device);
    if (events && waits != 1) {
        printf("the host waited %d times\n", waits - 1);
        return 1;
    }
    pgs_stream_free(s);
    return 0;
}

int main(int argc, char ** argv) {
    const int seeds = argc > 1 ? atoi(argv[1]) : 1;
    for (int seed = 0; seed < seeds; seed++) {
        state  = (unsigned) seed;
        events = seed % 4 != 0;
        if (run(1 + seed % 7) != 0) {
            return 1;
        }
    }
    return 0;
}
