// csrc/step_lanes.c on two devices with queues of their own, each a thread that does late what it was given, and a CPU between them: does each step read
// what its own parts left, does one lane queue at a time, and does the other one's part, and copies, pass beside what a device computes?
#include "pgs.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LANES = 2, DEVICES = 3, PARTS = 4, STEPS = 60, FAILS = 20, MOST = 64, UPLOAD = 0, COMPUTE, READ, RECORD };

typedef struct op {
    int kind, lane, part, number;
    struct ggml_backend_event * event;
} op;

struct ggml_backend {
    const char *    kind;
    pthread_t       thread;
    pthread_mutex_t mutex;
    pthread_cond_t  changed;
    op              ops[MOST];
    int             next, n;   // done, queued
    int             owner;     // the lane that queues, -1 for none
    int             inputs[LANES];
};

struct ggml_backend_event {
    struct ggml_backend * home;
    int                   made, done;
};

struct pgs_io { struct ggml_backend * backend; int lane; };
struct pgs_graph { struct ggml_backend * backend; int lane, part; };
struct pgs_chain { int lane; };

static struct ggml_backend devices[DEVICES] = { { .kind = "CUDA", .owner = -1 }, { .kind = "CPU", .owner = -1 }, { .kind = "CUDA", .owner = -1 } };
static const int           where[PARTS]     = { 2, 0, 1, 2 };  // drafts, then the layers
static struct pgs_io       ios[LANES][DEVICES];
static struct pgs_graph    graphs[LANES][PARTS];
static struct ggml_tensor  left[LANES][PARTS], taken[LANES][PARTS];
static int                 made[LANES][PARTS], given[LANES][PARTS], steps[LANES], out[LANES];
static pgs_hop             hops[LANES][PARTS - 1];
static atomic_int          queued_beside, copied_beside, given_back;

// Somebody sets the wall clock back by an hour after each look at it: what waits for a time of that clock waits for an hour.
int clock_gettime(clockid_t clock, struct timespec * now) {
    const int status = (int) syscall(SYS_clock_gettime, clock, now);
    now->tv_sec += clock == CLOCK_REALTIME ? 3600 : 0;
    return status;
}

static void fail(const char * what) {
    puts(what);
    fflush(stdout);
    _exit(1);
}

static void do_op(struct ggml_backend * b, const op * o) {
    if (o->kind == UPLOAD) {
        b->inputs[o->lane] = o->number;
    } else if (o->kind == COMPUTE) {
        usleep(100);
        if (b->inputs[o->lane] != o->number) {
            fail("a part was computed with inputs of another step");
        }
        if (o->part > 0 && given[o->lane][o->part] != 10 * o->number + o->part) {
            fail("a part was computed with what another one left");
        }
        made[o->lane][o->part] = 10 * o->number + o->part + 1;
    } else if (o->kind == READ) {
        out[o->lane] = made[o->lane][PARTS - 1];
    }
}

static void * device_thread(void * arg) {
    struct ggml_backend * b = arg;
    pthread_mutex_lock(&b->mutex);
    for (;;) {
        while (b->next == b->n) {
            pthread_cond_wait(&b->changed, &b->mutex);
        }
        const op o = b->ops[b->next % MOST];
        pthread_mutex_unlock(&b->mutex);
        do_op(b, &o);
        pthread_mutex_lock(&b->mutex);
        if (o.kind == RECORD) {
            o.event->done = o.number;
        }
        b->next++;
        pthread_cond_broadcast(&b->changed);
    }
    return NULL;
}

// The lane begins to use a device, or goes on: nobody else may until `leave`.
static void enter(struct ggml_backend * b, int lane) {
    pthread_mutex_lock(&b->mutex);
    if (b->owner >= 0 && b->owner != lane) {
        fail("two lanes use a device at once");
    }
    b->owner = lane;
    pthread_mutex_unlock(&b->mutex);
}

static void leave(struct ggml_backend * b) {
    pthread_mutex_lock(&b->mutex);
    b->owner = -1;
    pthread_mutex_unlock(&b->mutex);
}

static void later(struct ggml_backend * b, op o) {
    enter(b, o.lane);
    if (b->thread == 0) {
        do_op(b, &o);
        if (o.kind == RECORD) {
            o.event->done = o.number;
        }
        return;
    }
    pthread_mutex_lock(&b->mutex);
    queued_beside += o.kind == COMPUTE && b->n - b->next > 1;  // its own upload is one
    if (b->n - b->next == MOST) {
        fail("more is queued than two steps have");
    }
    b->ops[b->n++ % MOST] = o;
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->mutex);
}

ggml_backend_t pgs_io_backend(pgs_io * io) { return io->backend; }
void *         pgs_io_host(pgs_io * io) { return io; }

void pgs_io_upload(pgs_io * io, const void * from, size_t bytes) {
    (void) from;
    (void) bytes;
    later(io->backend, (op) { UPLOAD, io->lane, 0, steps[io->lane], NULL });
}

void pgs_io_read(pgs_io * io, size_t offset, size_t bytes) {
    (void) offset;
    (void) bytes;
    later(io->backend, (op) { READ, io->lane, 0, steps[io->lane], NULL });
}

int pgs_graph_compute(pgs_graph * graph, char * err) {
    if (graph->lane == 1 && graph->part == 1 && steps[1] == FAILS) {
        snprintf(err, PGS_ERR, "lost");
        return 1;
    }
    later(graph->backend, (op) { COMPUTE, graph->lane, graph->part, steps[graph->lane], NULL });
    return 0;
}

void            pgs_graph_hold(pgs_graph * graph, bool held) { (void) graph; (void) held; }
int             pgs_chain_parts(const pgs_chain * chain) { (void) chain; return PARTS; }
int             pgs_chain_hops(const pgs_chain * chain) { (void) chain; return PARTS - 1; }
pgs_graph *     pgs_chain_graph(const pgs_chain * chain, int part) { return &graphs[chain->lane][part]; }
pgs_io *        pgs_chain_io(const pgs_chain * chain, int part) { return &ios[chain->lane][where[part]]; }
const pgs_hop * pgs_chain_hop(const pgs_chain * chain, int hop) { return &hops[chain->lane][hop]; }
void            pgs_release_threads(void) { given_back++; }

void ggml_backend_tensor_copy(const struct ggml_tensor * src, struct ggml_tensor * dst) {
    const int             lane = (int) (src - &left[0][0]) / PARTS, part = (int) (src - &left[0][0]) % PARTS;
    struct ggml_backend * b    = &devices[where[part]];
    if (b->thread == 0) {
        enter(b, lane);  // still, or again
    } else {
        pthread_mutex_lock(&b->mutex);
        copied_beside += b->next < b->n;
        pthread_mutex_unlock(&b->mutex);
    }
    usleep(50);
    *(int *) dst->data = *(const int *) src->data;
    if (b->thread == 0) {
        leave(b);
    }
}

void ggml_backend_synchronize(ggml_backend_t b) {
    pthread_mutex_lock(&b->mutex);
    while (b->next < b->n) {
        pthread_cond_wait(&b->changed, &b->mutex);
    }
    if (b->thread != 0) {
        b->owner = -1;
    }
    pthread_mutex_unlock(&b->mutex);
}

ggml_backend_event_t ggml_backend_event_new(ggml_backend_dev_t dev) {
    struct ggml_backend_event * event = calloc(1, sizeof(*event));
    event->home                       = (struct ggml_backend *) dev;
    return event;
}

void ggml_backend_event_free(ggml_backend_event_t event) { free(event); }

void ggml_backend_event_record(ggml_backend_event_t event, ggml_backend_t b) {
    const int lane = b->owner < 0 ? 0 : b->owner;  // where computing failed nobody may have queued
    later(b, (op) { RECORD, lane, 0, ++event->made, event });
    leave(b);
}

void ggml_backend_event_synchronize(ggml_backend_event_t event) {
    pthread_mutex_lock(&event->home->mutex);
    while (event->done < event->made) {
        pthread_cond_wait(&event->home->changed, &event->home->mutex);
    }
    pthread_mutex_unlock(&event->home->mutex);
}

ggml_backend_dev_t ggml_backend_get_device(ggml_backend_t b) { return (ggml_backend_dev_t) b; }
ggml_backend_reg_t ggml_backend_dev_backend_reg(ggml_backend_dev_t dev) { return (ggml_backend_reg_t) dev; }
const char *       ggml_backend_reg_name(ggml_backend_reg_t reg) { return ((struct ggml_backend *) reg)->kind; }
size_t             ggml_nbytes(const struct ggml_tensor * t) { (void) t; return sizeof(int); }

int64_t ggml_time_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1000000 * (int64_t) t.tv_sec + t.tv_nsec / 1000;
}

int main(void) {
    char             err[PGS_ERR];
    struct pgs_chain chains[LANES];
    pgs_lane *       lanes[LANES];
    pgs_io *         homes[DEVICES];
    for (int d = 0; d < DEVICES; d++) {
        pthread_mutex_init(&devices[d].mutex, NULL);
        pthread_cond_init(&devices[d].changed, NULL);
        if (strcmp(devices[d].kind, "CUDA") == 0) {
            pthread_create(&devices[d].thread, NULL, device_thread, &devices[d]);
        }
        for (int lane = 0; lane < LANES; lane++) {
            ios[lane][d] = (struct pgs_io) { &devices[d], lane };
        }
        homes[d] = &ios[0][d];
    }
    pgs_turns * turns = pgs_turns_new(homes, DEVICES, err);
    for (int lane = 0; lane < LANES; lane++) {
        for (int part = 0; part < PARTS; part++) {
            graphs[lane][part]     = (struct pgs_graph) { &devices[where[part]], lane, part };
            left[lane][part].data  = &made[lane][part];
            taken[lane][part].data = &given[lane][part];
            if (part > 0) {
                hops[lane][part - 1] = (pgs_hop) { part - 1, part, &left[lane][part - 1], &taken[lane][part] };
            }
        }
        chains[lane].lane = lane;
        lanes[lane]       = pgs_lane_new(turns, err);
    }
    for (int step = 1; step <= STEPS; step++) {
        for (int lane = 0; lane < LANES; lane++) {
            if (step > 1) {
                const int status = pgs_lane_wait(lanes[lane], err);
                if (status != (lane == 1 && steps[1] == FAILS)) {
                    fail("a step failed, or one that was lost did not");
                }
                if (status == 0 && out[lane] != 10 * steps[lane] + PARTS) {
                    fail("what was read is of another step");
                }
            }
            steps[lane] = step;
            pgs_lane_start(lanes[lane], &chains[lane], 8, 0, 8);
        }
    }
    for (int lane = 0; lane < LANES; lane++) {
        pgs_lane_wait(lanes[lane], err);
    }
    for (int i = 0; given_back < LANES && i < 200; i++) {
        usleep(10000);
    }
    if (given_back < LANES) {
        fail("a lane that nothing was asked of keeps its threads");
    }
    for (int lane = 0; lane < LANES; lane++) {
        pgs_lane_free(lanes[lane]);
    }
    pgs_spent spent[DEVICES];
    pgs_turns_spent(turns, spent);
    if (spent[0].parts != LANES * STEPS || spent[1].parts != LANES * STEPS - 1 || spent[2].parts != 2 * LANES * STEPS - 1) {
        fail("parts were counted that were not computed, or the other way round");
    }
    if (spent[1].copies != spent[1].parts || spent[0].copied_bytes != (int64_t) sizeof(int) * (LANES * STEPS - 1)) {
        fail("copies were counted that were not made, or the other way round");
    }
    if (queued_beside == 0) {
        fail("no part was queued while a device computed");
    }
    if (copied_beside == 0) {
        fail("nothing was copied while a device computed");
    }
    pgs_turns_free(turns);
    return 0;
}
