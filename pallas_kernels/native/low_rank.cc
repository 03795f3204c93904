// Low-rank additions to products, as a function that XLA's programs call.

#include "low_rank.h"
#include "call.h"

namespace {

using namespace native;

// y [rows, columns], x [rows, inputs], a [layers, choices, panels, inputs, 16], b [layers, choices, panels, rank, 16],
// choices [rows], layer -> y, in place; `widths` are the sections of its columns.
ffi::Error LowRank(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> y, ffi::AnyBuffer x, ffi::AnyBuffer a, ffi::AnyBuffer b,
                   ffi::Buffer<ffi::S32> choices, ffi::Buffer<ffi::S32> layer, ffi::ResultBuffer<ffi::F32> out,
                   ffi::Span<const int64_t> widths) {
  const LowRankShape shape{x.dimensions()[0],  x.dimensions()[1], b.dimensions()[3],
                           y.dimensions()[1], widths.begin(),    static_cast<int64_t>(widths.size())};
  const int64_t num_choices = a.dimensions()[1], number = layer.typed_data()[0];
  const char* of_a = static_cast<const char*>(a.untyped_data()) + number * (a.size_bytes() / a.dimensions()[0]);
  const char* of_b = static_cast<const char*>(b.untyped_data()) + number * (b.size_bytes() / b.dimensions()[0]);
  if (auto error = CheckType(x.element_type()); error.failure()) return error;
  float* result = out->typed_data();
  if (result != y.typed_data()) std::copy_n(y.typed_data(), y.element_count(), result);
  using Narrow = std::conditional_t<std::is_same_v<Numbers, Float32>, NarrowFloat32, NarrowBFloat16>;
  AddLowRanks<Narrow>(pool, static_cast<const char*>(x.untyped_data()), of_a, of_b, choices.typed_data(), num_choices,
                      result, shape);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_low_rank, LowRank,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<ffi::Span<const int64_t>>("widths"));
