// Which instructions this processor has, and which of native kernels can therefore run on it.
#include "kernels.h"
#include "pgs.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>

static bool has_avx2(void) {
    __builtin_cpu_init();  // includes whether the operating system saves the registers
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static bool has_avx512vnni(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

static bool has_avxvnni(void) {
    unsigned a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
}
#endif

#ifdef PGS_HAVE_NEONDOT
#if defined(__APPLE__)
static bool has_dot_products(void) {
    return true;  // every processor that macOS 11 or later runs on
}
#else
#include <sys/auxv.h>

static bool has_dot_products(void) {
    return (getauxval(AT_HWCAP) >> 20 & 1) != 0;  // HWCAP_ASIMDDP
}
#endif
#endif

// Best first.
static const pgs_level * const LEVELS[] = {
#ifdef PGS_HAVE_AVX512VNNI
    &pgs_level_avx512vnni,
#endif
#ifdef PGS_HAVE_AVXVNNI
    &pgs_level_avxvnni,
#endif
#ifdef PGS_HAVE_AVXVNNI_EVEX
    &pgs_level_avxvnni_evex,
#endif
#ifdef PGS_HAVE_AVX2
    &pgs_level_avx2,
#endif
#ifdef PGS_HAVE_NEONDOT
    &pgs_level_neondot,
#endif
    NULL,
};

static bool runs_here(const pgs_level * level) {
#ifdef PGS_HAVE_AVX512VNNI
    if (level == &pgs_level_avx512vnni) {
        return has_avx512vnni();
    }
#endif
#ifdef PGS_HAVE_AVXVNNI
    if (level == &pgs_level_avxvnni) {
        return has_avxvnni();
    }
#endif
#ifdef PGS_HAVE_AVXVNNI_EVEX
    if (level == &pgs_level_avxvnni_evex) {
        return has_avx512vnni();
    }
#endif
#ifdef PGS_HAVE_AVX2
    if (level == &pgs_level_avx2) {
        return has_avx2();
    }
#endif
#ifdef PGS_HAVE_NEONDOT
    if (level == &pgs_level_neondot) {
        return has_dot_products();
    }
#endif
    return false;
}

const pgs_level * pgs_level_at(int index) {
    pgs_make_grids();
    for (int i = 0; LEVELS[i] != NULL; i++) {
        if (runs_here(LEVELS[i]) && index-- == 0) {
            return LEVELS[i];
        }
    }
    return NULL;
}

const char * pgs_level_name(const pgs_level * level) {
    return level->name;
}

const pgs_kernel * pgs_kernel_of(const pgs_level * level, int type) {
    for (int i = 0; i < level->count; i++) {
        if (level->kernels[i].type == type) {
            return &level->kernels[i];
        }
    }
    return NULL;
}

enum ggml_type pgs_activation_type(const pgs_level * level, enum ggml_type type) {
    int i = 0;
    while (level->kernels[i].activations != pgs_kernel_of(level, type)->activations) {
        i++;
    }
    return (enum ggml_type) level->kernels[i].type;
}
