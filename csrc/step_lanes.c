// Steps over several devices in parallel lanes (threads). A device computes for one lane at a time.
//
// While one group of slots is on the second device, another one is on the first. Devices that compute synchronously (CPU, workers) need threads for that, so
// a lane waits for each part and copy of its step; graphs, step buffers and copy targets are its own.
//
// A device with a queue (ggml-cuda) passes to the next lane as soon as a part is queued, so that uploads, launches and copies overlap with computation.
// Other devices are held until the part and its copies are done.
//
// Among waiting lanes, one that begins a step goes first: drafts are computed on the last device, and the others depend on them.
#include "pgs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <time.h>

enum { MOST_DEVICES = 16 };

struct pgs_turns {
    pthread_mutex_t mutex;
    pthread_cond_t  changed;
    int             n;
    ggml_backend_t  devices[MOST_DEVICES];
    bool            taken[MOST_DEVICES];
    int             urgent[MOST_DEVICES];  // lanes that wait for it to begin a step
    int64_t         until[MOST_DEVICES];   // when it had computed what it was last waited for
    pgs_spent       spent[MOST_DEVICES];
};

void pgs_turns_free(pgs_turns * turns) {
    if (turns != NULL) {
        pthread_cond_destroy(&turns->changed);
        pthread_mutex_destroy(&turns->mutex);
        free(turns);
    }
}

pgs_turns * pgs_turns_new(pgs_io ** ios, int n_ios, char * err) {
    if (n_ios > MOST_DEVICES) {
        snprintf(err, PGS_ERR, "a step goes over %d devices; %d are possible", n_ios, MOST_DEVICES);
        return NULL;
    }
    pgs_turns * turns = calloc(1, sizeof(*turns));
    if (turns == NULL) {
        snprintf(err, PGS_ERR, "no memory for the turns of %d devices", n_ios);
        return NULL;
    }
    turns->n = n_ios;
    for (int i = 0; i < n_ios; i++) {
        turns->devices[i] = pgs_io_backend(ios[i]);
    }
    pthread_mutex_init(&turns->mutex, NULL);
    pthread_cond_init(&turns->changed, NULL);
    return turns;
}

void pgs_turns_spent(pgs_turns * turns, pgs_spent * out) {
    pthread_mutex_lock(&turns->mutex);
    memcpy(out, turns->spent, sizeof(*out) * (size_t) turns->n);
    memset(turns->spent, 0, sizeof(turns->spent));
    pthread_mutex_unlock(&turns->mutex);
}

static int number(const pgs_turns * turns, ggml_backend_t backend) {
    int i = 0;
    while (i < turns->n - 1 && turns->devices[i] != backend) {
        i++;
    }
    return i;
}

static void take(pgs_turns * turns, int device, bool urgent) {
    const int64_t start = ggml_time_us();
    pthread_mutex_lock(&turns->mutex);
    turns->urgent[device] += urgent;
    while (turns->taken[device] || (!urgent && turns->urgent[device] > 0)) {
        pthread_cond_wait(&turns->changed, &turns->mutex);
    }
    turns->urgent[device] -= urgent;
    turns->taken[device] = true;
    turns->spent[device].queued_us += ggml_time_us() - start;
    pthread_mutex_unlock(&turns->mutex);
}

static void give(pgs_turns * turns, int device) {
    pthread_mutex_lock(&turns->mutex);
    turns->taken[device] = false;
    pthread_cond_broadcast(&turns->changed);
    pthread_mutex_unlock(&turns->mutex);
}

// A part queued at `start` is done; earlier parts of the queue count separately.
static void book_part(pgs_turns * turns, int device, int64_t start) {
    pthread_mutex_lock(&turns->mutex);
    const int64_t now = ggml_time_us(), began = turns->until[device] > start ? turns->until[device] : start;
    turns->spent[device].parts++;
    turns->spent[device].queued_us += began - start;
    turns->spent[device].computed_us += now - began;
    turns->until[device] = now;
    pthread_mutex_unlock(&turns->mutex);
}

static void book_copies(pgs_turns * turns, int device, int64_t start, int copies, int64_t bytes) {
    pthread_mutex_lock(&turns->mutex);
    turns->spent[device].copies += copies;
    turns->spent[device].copied_us += ggml_time_us() - start;
    turns->spent[device].copied_bytes += bytes;
    pthread_mutex_unlock(&turns->mutex);
}

typedef enum { IDLE, ASKED, OVER } lane_state;

struct pgs_lane {
    pgs_turns *     turns;
    ggml_backend_event_t computed[MOST_DEVICES];  // the lane's last part there; NULL where a device is held until it has computed
    pthread_t       thread;
    pthread_mutex_t mutex;
    pthread_cond_t  changed;
    lane_state      state;
    bool            warm;  // the thread has computed since it gave back what ggml computes with
    pgs_chain *     chain;
    size_t          upload_bytes, read_offset, read_bytes;
    int             status;
    char            err[PGS_ERR];
};

static void copy_rows(pgs_lane * lane, int part, int * hop, int device) {
    const int64_t start = ggml_time_us();
    int64_t       bytes = 0;
    int           copies = 0;
    for (; *hop < pgs_chain_hops(lane->chain) && pgs_chain_hop(lane->chain, *hop)->after == part; (*hop)++) {
        const pgs_hop * h = pgs_chain_hop(lane->chain, *hop);
        ggml_backend_tensor_copy(h->src, h->dst);
        copies++;
        bytes += (int64_t) ggml_nbytes(h->src);
    }
    if (copies > 0) {
        book_copies(lane->turns, device, start, copies, bytes);
    }
}

static int run(pgs_lane * lane) {
    pgs_turns * turns                  = lane->turns;
    const int   parts                  = pgs_chain_parts(lane->chain);
    bool        uploaded[MOST_DEVICES] = { false };
    int         hop                    = 0;
    for (int part = 0; part < parts; part++) {
        pgs_io *             io      = pgs_chain_io(lane->chain, part);
        const ggml_backend_t backend = pgs_io_backend(io);
        const int            device  = number(turns, backend);
        take(turns, device, part == 0 && parts > 1 && device == turns->n - 1);
        const int64_t start = ggml_time_us();
        if (!uploaded[device] && lane->upload_bytes > 0) {
            pgs_io_upload(io, pgs_io_host(io), lane->upload_bytes);
        }
        uploaded[device] = true;
        const int status = pgs_graph_compute(pgs_chain_graph(lane->chain, part), lane->err);
        if (status == 0 && part == parts - 1 && lane->read_bytes > 0) {
            pgs_io_read(io, lane->read_offset, lane->read_bytes);
        }
        const ggml_backend_event_t computed = lane->computed[device];
        if (computed != NULL) {
            ggml_backend_event_record(computed, backend);
            give(turns, device);
            ggml_backend_event_synchronize(computed);
        } else {
            ggml_backend_synchronize(backend);
        }
        book_part(turns, device, start);
        if (status == 0) {
            copy_rows(lane, part, &hop, device);
        }
        if (computed == NULL) {
            give(turns, device);
        }
        if (status != 0) {
            return status;
        }
    }
    return 0;
}

// No buffer that a step under way computes in may be exchanged for a larger one.
static void hold(const pgs_chain * chain, bool held) {
    for (int part = 0; part < pgs_chain_parts(chain); part++) {
        pgs_graph_hold(pgs_chain_graph(chain, part), held);
    }
}

// Waits for a change, or 20 ms of monotonic time; returns whether it timed out.
static bool wait_a_moment(pgs_lane * lane) {
    struct timespec until = { 0, 20000000 };
#ifdef __APPLE__
    return pthread_cond_timedwait_relative_np(&lane->changed, &lane->mutex, &until) != 0;
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    until.tv_nsec += now.tv_nsec;
    until.tv_sec = now.tv_sec + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return pthread_cond_timedwait(&lane->changed, &lane->mutex, &until) != 0;
#endif
}

static void cond_init(pthread_cond_t * cond) {
#ifdef __APPLE__
    pthread_cond_init(cond, NULL);
#else
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
#endif
}

// Ends this thread's ggml threads after an idle period: teams of more threads than there are cores sleep at every barrier.
static void wait_for_work(pgs_lane * lane) {
    while (lane->state == IDLE) {
        if (!lane->warm) {
            pthread_cond_wait(&lane->changed, &lane->mutex);
            continue;
        }
        if (wait_a_moment(lane) && lane->state == IDLE) {
            lane->warm = false;
            pgs_release_threads();
        }
    }
}

static void * live(void * arg) {
    pgs_lane * lane = arg;
    pthread_mutex_lock(&lane->mutex);
    for (;;) {
        wait_for_work(lane);
        if (lane->state == OVER) {
            break;
        }
        pthread_mutex_unlock(&lane->mutex);
        const int status = run(lane);
        hold(lane->chain, false);
        pthread_mutex_lock(&lane->mutex);
        lane->status = status;
        lane->warm   = true;
        lane->state  = IDLE;
        pthread_cond_broadcast(&lane->changed);
    }
    pthread_mutex_unlock(&lane->mutex);
    pgs_release_threads();
    return NULL;
}

static void release(pgs_lane * lane) {
    for (int i = 0; i < lane->turns->n; i++) {
        ggml_backend_event_free(lane->computed[i]);
    }
    pthread_cond_destroy(&lane->changed);
    pthread_mutex_destroy(&lane->mutex);
    free(lane);
}

// Whether one thread may queue on it while others wait for what they queued, and copy: that is known of ggml-cuda, however it was built.
static bool is_queue(ggml_backend_t backend) {
    const char * kind = ggml_backend_reg_name(ggml_backend_dev_backend_reg(ggml_backend_get_device(backend)));
    return strcmp(kind, "CUDA") == 0 || strcmp(kind, "ROCm") == 0 || strcmp(kind, "MUSA") == 0;
}

pgs_lane * pgs_lane_new(pgs_turns * turns, char * err) {
    pgs_lane * lane = calloc(1, sizeof(*lane));
    if (lane != NULL) {
        lane->turns = turns;
        for (int i = 0; i < turns->n; i++) {
            lane->computed[i] = is_queue(turns->devices[i]) ? ggml_backend_event_new(ggml_backend_get_device(turns->devices[i])) : NULL;
        }
        pthread_mutex_init(&lane->mutex, NULL);
        cond_init(&lane->changed);
        if (pthread_create(&lane->thread, NULL, live, lane) == 0) {
            return lane;
        }
        release(lane);
    }
    snprintf(err, PGS_ERR, "no thread could be started for the steps of a group of slots");
    return NULL;
}

void pgs_lane_free(pgs_lane * lane) {
    if (lane == NULL) {
        return;
    }
    pgs_lane_wait(lane, NULL);
    pthread_mutex_lock(&lane->mutex);
    lane->state = OVER;
    pthread_cond_broadcast(&lane->changed);
    pthread_mutex_unlock(&lane->mutex);
    pthread_join(lane->thread, NULL);
    release(lane);
}

void pgs_lane_start(pgs_lane * lane, pgs_chain * chain, size_t upload_bytes, size_t read_offset, size_t read_bytes) {
    pthread_mutex_lock(&lane->mutex);
    while (lane->state == ASKED) {
        pthread_cond_wait(&lane->changed, &lane->mutex);
    }
    lane->chain        = chain;
    lane->upload_bytes = upload_bytes;
    lane->read_offset  = read_offset;
    lane->read_bytes   = read_bytes;
    lane->status       = 0;
    lane->state        = ASKED;
    hold(chain, true);
    pthread_cond_broadcast(&lane->changed);
    pthread_mutex_unlock(&lane->mutex);
}

int pgs_lane_wait(pgs_lane * lane, char * err) {
    pthread_mutex_lock(&lane->mutex);
    while (lane->state == ASKED) {
        pthread_cond_wait(&lane->changed, &lane->mutex);
    }
    const int status = lane->status;
    if (status != 0 && err != NULL) {
        memcpy(err, lane->err, PGS_ERR);
    }
    pthread_mutex_unlock(&lane->mutex);
    return status;
}

bool pgs_lane_busy(pgs_lane * lane) {
    pthread_mutex_lock(&lane->mutex);
    const bool busy = lane->state == ASKED;
    pthread_mutex_unlock(&lane->mutex);
    return busy;
}
#else
static const char NO_THREADS[] = "groups of slots need POSIX threads, which this system does not have";

pgs_turns * pgs_turns_new(pgs_io ** ios, int n_ios, char * err) {
    (void) ios;
    (void) n_ios;
    snprintf(err, PGS_ERR, "%s", NO_THREADS);
    return NULL;
}
void       pgs_turns_free(pgs_turns * turns) { (void) turns; }
void       pgs_turns_spent(pgs_turns * turns, pgs_spent * out) { (void) turns; (void) out; }
pgs_lane * pgs_lane_new(pgs_turns * turns, char * err) { (void) turns; snprintf(err, PGS_ERR, "%s", NO_THREADS); return NULL; }
void       pgs_lane_free(pgs_lane * lane) { (void) lane; }
void       pgs_lane_start(pgs_lane * lane, pgs_chain * chain, size_t upload_bytes, size_t read_offset, size_t read_bytes) {
    (void) lane;
    (void) chain;
    (void) upload_bytes;
    (void) read_offset;
    (void) read_bytes;
}
int  pgs_lane_wait(pgs_lane * lane, char * err) { (void) lane; snprintf(err, PGS_ERR, "%s", NO_THREADS); return 1; }
bool pgs_lane_busy(pgs_lane * lane) { (void) lane; return false; }
#endif
