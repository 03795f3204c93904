// Attention as a function that XLA's programs call.

#include "attention.h"
#include "call.h"
#ifdef CACHE_OF_BYTES
#include "bytes.h"
#endif

namespace {

using namespace native;

// Calls f with a value of the cache's type: with CACHE_OF_BYTES an 8-bit type, else the queries'. `exponent_bits` tells
// which float8 is stored as uint8.
template <typename F>
ffi::Error WithCacheType(ffi::DataType type, int64_t exponent_bits, F f) {
#ifdef CACHE_OF_BYTES
  if (type == ffi::S8) {
    f(Int8());
  } else if (type == ffi::F8E4M3FN || (type == ffi::U8 && exponent_bits == 4)) {
    f(Float8<4>());
  } else if (type == ffi::F8E5M2 || (type == ffi::U8 && exponent_bits == 5)) {
    f(Float8<5>());
  } else {
    return ffi::Error::InvalidArgument("numbers of a cache must be int8 or float8");
  }
#else
  if (auto error = CheckType(type); error.failure()) return error;
  f(Numbers());
#endif
  return ffi::Error::Success();
}

// Computes `ops.tiled_paged_attention`. `places` has the strides of K, V and scales, as `attention.operands` packs
// them.
ffi::Error Attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::Buffer<ffi::S32> block_tables, ffi::Buffer<ffi::S32> query_starts,
                     ffi::Buffer<ffi::S32> seq_lens, ffi::Buffer<ffi::F32> k_scales, ffi::Buffer<ffi::F32> v_scales,
                     ffi::Buffer<ffi::S32> first_block, ffi::Buffer<ffi::S32> table_rows,
                     ffi::Buffer<ffi::F32> slopes, ffi::Buffer<ffi::F32> sinks,
                     ffi::Result<ffi::AnyBuffer> out, float scale, float soft_cap, int64_t window, int64_t chunk,
                     ffi::Span<const int64_t> places, int64_t block_stride, int64_t least_saved) {
  const auto queries = q.dimensions();
  const int64_t* at = places.begin();
  const bool has_scales = k_scales.element_count() > 0;
  if (auto error = CheckType(q.element_type()); error.failure()) return error;
  return WithCacheType(k.element_type(), at[12], [&](auto cache_type) {
    using C = decltype(cache_type);
    using Value = typename Numbers::Value;
    const int64_t bytes = sizeof(typename C::Value);
    const AttentionCall<Numbers, C> call{static_cast<const Value*>(q.untyped_data()),
                                         static_cast<const char*>(k.untyped_data()) + at[2] * bytes,
                                         static_cast<const char*>(v.untyped_data()) + at[3] * bytes,
                                         block_tables.typed_data(),
                                         query_starts.typed_data(),
                                         seq_lens.typed_data(),
                                         has_scales ? k_scales.typed_data() + at[7] : nullptr,
                                         has_scales ? v_scales.typed_data() + at[8] : nullptr,
                                         static_cast<Value*>(out->untyped_data()),
                                         queries[0],
                                         queries[1],
                                         queries[2],
                                         queries[3],
                                         at[0],
                                         at[1],
                                         block_tables.dimensions()[1],
                                         {at[4] * bytes, at[5] * bytes, at[6] * bytes},
                                         {at[9], at[10], at[11]},
                                         scale,
                                         window,
                                         chunk,
                                         {},
                                         first_block.typed_data()[0],
                                         block_stride,
                                         OrNull(table_rows),
                                         soft_cap,
                                         OrNull(slopes),
                                         OrNull(sinks),
                                         least_saved};
    AttendAll(pool, call);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_attention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
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
