// Decode attention over a paged KV cache on the CPU: one new token a sequence, K and V read in place, once.
//
// A gather followed by a dense kernel moves every K and V byte three times; this is bound by reading them once. The
// query heads of a group share each row of K and V while it is in registers. Softmax runs online over blocks
// (Milakov & Gimelshein, 2018), as in FlashAttention. Plain loops, which the compiler vectorizes for the machine.
//
// Layout of one layer: K of token t in block b at kv + b * block_stride + t * token_stride + head * head_dim, and V at
// side_stride after it. All strides count elements.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

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

// Rounds to nearest even, as torch does.
inline void narrow(float value, BFloat16* target) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    bits += 0x7FFF + ((bits >> 16) & 1);
    target->bits = static_cast<uint16_t>(bits >> 16);
}

// exp for arguments at most 0, to about 1 ulp: 2^k times a polynomial on [-ln2/2, ln2/2] (Cephes coefficients).
// Written without branches or calls, so that a loop over it vectorizes, which one over std::exp does not.
inline float exp_negative(float x) {
    x = std::max(x, -87.0f);
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

struct Shape {
    int64_t block_stride, side_stride, token_stride;
    int64_t max_blocks, block_size, num_heads, num_kv_heads, head_dim;
    float scale;
};

template <typename T>
inline void widen_rows(const T* __restrict source, int64_t stride, int64_t count, int64_t dim, float* __restrict rows) {
    for (int64_t t = 0; t < count; ++t)
        for (int64_t d = 0; d < dim; ++d) rows[t * dim + d] = widen(source[t * stride + d]);
}

// Scores of one query head against the rows of a block.
inline void score(const float* __restrict q, const float* __restrict rows, int64_t count, int64_t dim,
                  float* __restrict scores) {
    for (int64_t t = 0; t < count; ++t) {
        float dot = 0.0f;
        for (int64_t d = 0; d < dim; ++d) dot += q[d] * rows[t * dim + d];
        scores[t] = dot;
    }
}

// Turns scores into weights relative to their highest value so far; returns how much earlier sums decay by.
inline float weigh(float* __restrict scores, int64_t count, float* top, float* total) {
    float highest = *top;
    for (int64_t t = 0; t < count; ++t) highest = std::max(highest, scores[t]);
    const float decay = exp_negative(*top - highest);
    float sum = 0.0f;
    for (int64_t t = 0; t < count; ++t) {
        scores[t] = exp_negative(scores[t] - highest);
        sum += scores[t];
    }
    *total = *total * decay + sum;
    *top = highest;
    return decay;
}

// HeadDim is the head size when it is known at compile time, so that a head's accumulator stays in registers; else 0.
template <int64_t HeadDim>
inline void accumulate(const float* __restrict weights, const float* __restrict rows, int64_t count, int64_t dim,
                       float decay, float* __restrict acc) {
    if constexpr (HeadDim != 0) {
        float local[HeadDim];
        for (int64_t d = 0; d < HeadDim; ++d) local[d] = acc[d] * decay;
        for (int64_t t = 0; t < count; ++t) {
            const float weight = weights[t];
            for (int64_t d = 0; d < HeadDim; ++d) local[d] += weight * rows[t * HeadDim + d];
        }
        for (int64_t d = 0; d < HeadDim; ++d) acc[d] = local[d];
    } else {
        for (int64_t d = 0; d < dim; ++d) acc[d] *= decay;
        for (int64_t t = 0; t < count; ++t)
            for (int64_t d = 0; d < dim; ++d) acc[d] += weights[t] * rows[t * dim + d];
    }
}

// The next block is fetched while this one is worked on: blocks lie scattered, so the hardware does not foresee them.
template <typename T>
inline void prefetch_rows(const T* rows, int64_t num_elements) {
    const char* bytes = reinterpret_cast<const char*>(rows);
    for (int64_t i = 0; i < num_elements * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(bytes + i, 0, 1);
}

// One sequence, KV heads [first_head, last_head).
template <typename T, int64_t HeadDim>
void attend_sequence(const T* query, const T* kv, const int64_t* table, int64_t context_len, int64_t first_head,
                     int64_t last_head, const Shape& shape, T* out) {
    const int64_t dim = HeadDim ? HeadDim : shape.head_dim;
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    const int64_t block_size = shape.block_size;
    const int64_t first_row = first_head * group, num_rows = (last_head - first_head) * group;
    thread_local std::vector<float> scratch;
    scratch.resize(num_rows * (2 * dim + 2 + block_size) + block_size * dim);
    float* q = scratch.data();              // [num_rows, dim], scaled
    float* acc = q + num_rows * dim;        // [num_rows, dim]
    float* top = acc + num_rows * dim;      // [num_rows]
    float* total = top + num_rows;          // [num_rows]
    float* scores = total + num_rows;       // [num_rows, block_size]
    float* rows = scores + num_rows * block_size;  // [block_size, dim]: K or V of a block and head, widened

    for (int64_t i = 0; i < num_rows * dim; ++i) {
        q[i] = widen(query[first_row * dim + i]) * shape.scale;
        acc[i] = 0.0f;
    }
    std::fill(top, top + num_rows, -std::numeric_limits<float>::max());
    std::fill(total, total + num_rows, 0.0f);

    for (int64_t start = 0; start < context_len; start += block_size) {
        const int64_t count = std::min(block_size, context_len - start);
        const T* block = kv + table[start / block_size] * shape.block_stride;
        if (start + block_size < context_len) {
            const T* next = kv + table[start / block_size + 1] * shape.block_stride;
            prefetch_rows(next, block_size * shape.token_stride);
            prefetch_rows(next + shape.side_stride, block_size * shape.token_stride);
        }
        for (int64_t head = first_head; head < last_head; ++head) {
            const T* keys = block + head * dim;
            const int64_t base = (head - first_head) * group;
            widen_rows(keys, shape.token_stride, count, dim, rows);
            for (int64_t h = base; h < base + group; ++h)
                score(q + h * dim, rows, count, dim, scores + h * block_size);
            widen_rows(keys + shape.side_stride, shape.token_stride, count, dim, rows);
            for (int64_t h = base; h < base + group; ++h) {
                const float decay = weigh(scores + h * block_size, count, top + h, total + h);
                accumulate<HeadDim>(scores + h * block_size, rows, count, dim, decay, acc + h * dim);
            }
        }
    }
    for (int64_t h = 0; h < num_rows; ++h)
        for (int64_t d = 0; d < dim; ++d) narrow(acc[h * dim + d] / total[h], &out[(first_row + h) * dim + d]);
}

template <typename T>
void attend(const T* query, const T* kv, const int64_t* tables, const int64_t* context_lens, T* out, int64_t num_seqs,
            const Shape& shape, int64_t num_threads) {
    // A lone sequence is shared out by heads; many sequences are not, so that each block is read in one go.
    const int64_t num_parts = std::min(shape.num_kv_heads, std::max<int64_t>(1, num_threads / num_seqs));
    const int64_t row_size = shape.num_heads * shape.head_dim;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1 && num_seqs * num_parts > 1)
    for (int64_t task = 0; task < num_seqs * num_parts; ++task) {
        const int64_t seq = task / num_parts, part = task % num_parts;
        const int64_t first = part * shape.num_kv_heads / num_parts, last = (part + 1) * shape.num_kv_heads / num_parts;
        const int64_t* table = tables + seq * shape.max_blocks;
        const T* q = query + seq * row_size;
        T* o = out + seq * row_size;
        switch (shape.head_dim) {
            case 64: attend_sequence<T, 64>(q, kv, table, context_lens[seq], first, last, shape, o); break;
            case 128: attend_sequence<T, 128>(q, kv, table, context_lens[seq], first, last, shape, o); break;
            default: attend_sequence<T, 0>(q, kv, table, context_lens[seq], first, last, shape, o);
        }
    }
}

}  // namespace

extern "C" void epd_paged_decode_float32(const void* query, const void* kv, const int64_t* tables,
                                         const int64_t* context_lens, void* out, int64_t num_seqs, const Shape* shape,
                                         int64_t num_threads) {
    attend(static_cast<const float*>(query), static_cast<const float*>(kv), tables, context_lens,
           static_cast<float*>(out), num_seqs, *shape, num_threads);
}

extern "C" void epd_paged_decode_bfloat16(const void* query, const void* kv, const int64_t* tables,
                                          const int64_t* context_lens, void* out, int64_t num_seqs, const Shape* shape,
                                          int64_t num_threads) {
    attend(static_cast<const BFloat16*>(query), static_cast<const BFloat16*>(kv), tables, context_lens,
           static_cast<BFloat16*>(out), num_seqs, *shape, num_threads);
}
