// `quantised_product`: x @ kernel for kernels of 8 or 4 bits.
//
// The codes lie as a kernel's numbers do (see product.h): a word holds the next 4 or 8 inputs of a column, the first in
// its lowest bits. Beside them lie the scales, one for each column and group of inputs, and minima where there are
// some. Codes of either size are small floating-point numbers, or integers: of 8 bits signed, of 4 counted from the
// minimum, and where there is none from -8 scales.
//
// Codes become float32 in registers. For many rows they are widened once, some groups at a time, into a strip that
// stays in the first-level cache. There the sum of x times codes is taken for each group; times its scale, plus the
// minimum times the group's sum of x, it is added to the result. A row's sums thus have one order, whatever the other
// rows.

#ifndef PALLAS_KERNELS_NATIVE_QUANTISED_PRODUCT_H_
#define PALLAS_KERNELS_NATIVE_QUANTISED_PRODUCT_H_

#include "bytes.h"
#include "product.h"

namespace native {

// The scales, or the minima, of each column and group [panels, groups, 32], float16 or float32.
struct GroupNumbers {
  const char* numbers;  // null if there are none
  bool is_half;

  // Returns the numbers of a group, counted through all panels, from a column of the panel on.
  F32 Read(int64_t group, int64_t column) const {
    const int64_t first = group * kPanelColumns + column;
    return is_half ? ReadFloat16(numbers + 2 * first) : Load<F32>(numbers + 4 * first);
  }
  void PrefetchAll(int64_t group) const {
    const int64_t bytes = (is_half ? 2 : 4) * kPanelColumns;
    if (numbers != nullptr) Prefetch(numbers + group * bytes, bytes);
  }
};

// Formats of codes in words. `Number` converts one code of a word to float32; codes are counted from kFirst.
struct Int8Codes {
  static constexpr int kValues = 4, kRegisters = 1;  // codes of a word; registers that one takes beside its own
  static constexpr float kFirst = 0;
  static F32 Number(Words words, int i) {
    return __builtin_convertvector((I32)(words << (24 - 8 * i)) >> 24, F32);
  }
};

struct Int4Codes {
  static constexpr int kValues = 8, kRegisters = 1;
  static constexpr float kFirst = -8;
  static F32 Number(Words words, int i) { return __builtin_convertvector((I32)(words >> (4 * i) & 15u), F32); }
};

// e4m3: a sign, four exponent bits, three fraction bits m. Shifted to float32's positions, with the bias added, they
// are the number. Only a subnormal 2^-6 m / 8 becomes y = 2^-7 (1 + m / 8), and is 2 y - 2^-6. For all other numbers 2
// y - 2^-6 is not less than y, so the minimum of both is right for all. No float32 subnormals occur, which a processor
// may treat as zeros. NaN, which is never written, becomes 480.
struct Float8Codes {
  static constexpr int kValues = 4, kRegisters = 2;
  static constexpr float kFirst = 0;
  static F32 Number(Words words, int i) {
    const Words moved = i < 3 ? words << (20 - 8 * i) : words >> 4;
    const F32 number = (F32)((moved & 0x07f00000u) + (120u << 23));
    const F32 subnormal = number + number - (F32)(Words{} + (121u << 23));
    const F32 size = subnormal < number ? subnormal : number;
    return (F32)((Words)size | (words << (24 - 8 * i) & 0x80000000u));
  }
};

// e2m1: a sign, two exponent bits, one fraction bit.
struct Float4Codes {
  static constexpr int kValues = 8, kRegisters = 2;
  static constexpr float kFirst = 0;
  static F32 Number(Words words, int i) { return Widened<4, 2>(words >> (4 * i) & 15u); }
};

// A kernel of such codes.
template <typename Codes>
struct QuantisedKernel {
  static constexpr int kValues = Codes::kValues;
  // Fewer than a product of wide numbers has on AVX2, for the codes of a word take one or two more registers.
  static constexpr int kTileRows = kLanes == 16          ? 8
                                   : kLanes == 8         ? 6 - Codes::kRegisters
                                   : kNumRegisters == 32 ? 4
                                                         : 2;

  const char* codes;
  int64_t num_words, num_groups;
  GroupNumbers scales, minima;

  // For rows that share a strip of widened codes, which is multiplied like a float32 kernel.
  static constexpr int kWideRows = DenseKernel<Float32>::kTileRows;
  static constexpr int64_t kWideColumns = StripColumns<DenseKernel<Float32>>(kWideRows), kWideInputs = 256;

  int64_t num_inputs() const { return num_words * kValues; }
  int64_t group_size() const { return num_inputs() / num_groups; }
  bool has_minima() const { return minima.numbers != nullptr; }
  // A row's factors are followed by its sums in each group.
  int64_t num_factors() const { return num_inputs() + num_groups; }

  template <int kRows>
  [[gnu::noinline]] void Tile(const uint32_t* const* x, int64_t panel, int64_t column, float* const* y,
                              const Ahead& ahead) const {
    constexpr int kVectors = StripColumns<QuantisedKernel>(kRows) / kLanes;
    const char* strip = codes + panel * num_words * kStepBytes + 4 * column;
    const char* next = codes + (ahead.panel * num_words + ahead.first(num_words)) * kStepBytes;
    const int64_t share = ahead.share(), group_words = num_words / num_groups;
    for (int row = 0; row < kRows; ++row) std::fill_n(y[row], kVectors * kLanes, 0.0f);
    for (int64_t group = 0, word = 0; group < num_groups; ++group) {
      scales.PrefetchAll(ahead.panel * num_groups + group);
      minima.PrefetchAll(ahead.panel * num_groups + group);
      F32 sum[kRows][kVectors] = {};
      for (const int64_t end = word + group_words; word < end; ++word) {
        Prefetch(next + (word * share >> 16) * kStepBytes, kStepBytes);
        Words words[kVectors];
        UNROLL
        for (int v = 0; v < kVectors; ++v) words[v] = Load<Words>(strip + word * kStepBytes + v * kVectorBytes);
        UNROLL
        for (int i = 0; i < kValues; ++i) {
          F32 code[kVectors];
          UNROLL
          for (int v = 0; v < kVectors; ++v) code[v] = Codes::Number(words[v], i);
          UNROLL
          for (int row = 0; row < kRows; ++row) {
            const F32 factor = Splat(x[row][word * kValues + i]);
            UNROLL
            for (int v = 0; v < kVectors; ++v) sum[row][v] = sum[row][v] + factor * code[v];
          }
        }
      }
      Add<kRows, kVectors>(x, panel * num_groups + group, group, column, sum, y);
    }
  }

  // Widens some groups' codes of a strip to float32 [inputs, kWideColumns], and prefetches the same words of the panel
  // `next`, unless it is -1.
  void WidenStrip(int64_t panel, int64_t column, int64_t first_group, int64_t count, int64_t next, float* wide) const {
    const int64_t group_words = num_words / num_groups, first = first_group * group_words;
    const char* strip = codes + panel * num_words * kStepBytes + 4 * column;
    for (int64_t word = first; word < first + count * group_words; ++word) {
      if (next >= 0) Prefetch(codes + (next * num_words + word) * kStepBytes, kStepBytes);
      for (int v = 0; v < kWideColumns / kLanes; ++v) {
        const Words words = Load<Words>(strip + word * kStepBytes + v * kVectorBytes);
        UNROLL
        for (int i = 0; i < kValues; ++i) {
          Store(wide + ((word - first) * kValues + i) * kWideColumns + v * kLanes, Codes::Number(words, i));
        }
      }
    }
  }

  // Adds x[row] times a strip of widened codes of some groups to y[row].
  template <int kRows>
  [[gnu::noinline]] void WideTile(const uint32_t* const* x, const float* wide, int64_t panel, int64_t column,
                                  int64_t first_group, int64_t count, float* const* y) const {
    constexpr int kVectors = kWideColumns / kLanes;
    const int64_t size = group_size();
    for (int64_t group = first_group; group < first_group + count; ++group) {
      F32 sum[kRows][kVectors] = {};
      const uint32_t* factors[kRows];
      UNROLL
      for (int row = 0; row < kRows; ++row) factors[row] = x[row] + group * size;
      for (int64_t i = 0; i < size; ++i, wide += kWideColumns) {
        F32 code[kVectors];
        UNROLL
        for (int v = 0; v < kVectors; ++v) code[v] = Load<F32>(wide + v * kLanes);
        UNROLL
        for (int row = 0; row < kRows; ++row) {
          const F32 factor = Splat(factors[row][i]);
          UNROLL
          for (int v = 0; v < kVectors; ++v) sum[row][v] = sum[row][v] + factor * code[v];
        }
      }
      Add<kRows, kVectors>(x, panel * num_groups + group, group, column, sum, y);
    }
  }

 private:
  // Adds a group's sums, times its scales and with its minima, to the results. There is no branch between products and
  // additions: so a compiler fuses them, or not, alike for any number of rows.
  template <int kRows, int kVectors>
  void Add(const uint32_t* const* x, int64_t scale_row, int64_t group, int64_t column, const F32 (&sum)[kRows][kVectors],
           float* const* y) const {
    F32 scale[kVectors], minimum[kVectors];
    UNROLL
    for (int v = 0; v < kVectors; ++v) {
      scale[v] = scales.Read(scale_row, column + v * kLanes);
      minimum[v] = has_minima() ? minima.Read(scale_row, column + v * kLanes) : scale[v] * Codes::kFirst;
    }
    UNROLL
    for (int row = 0; row < kRows; ++row) {
      const F32 total = Splat(x[row][num_inputs() + group]);
      UNROLL
      for (int v = 0; v < kVectors; ++v) {
        float* result = y[row] + v * kLanes;
        Store(result, Load<F32>(result) + total * minimum[v] + sum[row][v] * scale[v]);
      }
    }
  }
};

// A kernel of codes for rows x of type T, which are widened to float32.
template <typename T, typename Codes>
struct QuantisedKernelFor : QuantisedKernel<Codes> {
  using X = T;

  int64_t x_words() const { return this->num_inputs() / T::kValues; }
  void Widen(const char* row, uint32_t* factors) const {
    using Value = typename T::Value;
    const int64_t num_inputs = this->num_inputs(), group_size = this->group_size();
    for (int64_t i = 0; i < num_inputs; ++i) {
      Store(factors + i, T::ToFloat(Load<Value>(row + i * sizeof(Value))));
    }
    for (int64_t group = 0; group < this->num_groups; ++group) {
      float sum = 0;
      for (int64_t i = 0; i < group_size; ++i) sum += Load<float>(factors + group * group_size + i);
      Store(factors + num_inputs + group, sum);
    }
  }
};

// Multiplies rows by a panel: few rows as for any kernel, many rows with codes that are widened once.
template <typename T, typename Codes>
void Panel(const LiveRows& live, const QuantisedKernelFor<T, Codes>& kernel, float* y, int64_t columns, int64_t panel,
           int64_t next_panel) {
  using K = QuantisedKernelFor<T, Codes>;
  const int64_t first_column = panel * kPanelColumns, size = kernel.group_size();
  if (live.count <= 2 * K::kTileRows || columns - first_column < kPanelColumns || size > K::kWideInputs) {
    return Panel<K>(live, kernel, y, columns, panel, next_panel);
  }
  thread_local Scratch<float> strip;
  float* wide = strip.Get(K::kWideInputs * K::kWideColumns);
  for (int64_t row = 0; row < live.count; ++row) {
    std::fill_n(y + live.rows[row] * columns + first_column, kPanelColumns, 0.0f);
  }
  const int64_t most = K::kWideInputs / size;
  for (int64_t group = 0; group < kernel.num_groups; group += most) {
    const int64_t num_groups = std::min(most, kernel.num_groups - group);
    for (int64_t column = 0; column < kPanelColumns; column += K::kWideColumns) {
      kernel.WidenStrip(panel, column, group, num_groups, column == 0 ? next_panel : -1, wide);
      InBlocks(live.count, K::kWideRows, [&](int64_t first, int64_t count) {
        const uint32_t* x[K::kWideRows];
        float* results[K::kWideRows];
        for (int64_t i = 0; i < count; ++i) {
          x[i] = live.factors + live.rows[first + i] * live.stride;
          results[i] = y + live.rows[first + i] * columns + first_column + column;
        }
        WithConstant<K::kWideRows>(count, [&](auto rows) {
          kernel.template WideTile<decltype(rows)::value>(x, wide, panel, column, group, num_groups, results);
        });
      });
    }
  }
}

// x [rows, inputs], codes [panels, words, 32], scales and minima [panels, groups, 32] -> y [rows, columns] float32.
template <typename T, typename Codes, typename Pool>
void MultiplyQuantised(Pool& pool, const void* x, const char* codes, const GroupNumbers& scales,
                       const GroupNumbers& minima, float* y, int64_t num_words, int64_t num_groups, int64_t num_rows,
                       int64_t columns) {
  const QuantisedKernelFor<T, Codes> kernel{{codes, num_words, num_groups, scales, minima}};
  MultiplyBy(pool, x, kernel, y, num_rows, columns);
}

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_QUANTISED_PRODUCT_H_
