// `low_rank`: y + x @ a @ b for some rows of x, each with an a and a b of its own choice.
//
// A matrix lies in memory in panels of 16 columns, one after the other; a panel holds the 16 numbers of its first row,
// then those of the next. So both products read what they need from the first byte to the last. Rows that have chosen
// the same are computed together, up to four at a time: what one of them reads serves all.
//
// A row's sums are taken in the order of the inputs, in lanes of their own: its bits depend neither on the other rows
// nor on how many of them have chosen as it has.

#ifndef PALLAS_KERNELS_NATIVE_LOW_RANK_H_
#define PALLAS_KERNELS_NATIVE_LOW_RANK_H_

#include "vector.h"
#include "work.h"

namespace native {

constexpr int64_t kNarrowPanel = 16, kRowsTogether = 4;

typedef float F8 __attribute__((vector_size(32)));
typedef uint32_t Words8 __attribute__((vector_size(32)));

// The columns of a panel in registers of eight lanes: in float32 its halves, in bfloat16 the even and the odd columns.
struct NarrowFloat32 {
  using Type = Float32;
  static F8 Number(const char* panel_row, int v) { return Load<F8>(panel_row + 32 * v); }
  static int Column(int v, int lane) { return 8 * v + lane; }
};
struct NarrowBFloat16 {
  using Type = BFloat16;
  static F8 Number(const char* panel_row, int v) {
    const Words8 words = Load<Words8>(panel_row);
    return (F8)(v == 0 ? words << 16 : words & 0xffff0000u);
  }
  static int Column(int v, int lane) { return 2 * lane + v; }
};

// Computes sums[row][column] = x[row] times a panel, for kRows rows.
template <typename N, int kRows>
void NarrowSums(const float* const* x, const char* panel, int64_t num_inputs, float (*sums)[kNarrowPanel]) {
  constexpr int64_t kRowBytes = kNarrowPanel * sizeof(typename N::Type::Value);
  F8 sum[kRows][2] = {};
  for (int64_t i = 0; i < num_inputs; ++i) {
    F8 numbers[2];
    UNROLL
    for (int v = 0; v < 2; ++v) numbers[v] = N::Number(panel + i * kRowBytes, v);
    UNROLL
    for (int row = 0; row < kRows; ++row) {
      const F8 factor = x[row][i] - F8{};
      UNROLL
      for (int v = 0; v < 2; ++v) sum[row][v] = sum[row][v] + factor * numbers[v];
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < 2; ++v) {
      for (int lane = 0; lane < 8; ++lane) sums[row][N::Column(v, lane)] = sum[row][v][lane];
    }
  }
}

// The sections of y's columns, each with a low-rank addition of its own. `a` has the first matrices of all sections
// side by side, `rank` columns each; `b` has the second ones, each in panels of its own.
struct LowRankShape {
  int64_t num_rows, num_inputs, rank, columns;
  const int64_t* widths;
  int64_t num_pieces;

  int64_t a_panels() const { return num_pieces * rank / kNarrowPanel; }
  int64_t b_panels() const {
    int64_t count = 0;
    for (int64_t i = 0; i < num_pieces; ++i) count += (widths[i] + kNarrowPanel - 1) / kNarrowPanel;
    return count;
  }
  int64_t a_numbers() const { return a_panels() * num_inputs * kNarrowPanel; }
  int64_t b_numbers() const { return b_panels() * rank * kNarrowPanel; }
};

// Adds to rows that have chosen the same a and b.
template <typename N, int kRows>
void AddLowRank(const int64_t* rows, const char* x, const char* a, const char* b, float* y,
                const LowRankShape& shape) {
  using Value = typename N::Type::Value;
  const int64_t inner = shape.num_pieces * shape.rank, panel_bytes = kNarrowPanel * sizeof(Value);
  thread_local Scratch<float> scratch;
  float* wide = scratch.Get(kRows * (shape.num_inputs + inner));
  float* between = wide + kRows * shape.num_inputs;  // x @ a
  const float *inputs[kRows], *inners[kRows];
  float sums[kRows][kNarrowPanel];
  for (int row = 0; row < kRows; ++row) {
    const char* its = x + rows[row] * shape.num_inputs * sizeof(Value);
    for (int64_t i = 0; i < shape.num_inputs; ++i) {
      wide[row * shape.num_inputs + i] = N::Type::ToFloat(Load<Value>(its + i * sizeof(Value)));
    }
    inputs[row] = wide + row * shape.num_inputs;
  }
  for (int64_t panel = 0; panel < shape.a_panels(); ++panel) {
    NarrowSums<N, kRows>(inputs, a + panel * shape.num_inputs * panel_bytes, shape.num_inputs, sums);
    for (int row = 0; row < kRows; ++row) std::copy_n(sums[row], kNarrowPanel, between + row * inner + panel * kNarrowPanel);
  }
  float* first = y;
  for (int64_t piece = 0; piece < shape.num_pieces; ++piece) {
    for (int row = 0; row < kRows; ++row) inners[row] = between + row * inner + piece * shape.rank;
    for (int64_t column = 0; column < shape.widths[piece]; column += kNarrowPanel, b += shape.rank * panel_bytes) {
      NarrowSums<N, kRows>(inners, b, shape.rank, sums);
      const int64_t existing = std::min(kNarrowPanel, shape.widths[piece] - column);
      for (int row = 0; row < kRows; ++row) {
        float* result = first + rows[row] * shape.columns + column;
        for (int64_t i = 0; i < existing; ++i) result[i] += sums[row][i];
      }
    }
    first += shape.widths[piece];
  }
}

// x [rows, inputs], a and b as `pack` leaves them one choice after the other, choices [rows], from 1 on, 0 for none
// -> y [rows, columns] float32, changed in place: rows without a choice are not touched.
template <typename N, typename Pool>
void AddLowRanks(Pool& pool, const char* x, const char* a, const char* b, const int32_t* choices, int64_t num_choices,
                 float* y, const LowRankShape& shape) {
  using Value = typename N::Type::Value;
  struct Group {
    int64_t first, count, choice;
  };
  std::vector<int64_t> order;
  std::vector<Group> groups;
  for (int64_t choice = 1; choice <= num_choices; ++choice) {
    const int64_t begin = order.size();
    for (int64_t row = 0; row < shape.num_rows; ++row) {
      if (choices[row] == choice) order.push_back(row);
    }
    if (static_cast<int64_t>(order.size()) == begin) continue;
    InBlocks(order.size() - begin, kRowsTogether,
             [&](int64_t first, int64_t count) { groups.push_back({begin + first, count, choice - 1}); });
  }
  const int64_t *rows = order.data(), a_bytes = shape.a_numbers() * sizeof(Value),
                b_bytes = shape.b_numbers() * sizeof(Value);
  const Group* all = groups.data();
  Share(pool, groups.size(), [=](int64_t item, int64_t) {
    const Group group = all[item];
    WithConstant<kRowsTogether>(group.count, [&](auto count) {
      AddLowRank<N, decltype(count)::value>(rows + group.first, x, a + group.choice * a_bytes,
                                            b + group.choice * b_bytes, y, shape);
    });
  });
}

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_LOW_RANK_H_
