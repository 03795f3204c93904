// Attention as a function that XLA's programs call.

#include "attention.h"
#include "call.h"

namespace {

using namespace native;

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
