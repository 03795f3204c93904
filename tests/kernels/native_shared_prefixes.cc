// Plans of shared prefixes as a program of its own. Arguments: tiles, blocks of a table, block size, rows of a tile and kv
// head, tokens to save at least, kv heads, threads. Tables, shared tokens and tokens come from standard input. A line for
// each part has the number of its items, one for each piece `begin end` and tiles.

#include "shared_prefixes.h"

#include <cstdio>
#include <cstdlib>

using namespace native;

int main(int, char** argv) {
  int64_t sizes[7];
  for (int i = 0; i < 7; ++i) sizes[i] = atoll(argv[i + 1]);
  const int64_t num_tiles = sizes[0], num_blocks = sizes[1];
  std::vector<int32_t> numbers(num_tiles * (num_blocks + 2));
  if (fread(numbers.data(), 4, numbers.size(), stdin) != numbers.size()) return 2;
  const int32_t *shared = &numbers[num_tiles * num_blocks], *tokens = shared + num_tiles;
  std::vector<Candidate> candidates;
  for (int32_t tile = 0; tile < num_tiles; ++tile) {
    if (shared[tile] >= kShareUnit) candidates.push_back({&numbers[tile * num_blocks], shared[tile], tokens[tile], tile});
  }
  const SharedPlan plan = SharedPlanner(candidates, num_tiles, {sizes[4], sizes[3]}, sizes[2], sizes[5], sizes[6]).Plan();
  for (const Part& part : plan.parts) {
    printf("part %ld\n", static_cast<long>(part.num_items));
    for (int64_t i = 0; i < part.num_pieces; ++i) {
      const Piece& piece = plan.pieces[part.first_piece + i];
      printf("%ld %ld", static_cast<long>(piece.begin), static_cast<long>(piece.end));
      for (int64_t j = 0; j < piece.count; ++j) printf(" %d", plan.tiles[part.first_tile + piece.first + j]);
      printf("\n");
    }
  }
}
