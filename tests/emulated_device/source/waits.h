// The host's waits for the device: each is counted by its kind, and told to a listener that knows the call.
//
// The last kind is no wait here: an asynchronous copy from memory that is not pinned, for which a driver may wait.

#pragma once

#include <atomic>
#include <array>

namespace emulated {

enum Wait : int {
  kItem,
  kCopyToHost,
  kCopyToDevice,
  kContent,
  kEventWait,
  kStreamWait,
  kDeviceWait,
  kStagedCopy,
  kWaitKinds,
};

class HostWaits {
 public:
  using Listener = void (*)(int);
  static HostWaits& get() {
    static auto* waits = new HostWaits;
    return *waits;
  }
  // Called before any lock is taken: the listener takes Python's.
  void note(Wait kind) {
    ++counts_[kind];
    if (Listener listener = listener_.load()) {
      listener(kind);
    }
  }
  long count(int kind) const {
    return counts_[static_cast<size_t>(kind)];
  }
  void listen(Listener listener) {
    listener_ = listener;
  }

 private:
  std::array<std::atomic<long>, kWaitKinds> counts_{};
  std::atomic<Listener> listener_{nullptr};
};

} // namespace emulated
