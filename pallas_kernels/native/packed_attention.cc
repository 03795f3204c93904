// Attention over caches of 4 bits a number, as a function that XLA's programs call.

#include "call.h"
#include "nibbles.h"

namespace {

using namespace native;

using Scales = ffi::Buffer<ffi::BF16>;

const uint16_t* Bits(const Scales& scales) { return static_cast<const uint16_t*>(scales.untyped_data()); }

// Computes `ops.tiled_paged_attention`. `places` has the strides of all arrays, as `attention.packed_operands` packs
// them.
ffi::Error PackedAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::Buffer<ffi::S32> block_tables,
                           ffi::Buffer<ffi::S32> query_starts, ffi::Buffer<ffi::S32> seq_lens, ffi::Buffer<ffi::U8> k,
                           Scales k_scale, Scales k_zero, ffi::AnyBuffer k_new, ffi::Buffer<ffi::S32> new_group,
                           ffi::Buffer<ffi::U8> v, Scales v_scale, Scales v_zero,
                           ffi::Buffer<ffi::S32> first_block, ffi::Buffer<ffi::S32> table_rows,
                           ffi::Buffer<ffi::F32> slopes, ffi::Buffer<ffi::F32> sinks,
                           ffi::Result<ffi::AnyBuffer> out, float scale, float soft_cap, int64_t window, int64_t chunk,
                           ffi::Span<const int64_t> places, int64_t block_stride, int64_t least_saved) {
  for (const auto& numbers : {q, k_new}) {
    if (auto error = CheckType(numbers.element_type()); error.failure()) return error;
  }
  using Value = typename Numbers::Value;
  const auto queries = q.dimensions();
  const int64_t* at = places.begin();
  const Packing<Nibbles<Numbers>> packing{Bits(k_scale),          Bits(k_zero),           Bits(v_scale),
                                          Bits(v_zero),           static_cast<const Value*>(k_new.untyped_data()),
                                          new_group.typed_data(), at[1],                  {at[5], at[6], at[7]},
                                          {at[11], at[12], at[13]}, {at[8], at[9], at[10]}};
  // Strides of scales are those of slots here: Packing finds the scales of a slot.
  const AttentionCall<Numbers, Nibbles<Numbers>> call{static_cast<const Value*>(q.untyped_data()),
                                                      static_cast<const char*>(k.untyped_data()),
                                                      static_cast<const char*>(v.untyped_data()),
                                                      block_tables.typed_data(),
                                                      query_starts.typed_data(),
                                                      seq_lens.typed_data(),
                                                      nullptr,
                                                      nullptr,
                                                      static_cast<Value*>(out->untyped_data()),
                                                      queries[0],
                                                      queries[1],
                                                      queries[2],
                                                      queries[3],
                                                      at[0],
                                                      at[1],
                                                      block_tables.dimensions()[1],
                                                      {at[2], at[3], at[4]},
                                                      {at[1], 1, 0},
                                                      scale,
                                                      window,
                                                      chunk,
                                                      packing,
                                                      first_block.typed_data()[0],
                                                      block_stride,
                                                      OrNull(table_rows),
                                                      soft_cap,
                                                      OrNull(slopes),
                                                      OrNull(sinks),
                                                      least_saved};
  AttendAll(pool, call);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_packed_attention, PackedAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<Scales>()
                                  .Arg<Scales>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<Scales>()
                                  .Arg<Scales>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("chunk")
                                  .Attr<ffi::Span<const int64_t>>("places")
                                  .Attr<int64_t>("block_stride")
                                  .Attr<int64_t>("least_saved"));
