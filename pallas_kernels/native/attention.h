// Causal attention of tiles of query tokens over paged K and V: `ops.tiled_paged_attention`.
//
// K and V are read where they lie, once for the query heads that share them, and only tokens that a query sees: the
// time follows the live tokens, and nothing is gathered. Tiles whose tables begin with the same blocks read these once,
// where that pays. Sums and the softmax's weights are in float32. A query's bits depend on its own tokens alone.

#ifndef PALLAS_KERNELS_NATIVE_ATTENTION_H_
#define PALLAS_KERNELS_NATIVE_ATTENTION_H_

#include "attention_job.h"
#include "scores.h"
#include "shared_prefixes.h"
#include "values.h"

namespace native {

// Tiles of as many rows or more share nothing with others.
constexpr int64_t kMostSharingRows = 16;
// So many bytes of weights stay in the second-level cache, beside K and V.
constexpr int64_t kWeightBytes = 1 << 19;

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

// Tiles that are computed together, and the pieces of their tokens.
struct Together {
  const int32_t* tiles;
  int64_t num_tiles;
  const Piece* pieces;
  int64_t num_pieces;
};

// Computes tiles for the kv heads [first_head, first_head + num_heads). Meanwhile it prefetches the first tokens of K of
// `next_tile`, for as many heads from `next_head` on.
template <typename T, typename C>
void Attend(const AttentionCall<T, C>& call, const Together& part, int64_t first_head, int64_t num_heads, int64_t next_tile,
            int64_t next_head) {
  using Value = typename T::Value;
  constexpr int64_t kChunk = Packing<C>::kChunk;
  const int64_t group = call.num_q_heads / call.num_kv_heads;
  const auto place = [&](int64_t tile, int64_t query, int64_t head) {
    return ((tile * call.tile_len + query) * call.num_q_heads + head) * call.head_dim;
  };
  const auto padded = [](int64_t tokens) { return (tokens + kChunk - 1) / kChunk * kChunk; };
  thread_local Scratch<int64_t> offsets, scale_offsets, ends, begins, places, first_rows;
  thread_local Scratch<uint32_t> factors;
  thread_local Scratch<float> weights, totals, sums;
  thread_local Scratch<char> copy;

  int64_t num_rows = 0;
  int64_t* const row_of = first_rows.Get(part.num_tiles + 1);  // each tile's first row
  for (int64_t i = 0; i < part.num_tiles; ++i) {
    const int64_t num_queries = SeenBy(call, part.tiles[i]).num_queries;
    for (int64_t query = num_queries; query < call.tile_len; ++query) {
      std::fill_n(call.out + place(part.tiles[i], query, first_head * group), num_heads * group * call.head_dim, Value{0});
    }
    row_of[i] = num_rows;
    num_rows += num_queries * group;
  }
  row_of[part.num_tiles] = num_rows;
  if (num_rows == 0) return;

  const int64_t origin = SeenBy(call, part.tiles[0]).begin;
  int64_t num_tokens = 0, num_offsets = 0;
  for (int64_t i = 0; i < part.num_pieces; ++i) {
    const int64_t tokens = padded(part.pieces[i].end - part.pieces[i].begin);
    num_tokens = std::max(num_tokens, part.pieces[i].begin - origin + tokens);
    num_offsets += tokens + kChunk;
  }
  // Of many rows, the weights of a token would lie in few sets of a cache.
  const int64_t stride = part.num_tiles > 1 ? num_tokens + num_tokens / kShareUnit % 2 * kShareUnit + kShareUnit : num_tokens;
  const int64_t num_places = num_heads * num_rows;
  const int64_t width = std::max(call.head_dim, kGroup), num_groups = (width + kGroup - 1) / kGroup;
  const int64_t width_bytes = width * sizeof(typename C::Value);
  const bool has_offsets = Packing<C>::kIsPacked || call.k_scales;
  const int64_t num_factors = (width_bytes + C::kBytes - 1) / C::kBytes * kLanes * C::kFactors;
  const Seen next = SeenBy(call, next_tile);
  const int64_t num_next = next.num_queries ? std::min(next.end - next.begin, kChunk) : 0;
  int64_t next_offsets[kChunk];
  if (num_next) Locate(call, next_tile, next.begin, next.begin + num_next, kChunk, next_offsets, nullptr);
  const Job<T, C> job{call, first_head, num_heads, num_rows, num_tokens, num_rows, 0, stride, width, num_groups, num_factors,
                      call.k + first_head * call.strides.head, call.v + first_head * call.strides.head,
                      offsets.Get(num_offsets), scale_offsets.Get(has_offsets ? num_offsets : 0),
                      ends.Get(num_rows), begins.Get(num_rows), places.Get(num_places), factors.Get(num_places * num_factors),
                      weights.Get(num_places * stride), totals.Get(num_places),
                      sums.Get(num_places * num_groups * kGroup), copy.Get(kChunk * width_bytes),
                      call.v + first_head * call.strides.head, call.k + next_head * call.strides.head, nullptr, next_offsets,
                      num_next};
  // Calls f(the job on a piece, the piece) for all pieces.
  const auto for_pieces = [&](auto f) {
    int64_t used = 0;
    for (int64_t i = 0; i < part.num_pieces; ++i) {
      const Piece& piece = part.pieces[i];
      const int64_t row = row_of[piece.first], tokens = padded(piece.end - piece.begin);
      Job<T, C> its = job.Of(row, row_of[piece.first + piece.count] - row, piece.begin - origin, tokens, job.offsets + used,
                             job.scale_offsets + used);
      used += tokens + kChunk;
      its.offsets_after_k = job.offsets;
      if (i + 1 < part.num_pieces) {
        const Piece& following = part.pieces[i + 1];
        its.num_after_v = std::min(following.end - following.begin, kChunk);
        its.after_k = job.k, its.after_v = job.v;
        its.offsets_after_k = its.offsets_after_v = job.offsets + used;
      }
      f(its, piece);
    }
  };

  if (width > call.head_dim) std::memset(job.copy, 0, kChunk * width_bytes);
  for_pieces([&](const Job<T, C>& its, const Piece& piece) {
    Locate(call, part.tiles[piece.first], piece.begin, piece.end, its.num_tokens, its.offsets,
           has_offsets ? its.scale_offsets : nullptr);
    for (int64_t i = 0; i < kChunk; ++i) its.offsets[its.num_tokens + i] = i * width_bytes;
  });
  for (int64_t i = 0; i < part.num_tiles; ++i) {
    const int64_t tile = part.tiles[i], start = call.query_starts[tile];
    for (int64_t row = row_of[i]; row < row_of[i + 1]; ++row) {
      const int64_t in_tile = row - row_of[i], position = start + in_tile / group;
      job.ends[row] = position + 1 - origin;
      job.begins[row] = call.FirstSeen(position) - origin;
      for (int64_t head = 0; head < num_heads; ++head) {
        const int64_t at = job.index(head, row);
        job.places[at] = place(tile, in_tile / group, (first_head + head) * group + in_tile % group);
        Spread<T, C>(call.q + job.places[at], call.head_dim, width, job.factors + at * num_factors);
      }
    }
  }
  const auto rescale = [&](const float* scales) {
    if (!scales) return;
    for_pieces([&](const Job<T, C>& its, const Piece&) {
      for (int64_t head = 0; head < num_heads; ++head) {
        Rescale(its, scales + (first_head + head) * call.scale_strides.head, head);
      }
    });
  };
  for_pieces([](const Job<T, C>& its, const Piece&) { Score(its); });
  rescale(call.k_scales);
  for (int64_t i = 0; i < part.num_tiles; ++i) {
    // As many as a tile alone has: what other tiles have more stays unwritten.
    const int64_t tokens = padded(SeenBy(call, part.tiles[i]).end - origin);
    for (int64_t head = 0; head < num_heads; ++head) {
      for (int64_t row = row_of[i]; row < row_of[i + 1]; ++row) {
        float* const its = job.weight(head, row);
        const int64_t row_begin = job.begin(row), row_end = job.end(row);
        float& total = job.totals[job.index(head, row)];
        if (call.HasChanges()) {
          const Changes changes = call.ChangesOf((first_head + head) * group + (row - row_of[i]) % group);
          Change(its, row_begin, row_end, call.scale, changes);
          total = Soften(its, tokens, row_begin, row_end, 1, changes.sink);
        } else {
          total = Soften(its, tokens, row_begin, row_end, call.scale);
        }
      }
    }
  }
  rescale(call.v_scales);
  std::fill_n(job.sums, num_places * num_groups * kGroup, 0.0f);
  for_pieces([](const Job<T, C>& its, const Piece&) { Gather(its); });
  Finish(job);
}

// Returns which tiles share the K and V of their first tokens. Those of many rows gain nothing: their arithmetic takes
// longer than reading.
template <typename T, typename C>
SharedPlan PlanOf(const AttentionCall<T, C>& call, int64_t num_threads) {
  const Worth worth{call.least_saved, call.tile_len * call.num_q_heads / call.num_kv_heads};
  if (worth.least_saved < 0 || worth.num_rows >= kMostSharingRows) return {};
  thread_local std::vector<Candidate> candidates;
  candidates.clear();
  int64_t num_live = 0;
  for (int64_t tile = 0; tile < call.num_tiles; ++tile) {
    const auto [start, num_queries, begin, end] = SeenBy(call, tile);
    if (num_queries == 0) continue;
    ++num_live;
    if (start + 1 < kShareUnit || call.FirstSeen(start + num_queries - 1) > 0) continue;
    candidates.push_back({call.TableOf(tile), start + 1, end, static_cast<int32_t>(tile)});
  }
  if (candidates.size() < 2) return {};
  return SharedPlanner(candidates, num_live, worth, call.block_size, call.num_kv_heads, num_threads).Plan();
}

// The work on some tiles, for the kv heads [first_head, first_head + num_heads).
struct Item {
  const int32_t* tiles;
  const Piece* pieces;  // null: one, all that the tile sees
  int64_t num_tiles, num_pieces, first_head, num_heads;
};

// Returns the work of a call in which tiles share tokens: the longest items first. `rest` becomes the other tiles.
template <typename T, typename C>
std::vector<Item> ItemsOf(const AttentionCall<T, C>& call, const SharedPlan& plan, int64_t num_threads,
                          std::vector<int32_t>& rest) {
  std::vector<bool> is_shared(call.num_tiles);
  for (const int32_t tile : plan.tiles) is_shared[tile] = true;
  for (int32_t tile = 0; tile < call.num_tiles; ++tile) {
    if (!is_shared[tile]) rest.push_back(tile);
  }
  const int64_t group = call.tile_len * call.num_q_heads / call.num_kv_heads;
  std::vector<Item> items;
  // Adds items that divide the kv heads, `count` of them.
  const auto add = [&](const int32_t* tiles, int64_t num_tiles, const Piece* pieces, int64_t num_pieces, int64_t count) {
    count = std::clamp<int64_t>(count, 1, call.num_kv_heads);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t first = call.num_kv_heads * i / count;
      items.push_back({tiles, pieces, num_tiles, num_pieces, first, call.num_kv_heads * (i + 1) / count - first});
    }
  };
  for (const Part& part : plan.parts) {
    const Piece* const pieces = &plan.pieces[part.first_piece];
    int64_t num_tokens = 0;
    for (int64_t i = 0; i < part.num_pieces; ++i) num_tokens = std::max(num_tokens, pieces[i].end);
    const int64_t num_bytes = call.num_kv_heads * part.num_tiles * group * num_tokens * sizeof(float);
    add(&plan.tiles[part.first_tile], part.num_tiles, pieces, part.num_pieces,
        std::max<int64_t>(part.num_items, (num_bytes + kWeightBytes - 1) / kWeightBytes));
  }
  const bool are_few = items.size() + rest.size() < 2 * num_threads;
  for (const int32_t& tile : rest) add(&tile, 1, nullptr, 1, are_few ? call.num_kv_heads : 1);
  return items;
}

template <typename T, typename C, typename Pool>
void AttendAll(Pool& pool, const AttentionCall<T, C>& call) {
  const auto attend = [](const AttentionCall<T, C>& call, const Item& item, const Item& next) {
    const Seen seen = SeenBy(call, item.tiles[0]);
    const Piece whole{0, 1, seen.begin, seen.end};
    Attend(call, {item.tiles, item.num_tiles, item.pieces ? item.pieces : &whole, item.num_pieces}, item.first_head,
           item.num_heads, next.tiles[0], next.first_head);
  };
  const SharedPlan plan = PlanOf(call, pool.num_threads());
  if (!plan.parts.empty()) {
    std::vector<int32_t> rest;
    const std::vector<Item> all = ItemsOf(call, plan, pool.num_threads(), rest);
    const Item* const items = all.data();  // lives as long as there are items to take
    return Share(pool, all.size(), [=](int64_t item, int64_t next) { attend(call, items[item], items[next]); });
  }
  // With all kv heads in a job, K and V are read in the order of memory; a job per head occupies more threads.
  const int64_t num_heads = call.num_tiles < 2 * pool.num_threads() ? 1 : call.num_kv_heads;
  const int64_t parts = call.num_kv_heads / num_heads;
  Share(pool, call.num_tiles * parts, [=](int64_t item, int64_t next) {
    const int32_t tile = item / parts, next_tile = next / parts;
    attend(call, {&tile, nullptr, 1, 1, item % parts * num_heads, num_heads},
           {&next_tile, nullptr, 1, 1, next % parts * num_heads, num_heads});
  });
}

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_ATTENTION_H_
