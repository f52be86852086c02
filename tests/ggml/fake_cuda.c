// CUDA's driver as tests want it: FAKE_GPUS of them (2), whose contexts are numbers, and memory of the host. FAKE_PEER=none: no peer access is offered;
// wrong: one byte arrives as another; waits: a copy never ends; fails: it is refused. Every call that switches peer access on goes into FAKE_LOG.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uintptr_t current[8];
static int       depth;

static int is(const char * what) {
    const char * asked = getenv("FAKE_PEER");
    return asked != NULL && strcmp(asked, what) == 0;
}

int cuInit(unsigned flags) { return (int) flags; }
int cuDriverGetVersion(int * out) { *out = 13000; return 0; }
int cuDeviceGetCount(int * out) { const char * n = getenv("FAKE_GPUS"); *out = n != NULL ? atoi(n) : 2; return 0; }
int cuDeviceGet(int * out, int ordinal) { *out = 10 + ordinal; return 0; }
int cuDeviceGetUuid_v2(char * out, int device) { memset(out, device, 16); return 0; }
int cuDeviceCanAccessPeer(int * out, int a, int b) { *out = a != b && !is("none"); return 0; }
int cuDevicePrimaryCtxRetain(void ** out, int device) { *out = (void *) (uintptr_t) (0x700000000 + device); return 0; }
int cuCtxPushCurrent_v2(void * context) { current[++depth] = (uintptr_t) context; return 0; }
int cuCtxPopCurrent_v2(void ** out) { *out = (void *) current[depth--]; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuMemAlloc_v2(uint64_t * out, size_t bytes) { *out = (uint64_t) (uintptr_t) malloc(bytes); return 0; }
int cuMemcpyHtoD_v2(uint64_t to, const void * from, size_t bytes) { memcpy((void *) (uintptr_t) to, from, bytes); return 0; }
int cuMemcpyDtoH_v2(void * to, uint64_t from, size_t bytes) { memcpy(to, (void *) (uintptr_t) from, bytes); return 0; }
int cuMemsetD8_v2(uint64_t at, unsigned char value, size_t bytes) { memset((void *) (uintptr_t) at, value, bytes); return 0; }

int cuCtxEnablePeerAccess(void * peer, unsigned flags) {
    static uintptr_t seen[8];
    static int       n;
    const char *     log = getenv("FAKE_LOG");
    FILE *           out = log != NULL ? fopen(log, "a") : NULL;
    if (out != NULL) {
        fprintf(out, "%d to %d\n", (int) (current[depth] & 0xff) - 10, (int) ((uintptr_t) peer & 0xff) - 10);
        fclose(out);
    }
    for (int i = 0; i < n; i++) {
        if (seen[i] == (current[depth] << 8 ^ (uintptr_t) peer)) {
            return 704;
        }
    }
    seen[n++ % 8] = current[depth] << 8 ^ (uintptr_t) peer;
    return (int) flags;
}

int cuMemcpyPeer(uint64_t to, void * there, uint64_t from, void * here, size_t bytes) {
    if (is("fails")) {
        return 719;
    }
    while (is("waits")) {
        sleep(1);
    }
    memcpy((void *) (uintptr_t) to, (void *) (uintptr_t) from, bytes);
    if (is("wrong") && bytes > 1 << 20 && there != here) {
        ((char *) (uintptr_t) to)[bytes - 1] ^= 1;
    }
    return 0;
}
