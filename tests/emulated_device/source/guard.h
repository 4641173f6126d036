// What torch asks of a device: which one is current, streams, events, generators, pinned memory.

#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"
#include "waits.h"

namespace emulated {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kType, Current::get().device};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "there are ", int{kDevices}, " emulated devices");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    Current::get().device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

  static c10::Stream stream_of(c10::DeviceIndex index, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
  }
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.has_index() ? device.index() : Current::get().device;
  }
  c10::Stream getStream(c10::Device device) const override {
    const auto index = index_of(device);
    return stream_of(index, Current::get().stream(index).id);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> made{0};
    return stream_of(index_of(device), ++made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    Current::get().streams[static_cast<size_t>(stream.device_index())] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Queues::get().reached(Queues::get().mark(StreamKey::of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    HostWaits::get().note(kStreamWait);
    Queues::get().run_to(Queues::get().mark(StreamKey::of(stream)));
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    HostWaits::get().note(kDeviceWait);
    Queues::get().run_device(index);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Mark{};
    }
    *static_cast<Mark*>(*event) = Queues::get().mark(StreamKey::of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      Queues::get().issue(StreamKey::of(stream), nullptr, {*static_cast<Mark*>(event)});
    }
  }
  // A look at an event lets the device go on, so that a loop of looks ends.
  bool queryEvent(void* event) const override {
    const bool done = event == nullptr || Queues::get().reached(*static_cast<Mark*>(event));
    if (!done) {
      Queues::get().run_to(*static_cast<Mark*>(event));
    }
    return done;
  }
  void synchronizeEvent(void* event) const override {
    HostWaits::get().note(kEventWait);
    if (event != nullptr) {
      Queues::get().run_to(*static_cast<Mark*>(event));
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Memory::get().record(data.get(), StreamKey::of(stream));
  }
};

// The random numbers of one device: those that a CPU generator with this seed gives.
struct EmulatedGenerator final : c10::GeneratorImpl {
  explicit EmulatedGenerator(c10::DeviceIndex index, at::Generator source = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        source(std::move(source)) {}
  void set_current_seed(uint64_t seed) override {
    source.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    source.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return source.get_offset();
  }
  uint64_t current_seed() const override {
    return source.current_seed();
  }
  uint64_t seed() override {
    return source.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    source.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return source.unsafeGetGeneratorImpl()->get_state();
  }
  EmulatedGenerator* clone_impl() const override {
    return new EmulatedGenerator(device().index(), source.clone());
  }

  mutable at::Generator source;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    Guard().setDevice({kType, index});
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return Current::get().device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({kType, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? Current::get().device : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override {
    return PinnedAllocator::get().holds(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &PinnedAllocator::get();
  }
  at::Device getDeviceFromPtr(void* data) const override {
    return {kType, Memory::get().device_of(data)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static auto* made = new std::vector<at::Generator>(make_generators());
    return (*made)[static_cast<size_t>(index < 0 ? Current::get().device : index)];
  }
  // `hands_out` makes torch.Generator(device) the default one: the only way in which Python gets hold of it.
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    const c10::DeviceIndex device = index < 0 ? Current::get().device : index;
    return hands_out ? getDefaultGenerator(device) : at::make_generator<EmulatedGenerator>(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;

  static std::vector<at::Generator> make_generators() {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex index = 0; index < kDevices; ++index) {
      made.push_back(at::make_generator<EmulatedGenerator>(index));
    }
    return made;
  }
  mutable bool hands_out = false;
  static Hooks& get() {
    static auto* hooks = new Hooks;
    return *hooks;
  }
};

// The storage gets memory of its new size, with what both sizes have; its own is freed.
inline void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  const c10::Device before = Guard().exchangeDevice(storage.device());
  c10::DataPtr data = DeviceAllocator::get().allocate(bytes);
  if (const size_t kept = std::min(bytes, storage.nbytes())) {
    const void* from = Memory::get().inside(storage.data());
    void* to = Memory::get().inside(data.get());
    const StreamKey stream = Current::get().stream(storage.device().index());
    Queues::get().issue(stream, [=] { std::memcpy(to, from, kept); });
  }
  Guard().setDevice(before);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

} // namespace emulated
