// Products of a few to a few hundred rows with a matrix whose columns were packed for it.
//
// A decode step is bound by reading weights, so they lie in the order in which they are used: panels of 32 outputs, in
// a panel one input after the other (for bfloat16 one pair of inputs after the other, as the machine's dot product
// takes them). A panel is read once from memory, for up to 12 rows at a time whose sums stay in registers. Measured
// against oneDNN's packed layout on Zen 4: twice as fast at one row, equal at several hundred.
#pragma once

#include "numbers.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace epd {

constexpr int64_t kPanel = 32;  // outputs of a panel: two vectors of 16
#ifdef __AVX512F__
constexpr int64_t kMaxTile = 12;  // rows whose sums fit the registers
#else
constexpr int64_t kMaxTile = 4;
#endif

typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(64), aligned(4), may_alias));

// Inputs that lie together in a panel.
template <typename T>
constexpr int64_t kTuple = sizeof(T) == 2 ? 2 : 1;

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }

struct FloatStep {
    Vector low, high;
    explicit FloatStep(const float* panel) : low(load(panel)), high(load(panel + 16)) {}
    inline void add(const float* input, Vector* sums) const {
        sums[0] += low * *input;
        sums[1] += high * *input;
    }
};

#ifdef __AVX512BF16__
struct BFloat16Step {
    __m512bh low, high;
    explicit BFloat16Step(const BFloat16* panel)
        : low((__m512bh)_mm512_loadu_si512(panel)), high((__m512bh)_mm512_loadu_si512(panel + 32)) {}
    inline void add(const BFloat16* input, Vector* sums) const {
        int32_t pair;
        std::memcpy(&pair, input, sizeof(pair));
        const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
        sums[0] = (Vector)_mm512_dpbf16_ps((__m512)sums[0], low, both);
        sums[1] = (Vector)_mm512_dpbf16_ps((__m512)sums[1], high, both);
    }
};
#else
struct BFloat16Step {
    Vector even_low, odd_low, even_high, odd_high;
    explicit BFloat16Step(const BFloat16* panel) {
        const Bits low = *reinterpret_cast<const Bits*>(panel), high = *reinterpret_cast<const Bits*>(panel + 32);
        even_low = (Vector)(low << 16), odd_low = (Vector)(low & 0xFFFF0000u);
        even_high = (Vector)(high << 16), odd_high = (Vector)(high & 0xFFFF0000u);
    }
    inline void add(const BFloat16* input, Vector* sums) const {
        const float even = widen(input[0]), odd = widen(input[1]);
        sums[0] += even_low * even;
        sums[0] += odd_low * odd;
        sums[1] += even_high * even;
        sums[1] += odd_high * odd;
    }
};
#endif

template <typename T>
struct StepOf {
    using type = FloatStep;
};
template <>
struct StepOf<BFloat16> {
    using type = BFloat16Step;
};

// sums[row][output] of Rows rows and one panel. Few rows split the inputs over Split sums: additions that wait for each
// other would be slower than memory.
template <typename T, int Rows, int Split>
__attribute__((noinline)) void multiply_tile(const T* input, int64_t input_stride, const T* panel, int64_t num_tuples,
                                             float* out) {
    constexpr int64_t tuple = kTuple<T>, step = kPanel * tuple;
    Vector sums[Split][Rows][2];
#pragma GCC unroll 4
    for (int s = 0; s < Split; ++s)
#pragma GCC unroll 12
        for (int row = 0; row < Rows; ++row) sums[s][row][0] = sums[s][row][1] = Vector{};
    int64_t k = 0;
    for (; k + Split <= num_tuples; k += Split) {
#pragma GCC unroll 4
        for (int s = 0; s < Split; ++s) {
            const typename StepOf<T>::type weights(panel + (k + s) * step);
#pragma GCC unroll 12
            for (int row = 0; row < Rows; ++row)
                weights.add(input + row * input_stride + (k + s) * tuple, sums[s][row]);
        }
    }
    for (; Split > 1 && k < num_tuples; ++k) {
        const typename StepOf<T>::type weights(panel + k * step);
#pragma GCC unroll 12
        for (int row = 0; row < Rows; ++row) weights.add(input + row * input_stride + k * tuple, sums[0][row]);
    }
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row) {
#pragma GCC unroll 4
        for (int s = 1; s < Split; ++s) {
            sums[0][row][0] += sums[s][row][0];
            sums[0][row][1] += sums[s][row][1];
        }
        store(out + row * kPanel, sums[0][row][0]);
        store(out + row * kPanel + 16, sums[0][row][1]);
    }
}

// Rows of the next tile, when `left` are to do: tiles of about equal size.
inline int64_t tile_rows(int64_t left) {
    const int64_t num_tiles = (left + kMaxTile - 1) / kMaxTile;
    return (left + num_tiles - 1) / num_tiles;
}

template <typename T>
inline void multiply_rows(int64_t rows, const T* input, int64_t stride, const T* panel, int64_t num_tuples,
                          float* out) {
    switch (rows) {
        case 1: return multiply_tile<T, 1, 4>(input, stride, panel, num_tuples, out);
        case 2: return multiply_tile<T, 2, 2>(input, stride, panel, num_tuples, out);
        case 3: return multiply_tile<T, 3, 2>(input, stride, panel, num_tuples, out);
        case 4: return multiply_tile<T, 4, 1>(input, stride, panel, num_tuples, out);
#ifdef __AVX512F__
        case 5: return multiply_tile<T, 5, 1>(input, stride, panel, num_tuples, out);
        case 6: return multiply_tile<T, 6, 1>(input, stride, panel, num_tuples, out);
        case 7: return multiply_tile<T, 7, 1>(input, stride, panel, num_tuples, out);
        case 8: return multiply_tile<T, 8, 1>(input, stride, panel, num_tuples, out);
        case 9: return multiply_tile<T, 9, 1>(input, stride, panel, num_tuples, out);
        case 10: return multiply_tile<T, 10, 1>(input, stride, panel, num_tuples, out);
        case 11: return multiply_tile<T, 11, 1>(input, stride, panel, num_tuples, out);
        case 12: return multiply_tile<T, 12, 1>(input, stride, panel, num_tuples, out);
#endif
    }
}

// One panel for all rows; `finish(row, sums)` takes the 32 sums of each.
template <typename T, typename Finish>
inline void multiply_panel(const T* input, int64_t num_rows, int64_t stride, const T* panel, int64_t num_inputs,
                           const Finish& finish) {
    alignas(64) float sums[kMaxTile * kPanel];
    for (int64_t row = 0; row < num_rows;) {
        const int64_t count = tile_rows(num_rows - row);
        multiply_rows(count, input + row * stride, stride, panel, num_inputs / kTuple<T>, sums);
        for (int64_t r = 0; r < count; ++r) finish(row + r, sums + r * kPanel);
        row += count;
    }
}

}  // namespace epd
