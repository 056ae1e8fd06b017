// Attention over a paged KV cache on the CPU: K and V are read in place, once.
//
// A gather followed by a dense kernel moves every K and V byte three times. Decodes (one new token a sequence) are bound
// by reading K and V: the query heads of a group share each row while it is in registers. Chunks of a prompt are bound
// by arithmetic: 64 keys at a time are packed for the matrix product that the layers use, and serve all query heads of
// their group. Softmax runs online over blocks (Milakov & Gimelshein, 2018), as in FlashAttention (Dao et al., 2022).
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
    float* q = scratch.data();              // [num_rows, dim], scaled
    float* acc = q + num_rows * dim;        // [num_rows, dim]
    float* top = acc + num_rows * dim;      // [num_rows]
    float* total = top + num_rows;          // [num_rows]
    float* scores = total + num_rows;       // [num_rows, block_size]
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
            for (int64_t h = base; h < base + group; ++h)
                score(q + h * dim, rows, count, dim, scores + h * block_size);
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

// Up to 64 keys and values of one head, as panels for matmul.h. What lies beyond `count` is zero.
template <typename T>
struct PackedKeys {
    static constexpr int64_t tuple = kTuple<T>;
    std::vector<T> keys, values;
    int64_t dim, num_value_panels;

    void reserve(int64_t head_dim) {
        dim = head_dim;
        num_value_panels = (dim + kPanel - 1) / kPanel;
        keys.resize(kKeys * dim);
        values.resize(num_value_panels * kPanel * kKeys);
    }

    void pack(const T* kv, const int64_t* table, int64_t start, int64_t count, const Step& step) {
        if (count < kKeys) {
            std::memset(static_cast<void*>(keys.data()), 0, keys.size() * sizeof(T));
            std::memset(static_cast<void*>(values.data()), 0, values.size() * sizeof(T));
        }
        for (int64_t i = 0; i < count; ++i) {
            const int64_t token = start + i;
            const T* key = kv + table[token / step.block_size] * step.block_stride +
                           (token % step.block_size) * step.token_stride;
            T* column = keys.data() + (i / kPanel) * kPanel * dim + (i % kPanel) * tuple;
            for (int64_t d = 0; d < dim; d += tuple) std::memcpy(column + d * kPanel, key + d, tuple * sizeof(T));
            const T* value = key + step.side_stride;
            T* row = values.data() + (i / tuple) * kPanel * tuple + i % tuple;
            for (int64_t panel = 0; panel < num_value_panels; ++panel) {
                const int64_t width = std::min(kPanel, dim - panel * kPanel);
                T* target = row + panel * kPanel * kKeys;
                for (int64_t d = 0; d < width; ++d) target[d * tuple] = value[panel * kPanel + d];
            }
        }
    }
};

// Online softmax and its product with V, for one query head and up to kMaxTile tokens against packed keys.
// `num_visible(row)` keys are visible to a row: all, none, or those up to itself.
template <typename T, typename Visible>
void attend_rows(const T* query, int64_t stride, int64_t rows, const PackedKeys<T>& packed, const Visible& num_visible,
                 float scale, float* top, float* total, float* acc) {
    constexpr int64_t tuple = kTuple<T>;
    const int64_t dim = packed.dim;
    alignas(64) float half[kMaxTile * kPanel];
    alignas(64) float scores[kMaxTile * kKeys];
    alignas(64) T weights[kMaxTile * kKeys];
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
        const T* values = packed.values.data() + panel * kPanel * kKeys;
        multiply_rows(rows, static_cast<const T*>(weights), kKeys, values, kKeys / tuple, half);
        const int64_t width = std::min(kPanel, dim - panel * kPanel);
        for (int64_t r = 0; r < rows; ++r) {
            float* target = acc + r * dim + panel * kPanel;
            for (int64_t d = 0; d < width; ++d) target[d] = target[d] * decay[r] + half[r * kPanel + d];
        }
    }
}

// Tokens [first_token, first_token + num_tokens) of a chunk and one KV head. `query` and `out` are rows of the step. A
// token sees those up to itself, or, if not IsCausal, the whole context.
template <typename T, bool IsCausal>
void attend_tile(const T* query, int64_t query_stride, const T* kv, const Chunk& chunk, int64_t first_token,
                 int64_t num_tokens, int64_t kv_head, const Step& step, const Heads& heads, T* out) {
    const int64_t dim = heads.head_dim, group = heads.num_heads / heads.num_kv_heads;
    const int64_t num_rows = group * num_tokens, out_stride = heads.num_heads * dim;
    thread_local std::vector<float> state;
    thread_local PackedKeys<T> packed;
    state.assign(num_rows * (dim + 2), 0.0f);
    packed.reserve(dim);
    float* acc = state.data();          // [group, num_tokens, dim]
    float* total = acc + num_rows * dim;
    float* top = total + num_rows;
    std::fill(top, top + num_rows, -std::numeric_limits<float>::max());

    const int64_t num_before = chunk.context_len - chunk.num_tokens + first_token;  // tokens before the tile's first
    const int64_t first_row = chunk.first_row + first_token;
    const int64_t num_keys = IsCausal ? num_before + num_tokens : chunk.context_len;
    for (int64_t start = 0; start < num_keys; start += kKeys) {
        packed.pack(kv + kv_head * dim, chunk.table, start, std::min(kKeys, num_keys - start), step);
        for (int64_t g = 0; g < group; ++g) {
            const T* head = query + first_row * query_stride + (kv_head * group + g) * dim;
            for (int64_t token = 0; token < num_tokens;) {
                const int64_t rows = tile_rows(num_tokens - token), state_row = g * num_tokens + token;
                attend_rows(head + token * query_stride, query_stride, rows, packed,
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
                             std::min(kTileTokens, chunk->num_tokens - first_token), task % heads.num_kv_heads, step, heads,
                             out);
    });
}

}  // namespace epd
