// Element types, rounding and the exponential that all kernels share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace epd {

struct BFloat16 {
    uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(BFloat16 value) {
    uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
}

inline void narrow(float value, float* target) { *target = value; }

inline void copy(const BFloat16* source, int64_t count, BFloat16* target) {
    std::memcpy(target, source, count * sizeof(BFloat16));
}

template <typename T>
inline void copy(const T* source, int64_t count, float* target) {
    for (int64_t i = 0; i < count; ++i) target[i] = widen(source[i]);
}

// Rounds to nearest even, as torch does.
inline void narrow(float value, BFloat16* target) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    bits += 0x7FFF + ((bits >> 16) & 1);
    target->bits = static_cast<uint16_t>(bits >> 16);
}

// The value that a tensor of type T would hold: where transformers' layers store a result, and so round it.
template <typename T>
inline float rounded(float value) {
    T stored;
    narrow(value, &stored);
    return widen(stored);
}

// exp to about 1 ulp on [-87, 88], and the end's value beyond: 2^k times a polynomial on [-ln2/2, ln2/2] (Cephes
// coefficients). Written without branches or calls, so that a loop over it vectorizes, which one over std::exp does
// not.
inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float k = std::floor(x * 1.44269504088896341f + 0.5f);
    float r = x - k * 0.693359375f;
    r -= k * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t scale_bits = (static_cast<int32_t>(k) + 127) << 23;
    float scale;
    std::memcpy(&scale, &scale_bits, sizeof(scale));
    return p * scale;
}

// The next block is fetched while this one is worked on: blocks lie scattered, so the hardware does not foresee them.
template <typename T>
inline void prefetch_rows(const T* rows, int64_t num_elements) {
    const char* bytes = reinterpret_cast<const char*>(rows);
    for (int64_t i = 0; i < num_elements * static_cast<int64_t>(sizeof(T)); i += 64)
        __builtin_prefetch(bytes + i, 0, 1);
}

}  // namespace epd
