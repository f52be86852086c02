// Calls ggml's AMX kernels, compiled with amx_tiles.h, and compares with the product of the dequantised weights.
// Prints "TYPE INPUTS ROWS BATCHES NMSE" for each product.

#include "amx/mmq.h"
#include "ggml-backend.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

void ggml_barrier(struct ggml_threadpool *) {} // there is one thread

static double error(ggml_type type, int64_t n_in, int64_t rows, int64_t batches) {
    const int64_t n_out = 64, n_rows = rows * batches, behind = 4096;
    ggml_context * ctx = ggml_init({16 * ggml_tensor_overhead(), nullptr, true});
    ggml_tensor * w = ggml_new_tensor_2d(ctx, type, n_in, n_out);
    ggml_tensor * x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_in, rows, batches);
    ggml_tensor * y = ggml_mul_mat(ctx, w, x);

    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> weights(n_in * n_out), input(n_in * n_rows), output(n_out * n_rows + behind, 7.0f);
    for (float & v : weights) v = normal(random);
    for (float & v : input) v = normal(random);
    std::vector<char> quantised(ggml_nbytes(w)), packed(ggml_backend_amx_get_alloc_size(w) + 64), work(ggml_backend_amx_desired_wsize(y));
    ggml_quantize_chunk(type, weights.data(), quantised.data(), 0, n_out, n_in, nullptr);
    ggml_get_type_traits(type)->to_float(quantised.data(), weights.data(), n_in * n_out);

    w->data = packed.data();
    x->data = input.data();
    y->data = output.data();
    ggml_backend_amx_convert_weight(w, quantised.data(), 0, quantised.size());
    ggml_compute_params params = {};
    params.nth = 1;
    params.wdata = work.data();
    params.wsize = work.size();
    ggml_backend_amx_mul_mat(&params, y);

    double sum = 0, norm = 0;
    for (int64_t r = 0; r < n_rows; r++) {
        for (int64_t n = 0; n < n_out; n++) {
            double right = 0;
            for (int64_t k = 0; k < n_in; k++) right += double(weights[n * n_in + k]) * input[r * n_in + k];
            sum += (output[r * n_out + n] - right) * (output[r * n_out + n] - right);
            norm += right * right;
        }
    }
    for (int64_t i = 0; i < behind; i++) sum += output[n_out * n_rows + i] != 7.0f; // written behind the tensor
    ggml_free(ctx);
    return sum / norm;
}

int main() {
    ggml_cpu_init();
    for (ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS})
        for (int64_t n_in : {32, 64, 256, 512})
            for (int64_t rows : {1, 2, 16, 31, 32, 33, 65})
                for (int64_t batches : {1, 3})
                    if (n_in % ggml_blck_size(type) == 0)
                        printf("%s %d %d %d %g\n", ggml_type_name(type), int(n_in), int(rows), int(batches), error(type, n_in, rows, batches));
}
