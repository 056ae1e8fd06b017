// What layers of all kinds consist of, over the rows of a batch: norms, projections, gates. Threads of one team share
// each phase out; between two phases is a barrier, not a call. Results are rounded where transformers' layers store
// them.
#pragma once

#include <atomic>
#include <memory>

#include "matmul.h"
#include "numbers.h"

namespace epd {

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

// A matrix packed as matmul.h says, and its bias or null.
template <typename T>
struct Projection {
    const T *weights, *bias;
    int64_t num_inputs, num_outputs;

    Projection(const void* packed, const void* bias_or_null, int64_t inputs, int64_t outputs)
        : weights(static_cast<const T*>(packed)),
          bias(static_cast<const T*>(bias_or_null)),
          num_inputs(inputs),
          num_outputs(outputs) {}
    void add_bias(int64_t first, int64_t count, float* sums) const {
        if (!bias) return;
        for (int64_t i = 0; i < count; ++i) sums[i] += widen(bias[first + i]);
    }
};

template <typename T>
class Phases {
  public:
    Phases(int64_t num_rows, int64_t num_phases) : num_rows_(num_rows), shares_(num_phases) {}

    template <typename Work>
    void by_rows(int64_t phase, const Work& work) {
        shares_.run(phase, (num_rows_ + kRowShare - 1) / kRowShare, [&](int64_t share) {
            const int64_t end = std::min(num_rows_, (share + 1) * kRowShare);
            for (int64_t row = share * kRowShare; row < end; ++row) work(row);
        });
    }

    template <typename Work>
    void by_pieces(int64_t phase, int64_t count, const Work& work) {
        shares_.run(phase, count, work);
    }

    void norm(int64_t phase, const T* input, const void* weight, int64_t size, float epsilon, T* out) {
        by_rows(phase, [&](int64_t row) {
            normalize(input + row * size, static_cast<const T*>(weight), size, epsilon, out + row * size);
        });
    }

    void project(int64_t phase, const T* input, const Projection<T>& by, T* out) {
        by_panels(phase, input, by.num_inputs, by.weights, (by.num_outputs + kPanel - 1) / kPanel,
                  [&](int64_t index, int64_t row, float* sums) {
                      const int64_t first = index * kPanel, count = std::min(kPanel, by.num_outputs - first);
                      by.add_bias(first, count, sums);
                      T results[kPanel];
                      for (int64_t i = 0; i < kPanel; ++i) narrow(sums[i], &results[i]);
                      std::memcpy(out + row * by.num_outputs + first, results, count * sizeof(T));
                  });
    }

    // A projection onto the residual stream.
    void project_back(int64_t phase, const T* input, const Projection<T>& by, T* residual) {
        by_panels(phase, input, by.num_inputs, by.weights, (by.num_outputs + kPanel - 1) / kPanel,
                  [&](int64_t index, int64_t row, float* sums) {
                      const int64_t first = index * kPanel, count = std::min(kPanel, by.num_outputs - first);
                      by.add_bias(first, count, sums);
                      T *target = residual + row * by.num_outputs + first, results[kPanel] = {};
                      std::memcpy(results, target, count * sizeof(T));
                      for (int64_t i = 0; i < kPanel; ++i) narrow(widen(results[i]) + rounded<T>(sums[i]), &results[i]);
                      std::memcpy(target, results, count * sizeof(T));
                  });
    }

    // SiLU(gate) * up. The panels of `both` hold 16 outputs of each, and `num_outputs` is that of one of them; the
    // bias, if any, is that of the gate, then that of `up`.
    void gate(int64_t phase, const T* input, const Projection<T>& both, T* out) {
        constexpr int64_t pairs = kPanel / 2;
        const int64_t size = both.num_outputs;
        by_panels(phase, input, both.num_inputs, both.weights, (size + pairs - 1) / pairs,
                  [&](int64_t index, int64_t row, float* sums) {
                      const int64_t first = index * pairs, count = std::min(pairs, size - first);
                      both.add_bias(first, count, sums);
                      both.add_bias(size + first, count, sums + pairs);
                      T results[pairs];
                      for (int64_t i = 0; i < pairs; ++i) {
                          const float value = rounded<T>(sums[i]), up = rounded<T>(sums[i + pairs]);
                          narrow(rounded<T>(value / (1.0f + exponential(-value))) * up, &results[i]);
                      }
                      std::memcpy(out + row * size + first, results, count * sizeof(T));
                  });
    }

  private:
    static constexpr int64_t kRowShare = 16;  // rows of a piece of work, where pieces are rows

    template <typename Finish>
    void by_panels(int64_t phase, const T* input, int64_t num_inputs, const T* weights, int64_t num_panels,
                   const Finish& finish) {
        multiply_panels(
            input, num_rows_, weights, num_inputs, [&](const auto& work) { shares_.run(phase, num_panels, work); },
            finish);
    }

    int64_t num_rows_;
    Shares shares_;
};

}  // namespace epd
