// Attention over a paged KV cache on the CPU: K and V are read in place, once.
//
// A gather followed by a dense kernel moves every K and V byte three times. Decodes (one new token a sequence) are
// bound by reading K and V: the query heads of a group share each row while it is near. Chunks of a prompt are bound by
// arithmetic: 64 keys at a time are packed for the matrix product that the layers use, and serve all query heads of
// their group; where packing is a matter of vector shuffles, decodes go that way too. Softmax runs online over blocks
// (Milakov & Gimelshein, 2018), as in FlashAttention (Dao et al., 2022).
//
// Layout of one layer: K of token t in block b at kv + b * block_stride + t * token_stride + head * head_dim, and V at
// side_stride after it. All strides count elements.
#pragma once

#include <limits>
#include <vector>

#include "matmul.h"
#include "numbers.h"

namespace epd {

constexpr int64_t kMaxHeadDim = 512;

// New tokens [first_row, first_row + num_tokens) of the step, which end a context of context_len tokens.
struct Chunk {
    int64_t first_row, num_tokens, context_len;
    const int64_t* table;
};

// One step as all layers see it.
struct Step {
    void* kv;
    int64_t block_stride, layer_stride, side_stride, token_stride, block_size;
    const int64_t *slot_blocks, *slot_offsets;
    int64_t num_tokens, num_decodes;
    const int64_t *decode_tables, *decode_lens;
    int64_t max_blocks, num_chunks;
    const Chunk* chunks;
    int64_t num_threads;
};

struct Heads {
    int64_t num_heads, num_kv_heads, head_dim;
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
    const float decay = exponential(*top - highest);
    float sum = 0.0f;
    for (int64_t t = 0; t < count; ++t) {
        scores[t] = exponential(scores[t] - highest);
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

// One sequence's new token, KV heads [first_head, last_head).
template <typename T, int64_t HeadDim>
void decode_sequence(const T* query, const T* kv, const int64_t* table, int64_t context_len, int64_t first_head,
                     int64_t last_head, const Step& step, const Heads& heads, T* out) {
    const int64_t dim = HeadDim ? HeadDim : heads.head_dim;
    const int64_t group = heads.num_heads / heads.num_kv_heads;
    const int64_t block_size = step.block_size;
    const int64_t first_row = first_head * group, num_rows = (last_head - first_head) * group;
    thread_local std::vector<float> scratch;
    scratch.resize(num_rows * (2 * dim + 2 + block_size) + block_size * dim);
    float* q = scratch.data();                     // [num_rows, dim], scaled
    float* acc = q + num_rows * dim;               // [num_rows, dim]
    float* top = acc + num_rows * dim;             // [num_rows]
    float* total = top + num_rows;                 // [num_rows]
    float* scores = total + num_rows;              // [num_rows, block_size]
    float* rows = scores + num_rows * block_size;  // [block_size, dim]: K or V of a block and head, widened

    for (int64_t i = 0; i < num_rows * dim; ++i) {
        q[i] = widen(query[first_row * dim + i]) * heads.scale;
        acc[i] = 0.0f;
    }
    std::fill(top, top + num_rows, -std::numeric_limits<float>::max());
    std::fill(total, total + num_rows, 0.0f);

    for (int64_t start = 0; start < context_len; start += block_size) {
        const int64_t count = std::min(block_size, context_len - start);
        const T* block = kv + table[start / block_size] * step.block_stride;
        if (start + block_size < context_len) {
            const T* next = kv + table[start / block_size + 1] * step.block_stride;
            prefetch_rows(next, block_size * step.token_stride);
            prefetch_rows(next + step.side_stride, block_size * step.token_stride);
        }
        for (int64_t head = first_head; head < last_head; ++head) {
            const T* keys = block + head * dim;
            const int64_t base = (head - first_head) * group;
            widen_rows(keys, step.token_stride, count, dim, rows);
            for (int64_t h = base; h < base + group; ++h) score(q + h * dim, rows, count, dim, scores + h * block_size);
            widen_rows(keys + step.side_stride, step.token_stride, count, dim, rows);
            for (int64_t h = base; h < base + group; ++h) {
                const float decay = weigh(scores + h * block_size, count, top + h, total + h);
                accumulate<HeadDim>(scores + h * block_size, rows, count, dim, decay, acc + h * dim);
            }
        }
    }
    for (int64_t h = 0; h < num_rows; ++h)
        for (int64_t d = 0; d < dim; ++d) narrow(acc[h * dim + d] / total[h], &out[(first_row + h) * dim + d]);
}

constexpr int64_t kKeys = 64;        // keys that are packed at a time: two panels
constexpr int64_t kTileTokens = 48;  // new tokens that share a packing

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define EPD_PACKS_WITH_VECTORS
// Writes dword d of 16 rows side by side, for 16 dwords: to[d * stride] is a vector of 16. Rows past `count` are zero.
inline void transpose_dwords(const BFloat16* const* rows, int64_t count, uint32_t* to, int64_t stride) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = i < count ? _mm512_loadu_si512(rows[i]) : _mm512_setzero_si512();
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    // r[4 * i + j]: in lane L, dword 4 * L + j of rows 4 * i to 4 * i + 3.
    for (int i = 0; i < 4; ++i)
        for (int half = 0; half < 2; ++half) {
            r[4 * i + 2 * half] = _mm512_unpacklo_epi64(t[4 * i + half], t[4 * i + 2 + half]);
            r[4 * i + 2 * half + 1] = _mm512_unpackhi_epi64(t[4 * i + half], t[4 * i + 2 + half]);
        }
    for (int j = 0; j < 4; ++j) {
        const __m512i even_low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xDD);
        const __m512i even_high = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        const __m512i odd_high = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xDD);
        _mm512_storeu_si512(to + j * stride, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
        _mm512_storeu_si512(to + (4 + j) * stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
        _mm512_storeu_si512(to + (8 + j) * stride, _mm512_shuffle_i32x4(even_low, even_high, 0xDD));
        _mm512_storeu_si512(to + (12 + j) * stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD));
    }
}

// Writes 32 numbers of two rows alternately; a row that is null is zero.
inline void interleave_words(const BFloat16* first, const BFloat16* second, BFloat16* to) {
    alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i a = first ? _mm512_loadu_si512(first) : _mm512_setzero_si512();
    const __m512i b = second ? _mm512_loadu_si512(second) : _mm512_setzero_si512();
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, high, b));
}
#endif

// Up to 64 keys and values of one head, as panels for matmul.h. What lies beyond `count` is zero.
template <typename T>
struct PackedKeys {
    static constexpr int64_t tuple = kTuple<Operand<T>>;
    std::vector<Operand<T>> keys, values;
    int64_t dim, num_value_panels;

    void reserve(int64_t head_dim) {
        dim = head_dim;
        num_value_panels = (dim + kPanel - 1) / kPanel;
        keys.resize(kKeys * dim);
        values.resize(num_value_panels * kPanel * kKeys);
    }

    static const T* key_at(const T* kv, const int64_t* table, int64_t token, const Step& step) {
        return kv + table[token / step.block_size] * step.block_stride + (token % step.block_size) * step.token_stride;
    }

    // Whether `pack` takes some instructions a key, so that it pays for the few rows of a decode.
    static constexpr bool packs_fast(int64_t head_dim) {
#ifdef EPD_PACKS_WITH_VECTORS
        return sizeof(T) == 2 && head_dim % kPanel == 0;
#else
        return head_dim < 0;
#endif
    }

    void pack(const T* kv, const int64_t* table, int64_t start, int64_t count, const Step& step) {
#ifdef EPD_PACKS_WITH_VECTORS
        if constexpr (sizeof(T) == 2)
            if (packs_fast(dim)) return pack_vectors(kv, table, start, count, step);
#endif
        if (count < kKeys) {
            std::memset(static_cast<void*>(keys.data()), 0, keys.size() * sizeof(Operand<T>));
            std::memset(static_cast<void*>(values.data()), 0, values.size() * sizeof(Operand<T>));
        }
        for (int64_t i = 0; i < count; ++i) {
            const T* key = key_at(kv, table, start + i, step);
            Operand<T>* column = keys.data() + (i / kPanel) * kPanel * dim + (i % kPanel) * tuple;
            for (int64_t d = 0; d < dim; d += tuple) copy(key + d, tuple, column + d * kPanel);
            const T* value = key + step.side_stride;
            Operand<T>* row = values.data() + (i / tuple) * kPanel * tuple + i % tuple;
            for (int64_t panel = 0; panel < num_value_panels; ++panel) {
                const int64_t width = std::min(kPanel, dim - panel * kPanel);
                Operand<T>* target = row + panel * kPanel * kKeys;
                for (int64_t d = 0; d < width; ++d) copy(value + panel * kPanel + d, 1, target + d * tuple);
            }
        }
    }

#ifdef EPD_PACKS_WITH_VECTORS
    void pack_vectors(const T* kv, const int64_t* table, int64_t start, int64_t count, const Step& step) {
        const T* rows[kKeys] = {};
        for (int64_t i = 0; i < count; ++i) rows[i] = key_at(kv, table, start + i, step);
        for (int64_t first = 0; first < kKeys; first += 16) {
            uint32_t* column =
                reinterpret_cast<uint32_t*>(keys.data()) + (first / kPanel) * kPanel * (dim / 2) + first % kPanel;
            for (int64_t d = 0; d < dim; d += 32) {
                const T* shifted[16];
                for (int64_t i = 0; i < 16; ++i) shifted[i] = rows[first + i] + d;
                transpose_dwords(shifted, count - first, column + (d / 2) * kPanel, kPanel);
            }
        }
        for (int64_t i = 0; i < kKeys; i += 2)
            for (int64_t panel = 0; panel < num_value_panels; ++panel) {
                const int64_t shift = step.side_stride + panel * kPanel;
                interleave_words(i < count ? rows[i] + shift : nullptr, i + 1 < count ? rows[i + 1] + shift : nullptr,
                                 values.data() + panel * kPanel * kKeys + i * kPanel);
            }
    }
#endif
};

// Online softmax and its product with V, for one query head and up to kMaxTile tokens against packed keys.
// `num_visible(row)` keys are visible to a row: all, none, or those up to itself.
template <typename T, typename Visible>
void attend_rows(const Operand<T>* query, int64_t stride, int64_t rows, const PackedKeys<T>& packed,
                 const Visible& num_visible, float scale, float* top, float* total, float* acc) {
    constexpr int64_t tuple = kTuple<Operand<T>>;
    const int64_t dim = packed.dim;
    alignas(64) float half[kMaxTile * kPanel];
    alignas(64) float scores[kMaxTile * kKeys];
    alignas(64) Operand<T> weights[kMaxTile * kKeys];
    float decay[kMaxTile];
    for (int64_t panel = 0; panel < kKeys / kPanel; ++panel) {
        multiply_rows(rows, query, stride, packed.keys.data() + panel * kPanel * dim, dim / tuple, half);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t i = 0; i < kPanel; ++i) scores[r * kKeys + panel * kPanel + i] = half[r * kPanel + i] * scale;
    }
    for (int64_t r = 0; r < rows; ++r) {
        float* row = scores + r * kKeys;
        const int64_t visible = std::min(kKeys, std::max<int64_t>(0, num_visible(r)));
        decay[r] = visible ? weigh(row, visible, top + r, total + r) : 1.0f;
        for (int64_t i = visible; i < kKeys; ++i) row[i] = 0.0f;
        for (int64_t i = 0; i < kKeys; ++i) narrow(row[i], &weights[r * kKeys + i]);
    }
    for (int64_t panel = 0; panel < packed.num_value_panels; ++panel) {
        const Operand<T>* values = packed.values.data() + panel * kPanel * kKeys;
        multiply_rows(rows, static_cast<const Operand<T>*>(weights), kKeys, values, kKeys / tuple, half);
        const int64_t width = std::min(kPanel, dim - panel * kPanel);
        for (int64_t r = 0; r < rows; ++r) {
            float* target = acc + r * dim + panel * kPanel;
            for (int64_t d = 0; d < width; ++d) target[d] = target[d] * decay[r] + half[r * kPanel + d];
        }
    }
}

// One sequence's new token, KV heads [first_head, last_head), by the matrix product: the query heads of a group are its
// rows. As `decode_sequence`, where packing is fast.
template <typename T>
void decode_packed(const T* query, const T* kv, const int64_t* table, int64_t context_len, int64_t first_head,
                   int64_t last_head, const Step& step, const Heads& heads, T* out) {
    const int64_t dim = heads.head_dim, group = heads.num_heads / heads.num_kv_heads;
    const int64_t num_rows = (last_head - first_head) * group;
    thread_local std::vector<float> state;
    thread_local std::vector<Operand<T>> queries;
    thread_local PackedKeys<T> packed;
    packed.reserve(dim);
    queries.resize(num_rows * dim);
    copy(query + first_head * group * dim, num_rows * dim, queries.data());
    state.assign(num_rows * (dim + 2), 0.0f);
    float* acc = state.data();  // [num_rows, dim]
    float* total = acc + num_rows * dim;
    float* top = total + num_rows;
    std::fill(top, top + num_rows, -std::numeric_limits<float>::max());
    for (int64_t start = 0; start < context_len; start += kKeys) {
        const int64_t count = std::min(kKeys, context_len - start);
        for (int64_t next = start + kKeys; next < std::min(start + 2 * kKeys, context_len); ++next) {
            const T* keys = PackedKeys<T>::key_at(kv, table, next, step) + first_head * dim;
            prefetch_rows(keys, (last_head - first_head) * dim);
            prefetch_rows(keys + step.side_stride, (last_head - first_head) * dim);
        }
        for (int64_t head = first_head; head < last_head; ++head) {
            packed.pack(kv + head * dim, table, start, count, step);
            for (int64_t row = 0; row < group;) {
                const int64_t rows = tile_rows<Operand<T>>(group - row), first = (head - first_head) * group + row;
                attend_rows(
                    queries.data() + first * dim, dim, rows, packed, [&](int64_t) { return count; }, heads.scale,
                    top + first, total + first, acc + first * dim);
                row += rows;
            }
        }
    }
    T* target = out + first_head * group * dim;
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t d = 0; d < dim; ++d) narrow(acc[row * dim + d] / total[row], &target[row * dim + d]);
}

// Tokens [first_token, first_token + num_tokens) of a chunk and one KV head. `query` and `out` are rows of the step. A
// token sees those up to itself, or, if not IsCausal, the whole context.
template <typename T, bool IsCausal>
void attend_tile(const T* query, int64_t query_stride, const T* kv, const Chunk& chunk, int64_t first_token,
                 int64_t num_tokens, int64_t kv_head, const Step& step, const Heads& heads, T* out) {
    const int64_t dim = heads.head_dim, group = heads.num_heads / heads.num_kv_heads;
    const int64_t num_rows = group * num_tokens, out_stride = heads.num_heads * dim;
    thread_local std::vector<float> state;
    thread_local std::vector<Operand<T>> queries;  // [group, num_tokens, dim]
    thread_local PackedKeys<T> packed;
    state.assign(num_rows * (dim + 2), 0.0f);
    packed.reserve(dim);
    queries.resize(num_rows * dim);
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t token = chunk.first_row + first_token + row % num_tokens,
                      head = kv_head * group + row / num_tokens;
        copy(query + token * query_stride + head * dim, dim, queries.data() + row * dim);
    }
    float* acc = state.data();  // [group, num_tokens, dim]
    float* total = acc + num_rows * dim;
    float* top = total + num_rows;
    std::fill(top, top + num_rows, -std::numeric_limits<float>::max());

    const int64_t num_before = chunk.context_len - chunk.num_tokens + first_token;  // tokens before the tile's first
    const int64_t first_row = chunk.first_row + first_token;
    const int64_t num_keys = IsCausal ? num_before + num_tokens : chunk.context_len;
    for (int64_t start = 0; start < num_keys; start += kKeys) {
        packed.pack(kv + kv_head * dim, chunk.table, start, std::min(kKeys, num_keys - start), step);
        for (int64_t g = 0; g < group; ++g) {
            for (int64_t token = 0; token < num_tokens;) {
                const int64_t rows = tile_rows<Operand<T>>(num_tokens - token), state_row = g * num_tokens + token;
                attend_rows(
                    queries.data() + state_row * dim, dim, rows, packed,
                    [&](int64_t row) { return (IsCausal ? num_before + token + row + 1 : num_keys) - start; },
                    heads.scale, top + state_row, total + state_row, acc + state_row * dim);
                token += rows;
            }
        }
    }
    for (int64_t g = 0; g < group; ++g)
        for (int64_t token = 0; token < num_tokens; ++token) {
            const int64_t row = g * num_tokens + token;
            T* target = out + (first_row + token) * out_stride + (kv_head * group + g) * dim;
            for (int64_t d = 0; d < dim; ++d) narrow(acc[row * dim + d] / total[row], &target[d]);
        }
}

// The attention of one layer: decodes and chunks as pieces of work, which `share(count, work)` hands out.
// `query` is [num_tokens, query_stride], a row starting with its heads; `out` is [num_tokens, num_heads * head_dim].
template <typename T, typename Share>
void attend_step(const Step& step, int64_t layer, const T* query, int64_t query_stride, const Heads& heads, T* out,
                 const Share& share) {
    const T* kv = static_cast<const T*>(step.kv) + layer * step.layer_stride;
    // A lone sequence is shared out by heads; many sequences are not, so that each block is read in one go.
    const int64_t per_sequence = std::max<int64_t>(1, step.num_threads / std::max<int64_t>(1, step.num_decodes));
    const int64_t num_parts = std::min(heads.num_kv_heads, per_sequence);
    const int64_t num_decode_tasks = step.num_decodes * num_parts, row_size = heads.num_heads * heads.head_dim;
    int64_t num_tasks = num_decode_tasks;
    for (int64_t i = 0; i < step.num_chunks; ++i)
        num_tasks += (step.chunks[i].num_tokens + kTileTokens - 1) / kTileTokens * heads.num_kv_heads;
    share(num_tasks, [&](int64_t task) {
        if (task < num_decode_tasks) {
            const int64_t seq = task / num_parts, part = task % num_parts;
            const int64_t first = part * heads.num_kv_heads / num_parts;
            const int64_t last = (part + 1) * heads.num_kv_heads / num_parts;
            const int64_t *table = step.decode_tables + seq * step.max_blocks, length = step.decode_lens[seq];
            const T* q = query + seq * query_stride;
            T* o = out + seq * row_size;
            if (PackedKeys<T>::packs_fast(heads.head_dim))
                return decode_packed(q, kv, table, length, first, last, step, heads, o);
            switch (heads.head_dim) {
                case 64: return decode_sequence<T, 64>(q, kv, table, length, first, last, step, heads, o);
                case 128: return decode_sequence<T, 128>(q, kv, table, length, first, last, step, heads, o);
                default: return decode_sequence<T, 0>(q, kv, table, length, first, last, step, heads, o);
            }
        }
        task -= num_decode_tasks;
        const Chunk* chunk = step.chunks;
        for (;; ++chunk) {
            const int64_t num = (chunk->num_tokens + kTileTokens - 1) / kTileTokens * heads.num_kv_heads;
            if (task < num) break;
            task -= num;
        }
        // The last tiles of a chunk see the most keys: they go first, so that no thread is left with one at the end.
        const int64_t num_tiles = (chunk->num_tokens + kTileTokens - 1) / kTileTokens;
        const int64_t first_token = (num_tiles - 1 - task / heads.num_kv_heads) * kTileTokens;
        attend_tile<T, true>(query, query_stride, kv, *chunk, first_token,
                             std::min(kTileTokens, chunk->num_tokens - first_token), task % heads.num_kv_heads, step,
                             heads, out);
    });
}

}  // namespace epd
