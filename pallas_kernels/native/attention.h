// Causal attention of tiles of query tokens over paged K and V: `ops.tiled_paged_attention`.
//
// K and V are read where they lie, once for the query heads that share them, and only tokens that a query sees: the
// time follows the live tokens, and nothing is gathered. Sums and the softmax's weights are in float32. A query's bits
// depend on its own tokens alone.

#ifndef PALLAS_KERNELS_NATIVE_ATTENTION_H_
#define PALLAS_KERNELS_NATIVE_ATTENTION_H_

#include "attention_job.h"
#include "scores.h"
#include "values.h"

namespace native {

// Multiplies the weights of all rows of a head by the scales of the tokens' K or V; `scales` is the head's first one.
template <typename T, typename C>
void Rescale(const Job<T, C>& job, const float* scales, int64_t head) {
  for (int64_t token = 0; token < job.num_tokens; token += kLanes) {
    F32 factors;
    for (int i = 0; i < kLanes; ++i) factors[i] = scales[job.scale_offsets[token + i]];
    for (int64_t row = 0; row < job.num_rows; ++row) {
      float* weights = job.weight(head, row) + token;
      Store(weights, Load<F32>(weights) * factors);
    }
  }
}

// The live queries of a tile, `num_queries` from position `start` on, and the tokens [begin, end) that they see.
struct Seen {
  int64_t start, num_queries, begin, end;
};

template <typename T, typename C>
Seen SeenBy(const AttentionCall<T, C>& call, int64_t tile) {
  constexpr int64_t kAlignment = Packing<C>::kAlignment;
  const int64_t start = call.query_starts[tile], end = std::min<int64_t>(start + call.tile_len, call.seq_lens[tile]);
  // Padding: queries at or beyond the sequence's end, all of them if it has no tokens.
  const int64_t num_queries = start < 0 ? 0 : std::max<int64_t>(end - start, 0);
  return {start, num_queries, call.FirstSeen(std::max<int64_t>(start, 0)) / kAlignment * kAlignment, end};
}

// Writes the offsets of the tokens [begin, end) of a tile, and those of their scales, if there are any. The last
// token's pad them to `num_tokens`: it is read again without weight, for the cache may end behind it.
template <typename T, typename C>
void Locate(const AttentionCall<T, C>& call, int64_t tile, int64_t begin, int64_t end, int64_t num_tokens,
            int64_t* offsets, int64_t* scale_offsets) {
  const int32_t* const table = call.TableOf(tile);
  for (int64_t position = begin; position < end;) {
    const int64_t block = position / call.block_size, block_end = std::min((block + 1) * call.block_size, end);
    const int64_t block_id = call.first_block + table[block] * call.block_stride;
    for (; position < block_end; ++position) {
      const int64_t offset = position - block * call.block_size;
      offsets[position - begin] = call.strides.At(block_id, offset);
      if (scale_offsets) scale_offsets[position - begin] = call.scale_strides.At(block_id, offset);
    }
  }
  const int64_t count = end - begin;
  std::fill(offsets + count, offsets + num_tokens, offsets[count - 1]);
  if (scale_offsets) std::fill(scale_offsets + count, scale_offsets + num_tokens, scale_offsets[count - 1]);
}

// Computes one tile for the kv heads [first_head, first_head + num_heads). Meanwhile it prefetches the first tokens of
// K of `next_tile`, for as many heads from `next_head` on.
template <typename T, typename C>
void Attend(const AttentionCall<T, C>& call, int64_t tile, int64_t first_head, int64_t num_heads, int64_t next_tile,
            int64_t next_head) {
  using Value = typename T::Value;
  const auto [start, num_queries, begin, end] = SeenBy(call, tile);
  const int64_t group = call.num_q_heads / call.num_kv_heads;
  const auto place = [&, tile = tile](int64_t query, int64_t head) {
    return ((tile * call.tile_len + query) * call.num_q_heads + head) * call.head_dim;
  };
  for (int64_t query = num_queries; query < call.tile_len; ++query) {
    std::fill_n(call.out + place(query, first_head * group), num_heads * group * call.head_dim, Value{0});
  }
  if (num_queries == 0) return;

  constexpr int64_t kChunk = Packing<C>::kChunk;
  const int64_t num_tokens = (end - begin + kChunk - 1) / kChunk * kChunk;
  const int64_t num_rows = num_queries * group, num_places = num_heads * num_rows;
  const int64_t width = std::max(call.head_dim, kGroup), num_groups = (width + kGroup - 1) / kGroup;
  const int64_t width_bytes = width * sizeof(typename C::Value);
  const bool has_offsets = Packing<C>::kIsPacked || call.k_scales;
  const int64_t num_factors = (width_bytes + C::kBytes - 1) / C::kBytes * kLanes * C::kFactors;
  const Seen next = SeenBy(call, next_tile);
  const int64_t num_next = next.num_queries ? std::min(next.end - next.begin, kChunk) : 0;
  int64_t next_offsets[kChunk];
  if (num_next) Locate(call, next_tile, next.begin, next.begin + num_next, kChunk, next_offsets, nullptr);
  thread_local Scratch<int64_t> offsets, scale_offsets, ends, begins, places;
  thread_local Scratch<uint32_t> factors;
  thread_local Scratch<float> weights, totals, sums;
  thread_local Scratch<char> copy;
  const Job<T, C> job{call, first_head, num_heads, num_rows, num_tokens, width, num_groups, num_factors,
                      call.k + first_head * call.strides.head, call.v + first_head * call.strides.head,
                      offsets.Get(num_tokens + kChunk), scale_offsets.Get(has_offsets ? num_tokens : 0),
                      ends.Get(num_rows), begins.Get(num_rows), places.Get(num_places), factors.Get(num_places * num_factors),
                      weights.Get(num_places * num_tokens), totals.Get(num_places),
                      sums.Get(num_places * num_groups * kGroup), copy.Get(kChunk * width_bytes),
                      call.k + next_head * call.strides.head, next_offsets, num_next};

  Locate(call, tile, begin, end, num_tokens, job.offsets, has_offsets ? job.scale_offsets : nullptr);
  for (int64_t i = 0; i < kChunk; ++i) job.offsets[num_tokens + i] = i * width_bytes;
  if (width > call.head_dim) std::memset(job.copy, 0, kChunk * width_bytes);

  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t position = start + row / group;
    job.ends[row] = position + 1 - begin;
    job.begins[row] = call.FirstSeen(position) - begin;
  }
  for (int64_t head = 0; head < num_heads; ++head) {
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t i = job.index(head, row);
      job.places[i] = place(row / group, (first_head + head) * group + row % group);
      Spread<T, C>(call.q + job.places[i], call.head_dim, width, job.factors + i * num_factors);
    }
  }
  Score(job);
  for (int64_t head = 0; head < num_heads; ++head) {
    const int64_t its = (first_head + head) * call.scale_strides.head;
    if (call.k_scales) Rescale(job, call.k_scales + its, head);
    for (int64_t row = 0; row < num_rows; ++row) {
      float* const weights = job.weight(head, row);
      const int64_t row_begin = job.begin(row), row_end = job.ends[row];
      float& total = job.totals[job.index(head, row)];
      if (call.HasChanges()) {
        const Changes changes = call.ChangesOf((first_head + head) * group + row % group);
        Change(weights, row_begin, row_end, call.scale, changes);
        total = Soften(weights, num_tokens, row_begin, row_end, 1, changes.sink);
      } else {
        total = Soften(weights, num_tokens, row_begin, row_end, call.scale);
      }
    }
    if (call.v_scales) Rescale(job, call.v_scales + its, head);
  }
  Gather(job);
  Finish(job);
}

template <typename T, typename C, typename Pool>
void AttendAll(Pool& pool, const AttentionCall<T, C>& call) {
  // With all kv heads in a job, K and V are read in the order of memory; a job per head occupies more threads.
  const int64_t num_heads = call.num_tiles < 2 * pool.num_threads() ? 1 : call.num_kv_heads;
  const int64_t parts = call.num_kv_heads / num_heads;
  Share(pool, call.num_tiles * parts, [=](int64_t item, int64_t next) {
    Attend(call, item / parts, item % parts * num_heads, num_heads, next / parts, next % parts * num_heads);
  });
}

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_ATTENTION_H_
