// Products of a few to a few hundred rows with a matrix whose columns were packed for it.
//
// A decode step is bound by reading weights, so they lie in the order in which they are used: panels of 32 outputs, in
// a panel one input after the other (for bfloat16 one pair of inputs after the other, as the machine's dot product
// takes them). A panel is read once from memory, for as many rows at a time as leave their sums in registers. Measured
// against oneDNN's packed layout on Zen 4: twice as fast at one row, equal at several hundred.
#pragma once

#include <vector>

#include "numbers.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace epd {

constexpr int64_t kPanel = 32;  // outputs of a panel
#if defined(__AVX512F__)
constexpr int kLanes = 16, kAccumulators = 24, kMaxTile = 12;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kAccumulators = 12, kMaxTile = 6;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kAccumulators = 24, kMaxTile = 6;
#else
constexpr int kLanes = 4, kAccumulators = 12, kMaxTile = 6;
#endif
constexpr int kVectors = kPanel / kLanes;

// A tile's sums stay in registers: all of a panel for few rows, part of it for more.
template <int Rows>
constexpr int kTileVectors = Rows * kVectors <= kAccumulators ? kVectors : kAccumulators / kMaxTile;

typedef float Vector __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

// What products of T are taken in where both sides are packed on the way: T itself if the machine multiplies it.
template <typename T>
struct OperandOf {
    using type = float;
};
#ifdef __AVX512BF16__
template <>
struct OperandOf<BFloat16> {
    using type = BFloat16;
};
#endif
template <typename T>
using Operand = typename OperandOf<T>::type;

// Inputs that lie together in a panel.
template <typename T>
constexpr int64_t kTuple = sizeof(T) == 2 ? 2 : 1;

inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }

// sums[row] += weights * inputs[row]: `weights(v)` is a vector of the panel, `input(row)` a number of a row, repeated.
template <int Rows, int Width, typename Weights, typename Input>
inline __attribute__((always_inline)) void add_product(const Weights& weights, const Input& input,
                                                       Vector (&sums)[Rows][Width]) {
    Vector columns[Width];
#pragma GCC unroll 8
    for (int v = 0; v < Width; ++v) columns[v] = weights(v);
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row) {
        const Vector value = input(row);
#pragma GCC unroll 8
        for (int v = 0; v < Width; ++v) sums[row][v] += columns[v] * value;
    }
}

// Adds one tuple of inputs of each row times their weights.
template <int Rows, int Width>
inline __attribute__((always_inline)) void add_tuple(const float* input, int64_t stride, const float* panel,
                                                     Vector (&sums)[Rows][Width]) {
    const Vector* weights = reinterpret_cast<const Vector*>(panel);
    add_product<Rows, Width>([&](int v) { return weights[v]; }, [&](int row) { return Vector{} + input[row * stride]; },
                             sums);
}

#ifdef __AVX512BF16__
template <int Rows, int Width>
inline __attribute__((always_inline)) void add_tuple(const BFloat16* input, int64_t stride, const BFloat16* panel,
                                                     Vector (&sums)[Rows][Width]) {
    static_assert(Width == 2);
    const __m512bh low = (__m512bh)_mm512_loadu_si512(panel), high = (__m512bh)_mm512_loadu_si512(panel + kPanel);
#pragma GCC unroll 12
    for (int row = 0; row < Rows; ++row) {
        int32_t pair;
        std::memcpy(&pair, input + row * stride, sizeof(pair));
        const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
        sums[row][0] = (Vector)_mm512_dpbf16_ps((__m512)sums[row][0], low, both);
        sums[row][1] = (Vector)_mm512_dpbf16_ps((__m512)sums[row][1], high, both);
    }
}
#else
// The first of each pair, then the second: a bfloat16 is the upper half of a float32.
template <int Rows, int Width>
inline __attribute__((always_inline)) void add_tuple(const BFloat16* input, int64_t stride, const BFloat16* panel,
                                                     Vector (&sums)[Rows][Width]) {
    const Bits* weights = reinterpret_cast<const Bits*>(panel);
    const auto pair = [&](int row) {
        uint32_t bits;
        std::memcpy(&bits, input + row * stride, sizeof(bits));
        return Bits{} + bits;
    };
    add_product<Rows, Width>([&](int v) { return (Vector)(weights[v] << 16); },
                             [&](int row) { return (Vector)(pair(row) << 16); }, sums);
    add_product<Rows, Width>([&](int v) { return (Vector)(weights[v] & 0xFFFF0000u); },
                             [&](int row) { return (Vector)(pair(row) & 0xFFFF0000u); }, sums);
}
#endif

// sums[row][output] of Rows rows and one panel. Few rows split the inputs over several sums: additions that wait for
// each other would be slower than memory.
template <typename T, int Rows>
__attribute__((noinline)) void multiply_tile(const T* input, int64_t input_stride, const T* panel, int64_t num_tuples,
                                             float* out) {
    constexpr int64_t tuple = kTuple<T>, step = kPanel * tuple;
    constexpr int Width = kTileVectors<Rows>, Split = Rows * Width <= 2 ? 4 : Rows * Width <= 6 ? 2 : 1;
    for (int first = 0; first < kVectors; first += Width, panel += Width * kLanes * tuple, out += Width * kLanes) {
        Vector sums[Split][Rows][Width];
#pragma GCC unroll 4
        for (int s = 0; s < Split; ++s)
#pragma GCC unroll 12
            for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 8
                for (int v = 0; v < Width; ++v) sums[s][row][v] = Vector{};
        int64_t k = 0;
        for (; k + Split <= num_tuples; k += Split) {
#pragma GCC unroll 4
            for (int s = 0; s < Split; ++s)
                add_tuple<Rows, Width>(input + (k + s) * tuple, input_stride, panel + (k + s) * step, sums[s]);
        }
        for (; Split > 1 && k < num_tuples; ++k)
            add_tuple<Rows, Width>(input + k * tuple, input_stride, panel + k * step, sums[0]);
#pragma GCC unroll 12
        for (int row = 0; row < Rows; ++row)
#pragma GCC unroll 8
            for (int v = 0; v < Width; ++v) {
#pragma GCC unroll 4
                for (int s = 1; s < Split; ++s) sums[0][row][v] += sums[s][row][v];
                store(out + row * kPanel + v * kLanes, sums[0][row][v]);
            }
    }
}

// Rows of the next tile, when `left` are to do. With few registers a whole panel's sums of three rows fit, or half a
// panel's of six: the latter reads weights less often, the former widens fewer numbers.
template <typename T>
inline int64_t tile_rows(int64_t left) {
#ifdef __AVX512F__
    const int64_t num_tiles = (left + kMaxTile - 1) / kMaxTile;
    return (left + num_tiles - 1) / num_tiles;
#else
    if (sizeof(T) == 4 && left >= kMaxTile) return kMaxTile;
    return std::min<int64_t>(left, 3);
#endif
}

template <typename T>
inline void multiply_rows(int64_t rows, const T* input, int64_t stride, const T* panel, int64_t num_tuples,
                          float* out) {
    switch (rows) {
        case 1: return multiply_tile<T, 1>(input, stride, panel, num_tuples, out);
        case 2: return multiply_tile<T, 2>(input, stride, panel, num_tuples, out);
        case 3: return multiply_tile<T, 3>(input, stride, panel, num_tuples, out);
        case 4: return multiply_tile<T, 4>(input, stride, panel, num_tuples, out);
        case 5: return multiply_tile<T, 5>(input, stride, panel, num_tuples, out);
        case 6: return multiply_tile<T, 6>(input, stride, panel, num_tuples, out);
#ifdef __AVX512F__
        case 7: return multiply_tile<T, 7>(input, stride, panel, num_tuples, out);
        case 8: return multiply_tile<T, 8>(input, stride, panel, num_tuples, out);
        case 9: return multiply_tile<T, 9>(input, stride, panel, num_tuples, out);
        case 10: return multiply_tile<T, 10>(input, stride, panel, num_tuples, out);
        case 11: return multiply_tile<T, 11>(input, stride, panel, num_tuples, out);
        case 12: return multiply_tile<T, 12>(input, stride, panel, num_tuples, out);
#endif
    }
}

// One panel for all rows; `finish(row, sums)` takes the 32 sums of each, and may change them.
template <typename T, typename Finish>
inline void multiply_panel(const T* input, int64_t num_rows, int64_t stride, const T* panel, int64_t num_inputs,
                           const Finish& finish) {
    alignas(64) float sums[kMaxTile * kPanel];
    for (int64_t row = 0; row < num_rows;) {
        const int64_t count = tile_rows<T>(num_rows - row);
        multiply_rows(count, input + row * stride, stride, panel, num_inputs / kTuple<T>, sums);
        for (int64_t r = 0; r < count; ++r) finish(row + r, sums + r * kPanel);
        row += count;
    }
}

// All panels that a thread gets from `next_panel(work)`, for all rows of `input`, which lie side by side;
// `finish(panel, row, sums)` takes the sums.
template <typename T, typename NextPanel, typename Finish>
inline void multiply_panels(const T* input, int64_t num_rows, const T* panels, int64_t num_inputs,
                            const NextPanel& next_panel, const Finish& finish) {
#ifndef __AVX512BF16__
    constexpr int64_t kManyRows = 24;  // from here on it pays to widen everything once
    if constexpr (sizeof(T) == 2)
        if (num_rows >= kManyRows) {
            thread_local std::vector<float> wide_input, wide_panel;
            wide_input.resize(num_rows * num_inputs);
            wide_panel.resize(kPanel * num_inputs);
            for (int64_t i = 0; i < num_rows * num_inputs; ++i) wide_input[i] = widen(input[i]);
            next_panel([&](int64_t index) {
                const T* panel = panels + index * kPanel * num_inputs;
                for (int64_t k = 0; k < num_inputs; k += 2, panel += 2 * kPanel)
                    for (int64_t i = 0; i < kPanel; ++i)
                        for (int64_t side = 0; side < 2; ++side)
                            wide_panel[(k + side) * kPanel + i] = widen(panel[2 * i + side]);
                multiply_panel<float>(wide_input.data(), num_rows, num_inputs, wide_panel.data(), num_inputs,
                                      [&](int64_t row, float* sums) { finish(index, row, sums); });
            });
            return;
        }
#endif
    next_panel([&](int64_t index) {
        multiply_panel(input, num_rows, num_inputs, panels + index * kPanel * num_inputs, num_inputs,
                       [&](int64_t row, float* sums) { finish(index, row, sums); });
    });
}

}  // namespace epd
