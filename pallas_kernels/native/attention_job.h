// The arguments of an attention call, and the job of one thread at a time.

#ifndef PALLAS_KERNELS_NATIVE_ATTENTION_JOB_H_
#define PALLAS_KERNELS_NATIVE_ATTENTION_JOB_H_

#include "softmax.h"
#include "vector.h"
#include "work.h"

namespace native {

// Columns of V are summed in groups of so many, in registers; see `values.h`.
constexpr int kSumVectors = kLanes == 8 ? 2 : 4;
constexpr int64_t kGroup = kSumVectors * kLanes;

// Distances from one block, token and head to the next.
struct Strides {
  int64_t block, token, head;
  int64_t At(int64_t block_id, int64_t offset) const { return block_id * block + offset * token; }
};

// How K and V are unpacked. Only packed numbers need it (`nibbles.h`); others are read where they lie.
template <typename C>
struct Packing {
  static constexpr bool kIsPacked = false;
  static constexpr int64_t kChunk = 32;  // tokens whose K or V stays in the first-level cache for all rows
  static int64_t HeadBytes(int64_t head_dim) { return head_dim * sizeof(typename C::Value); }
  // A job's first token is a multiple of this.
  static constexpr int64_t kAlignment = 1;
};

// The arguments of a call. Queries and outputs have type T, K and V type C.
template <typename T, typename C>
struct AttentionCall {
  const typename T::Value* q;
  const char *k, *v;  // of block 0, its first token and head
  const int32_t *block_tables, *query_starts, *seq_lens;
  const float *k_scales, *v_scales;  // factors of the numbers of K and V; null for none
  typename T::Value* out;
  int64_t num_tiles, tile_len, num_q_heads, head_dim, num_kv_heads, block_size, max_blocks;
  Strides strides;        // of K and V, in bytes
  Strides scale_strides;  // in numbers
  float scale;
  int64_t window, chunk;  // tokens that a query sees at most, and that a chunk of a sequence has
  Packing<C> packing{};
  // Block i of the tables is block first_block + i * block_stride of the arrays.
  int64_t first_block = 0, block_stride = 1;
  const int32_t* table_rows = nullptr;  // of each tile; null: in their order
  float soft_cap = 0;                   // 0: none
  const float *slopes = nullptr, *sinks = nullptr;  // [num_q_heads]; null: none
  int64_t least_saved = 256;                        // see `Worth`

  bool HasChanges() const { return soft_cap != 0 || slopes || sinks; }
  Changes ChangesOf(int64_t q_head) const {
    Changes changes;
    changes.soft_cap = soft_cap;
    if (slopes) changes.slope = slopes[q_head];
    if (sinks) changes.sink = sinks[q_head];
    return changes;
  }

  const int32_t* TableOf(int64_t tile) const { return block_tables + (table_rows ? table_rows[tile] : tile) * max_blocks; }

  // Returns the first token that a query sees: its window's, or its chunk's.
  int64_t FirstSeen(int64_t position) const {
    return std::max<int64_t>(position + 1 - window, position / chunk * chunk);
  }

  int64_t head_bytes() const { return Packing<C>::HeadBytes(head_dim); }
};

// The addresses of a head of K or V, for some tokens.
struct Heads {
  const char* base;
  const int64_t* offsets;
  const char* operator[](int64_t token) const { return base + offsets[token]; }
};

// Memory to prefetch while other tokens are computed: chunk by chunk, in the order of its addresses.
struct NextHeads {
  Heads heads;
  int64_t bytes;         // of a chunk; 0 to prefetch nothing
  int64_t num_pieces;    // chunks of a token, side by side
  int64_t token, piece;  // the next chunk to prefetch
  [[gnu::always_inline]] void Ask() {
    if (bytes == 0) return;
    Prefetch(heads[token] + piece * bytes, bytes);
    if (++piece == num_pieces) ++token, piece = 0;
  }
  // Prefetches the `part`th of num_parts equal ranges of `count` chunks. A processor cannot prefetch all at once.
  void AskPart(int64_t part, int64_t num_parts, int64_t count) {
    for (int64_t i = part * count / num_parts; i < (part + 1) * count / num_parts; ++i) Ask();
  }
};

// The work on one tile and some of its kv heads. A row is one query head of one token; all rows of a kv head share its
// K and V. Tokens are those that some row sees, counted from the first one, padded to whole chunks.
template <typename T, typename C>
struct Job {
  static constexpr int64_t kChunk = Packing<C>::kChunk;
  const AttentionCall<T, C>& call;
  int64_t first_head, num_heads, num_rows, num_tokens;
  int64_t rows_of_head;  // from a row to that of the next head
  int64_t first;         // the job's first token, counted as the rows' tokens are
  int64_t stride;        // from the weights of a row to those of the next
  int64_t width, num_groups;  // columns of a head, and groups of them; narrow heads are padded to one group
  int64_t num_factors;        // words of a query, as `Spread` writes it
  const char *k, *v;          // of the first kv head
  int64_t* offsets;           // [num_tokens + kChunk]: of tokens from k and v in bytes, then kChunk offsets from `copy`
  int64_t* scale_offsets;     // [num_tokens]: of scales from a head's first one; slots, if numbers are packed
  int64_t* ends;              // [num_rows]: the number of tokens up to and including a row's own
  int64_t* begins;            // [num_rows]: the first token that a row sees
  int64_t* places;            // [num_heads, rows_of_head]: each row's offset in q and out
  uint32_t* factors;          // [num_heads, rows_of_head, num_factors]
  float* weights;             // [num_heads, rows_of_head, stride]
  float* totals;              // [num_heads, rows_of_head], of weights
  float* sums;                // [num_heads, rows_of_head, num_groups * kGroup]
  char* copy;                 // [kChunk, width]: a padded or unpacked chunk
  // What is prefetched at the end of K and of V, for the first kv head, and how many tokens that are.
  const char *after_k, *after_v;
  const int64_t *offsets_after_k, *offsets_after_v;  // [kChunk]
  int64_t num_after_v;

  int64_t index(int64_t head, int64_t row) const { return head * rows_of_head + row; }
  float* weight(int64_t head, int64_t row) const { return weights + index(head, row) * stride + first; }
  int64_t begin(int64_t row) const { return begins[row] - first; }
  int64_t end(int64_t row) const { return ends[row] - first; }
  // Returns whether any of `count` rows sees any of `tokens` tokens.
  bool Sees(int64_t row, int64_t count, int64_t token, int64_t tokens) const {
    return token < end(row + count - 1) && begin(row) < token + tokens;
  }
  // Returns the job on `rows` rows from `row` on, and `tokens` tokens from `token` on.
  Job Of(int64_t row, int64_t rows, int64_t token, int64_t tokens, int64_t* its_offsets, int64_t* its_scale_offsets) const {
    Job some = *this;
    some.num_rows = rows, some.num_tokens = tokens, some.first = token;
    some.offsets = its_offsets, some.scale_offsets = its_scale_offsets;
    some.ends += row, some.begins += row, some.places += row, some.totals += row;
    some.factors += row * num_factors, some.weights += row * stride, some.sums += row * num_groups * kGroup;
    return some;
  }
  // Returns the first column of a group. The last group ends with the head, and may overlap the one before.
  int64_t column(int64_t group) const { return std::min(group * kGroup, width - kGroup); }
  Heads At(const char* base, int64_t head, int64_t token) const {
    return {base + head * call.strides.head, offsets + token};
  }
  // Returns what to prefetch while a head of the chunk of K before `chunk_end` is computed.
  NextHeads AfterK(int64_t head, int64_t chunk_end) const {
    return chunk_end < num_tokens ? Ahead(k, offsets + chunk_end, kChunk, head) : Ahead(after_k, offsets_after_k, kChunk, head);
  }
  // Returns what to prefetch while `count` tokens of V before `end` are computed.
  NextHeads AfterV(int64_t head, int64_t end, int64_t count, int64_t part = 0, int64_t num_parts = 1) const {
    if (end < num_tokens) return Ahead(v, offsets + end, count, head, part, num_parts);
    return num_after_v > 0 ? Ahead(after_v, offsets_after_v, count, head, part, num_parts) : NextHeads{};
  }
  // A chunk of tokens, of which whole registers can be read.
  Heads Chunk(const char* base, int64_t head, int64_t token) const {
    const Heads heads = At(base, head, token), copies{copy, offsets + num_tokens};
    if (width == call.head_dim) return heads;
    for (int64_t i = 0; i < kChunk; ++i) std::memcpy(copy + copies.offsets[i], heads[i], call.head_bytes());
    return copies;
  }
  Heads ChunkOfK(int64_t head, int64_t token) const {
    if constexpr (Packing<C>::kIsPacked) {
      call.packing.UnpackK(At(k, head, token), scale_offsets[token], first_head + head, call.head_dim, width, copy);
      return {copy, offsets + num_tokens};
    } else {
      return Chunk(k, head, token);
    }
  }
  Heads ChunkOfV(int64_t head, int64_t token) const {
    if constexpr (Packing<C>::kIsPacked) {
      call.packing.UnpackV(At(v, head, token), scale_offsets[token], first_head + head, call.head_dim, width, copy);
      return {copy, offsets + num_tokens};
    } else {
      return Chunk(v, head, token);
    }
  }

 private:
  // Returns the memory, of `count` tokens from `base` on, to prefetch while one of the heads is computed: the `part`th
  // of num_parts. Heads that lie side by side are prefetched token by token, whichever head is computed: reading memory
  // in its order takes two thirds of the time of one head after the other.
  NextHeads Ahead(const char* base, const int64_t* its_offsets, int64_t count, int64_t head, int64_t part = 0,
                  int64_t num_parts = 1) const {
    const int64_t head_bytes = call.head_bytes();
    if (head_bytes % (num_parts * kCacheLine) != 0) {
      if (part > 0) return {};
      num_parts = 1;
    }
    const bool side_by_side = call.strides.head == head_bytes;
    const int64_t num_pieces = side_by_side ? num_heads * num_parts : num_parts;
    const int64_t first = (side_by_side ? head * num_parts + part : part) * count;
    return {{side_by_side ? base : base + head * call.strides.head, its_offsets}, head_bytes / num_parts, num_pieces,
            first / num_pieces, first % num_pieces};
  }
};

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_ATTENTION_JOB_H_
