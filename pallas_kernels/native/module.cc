// The kernels as functions that XLA's programs call.

#include "attention.h"
#include "product.h"
#include "xla/ffi/api/ffi.h"

namespace {

using namespace native;

namespace ffi = xla::ffi;

// f(Float32() or BFloat16()), or an error for another type.
template <typename F>
ffi::Error WithType(ffi::DataType type, F f) {
  if (type == ffi::F32) {
    f(Float32());
  } else if (type == ffi::BF16) {
    f(BFloat16());
  } else {
    return ffi::Error::InvalidArgument("numbers must be float32 or bfloat16");
  }
  return ffi::Error::Success();
}

// x [rows, inputs], kernels [layers, panels, steps, 32, 1 or 2], layer -> y [rows, columns].
ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer kernels, ffi::Buffer<ffi::S32> layer,
                   ffi::ResultBuffer<ffi::F32> y) {
  const ProductShape shape{x.dimensions()[0], kernels.dimensions()[2], y->dimensions()[1]};
  const char* kernel = static_cast<const char*>(kernels.untyped_data()) + layer.typed_data()[0] * shape.kernel_bytes();
  return WithType(kernels.element_type(), [&](auto type) {
    Multiply<decltype(type)>(pool, x.untyped_data(), kernel, y->typed_data(), shape);
  });
}

// As `ops.tiled_paged_attention`.
ffi::Error Attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::Buffer<ffi::S32> block_tables, ffi::Buffer<ffi::S32> query_starts,
                     ffi::Buffer<ffi::S32> seq_lens, ffi::Result<ffi::AnyBuffer> out, float scale, int64_t window) {
  const auto queries = q.dimensions(), cache = k.dimensions();
  return WithType(q.element_type(), [&](auto type) {
    using T = decltype(type);
    using Value = typename T::Value;
    const AttentionCall<T> call{static_cast<const Value*>(q.untyped_data()),
                                static_cast<const char*>(k.untyped_data()),
                                static_cast<const char*>(v.untyped_data()),
                                block_tables.typed_data(),
                                query_starts.typed_data(),
                                seq_lens.typed_data(),
                                static_cast<Value*>(out->untyped_data()),
                                queries[0],
                                queries[1],
                                queries[2],
                                queries[3],
                                cache[2],
                                cache[1],
                                block_tables.dimensions()[1],
                                scale,
                                window};
    AttendAll(pool, call);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_product, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_attention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window"));
