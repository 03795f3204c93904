// The plan of tiles that are computed together, because their block tables begin with the same blocks.
//
// A prefix's K and V are read once for all rows behind it. A row's sums do not change: products are summed along a head,
// the softmax and V along the row's tokens, whatever other rows there are.

#ifndef PALLAS_KERNELS_NATIVE_SHARED_PREFIXES_H_
#define PALLAS_KERNELS_NATIVE_SHARED_PREFIXES_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace native {

// Pieces of prefixes begin at multiples of so many tokens: whole chunks of any cache.
constexpr int64_t kShareUnit = 32;
// Weights of one kv head that a part has at most, unless it has sixteen tiles or fewer.
constexpr int64_t kPartBytes = 1 << 21;

// Where sharing pays. It saves reading, not arithmetic, and its lists of work cost time.
struct Worth {
  int64_t least_saved;  // tokens of a piece and of a part; 0: whatever is saved; negative: nothing is shared
  int64_t num_rows;     // of a tile and kv head

  // Returns whether it pays to read `saved` of `alone` tokens less. Reading takes most of one row's time; that of three
  // rows and more is arithmetic, where nothing else reads.
  bool Pays(int64_t saved, int64_t alone) const {
    if (least_saved == 0 || saved < least_saved) return saved > 0 && least_saved == 0;
    return num_rows == 1 ? 3 * saved >= alone : num_rows == 2 ? 2 * saved >= alone : 8 * saved >= 7 * alone;
  }
};

// A tile that may share its first `shared` tokens, which all of its queries see. It sees `tokens`.
struct Candidate {
  const int32_t* table;
  int64_t shared, tokens;
  int32_t tile;
};

// Tokens [begin, end) that tiles of a part see: `count` of them, from its `first`th on.
struct Piece {
  int64_t first, count, begin, end;
};

// Tiles that are computed together: a range of the plan's tiles, and one of its pieces. A tile's pieces are in the order
// of its tokens. The kv heads are divided among `num_items` items of work at least.
struct Part {
  int64_t first_tile, num_tiles, first_piece, num_pieces, num_items;
};

struct SharedPlan {
  std::vector<int32_t> tiles;  // of the parts
  std::vector<Piece> pieces;
  std::vector<Part> parts;
};

class SharedPlanner {
 public:
  // num_tiles: of the call, those that share nothing included.
  SharedPlanner(std::vector<Candidate>& candidates, int64_t num_tiles, Worth worth, int64_t block_size,
                int64_t num_kv_heads, int64_t num_threads)
      : candidates_(candidates),
        num_tiles_(num_tiles),
        worth_(worth),
        block_size_(block_size),
        num_kv_heads_(num_kv_heads),
        num_threads_(num_threads) {}

  SharedPlan Plan() {
    if (!BeginAlike()) return {};
    std::sort(candidates_.begin(), candidates_.end(), [&](const Candidate& a, const Candidate& b) {
      const int64_t a_blocks = Blocks(a), b_blocks = Blocks(b);
      const int order = std::memcmp(a.table, b.table, std::min(a_blocks, b_blocks) * sizeof *a.table);
      if (order != 0) return order < 0;
      return a_blocks != b_blocks ? a_blocks < b_blocks : a.tile < b.tile;
    });
    const int64_t count = candidates_.size();
    common_.assign(count, 0);
    for (int64_t i = 1; i < count; ++i) {
      const Candidate &a = candidates_[i - 1], &b = candidates_[i];
      const int64_t most = std::min(Blocks(a), Blocks(b));
      const int64_t blocks = std::mismatch(a.table, a.table + most, b.table).first - a.table;
      common_[i] = std::min({blocks * block_size_, a.shared, b.shared}) / kShareUnit * kShareUnit;
    }
    Divide(0, count);
    return std::move(plan_);
  }

 private:
  int64_t Blocks(const Candidate& its) const { return (its.shared + block_size_ - 1) / block_size_; }

  // Returns whether two tables begin with the same block. Otherwise nothing is sorted.
  bool BeginAlike() const {
    int64_t size = 16;
    while (size < 2 * static_cast<int64_t>(candidates_.size())) size *= 2;
    thread_local std::vector<int32_t> found;
    found.assign(size, -1);
    for (const Candidate& its : candidates_) {
      int64_t i = its.table[0] * 0x9e3779b1u & (size - 1);
      for (; found[i] != -1; i = (i + 1) & (size - 1)) {
        if (found[i] == its.table[0]) return true;
      }
      found[i] = its.table[0];
    }
    return false;
  }

  int64_t LeastCommon(int64_t first, int64_t end) const {
    return *std::min_element(common_.begin() + first + 1, common_.begin() + end);
  }

  // Calls f(first, end) for the ranges of neighbours that have more than `least` tokens in common.
  template <typename F>
  void ForRanges(int64_t first, int64_t end, int64_t least, F f) {
    for (int64_t i = first + 1; i <= end; ++i) {
      if (i == end || common_[i] <= least) f(first, i), first = i;
    }
  }

  // Returns into how many parts some tiles are divided, and how many items each has, so that each thread has two of them,
  // as far as these tiles are all. Heads are divided before tiles: each part reads the prefix.
  std::pair<int64_t, int64_t> Division(int64_t first, int64_t end) const {
    const auto divided = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    int64_t tokens = 0;
    for (int64_t i = first; i < end; ++i) tokens = std::max(tokens, candidates_[i].tokens);
    const int64_t count = end - first, items = divided(2 * num_threads_ * count, num_tiles_);
    const int64_t bytes = count * worth_.num_rows * tokens * static_cast<int64_t>(sizeof(float));
    const int64_t parts = std::max({divided(items, num_kv_heads_), std::min(count / 16, divided(bytes, kPartBytes)), int64_t{1}});
    const int64_t of_part = divided(items, parts);
    return {parts, num_kv_heads_ % of_part == 0 ? of_part : num_kv_heads_};
  }

  // Makes parts of some neighbours: of all, if that saves enough, else of those that have more in common.
  void Divide(int64_t first, int64_t end) {
    if (end - first < 2) return;
    const int64_t least = LeastCommon(first, end), count = end - first;
    if (least > 0) {
      const auto [num_parts, num_items] = Division(first, end);
      const size_t parts = plan_.parts.size(), tiles = plan_.tiles.size(), pieces = plan_.pieces.size();
      bool all_save = true;
      for (int64_t i = 0; i < num_parts && all_save; ++i) {
        all_save = Add(first + count * i / num_parts, first + count * (i + 1) / num_parts, num_items);
      }
      if (all_save) return;
      plan_.parts.resize(parts), plan_.tiles.resize(tiles), plan_.pieces.resize(pieces);
    }
    ForRanges(first, end, least, [&](int64_t from, int64_t to) { Divide(from, to); });
  }

  // Adds a part. Returns whether it saves enough.
  bool Add(int64_t first, int64_t end, int64_t num_items) {
    if (end - first < 2) return false;
    Part part{static_cast<int64_t>(plan_.tiles.size()), end - first, static_cast<int64_t>(plan_.pieces.size()), 0, num_items};
    int64_t alone = 0;
    for (int64_t i = first; i < end; ++i) {
      alone += candidates_[i].tokens;
      plan_.tiles.push_back(candidates_[i].tile);
    }
    const int64_t saved = AddPieces(first, first, end, 0);
    part.num_pieces = plan_.pieces.size() - part.first_piece;
    plan_.parts.push_back(part);
    return worth_.Pays(saved, alone);
  }

  // Adds the pieces of some neighbours from token `begin` on. Returns how many tokens less are read.
  int64_t AddPieces(int64_t origin, int64_t first, int64_t end, int64_t begin) {
    if (end - first == 1) {
      const int64_t tokens = candidates_[first].tokens;
      if (begin < tokens) plan_.pieces.push_back({first - origin, 1, begin, tokens});
      return 0;
    }
    const int64_t least = LeastCommon(first, end);
    int64_t saved = (least - begin) * (end - first - 1);
    if (saved < std::max<int64_t>(worth_.least_saved, 1)) {
      saved = 0;
    } else {
      plan_.pieces.push_back({first - origin, end - first, begin, least});
      begin = least;
    }
    ForRanges(first, end, least, [&](int64_t from, int64_t to) { saved += AddPieces(origin, from, to, begin); });
    return saved;
  }

  std::vector<Candidate>& candidates_;
  const int64_t num_tiles_;
  const Worth worth_;
  const int64_t block_size_, num_kv_heads_, num_threads_;
  std::vector<int64_t> common_;  // tokens of each candidate and the one before it
  SharedPlan plan_;
};

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_SHARED_PREFIXES_H_
