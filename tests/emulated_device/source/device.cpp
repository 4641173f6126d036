// The device as torch sees it: operators that are not CPU kernels on the same memory, and the control of the tests.

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "fallback.h"

namespace emulated {

c10::DispatchKeySet keys() {
  return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::Device before = Guard().exchangeDevice({kType, Guard::index_of(device.value_or(Guard().getDevice()))});
  at::Tensor made = at::detail::empty_generic(
      size, &DeviceAllocator::get(), keys(), c10::dtype_or_default(dtype), format);
  Guard().setDevice(before);
  return made;
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::Device before = Guard().exchangeDevice({kType, Guard::index_of(device.value_or(Guard().getDevice()))});
  at::Tensor made = at::detail::empty_strided_generic(
      size, stride, &DeviceAllocator::get(), keys(), c10::dtype_or_default(dtype));
  Guard().setDevice(before);
  return made;
}

at::Tensor& set_storage(
    at::Tensor& self,
    at::Storage source,
    int64_t offset,
    at::IntArrayRef size,
    at::IntArrayRef stride) {
  std::vector<int64_t> steps = stride.vec();
  if (steps.size() != size.size()) {
    steps.assign(size.size(), 1);
    for (size_t dim = size.size(); dim-- > 1;) {
      steps[dim - 1] = steps[dim] * std::max<int64_t>(size[dim], 1);
    }
  }
  at::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, steps, offset);
  const size_t needed = at::detail::computeStorageNbytes(size, steps, self.itemsize(), static_cast<size_t>(offset));
  if (self.numel() > 0 && self.storage().nbytes() < needed) {
    Hooks::get().resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, DeviceAllocator::get().allocate(0), &DeviceAllocator::get(), true);
  return set_storage(self, std::move(none), 0, {0}, {});
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  at::Tensor target = self;
  if (target.sizes() != size) {
    set_storage(target, target.storage(), target.storage_offset(), size, {});
  }
  return self;
}

at::Tensor as_strided(
    const at::Tensor& self,
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

// Waits until the stream of this thread on `device` has done all that it was told.
void catch_up(c10::DeviceIndex device, Wait kind) {
  HostWaits::get().note(kind);
  Queues::get().run_to(Queues::get().mark(Current::get().stream(device)));
}

at::Tensor to_host(const at::Tensor& from, const at::Tensor& to, bool async) {
  const Place source = Place::of(from);
  const auto index = static_cast<c10::DeviceIndex>(from.get_device());
  Queues::get().issue(Current::get().stream(index), [source, to] {
    OnlyKernels only;
    to.copy_(source.on_cpu());
  });
  // memory that is not pinned is written through a buffer of the driver, for which the host waits
  if (!async || !PinnedAllocator::get().holds(to.data_ptr())) {
    catch_up(index, kCopyToHost);
  }
  return to;
}

at::Tensor to_device(const at::Tensor& from, const at::Tensor& to, bool async) {
  const bool pinned = async && from.numel() > 0 && PinnedAllocator::get().holds(from.data_ptr());
  const at::Tensor source = pinned ? from.detach() : from.detach().clone();
  const Place target = Place::of(to);
  const auto index = static_cast<c10::DeviceIndex>(to.get_device());
  Queues::get().issue(Current::get().stream(index), [source, target] {
    OnlyKernels only;
    target.on_cpu().copy_(source);
  });
  if (!async) {
    catch_up(index, kCopyToDevice);
  } else if (!pinned) {
    HostWaits::get().note(kStagedCopy);
  }
  return to;
}

// Between devices a copy waits for all that the source was told, and the source keeps its memory until then: no wait of
// an engine is tested by it.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool async) {
  OnlyKernels only;
  if (!is_ours(to)) {
    return to_host(from, to, async);
  }
  if (!is_ours(from)) {
    return to_device(from, to, async);
  }
  const auto index = static_cast<c10::DeviceIndex>(to.get_device());
  std::deque<Mark> waits;
  if (from.get_device() != to.get_device()) {
    waits = Queues::get().marks(static_cast<c10::DeviceIndex>(from.get_device()));
    Memory::get().record(from.storage().data(), Current::get().stream(index));
  }
  const Place source = Place::of(from), target = Place::of(to);
  auto task = [source, target] {
    OnlyKernels only;
    target.on_cpu().copy_(source.on_cpu());
  };
  Queues::get().issue(Current::get().stream(index), task, std::move(waits));
  return to;
}

at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) {
    resize(to, from.sizes(), std::nullopt);
  }
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& self) {
  OnlyKernels only;
  catch_up(static_cast<c10::DeviceIndex>(self.get_device()), kItem);
  return Place::of(self).on_cpu().item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Memory::get().record(self.storage().data(), StreamKey::of(stream));
}

// ``parameter.data = tensor`` moves a parameter between the CPU and any device that torch knows by name.
bool may_replace_data(const at::Tensor&, const at::Tensor&) {
  return true;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("set_", &set_empty);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &may_replace_data);
  // torch has a formula for every device here, and a kernel for the CPU: the same bits as on the CPU are wanted
  for (const char* name : {"native_layer_norm", "native_group_norm", "native_group_norm_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&any_operator>());
  }
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace emulated

extern "C" {

void emulated_start() {
  c10::SetAllocator(emulated::kType, &emulated::DeviceAllocator::get());
  at::RegisterPrivateUse1HooksInterface(&emulated::Hooks::get());
  emulated::FaultReport::install();
}
void emulated_set_policy(int policy, uint64_t seed) {
  emulated::Queues::get().set_policy(policy, seed);
}
long emulated_waits(int kind) {
  return emulated::HostWaits::get().count(kind);
}
void emulated_listen(void (*listener)(int)) {
  emulated::HostWaits::get().listen(listener);
}
uint64_t emulated_tasks() {
  return emulated::Queues::get().issued();
}
uint64_t emulated_peak_bytes(int device) {
  return emulated::Memory::get().peak(static_cast<c10::DeviceIndex>(device));
}
void emulated_hand_out_generators(int hands_out) {
  emulated::Hooks::get().hands_out = hands_out != 0;
}
int emulated_current_device() {
  return emulated::Current::get().device;
}
void emulated_set_device(int device) {
  emulated::Guard().setDevice({emulated::kType, static_cast<c10::DeviceIndex>(device)});
}
}
