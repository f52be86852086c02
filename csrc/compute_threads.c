// The threads that ggml computes with, where it was built with OpenMP (llama-cpp-python's wheels are).
//
// GCC's OpenMP keeps a team per computing thread as long as the thread lives. With more team threads than cores, barriers spin briefly and then sleep in the
// kernel, which costs most of the decoding speed; so threads that stop computing release their team.
#include "pgs.h"

#include <stdatomic.h>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif

// CPU backends with an adaptive number of threads (ggml/cores.py).
enum { MOST_BACKENDS = 64 };

static struct {
    _Atomic(ggml_backend_t) backend;
    void (*set)(ggml_backend_t, int);
    int         most;
    _Atomic int now;
} followers[MOST_BACKENDS];

static int place_of(ggml_backend_t backend) {
    int i = 0;
    while (i < MOST_BACKENDS && atomic_load_explicit(&followers[i].backend, memory_order_acquire) != backend) {
        i++;
    }
    return i;
}

// Registers a backend, whose steps take `most` threads at first; false where there is no room. By one thread at a time.
bool pgs_threads_begin(ggml_backend_t backend, void * set, int most) {
    const int i = place_of(NULL);
    if (i == MOST_BACKENDS) {
        return false;
    }
    *(void **) &followers[i].set = set;
    followers[i].most            = most;
    followers[i].now             = most;
    atomic_store_explicit(&followers[i].backend, backend, memory_order_release);
    return true;
}

void pgs_threads_end(ggml_backend_t backend) {
    const int i = place_of(backend);
    if (i < MOST_BACKENDS) {
        atomic_store_explicit(&followers[i].backend, NULL, memory_order_release);
    }
}

// From the next graph on.
void pgs_threads_now(ggml_backend_t backend, int threads) {
    const int i = place_of(backend);
    if (i < MOST_BACKENDS) {
        followers[i].now = threads;
    }
}

// Before a graph of a registered backend; `all`: whatever other work leaves, because its bits depend on their number.
void pgs_threads_before(ggml_backend_t backend, bool all) {
    const int i = place_of(backend);
    if (i < MOST_BACKENDS) {
        followers[i].set(backend, all ? followers[i].most : followers[i].now);
    }
}

// Whether a node's bits depend on the number of threads: ggml's attention of one row cuts 512 positions or more into as many pieces.
static bool cuts_by_threads(const struct ggml_tensor * node) {
    return node->op == GGML_OP_FLASH_ATTN_EXT && node->src[0]->ne[1] == 1 && node->src[0]->ne[3] == 1 && node->src[1]->ne[1] >= 512;
}

bool pgs_needs_all_threads(struct ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        if (cuts_by_threads(ggml_graph_node(graph, i))) {
            return true;
        }
    }
    return false;
}

// Ends the team of the calling thread; its next graph makes another one, which takes some 30 us per thread. Not inside of a graph.
void pgs_release_threads(void) {
#if defined(__unix__) || defined(__APPLE__)
    const int soft = 1;  // omp_pause_soft: what belongs to others stays as it is
    int (*pause)(int);
    *(void **) &pause = dlsym(RTLD_DEFAULT, "omp_pause_resource_all");
    if (pause != NULL) {
        pause(soft);
    }
#endif
}
