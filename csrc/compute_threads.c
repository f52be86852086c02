// The threads that ggml computes with, where it was built with OpenMP (llama-cpp-python's wheels are).
//
// GCC's OpenMP gives every thread that computes a team of its own, which lives as long as that thread, asleep or not. While a process has more
// threads in teams than it has cores, every barrier of every team spins for 1,000 rounds at most, not 300,000, and then sleeps in the kernel. So a
// thread that computes no more, and a second one that does, on two cores: 73 sleeps per token instead of none, 187 tok/s instead of 712.
#include "pgs.h"

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif

// Ends the team of the calling thread; its next graph makes another one, which takes some 30 us per thread. Not inside of a graph.
void pgs_give_back_threads(void) {
#if defined(__unix__) || defined(__APPLE__)
    const int soft = 1;  // omp_pause_soft: what belongs to others stays as it is
    int (*pause)(int);
    *(void **) &pause = dlsym(RTLD_DEFAULT, "omp_pause_resource_all");
    if (pause != NULL) {
        pause(soft);
    }
#endif
}
