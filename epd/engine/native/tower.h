// One block of a vision tower over the patches of a batch: norms, projections with biases, rotary positions, attention
// within segments (windows, or whole frames), gated MLP. One call a block and one team of threads.
#pragma once

#include <omp.h>

#include <vector>

#include "attention.h"
#include "phases.h"

namespace epd {

// Addresses of a block's weights. Matrices are packed (matmul.h): q, k and v as one; gate and up as one whose panels
// hold 16 outputs of each, with one bias after the other.
struct Block {
    const void *first_norm, *qkv, *qkv_bias, *output, *output_bias, *second_norm, *gate_up, *gate_up_bias, *down,
        *down_bias;
    int64_t hidden_size, intermediate_size, num_heads, head_dim;
    float epsilon, scale;
};

// Rows [starts[i], starts[i + 1]) attend to each other.
struct Segments {
    const int64_t* starts;
    int64_t num_segments, num_rows, num_threads;
};

template <typename T>
class BlockForward {
  public:
    // `hidden` is changed in place; `cos` and `sin` are float32 [num_rows, head_dim].
    BlockForward(const Block& block, const Segments& segments, T* hidden, const float* cos, const float* sin)
        : block_(block),
          segments_(segments),
          hidden_(hidden),
          cos_(cos),
          sin_(sin),
          phases_(segments.num_rows, kPhases) {
        const int64_t n = segments.num_rows, size = block.hidden_size;
        // Kept from block to block by the calling thread: fresh pages every time would cost more than the arithmetic.
        thread_local std::vector<T> scratch;
        const int64_t needed = n * (5 * size + block.intermediate_size);
        if (static_cast<int64_t>(scratch.size()) < needed) scratch.resize(needed);
        normed_ = scratch.data();
        qkv_ = normed_ + n * size;
        attended_ = qkv_ + n * 3 * size;
        gated_ = attended_ + n * size;
        for (int64_t i = 0; i < segments.num_segments; ++i)
            for (int64_t row = segments.starts[i]; row < segments.starts[i + 1]; row += kTileRows)
                tiles_.push_back({i, row});
    }

    void run() {
        const int64_t size = block_.hidden_size, gated = block_.intermediate_size;
        const Projection<T> qkv(block_.qkv, block_.qkv_bias, size, 3 * size);
        const Projection<T> output(block_.output, block_.output_bias, size, size);
        const Projection<T> gate_up(block_.gate_up, block_.gate_up_bias, size, gated);
        const Projection<T> down(block_.down, block_.down_bias, gated, size);
#pragma omp parallel num_threads(segments_.num_threads) if (segments_.num_threads > 1)
        {
            phases_.norm(0, hidden_, block_.first_norm, size, block_.epsilon, normed_);
#pragma omp barrier
            phases_.project(1, normed_, qkv, qkv_);
#pragma omp barrier
            phases_.by_rows(2, [&](int64_t row) { turn(row); });
#pragma omp barrier
            const int64_t num_tasks = static_cast<int64_t>(tiles_.size()) * block_.num_heads;
            phases_.by_pieces(3, num_tasks,
                              [&](int64_t task) { attend(task / block_.num_heads, task % block_.num_heads); });
#pragma omp barrier
            phases_.project_back(4, attended_, output, hidden_);
#pragma omp barrier
            phases_.norm(5, hidden_, block_.second_norm, size, block_.epsilon, normed_);
#pragma omp barrier
            phases_.gate(6, normed_, gate_up, gated_);
#pragma omp barrier
            phases_.project_back(7, gated_, down, hidden_);
        }
    }

  private:
    static constexpr int64_t kPhases = 8;
    static constexpr int64_t kTileRows = 192;  // rows that share a packing of keys

    struct Tile {
        int64_t segment, first_row;
    };

    // Rotates the queries and keys of a row in place, in float32 as the tower does.
    void turn(int64_t row) {
        const int64_t dim = block_.head_dim, half = dim / 2;
        const float *cos = cos_ + row * dim, *sin = sin_ + row * dim;
        for (int64_t head = 0; head < 2 * block_.num_heads; ++head) {
            T* __restrict values = qkv_ + row * 3 * block_.hidden_size + head * dim;
            for (int64_t i = 0; i < half; ++i) {
                const float first = widen(values[i]), second = widen(values[i + half]);
                narrow(first * cos[i] - second * sin[i], &values[i]);
                narrow(second * cos[i + half] + first * sin[i + half], &values[i + half]);
            }
        }
    }

    // A segment's keys are a sequence in a cache of one block, which is the projection's result itself.
    void attend(int64_t tile, int64_t head) {
        static constexpr int64_t table[1] = {0};
        const int64_t size = block_.hidden_size, segment = tiles_[tile].segment;
        const int64_t first = segments_.starts[segment], count = segments_.starts[segment + 1] - first;
        Step step{};
        step.block_size = std::numeric_limits<int64_t>::max();
        step.token_stride = 3 * size;
        step.side_stride = size;
        const Heads heads{block_.num_heads, block_.num_heads, block_.head_dim, block_.scale};
        const Chunk chunk{first, count, count, table};
        const int64_t offset = tiles_[tile].first_row - first;
        attend_tile<T, false>(qkv_, 3 * size, qkv_ + first * 3 * size + size, chunk, offset,
                              std::min(kTileRows, count - offset), head, step, heads, attended_);
    }

    const Block& block_;
    const Segments& segments_;
    T *hidden_, *normed_, *qkv_, *attended_, *gated_;
    const float *cos_, *sin_;
    Phases<T> phases_;
    std::vector<Tile> tiles_;
};

}  // namespace epd
