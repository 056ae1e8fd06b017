// The functions that Python calls, once for each element type. Addresses are those of contiguous tensors.

#include "attention.h"
#include "decoder.h"
#include "matmul.h"
#include "numbers.h"
#include "tower.h"

namespace {

using namespace epd;

template <typename T>
void attend(const T* query, const Step& step, int64_t layer, const Heads& heads, T* out) {
    Shares shares(1);
#pragma omp parallel num_threads(step.num_threads) if (step.num_threads > 1)
    attend_step<T>(step, layer, query, heads.num_heads * heads.head_dim, heads, out,
                   [&](int64_t count, const auto& work) { shares.run(0, count, work); });
}

}  // namespace

#define EPD_EXPORT(NAME, T)                                                                                            \
    extern "C" void epd_attend_##NAME(const void* query, const Step* step, int64_t layer, const Heads* heads,          \
                                      void* out) {                                                                     \
        attend(static_cast<const T*>(query), *step, layer, *heads, static_cast<T*>(out));                              \
    }                                                                                                                  \
    extern "C" void epd_decoder_##NAME(const Decoder* model, const Step* step, const void* hidden, const void* cos,    \
                                       const void* sin, void* out) {                                                   \
        Forward<T>(*model, *step, static_cast<const T*>(hidden), static_cast<const T*>(cos),                           \
                   static_cast<const T*>(sin), static_cast<T*>(out))                                                   \
            .run();                                                                                                    \
    }                                                                                                                  \
    extern "C" void epd_tower_block_##NAME(const Block* block, const Segments* segments, void* hidden,                 \
                                           const float* cos, const float* sin) {                                       \
        BlockForward<T>(*block, *segments, static_cast<T*>(hidden), cos, sin).run();                                   \
    }                                                                                                                  \
    extern "C" void epd_linear_##NAME(const void* input, const void* weights, const void* bias, void* out,             \
                                      int64_t num_rows, int64_t num_inputs, int64_t num_outputs,                       \
                                      int64_t num_threads) {                                                           \
        linear(static_cast<const T*>(input), Projection<T>(weights, bias, num_inputs, num_outputs),                    \
               static_cast<float*>(out), num_rows, num_threads);                                                       \
    }

EPD_EXPORT(float32, float)
EPD_EXPORT(bfloat16, BFloat16)
