// Definitions that every function called by XLA's programs needs.

#pragma once

#include <type_traits>

#include "helpers.h"
#include "vector.h"
#include "xla/ffi/api/ffi.h"

namespace native {

namespace ffi = xla::ffi;

// A library has kernels for one type, given by -DNUMBERS: Float32 or BFloat16. So no caller waits for the compilation
// of the other type.
using Numbers = NUMBERS;

// Returns an error unless an array is of the library's type.
inline ffi::Error CheckType(ffi::DataType type) {
  if (type == (std::is_same_v<Numbers, Float32> ? ffi::F32 : ffi::BF16)) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("the library has kernels for numbers of another type");
}

// Returns an array's first number; null if the array is empty, which stands for an absent one.
template <typename Buffer>
auto OrNull(const Buffer& array) -> decltype(array.typed_data()) {
  return array.element_count() ? array.typed_data() : nullptr;
}

}  // namespace native

// Lets this library's threads wait where those of another library do. Returns that address; null chooses the own one.
extern "C" void* jaxpaged_wait_at(void* others) {
  if (others) native::places = static_cast<native::Places*>(others);
  return native::places;
}
