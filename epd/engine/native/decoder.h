// All layers of a decoder over one packed step: norms, projections, rotary positions, paged attention, gated MLP. One
// call a step and one team of threads.
#pragma once

#include <omp.h>

#include <vector>

#include "attention.h"
#include "phases.h"

namespace epd {

// Addresses of one layer's weights; those that a model lacks are null. Matrices are packed (matmul.h): q, k and v as
// one; gate and up as one whose panels hold 16 outputs of each.
struct Layer {
    const void *input_norm, *qkv, *qkv_bias, *query_norm, *key_norm, *output, *output_bias, *post_norm, *gate_up, *down;
};

struct Decoder {
    const Layer* layers;
    const void* final_norm;
    int64_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
    float epsilon, scale;
};

// Rotates one head (halves paired, as transformers' rotate_half does), from source to target.
template <typename T>
inline void rotate(const T* __restrict source, const T* __restrict cos, const T* __restrict sin, int64_t dim,
                   T* __restrict target) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float first = widen(source[i]), second = widen(source[i + half]);
        narrow(rounded<T>(first * widen(cos[i])) - rounded<T>(second * widen(sin[i])), &target[i]);
        narrow(rounded<T>(second * widen(cos[i + half])) + rounded<T>(first * widen(sin[i + half])), &target[i + half]);
    }
}

template <typename T>
class Forward {
  public:
    Forward(const Decoder& model, const Step& step, const T* hidden, const T* cos, const T* sin, T* out)
        : model_(model),
          step_(step),
          cos_(cos),
          sin_(sin),
          out_(out),
          phases_(step.num_tokens, model.num_layers * kPhases + 1) {
        const int64_t n = step.num_tokens;
        query_size_ = model.num_heads * model.head_dim;
        kv_size_ = model.num_kv_heads * model.head_dim;
        qkv_size_ = query_size_ + 2 * kv_size_;
        // Kept from step to step by the calling thread: fresh pages every step would cost more than the arithmetic.
        thread_local std::vector<T> scratch;
        const int64_t needed = n * (2 * model.hidden_size + qkv_size_ + query_size_ + model.intermediate_size);
        if (static_cast<int64_t>(scratch.size()) < needed) scratch.resize(needed);
        hidden_ = scratch.data();
        normed_ = hidden_ + n * model.hidden_size;
        qkv_ = normed_ + n * model.hidden_size;
        attended_ = qkv_ + n * qkv_size_;
        gated_ = attended_ + n * query_size_;
        std::memcpy(hidden_, hidden, n * model.hidden_size * sizeof(T));
    }

    void run() {
#pragma omp parallel num_threads(step_.num_threads) if (step_.num_threads > 1)
        {
            for (int64_t index = 0; index < model_.num_layers; ++index) layer(model_.layers[index], index);
            norm(model_.num_layers * kPhases, model_.final_norm, out_);
        }
    }

  private:
    static constexpr int64_t kPhases = 8;

    void layer(const Layer& weights, int64_t index) {
        const int64_t phase = index * kPhases, size = model_.hidden_size, gated = model_.intermediate_size;
        norm(phase, weights.input_norm, normed_);
#pragma omp barrier
        phases_.project(phase + 1, normed_, Projection<T>(weights.qkv, weights.qkv_bias, size, qkv_size_), qkv_);
#pragma omp barrier
        place(phase + 2, weights, index);
#pragma omp barrier
        attend_step<T>(step_, index, qkv_, qkv_size_, heads(), attended_,
                       [&](int64_t count, const auto& work) { phases_.by_pieces(phase + 3, count, work); });
#pragma omp barrier
        const Projection<T> output(weights.output, weights.output_bias, query_size_, size);
        phases_.project_back(phase + 4, attended_, output, hidden_);
#pragma omp barrier
        norm(phase + 5, weights.post_norm, normed_);
#pragma omp barrier
        phases_.gate(phase + 6, normed_, Projection<T>(weights.gate_up, nullptr, size, gated), gated_);
#pragma omp barrier
        phases_.project_back(phase + 7, gated_, Projection<T>(weights.down, nullptr, gated, size), hidden_);
#pragma omp barrier
    }

    Heads heads() const { return {model_.num_heads, model_.num_kv_heads, model_.head_dim, model_.scale}; }

    void norm(int64_t phase, const void* weight, T* out) {
        phases_.norm(phase, hidden_, weight, model_.hidden_size, model_.epsilon, out);
    }

    // Norms and rotates queries in place and keys into the cache; copies values there.
    void place(int64_t phase, const Layer& weights, int64_t layer_index) {
        const int64_t dim = model_.head_dim;
        T* kv = static_cast<T*>(step_.kv) + layer_index * step_.layer_stride;
        phases_.by_rows(phase, [&](int64_t row) {
            T* qkv = qkv_ + row * qkv_size_;
            T* slot = kv + step_.slot_blocks[row] * step_.block_stride + step_.slot_offsets[row] * step_.token_stride;
            for (int64_t head = 0; head < model_.num_heads; ++head)
                turn(qkv + head * dim, weights.query_norm, row, qkv + head * dim);
            for (int64_t head = 0; head < model_.num_kv_heads; ++head)
                turn(qkv + query_size_ + head * dim, weights.key_norm, row, slot + head * dim);
            std::memcpy(slot + step_.side_stride, qkv + query_size_ + kv_size_, kv_size_ * sizeof(T));
        });
    }

    void turn(const T* source, const void* norm_weight, int64_t row, T* target) {
        const int64_t dim = model_.head_dim;
        T head[kMaxHeadDim];
        if (norm_weight)
            normalize(source, static_cast<const T*>(norm_weight), dim, model_.epsilon, head);
        else
            std::memcpy(head, source, dim * sizeof(T));
        rotate(head, cos_ + row * dim, sin_ + row * dim, dim, target);
    }

    const Decoder& model_;
    const Step& step_;
    const T *cos_, *sin_;
    T *out_, *hidden_, *normed_, *qkv_, *attended_, *gated_;
    int64_t query_size_, kv_size_, qkv_size_;
    Phases<T> phases_;
};

// out[row][output] in float32, rounded to T first as a linear layer's result is.
template <typename T>
void linear(const T* input, const Projection<T>& by, float* out, int64_t num_rows, int64_t num_threads) {
    const int64_t num_outputs = by.num_outputs, num_panels = (num_outputs + kPanel - 1) / kPanel;
    Shares shares(1);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    multiply_panels(
        input, num_rows, by.weights, by.num_inputs, [&](const auto& work) { shares.run(0, num_panels, work); },
        [&](int64_t index, int64_t row, float* sums) {
            const int64_t first = index * kPanel, count = std::min(kPanel, num_outputs - first);
            by.add_bias(first, count, sums);
            float* target = out + row * num_outputs + first;
            for (int64_t i = 0; i < count; ++i) target[i] = rounded<T>(sums[i]);
        });
}

}  // namespace epd
