// All layers of a decoder over one packed step: norms, projections, rotary positions, paged attention, gated MLP.
//
// One call a step and one team of threads: between two phases of a layer is a barrier, not a call. Results are rounded
// where transformers' layers store them.
#pragma once

#include <omp.h>

#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "matmul.h"
#include "numbers.h"

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

// Hands out pieces of work, so that a thread whose core is shared with others takes fewer.
class Shares {
  public:
    explicit Shares(int64_t num_phases) : next_(new std::atomic<int64_t>[num_phases]) {
        for (int64_t i = 0; i < num_phases; ++i) next_[i].store(0, std::memory_order_relaxed);
    }
    template <typename Work>
    void run(int64_t phase, int64_t count, const Work& work) {
        for (int64_t i; (i = next_[phase].fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
    }

  private:
    std::unique_ptr<std::atomic<int64_t>[]> next_;
};

template <typename T>
inline void normalize(const T* row, const T* weight, int64_t size, float epsilon, T* out) {
    float squares = 0.0f;
    for (int64_t i = 0; i < size; ++i) squares += widen(row[i]) * widen(row[i]);
    const float factor = 1.0f / std::sqrt(squares / static_cast<float>(size) + epsilon);
    for (int64_t i = 0; i < size; ++i) narrow(widen(weight[i]) * rounded<T>(widen(row[i]) * factor), &out[i]);
}

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
        : model_(model), step_(step), cos_(cos), sin_(sin), out_(out), shares_(model.num_layers * kPhases + 1) {
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
    static constexpr int64_t kRowShare = 16;  // rows of a piece of work, where pieces are rows

    void layer(const Layer& weights, int64_t index) {
        const int64_t phase = index * kPhases;
        norm(phase, weights.input_norm, normed_);
#pragma omp barrier
        project_qkv(phase + 1, weights);
#pragma omp barrier
        place(phase + 2, weights, index);
#pragma omp barrier
        attend_step<T>(step_, index, qkv_, qkv_size_, heads(), attended_, [&](int64_t count, const auto& work) {
            shares_.run(phase + 3, count, work);
        });
#pragma omp barrier
        project_back(phase + 4, attended_, query_size_, weights.output, weights.output_bias);
#pragma omp barrier
        norm(phase + 5, weights.post_norm, normed_);
#pragma omp barrier
        gate(phase + 6, weights);
#pragma omp barrier
        project_back(phase + 7, gated_, model_.intermediate_size, weights.down, nullptr);
#pragma omp barrier
    }

    Heads heads() const { return {model_.num_heads, model_.num_kv_heads, model_.head_dim, model_.scale}; }

    template <typename Work>
    void by_rows(int64_t phase, const Work& work) {
        const int64_t n = step_.num_tokens;
        shares_.run(phase, (n + kRowShare - 1) / kRowShare, [&](int64_t share) {
            const int64_t end = std::min(n, (share + 1) * kRowShare);
            for (int64_t row = share * kRowShare; row < end; ++row) work(row);
        });
    }

    void norm(int64_t phase, const void* weight, T* out) {
        const int64_t size = model_.hidden_size;
        by_rows(phase, [&](int64_t row) {
            normalize(hidden_ + row * size, static_cast<const T*>(weight), size, model_.epsilon, out + row * size);
        });
    }

    template <typename Finish>
    void by_panels(int64_t phase, const T* input, int64_t num_inputs, const void* weights, int64_t num_panels,
                   const Finish& finish) {
        shares_.run(phase, num_panels, [&](int64_t index) {
            const T* panel = static_cast<const T*>(weights) + index * kPanel * num_inputs;
            multiply_panel(input, step_.num_tokens, num_inputs, panel, num_inputs,
                           [&](int64_t row, const float* sums) { finish(index, row, sums); });
        });
    }

    void project_qkv(int64_t phase, const Layer& weights) {
        const T* bias = static_cast<const T*>(weights.qkv_bias);
        by_panels(phase, normed_, model_.hidden_size, weights.qkv, (qkv_size_ + kPanel - 1) / kPanel,
                  [&](int64_t index, int64_t row, const float* sums) {
                      const int64_t first = index * kPanel, count = std::min(kPanel, qkv_size_ - first);
                      T* out = qkv_ + row * qkv_size_ + first;
                      for (int64_t i = 0; i < count; ++i) narrow(sums[i] + (bias ? widen(bias[first + i]) : 0.0f), &out[i]);
                  });
    }

    // Norms and rotates queries in place and keys into the cache; copies values there.
    void place(int64_t phase, const Layer& weights, int64_t layer_index) {
        const int64_t dim = model_.head_dim;
        T* kv = static_cast<T*>(step_.kv) + layer_index * step_.layer_stride;
        by_rows(phase, [&](int64_t row) {
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

    // A projection onto the residual stream.
    void project_back(int64_t phase, const T* input, int64_t num_inputs, const void* weights, const void* bias_or_null) {
        const int64_t size = model_.hidden_size;
        const T* bias = static_cast<const T*>(bias_or_null);
        by_panels(phase, input, num_inputs, weights, (size + kPanel - 1) / kPanel,
                  [&](int64_t index, int64_t row, const float* sums) {
                      const int64_t first = index * kPanel, count = std::min(kPanel, size - first);
                      T* out = hidden_ + row * size + first;
                      for (int64_t i = 0; i < count; ++i) {
                          const float value = rounded<T>(sums[i] + (bias ? widen(bias[first + i]) : 0.0f));
                          narrow(widen(out[i]) + value, &out[i]);
                      }
                  });
    }

    void gate(int64_t phase, const Layer& weights) {
        constexpr int64_t pairs = kPanel / 2;
        const int64_t size = model_.intermediate_size;
        by_panels(phase, normed_, model_.hidden_size, weights.gate_up, (size + pairs - 1) / pairs,
                  [&](int64_t index, int64_t row, const float* sums) {
                      const int64_t first = index * pairs, count = std::min(pairs, size - first);
                      T* out = gated_ + row * size + first;
                      for (int64_t i = 0; i < count; ++i) {
                          const float value = rounded<T>(sums[i]);
                          const float silu = rounded<T>(value / (1.0f + exponential(-value)));
                          narrow(silu * rounded<T>(sums[i + pairs]), &out[i]);
                      }
                  });
    }

    const Decoder& model_;
    const Step& step_;
    const T *cos_, *sin_;
    T *out_, *hidden_, *normed_, *qkv_, *attended_, *gated_;
    int64_t query_size_, kv_size_, qkv_size_;
    Shares shares_;
};

// out[row][output] in float32, rounded to T first as a linear layer's result is.
template <typename T>
void linear(const T* input, const T* weights, float* out, int64_t num_rows, int64_t num_inputs, int64_t num_outputs,
            int64_t num_threads) {
    const int64_t num_panels = (num_outputs + kPanel - 1) / kPanel;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1)
    for (int64_t index = 0; index < num_panels; ++index) {
        const int64_t first = index * kPanel, count = std::min(kPanel, num_outputs - first);
        multiply_panel(input, num_rows, num_inputs, weights + first * num_inputs, num_inputs,
                       [&](int64_t row, const float* sums) {
                           float* target = out + row * num_outputs + first;
                           for (int64_t i = 0; i < count; ++i) target[i] = rounded<T>(sums[i]);
                       });
    }
}

}  // namespace epd
