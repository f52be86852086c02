// Reading a page of a mapped file that was truncated since raises SIGBUS ("Bus error"): this handler names the file and exits with status 1. Weights in host
// memory are such pages while a model is loaded, so there is no way to continue.
#include "pgs.h"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MOST_MAPS = 256, SENTENCE = 1024 };

static struct {
    _Atomic(const char *) start;  // NULL: not in use; set last
    size_t                bytes, length;
    char                  sentence[SENTENCE];
} maps[MOST_MAPS];

static pthread_mutex_t  mutex = PTHREAD_MUTEX_INITIALIZER;
static bool             installed;
static atomic_flag      said = ATOMIC_FLAG_INIT;
static struct sigaction before;  // what was to be done with the signal until now, and is with those of other memory

static void on_bus(int number, siginfo_t * info, void * context) {
    const bool   sent = info->si_code <= 0;  // sent by a process, whose id is at the place of the fault address
    const char * at   = info->si_addr;
    for (int i = 0; !sent && i < MOST_MAPS; i++) {
        const char * start = atomic_load(&maps[i].start);
        if (start != NULL && at >= start && at < start + maps[i].bytes) {
            while (atomic_flag_test_and_set(&said)) {  // by another thread, which ends this one
                pause();
            }
            if (write(STDERR_FILENO, maps[i].sentence, maps[i].length) < 0) {
                // no reader
            }
            _exit(1);
        }
    }
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else if (!sent || before.sa_handler == SIG_DFL) {  // a fault comes again, when this one returns
        sigaction(number, &before, NULL);
        if (sent) {
            raise(number);
        }
    }
}

int pgs_watch_map(const void * start, size_t bytes, const char * sentence) {
    int found = -1;
    pthread_mutex_lock(&mutex);
    if (!installed) {
        struct sigaction action;
        memset(&action, 0, sizeof(action));
        action.sa_sigaction = on_bus;
        action.sa_flags     = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        installed = sigaction(SIGBUS, &action, &before) == 0;
    }
    for (int i = 0; installed && found < 0 && i < MOST_MAPS; i++) {
        if (atomic_load(&maps[i].start) == NULL) {
            found          = i;
            maps[i].bytes  = bytes;
            maps[i].length = (size_t) snprintf(maps[i].sentence, SENTENCE, "%s", sentence);
            if (maps[i].length >= SENTENCE) {
                maps[i].length                = SENTENCE - 1;
                maps[i].sentence[SENTENCE - 2] = '\n';
            }
            atomic_store(&maps[i].start, (const char *) start);
        }
    }
    pthread_mutex_unlock(&mutex);
    return found;
}

void pgs_unwatch_map(int number) {
    pthread_mutex_lock(&mutex);
    if (number >= 0 && number < MOST_MAPS) {
        atomic_store(&maps[number].start, NULL);
    }
    pthread_mutex_unlock(&mutex);
}
#else
int pgs_watch_map(const void * start, size_t bytes, const char * sentence) {
    (void) start;
    (void) bytes;
    (void) sentence;
    return -1;
}

void pgs_unwatch_map(int number) {
    (void) number;
}
#endif
