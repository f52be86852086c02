// Weights on their way from files to devices, in threads of their own: each reads a piece into memory that the device copies from at the speed of its bus (pinned),
// and hands it on while the others read. One thread that copies from a map of the file has a tenth of that speed; and the caller plans graphs meanwhile.
#include "pgs.h"

#if defined(__unix__) || defined(__APPLE__)
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 4 << 20, MOST_THREADS = 16 };

typedef struct upload_job {
    int                  fd;
    size_t               at;  // in the file
    struct ggml_tensor * tensor;
    size_t               offset, bytes;  // in the tensor
} upload_job;

struct pgs_upload {
    ggml_backend_buffer_type_t staging;
    pthread_t                  threads[MOST_THREADS];
    int                        n_threads;
    pthread_mutex_t            mutex;
    pthread_cond_t             queued, arrived;
    upload_job *               jobs;
    int                        n_jobs, capacity;
    int                        next;  // the job of the next piece, which begins at byte `within` of it
    size_t                     within;
    int                        under_way;
    bool                       closing;
    pgs_upload_state           state;
};

static bool read_all(const upload_job * piece, char * to, int * error) {
    for (size_t done = 0; done < piece->bytes;) {
        const ssize_t n = pread(piece->fd, to + done, piece->bytes - done, (off_t) (piece->at + done));
        if (n <= 0 && !(n < 0 && errno == EINTR)) {
            *error = n < 0 ? errno : 0;
            return false;
        }
        done += n > 0 ? (size_t) n : 0;
    }
    return true;
}

static void fail(pgs_upload * u, int job, int error) {
    if (u->state.failed < 0) {
        u->state.failed = job;
        u->state.error  = error;
    }
}

static void * work(void * of) {
    pgs_upload *          u       = of;
    ggml_backend_buffer_t staging = NULL;  // allocated by this thread: pinning takes milliseconds
    pthread_mutex_lock(&u->mutex);
    for (;;) {
        while (!u->closing && (u->next == u->n_jobs || u->state.failed >= 0)) {
            pthread_cond_wait(&u->queued, &u->mutex);
        }
        if (u->closing) {
            break;
        }
        const int  number = u->next;
        upload_job piece  = u->jobs[number];
        const size_t left = piece.bytes - u->within;
        piece.at += u->within;
        piece.offset += u->within;
        piece.bytes = left < PIECE ? left : PIECE;
        u->within   = left > PIECE ? u->within + PIECE : 0;
        u->next += left <= PIECE;
        u->under_way++;
        pthread_mutex_unlock(&u->mutex);

        int  error = ENOMEM;
        staging    = staging != NULL ? staging : ggml_backend_buft_alloc_buffer(u->staging, PIECE);
        char *     place = staging != NULL ? ggml_backend_buffer_get_base(staging) : NULL;
        const bool read  = place != NULL && read_all(&piece, place, &error);
        if (read) {
            ggml_backend_tensor_set(piece.tensor, place, piece.offset, piece.bytes);
        }
        pthread_mutex_lock(&u->mutex);
        u->under_way--;
        if (read) {
            u->state.bytes += (int64_t) piece.bytes;
        } else {
            fail(u, number, error);
        }
        pthread_cond_broadcast(&u->arrived);
    }
    pthread_mutex_unlock(&u->mutex);
    ggml_backend_buffer_free(staging);
    return NULL;
}

pgs_upload * pgs_upload_new(ggml_backend_dev_t device, int threads) {
    pgs_upload * u = calloc(1, sizeof(*u));
    if (u == NULL) {
        return NULL;
    }
    ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(device);
    u->staging      = pinned != NULL ? pinned : ggml_backend_cpu_buffer_type();
    u->state.failed = -1;
    pthread_mutex_init(&u->mutex, NULL);
    pthread_cond_init(&u->queued, NULL);
    pthread_cond_init(&u->arrived, NULL);
    sigset_t all, before;  // signals are the caller's
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (u->n_threads < threads && u->n_threads < MOST_THREADS && pthread_create(&u->threads[u->n_threads], NULL, work, u) == 0) {
        u->n_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (u->n_threads == 0) {
        pgs_upload_free(u);
        return NULL;
    }
    return u;
}

bool pgs_upload_add(pgs_upload * u, int fd, size_t at, struct ggml_tensor * tensor, size_t offset, size_t bytes) {
    if (tensor->buffer == NULL || offset > ggml_nbytes(tensor) || bytes > ggml_nbytes(tensor) - offset || bytes == 0) {
        return false;
    }
    pthread_mutex_lock(&u->mutex);
    if (u->n_jobs == u->capacity) {
        const int    capacity = u->capacity > 0 ? 2 * u->capacity : 1024;
        upload_job * jobs     = realloc(u->jobs, (size_t) capacity * sizeof(*jobs));
        if (jobs == NULL) {
            pthread_mutex_unlock(&u->mutex);
            return false;
        }
        u->jobs     = jobs;
        u->capacity = capacity;
    }
    u->jobs[u->n_jobs++] = (upload_job) { fd, at, tensor, offset, bytes };
    pthread_cond_broadcast(&u->queued);
    pthread_mutex_unlock(&u->mutex);
    return true;
}

bool pgs_upload_wait(pgs_upload * u, int ms, pgs_upload_state * out) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += ms / 1000;
    until.tv_nsec += (long) (ms % 1000) * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&u->mutex);
    bool ended, late = false;
    while (!(ended = u->under_way == 0 && (u->next == u->n_jobs || u->state.failed >= 0)) && !late) {
        late = pthread_cond_timedwait(&u->arrived, &u->mutex, &until) == ETIMEDOUT;
    }
    *out = u->state;
    pthread_mutex_unlock(&u->mutex);
    return ended;
}

void pgs_upload_free(pgs_upload * u) {
    if (u == NULL) {
        return;
    }
    pthread_mutex_lock(&u->mutex);
    u->closing = true;
    pthread_cond_broadcast(&u->queued);
    pthread_mutex_unlock(&u->mutex);
    for (int i = 0; i < u->n_threads; i++) {
        pthread_join(u->threads[i], NULL);
    }
    pthread_mutex_destroy(&u->mutex);
    pthread_cond_destroy(&u->queued);
    pthread_cond_destroy(&u->arrived);
    free(u->jobs);
    free(u);
}
#else
pgs_upload * pgs_upload_new(ggml_backend_dev_t device, int threads) {
    (void) device;
    (void) threads;
    return NULL;  // the caller copies
}

bool pgs_upload_add(pgs_upload * u, int fd, size_t at, struct ggml_tensor * tensor, size_t offset, size_t bytes) {
    (void) u, (void) fd, (void) at, (void) tensor, (void) offset, (void) bytes;
    return false;
}

bool pgs_upload_wait(pgs_upload * u, int ms, pgs_upload_state * out) {
    (void) u, (void) ms, (void) out;
    return true;
}

void pgs_upload_free(pgs_upload * u) {
    (void) u;
}
#endif
