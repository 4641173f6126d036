// Tensors of the device as its tasks know them, and what a task runs in.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "guard.h"

namespace emulated {

// Leaves only the kernels of backends: a task may run inside any mode of Python, and later than it was issued.
struct OnlyKernels {
  static c10::DispatchKeySet rest() {
    return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset | c10::python_ks |
        c10::functorch_transforms_ks | c10::DispatchKeySet(c10::DispatchKey::PythonDispatcher);
  }
  c10::impl::ExcludeDispatchKeyGuard guard{rest()};
};

// A tensor as a task knows it.
struct Place {
  void* inner = nullptr;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype{};
  bool conjugate = false, negative = false;

  static Place of(const at::Tensor& tensor) {
    return {
        Memory::get().inside(tensor.numel() == 0 ? nullptr : tensor.unsafeGetTensorImpl()->data()),
        tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), tensor.is_conj(), tensor.is_neg()};
  }
  at::Tensor on_cpu() const {
    at::Tensor made = at::from_blob(inner, sizes, strides, at::TensorOptions().dtype(dtype).device(at::kCPU));
    made._set_conj(conjugate);
    made._set_neg(negative);
    return made;
  }
};

inline bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// Calls `change(tensor)` for every tensor of an argument, also those in lists, and returns the changed argument.
template <typename Change>
c10::IValue map_tensors(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& one : value.toTensorVector()) {
      made.push_back(change(one));
    }
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorList()) {
      made.push_back(one.has_value() ? std::optional<at::Tensor>(change(*one)) : std::nullopt);
    }
    return made;
  }
  return value;
}

// The CPU's own generator stands at the state of `source`, as kernels that are given none take it; `source` follows.
class LentGenerator {
 public:
  explicit LentGenerator(at::Generator source) : source_(std::move(source)), before_(own().get_state()) {
    own().set_state(source_.get_state());
  }
  ~LentGenerator() {
    source_.set_state(own().get_state());
    own().set_state(before_);
  }

 private:
  static at::Generator own() {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator source_;
  at::Tensor before_;
};

} // namespace emulated
