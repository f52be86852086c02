// Preloaded, it is ggml-cpu's repacked buffer type: one called FAKE, whose products raise the signal FAKE_SIGNAL. With FAKE_WORDS it says on
// stderr what ggml says of AMX, and a line more.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "ggml-backend.h"
#include "ggml.h"

// ggml's own, which are in no installed header
namespace ggml::cpu {
struct tensor_traits {
    virtual ~tensor_traits() {}
    virtual bool work_size(int, const ggml_tensor *, size_t & size) { return size = 0, true; }
    virtual bool compute_forward(void *, ggml_tensor *) { return raise(atoi(getenv("FAKE_SIGNAL"))), true; }
};
struct extra_buffer_type {
    virtual ~extra_buffer_type() {}
    virtual bool supports_op(ggml_backend_dev_t, const ggml_tensor * op);
    virtual tensor_traits * get_tensor_traits(const ggml_tensor * op);
};
}  // namespace ggml::cpu

struct fake_buffer { void * iface[11]; ggml_backend_buffer_type_t buft; };
struct fake_type {
    const char * (*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t);
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    void * others[3];
    ggml_backend_dev_t device;
    ggml::cpu::extra_buffer_type * context;
};

static ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    reinterpret_cast<fake_buffer *>(buffer)->buft = type;
    return buffer;
}

static ggml::cpu::extra_buffer_type extra;
static ggml::cpu::tensor_traits traits;
static fake_type fake = {[](ggml_backend_buffer_type_t) { return "FAKE"; }, allocate, [](ggml_backend_buffer_type_t) -> size_t { return 64; },
                         {}, nullptr, &extra};

static bool mine(const ggml_tensor * op) {
    return op->op == GGML_OP_MUL_MAT && op->src[0]->buffer && (void *) reinterpret_cast<fake_buffer *>(op->src[0]->buffer)->buft == &fake;
}
bool ggml::cpu::extra_buffer_type::supports_op(ggml_backend_dev_t, const ggml_tensor * op) { return mine(op); }
ggml::cpu::tensor_traits * ggml::cpu::extra_buffer_type::get_tensor_traits(const ggml_tensor * op) { return mine(op) ? &traits : nullptr; }

ggml_backend_buffer_type_t ggml_backend_cpu_repack_buffer_type() {
    static int asked;
    if (getenv("FAKE_WORDS") && !asked++) fprintf(stderr, "AMX is not ready to be used!\nsomething else\n");
    if (!getenv("FAKE_SIGNAL")) return nullptr;
    fake.device = ggml_backend_reg_dev_get(ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)), 0);
    return reinterpret_cast<ggml_backend_buffer_type_t>(&fake);
}
